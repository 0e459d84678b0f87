"""``suite.json``, what a folder of results says of its suite: ``tunery bench`` writes it, ``tunery report`` reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.artifacts import write_json
from .errors import ResultError

if TYPE_CHECKING:
    from .suite import Suite

SUITE = "suite.json"


def write_suite(suite: Suite, folder: Path) -> None:
    """Write ``suite.json``; what it held of tasks, methods and seeds of earlier calls stays in it.

    Tasks and methods are lists there, of a name and its keys each: JSON is written with sorted keys, and theirs is the
    order of a table.
    """
    content = suite.model_dump(mode="json")
    path = folder / SUITE
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        earlier = {key: {item["name"]: item["keys"] for item in before[key]} for key in ("tasks", "methods")}
        content["seeds"] = sorted({*content["seeds"], *before["seeds"]})
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        before, earlier = None, {"tasks": {}, "methods": {}}  # none yet, or damaged: this one takes its place
    for key, named in earlier.items():
        kept = {name: keys for name, keys in named.items() if name not in content[key]}
        content[key] = [{"name": name, "keys": keys} for name, keys in {**content[key], **kept}.items()]
    if content != before:
        write_json(path, content)


def read_suite_file(path: Path) -> dict[str, Any]:
    """Read ``suite.json``; nothing where there is none.

    Raises:
        ResultError: it cannot be read, or is no suite's.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ResultError(f"cannot read {path}: {error}", remedy="remove it, or run tunery bench again") from None
    if not _is_suite(content):
        raise ResultError(f"{path} is no suite", remedy="remove it, or run tunery bench again")
    return content


def _is_suite(content: Any) -> bool:
    """Whether it lists tasks, methods, seeds and overrides, as far as it has them, as a suite does."""
    return isinstance(content, dict) and all(
        isinstance(items := content.get(key) or [], list) and all(map(fits, items)) for key, fits in _LISTS.items()
    )


def _is_named(item: Any) -> bool:
    return isinstance(item.get("name") if isinstance(item, Mapping) else item, str)


def _is_override(item: Any) -> bool:
    return isinstance(item, Mapping) and all(isinstance(item.get(key, "*"), str) for key in ("tasks", "methods"))


_LISTS: Mapping[str, Callable[[Any], bool]] = {
    "tasks": _is_named,
    "methods": _is_named,
    "seeds": lambda item: isinstance(item, int),
    "overrides": _is_override,
}


def names_in(suite: Mapping[str, Any], key: str) -> list[str]:
    """Return the names of the tasks or methods that ``suite.json`` lists."""
    return [str(item["name"] if isinstance(item, Mapping) else item) for item in suite.get(key) or ()]


def position(suite: Mapping[str, Any], key: str) -> Callable[[str], tuple[int, str]]:
    """Return a sort key: where the suite lists a name; names it does not list come after, by alphabet."""
    places = {name: place for place, name in enumerate(names_in(suite, key))}
    return lambda name: (places.get(name, len(places)), name)
