"""Where the numbers come from: protocol and recipe, plugins with distribution and version, software, and what failed."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import yaml

from ..results import Results
from .markup import html_table, joined
from .words import NONE, number


def failures(results: Results) -> str:
    """Return the cells that failed or are no better than the majority class, and the files that were damaged."""
    rows = [("task", "method", "seed", "what happened")]
    for cell in results.cells:
        if cell.degenerate and cell.score is not None and cell.majority is not None:
            said = f"{number(cell.score)} is no better than the majority class, {number(cell.majority)}"
            rows.append((cell.task, cell.method, str(cell.seed), said))
        elif cell.failed:
            rows.append((cell.task, cell.method, str(cell.seed), cell.error or f"no finite {cell.main_metric}"))
    text = html_table(rows, text=3, wrap=3) if len(rows) > 1 else ""
    if results.damaged:
        damaged = [("damaged file", "why"), *((path.name, why) for path, why in results.damaged.items())]
        text += html_table(damaged, text=1, wrap=1)
    return text


def protocol(results: Results) -> str:
    """Return how the runs were made: pieces of the protocol, seeds, and the keys of every task and method."""
    suite = results.suite
    pieces = suite.get("protocol")
    named = joined(map(str, pieces)) if isinstance(pieces, (list, tuple)) else str(pieces or "not recorded")
    seeds = ", ".join(map(str, results.seeds))
    metrics = joined(f"{cell.task}: {cell.main_metric or NONE}" for cell in results.cells)
    lines = [f"<p>Protocol: {escape(named)}. Seeds: {seeds}. Main metrics: {escape(metrics)}.</p>"]
    lines.append(html_table(_methods(results), text=4, wrap=3))
    keys = {key: suite[key] for key in ("defaults", "tasks", "methods", "overrides", "threads") if suite.get(key)}
    if keys:
        recipe = yaml.safe_dump(_by_name(keys), sort_keys=False, allow_unicode=True, width=110)
        lines.append(f"<details><summary>Recipe keys of every cell</summary><pre>{escape(recipe)}</pre></details>")
    return "".join(lines)


def _methods(results: Results) -> list[tuple[str, ...]]:
    """Return a header and a row for each method: what its runs were made of, as they recorded it."""
    rows: list[tuple[str, ...]] = [("method", "strategy", "regularizers", "learning rate")]
    for method in results.methods:
        made = [cell.run_info for cell in results.cells if cell.method == method]
        regularizers = joined(str(item) for info in made for item in info.get("regularizers") or ()) or NONE
        strategies = joined(str(info["strategy"]) for info in made if info.get("strategy")) or NONE
        rates = joined(f"{info['learning_rate']:g}" for info in made if info.get("learning_rate") is not None) or NONE
        rows.append((method, strategies, regularizers, rates))
    return rows


def _by_name(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return lists of named items as mappings, as a suite file has them."""
    return {
        key: {item["name"]: item.get("keys", {}) for item in value}
        if isinstance(value, list) and all(isinstance(item, Mapping) and "name" in item for item in value)
        else value
        for key, value in keys.items()
    }


def origins(results: Results) -> str:
    """Return every plugin that made a result, with where it came from and which methods used it."""
    found: dict[tuple[str, ...], dict[str, None]] = {}
    for cell in results.cells:
        for plugin in cell.meta_info.get("plugins") or ():
            key = tuple(str(plugin.get(name) or NONE) for name in ("kind", "name", "distribution", "version"))
            found.setdefault(key, {})[cell.method] = None
    if not found:
        return "<p>No plugin is recorded.</p>"
    rows = [("plugin", "kind", "distribution", "version", "methods")]
    rows += [(name, kind, source, number, ", ".join(used)) for (kind, name, source, number), used in found.items()]
    twice = sorted({key[1] for key in found if sum(other[:2] == key[:2] for other in found) > 1})
    warning = f"<p><b>{escape(', '.join(twice))}: more than one version made these results.</b></p>" if twice else ""
    return warning + html_table(rows, text=5, wrap=4)


def software(results: Results) -> str:
    """Return the versions and the hardware the cells ran with; a name with several is bold."""
    found: dict[str, dict[str, None]] = {}
    for cell in results.cells:
        for name, number_ in (cell.meta_info.get("versions") or {}).items():
            found.setdefault(str(name), {})[str(number_)] = None
    for cell in results.cells:
        for name in ("cpu", "gpu"):
            found.setdefault(name, {})[str(cell.meta_info.get(name) or "none")] = None
    items = [(name, " and ".join(numbers), len(numbers) > 1) for name, numbers in found.items()]
    text = ", ".join(f"{'<b>' * mixed}{escape(f'{name} {numbers}')}{'</b>' * mixed}" for name, numbers, mixed in items)
    return f"<p>Software: {text}.</p>" if text else ""


def ran(results: Results) -> str:
    """Return when the cells ran, and in how much time."""
    starts = sorted(str(cell.meta_info["started"]) for cell in results.cells if cell.meta_info.get("started"))
    ends = sorted(str(cell.meta_info["finished"]) for cell in results.cells if cell.meta_info.get("finished"))
    spent = sum(float(cell.train_info.get("seconds") or 0) for cell in results.cells)
    when = f"runs from {starts[0][:16]} to {ends[-1][:16]}" if starts and ends else "runs at times not recorded"
    time = f"{spent / 60:.0f} minutes" if spent < 5400 else f"{spent / 3600:.1f} hours"
    return escape(f"{when}, {time} of training in all")
