"""What of a suite is run: its methods and strangers', its cells by name, a share of them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

from ..registry.catalog import Catalog
from ..registry.errors import RecipeError, did_you_mean
from ..registry.selection import configure, parse_selection
from .suite import Cell, Keys, Suite


def with_methods(suite: Suite, asked: Sequence[str], catalog: Catalog) -> tuple[Suite, list[str]]:
    """Return the suite with the methods asked for among its own, and the names of those to run.

    Args:
        suite: the suite.
        asked: methods of the suite, or strategies and regularizers by name or selection; with a ``+`` in front of the first,
            they come on top of the suite's.
        catalog: every plugin installed.

    Raises:
        RecipeError: neither a method of the suite nor a plugin.
        SelectionError: options that the plugin does not take.
        PluginError: a plugin that failed to load, or that two distributions offer.
    """
    methods = dict(suite.methods)
    names = list(methods) if asked and asked[0].startswith("+") else []
    for item in asked:
        name = item.removeprefix("+")
        if name not in methods:
            name, keys = _plugin_as_method(name, suite, catalog)
            methods[name] = keys
        names.append(name)
    chosen = list(dict.fromkeys(names)) if asked else list(methods)
    return suite.model_copy(update={"methods": methods}), chosen


def _plugin_as_method(text: str, suite: Suite, catalog: Catalog) -> tuple[str, Keys]:
    selection = parse_selection(text, "method")
    kinds = [entry.kind for entry in catalog if entry.name == selection.name and entry.kind != "probe"]
    if not kinds:
        plugins = [entry.name for entry in catalog if entry.kind != "probe"]
        known = list(dict.fromkeys([*suite.methods, *plugins]))
        remedy = did_you_mean(selection.name, known) or "pip install the distribution that offers it"
        raise RecipeError(f"no method {selection.name!r}", known=known, remedy=remedy)
    entry = catalog.find(kinds[0], selection.name)
    configure(entry.cls, selection, owner=str(entry.origin))  # rather now than in every cell
    keys: Keys = {"strategy": text} if kinds[0] == "strategy" else {"strategy": "full", "regularizers": [text]}
    return re.sub(r"[^A-Za-z0-9_.+]+", "-", text).strip("-"), keys


def select(cells: Iterable[Cell], only: Sequence[str], shard: str | None) -> list[Cell]:
    """Return the cells whose name matches one of the globs, and of these every n-th.

    Raises:
        RecipeError: there are no cells, nothing matches, or ``shard`` is not i/n with 1 <= i <= n.
    """
    cells = list(cells)
    if not cells:
        raise RecipeError("no cell is left: the suite's overrides skip them all")
    chosen = [cell for cell in cells if not only or any(fnmatch.fnmatchcase(cell.name, glob) for glob in only)]
    if not chosen:
        names = [cell.name for cell in cells]
        raise RecipeError(
            f"no cell matches --only {' '.join(only)}", remedy=did_you_mean(only[0], names) or "see --list"
        )
    if shard is None:
        return chosen
    found = re.fullmatch(r"(\d+)/(\d+)", shard)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise RecipeError(f"--shard {shard}", remedy="give i/n, for example 1/4 ... 4/4")
    return chosen[int(found[1]) - 1 :: int(found[2])]
