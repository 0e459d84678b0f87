"""The pictures that weigh one thing against another: score against cost, spread against score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..comparison import AVERAGE, Standings
from .figures import WIDTH, Palette, overall
from .svg import GROUND, INK, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COSTS: dict[str, tuple[str, Callable[[Mapping[str, Any]], float | None]]] = {
    "parameters": ("trainable parameters", lambda info: (info.get("parameters") or {}).get("trainable")),
    "memory": ("peak memory in GB", lambda info: _giga(info.get("peak_memory_bytes"))),
    "seconds": ("seconds a run", lambda info: info.get("seconds")),
}


def _giga(count: float | None) -> float | None:
    return None if count is None else count / 1e9


def costs(table: Standings, group: str) -> dict[str, dict[str, float]]:
    """Return what a run of each method costs on average, by kind of cost, on one task or on all."""
    found: dict[str, dict[str, float]] = {}
    for kind, (_, read) in COSTS.items():
        for method in table.results.methods:
            runs = [
                c
                for c in table.results.cells
                if c.method == method and group in (AVERAGE, c.task) and c.score is not None
            ]
            values = [value for cell in runs if (value := read(cell.train_info)) is not None]
            if values:
                found.setdefault(kind, {})[method] = float(np.mean(values))
    return found


def pareto(points: Mapping[str, tuple[float, float]], higher: bool = True) -> list[str]:
    """Return the methods that no other beats in score at the same cost or less, cheapest first.

    Args:
        points: cost and score by method.
        higher: whether a higher score is better.
    """
    front: list[str] = []
    for method, (_, score) in sorted(
        points.items(), key=lambda item: (item[1][0], -item[1][1] if higher else item[1][1])
    ):
        best = points[front[-1]][1] if front else None
        if best is None or (score > best if higher else score < best):
            front.append(method)
    return front


def cost(table: Standings) -> str:
    """Draw score against trainable parameters, memory and time, with the methods no other beats joined by a line."""
    palette = Palette(table)
    panels = [
        (group, kind, by, scores)
        for group, scores in overall(table).items()
        for kind, by in costs(table, group).items()
        if by.keys() & scores.keys()
    ]
    if not panels:
        return ""
    from matplotlib.ticker import EngFormatter, NullFormatter

    higher = {cell.task: cell.higher_is_better for cell in table.results.cells}
    rows = -(-len(panels) // 3)
    with drawing(WIDTH, 3.1 * rows, "cost", "Score against parameters, memory and time") as drawn:
        for axes, (group, kind, by, scores) in zip(drawn.panels(len(panels), 3), panels, strict=True):
            points = {method: (by[method], scores[method][0]) for method in by if method in scores}
            front = pareto(points, higher.get(group, True))
            axes.plot(
                *zip(*(points[method] for method in front), strict=True), color=INK, linewidth=1, alpha=0.55, zorder=1
            )
            for method, point in points.items():
                _dot(axes, palette, method, *point)
            if kind == "parameters" and min(by.values()) > 0:
                axes.set_xscale("log")
                axes.xaxis.set_major_formatter(EngFormatter(sep=""))
                axes.xaxis.set_minor_formatter(NullFormatter())
            axes.grid()
            axes.margins(0.12)
            axes.set(xlabel=COSTS[kind][0])
            if kind == panels[0][1]:
                axes.set_ylabel("score" if group == AVERAGE else group)
    return drawn.text


def _dot(axes: Axes, palette: Palette, method: str, x: float, y: float) -> None:
    axes.plot(x, y, palette.marker(method), color=palette.colour(method), markersize=8.5, markeredgecolor=GROUND)


def stability(table: Standings) -> str:
    """Draw spread over seeds against score; beside it the change in both on every task, against the baseline."""
    palette = Palette(table)
    panels = {group: {m: p for m, p in by.items() if p[1] is not None} for group, by in overall(table).items()}
    panels = {group: by for group, by in panels.items() if by}
    changes = _changes(table)
    count = len(panels) + bool(changes)
    if not panels:
        return ""
    with drawing(
        WIDTH if count > 1 else 5.5, 3.6 * -(-count // 2), "stability", "Spread over seeds against score"
    ) as drawn:
        axes_of = drawn.panels(count, 2)
        for axes, (group, by) in zip(axes_of, panels.items(), strict=False):
            for method, (mean, sd) in by.items():
                assert sd is not None
                _dot(axes, palette, method, sd, mean)
            axes.margins(0.14)
            axes.grid()
            axes.set(xlabel="sd over seeds, steadier to the left", ylabel="score", title=group)
        if changes:
            axes = axes_of[-1]
            axes.axhline(0, color=INK, linewidth=0.8)
            axes.axvline(0, color=INK, linewidth=0.8)
            for method, x, y in changes:
                axes.plot(
                    x, y, palette.marker(method), color=palette.colour(method), markersize=6.5, markeredgecolor=GROUND
                )
            axes.margins(0.14)
            axes.grid()
            axes.set(xlabel="change in sd", ylabel="change in score", title=f"each task, against {table.baseline}")
            axes.annotate(
                "better and steadier", (0.02, 0.97), xycoords="axes fraction", va="top", fontsize=8.5, style="italic"
            )
    return drawn.text


def _changes(table: Standings) -> list[tuple[str, float, float]]:
    """Return (method, change in sd, change in score) of every task scored in points, if there are several."""
    tasks = [task for task in table.results.tasks if table.scale[task] == 100]
    found = []
    for (task, method), one in table.summaries.items():
        base = table.summaries.get((task, table.baseline))
        if task in tasks and method != table.baseline and base and one.sd is not None and base.sd is not None:
            found.append((method, 100 * (one.sd - base.sd), 100 * (one.mean - base.mean)))
    return found if len(tasks) > 1 else []
