"""What a cell's result depends on, so that a changed input makes it stale, and what changed can be said."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..core.data import DataArguments
from ..core.data.loading import BUILT_IN, FILE_TYPES
from ..core.models import resolve
from ..registry.catalog import Catalog, Entry
from ..registry.selection import Selection, parse_selections
from .suite import Cell

_FILES = ("train_file", "validation_file", "test_file")
_MODEL_FILES = ("*.json", "*.safetensors", "*.bin", "*.txt", "*.model")


def inputs_of(cell: Cell, catalog: Catalog) -> dict[str, Any]:
    """Return everything that decides a cell's result, and the ``fingerprint`` of it.

    Files count by content, wherever they lie, those that a plugin's options name too; plugins by distribution and version. A
    model or dataset on the hub counts by name and revision. Where a run keeps its caches does not count.

    Raises:
        TuneryError: the cell cannot be run: data that are none, no such model package or plugin.
    """
    keys = cell.keys
    found: dict[str, Any] = {
        "recipe": without_caches(cell.recipe, catalog),
        "protocol": list(cell.pieces),
        **({} if cell.command == "train" else {"command": cell.command}),
        "threads": cell.threads,
        "data": dict(_data(keys)),
        "model": _folder_digest(resolve(str(keys.get("model_name_or_path", ""))), _MODEL_FILES),
        "plugins": _plugins(keys, catalog),
    }
    if files := dict(_files(keys, catalog)):
        found["files"] = files
    text = json.dumps(found, sort_keys=True, separators=(",", ":"), default=str)
    return {**json.loads(text), "fingerprint": hashlib.sha256(text.encode()).hexdigest()}


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return what changed between two sets of inputs, one ``key: old -> new`` each."""
    changed = []
    for key in sorted({*old, *new} - {"fingerprint"}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changed += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            changed.append(f"{prefix}{key}: {_shown(before)} -> {_shown(after)}")
    return changed


def _shown(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def without_caches(recipe: Mapping[str, Any], catalog: Catalog) -> dict[str, Any]:
    """Return a recipe without the options that say where a strategy keeps its caches; without any, as it was written."""
    found = dict(recipe)
    for selection in parse_selections(recipe.get("strategy"), "strategy"):
        config = catalog.find("strategy", selection.name).cls.Config
        caches = {item.name for item in dataclasses.fields(config) if item.metadata.get("cache")}
        if caches & selection.options.keys():
            options = {key: value for key, value in selection.options.items() if key not in caches}
            found["strategy"] = str(Selection(selection.name, options))
    return found


def _selected(keys: Mapping[str, Any], catalog: Catalog) -> Iterator[tuple[Entry, Selection]]:
    for kind, field in (("strategy", "strategy"), ("regularizer", "regularizers"), ("probe", "probes")):
        for selection in parse_selections(keys.get(field), kind):
            yield catalog.find(kind, selection.name), selection


def _plugins(keys: Mapping[str, Any], catalog: Catalog) -> dict[str, str]:
    return {
        f"{entry.kind} {entry.name}": f"{entry.origin.distribution} {entry.origin.version}"
        for entry, _ in _selected(keys, catalog)
    }


def _files(keys: Mapping[str, Any], catalog: Catalog) -> Iterator[tuple[str, str]]:
    """Yield the files and folders that options of plugins and ``deepspeed`` name, each with the hash of its content."""
    named = {"deepspeed": keys.get("deepspeed")}
    for entry, selection in _selected(without_caches(keys, catalog), catalog):
        named |= {f"{entry.kind} {entry.name}:{key}": value for key, value in selection.options.items()}
    for name, value in named.items():
        if isinstance(value, str) and os.path.isfile(value):  # unlike pathlib's, it takes any text
            yield name, _digest(Path(value))
        elif isinstance(value, str) and os.path.isdir(value):
            yield name, _folder_digest(value, ("**/*",))


def _data(keys: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the files a recipe names, each with the hash of its content."""
    source = str(keys.get("server_data") or "")
    if source:
        is_file = Path(source).suffix.lower() in FILE_TYPES
        yield "server_data", _digest(Path(source)) if is_file else _digest_of_dataset(source)
    names = [item.name for item in dataclasses.fields(DataArguments)]
    DataArguments(**{name: keys[name] for name in names if name in keys}).each()  # refuses what names no data
    for task in (keys, *(keys.get("tasks") or ())):
        prefix = f"{task['name']}/" if "name" in task else ""
        for key in _FILES:
            if task.get(key):
                yield f"{prefix}{key}", _digest(Path(task[key])) if Path(task[key]).suffix else str(task[key])
        if task.get("data_files"):
            for path in sorted(Path(task["data_files"]).expanduser().glob("*")):
                if path.suffix.lower() in FILE_TYPES:
                    yield f"{prefix}{path.name}", _digest(path)
        if name := task.get("dataset_name"):
            yield f"{prefix}{name}", _digest_of_dataset(name)


def _digest_of_dataset(name: str) -> str:
    """Return what stands for a dataset: a folder's content, a name on the hub, or what a built-in one is made of."""
    if name in BUILT_IN:  # Python's own documentation
        return f"Python {platform.python_version()}"
    return _folder_digest(name, ("**/*",))


def _folder_digest(reference: str, patterns: tuple[str, ...]) -> str:
    """Return the hash of a local folder's files; a reference that is none stands for itself."""
    folder = Path(reference)
    if not folder.is_dir():
        return reference
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    parts = [f"{path.relative_to(folder)} {_digest(path)}" for path in paths]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _digest(path: Path) -> str:
    path = path.expanduser()
    if not path.is_file():
        return "missing"  # the run itself says so, in its own words
    state = path.stat()
    return _digest_of(path.resolve(), state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=4096)
def _digest_of(path: Path, modified: int, size: int) -> str:
    """Hash a file; each one once a process while it stays as it is."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
