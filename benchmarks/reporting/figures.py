"""The pictures of the page: differences, spread by seed, cost, stability, learning curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from ..comparison import AVERAGE, Standings
from ..results import CellResult
from .rounds import is_federated
from .svg import COLOURS, FAINT, GROUND, INK, MARKERS, drawing
from .words import verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 11.0
_VERDICTS = {"better": "#12976f", "worse": "#d6336c", "open": "#7d8590", "few": "#7d8590"}
_ROW = 0.34


class Palette:
    """A colour and a marker for every method; the baseline is grey."""

    def __init__(self, table: Standings) -> None:
        order = [table.baseline, *(method for method in table.results.methods if method != table.baseline)]
        self._places = {method: place for place, method in enumerate(order)}

    def colour(self, method: str) -> str:
        """Return the method's colour."""
        place = self._places[method]
        return COLOURS[0] if place == 0 else COLOURS[1 + (place - 1) % (len(COLOURS) - 1)]

    def marker(self, method: str) -> str:
        """Return the method's marker."""
        return MARKERS[self._places[method] % len(MARKERS)]


def overall(table: Standings) -> dict[str, dict[str, tuple[float, float | None]]]:
    """Return mean and sd by method, as shown: of the average over tasks, or of every task where there is none."""
    if len(table.results.tasks) > 1 and table.averages:
        by = {method: (100 * mean, None if sd is None else 100 * sd) for method, (mean, sd) in table.averages.items()}
        return {AVERAGE: by}
    found: dict[str, dict[str, tuple[float, float | None]]] = {}
    for (task, method), summary in table.summaries.items():
        scale = table.scale[task]
        found.setdefault(task, {})[method] = (scale * summary.mean, None if summary.sd is None else scale * summary.sd)
    return found


def differences(table: Standings) -> str:
    """Draw every method's difference to the baseline with its interval; beside it, what the seeds could have shown."""
    groups = list(overall(table))
    others = [method for method in table.results.methods if method != table.baseline]
    found = [[(method, table.versus.get((group, method))) for method in others] for group in groups]
    if not any(one for rows in found for _, one in rows):
        return ""
    height = (0.8 + _ROW * len(others)) * -(-len(groups) // 2)
    with drawing(WIDTH if len(groups) > 1 else 7.6, height, "differences", f"Differences to {table.baseline}") as drawn:
        for axes, group, rows in zip(drawn.panels(len(groups), 2), groups, found, strict=True):
            scale = table.scale.get(group, 100)
            for place, (_, one) in enumerate(rows):
                if one is None:
                    continue
                middle, colour = one.comparison.difference * scale, _VERDICTS[verdict(one)]
                if one.comparison.detectable is not None:
                    able = one.comparison.detectable * scale
                    axes.barh(place, 2 * able, left=-able, height=0.62, color=FAINT, alpha=0.45, linewidth=0)
                if one.comparison.interval is not None:
                    span = [one.comparison.interval.low * scale, one.comparison.interval.high * scale]
                    axes.plot(span, [place, place], color=colour, linewidth=2.4)
                axes.plot(middle, place, "o", color=colour, markersize=6.5, markeredgecolor=GROUND)
            axes.axvline(0, color=INK, linewidth=0.8)
            _rows(axes, [method for method, _ in rows])
            unit = " in points" if scale == 100 else ""
            axes.set(
                xlabel=f"difference to {table.baseline}{unit}, better to the right",
                title=group if group != AVERAGE else "",
            )
    return drawn.text


def distributions(table: Standings) -> str:
    """Draw every run of every method, task by task: the seeds, a box of their quartiles, a violin of their density."""
    tasks, methods, palette = table.results.tasks, table.results.methods, Palette(table)
    columns = 2 if len(tasks) > 1 else 1
    height = (0.75 + _ROW * len(methods)) * -(-len(tasks) // columns)
    with drawing(WIDTH if columns > 1 else 7.6, height, "distributions", "Scores of every seed, by task") as drawn:
        for place, (axes, task) in enumerate(zip(drawn.panels(len(tasks), columns), tasks, strict=True)):
            scale = table.scale[task]
            for row, method in enumerate(methods):
                _strip(
                    axes,
                    row,
                    [c for c in table.results.of(task, method) if c.score is not None],
                    scale,
                    palette.colour(method),
                )
            _majority(axes, {cell.majority for cell in table.results.cells if cell.task == task}, scale)
            _rows(axes, methods if place % columns == 0 else [""] * len(methods))
            metric = next(cell.main_metric for cell in table.results.cells if cell.task == task)
            axes.set_title(f"{task}, {metric.replace('_', ' ')}")
    return drawn.text


def _strip(axes: Axes, row: int, cells: Sequence[CellResult], scale: float, colour: str) -> None:
    values = np.array([cell.score for cell in cells], dtype=float) * scale
    if not len(values):
        axes.annotate("no score", (0.02, row), xycoords=("axes fraction", "data"), va="center", fontsize=8.5)
        return
    if len(values) >= 3 and np.ptp(values) > 1e-9:
        reach = np.linspace(values.min() - values.std(), values.max() + values.std(), 80)
        reach = reach[reach <= scale] if scale == 100 else reach  # nothing scores above 100
        density = stats.gaussian_kde(values)(reach)
        half = 0.42 * density / density.max()
        axes.fill_between(reach, row - half, row + half, color=colour, alpha=0.2, linewidth=0)
        low, middle, high = np.percentile(values, [25, 50, 75])
        axes.plot([low, high], [row, row], color=colour, linewidth=5, alpha=0.45, solid_capstyle="butt")
        axes.plot([middle, middle], [row - 0.2, row + 0.2], color=colour, linewidth=2)
    # Even steps up and down by rank of the seed: the same picture every time, and no two dots of one value on one spot.
    heights = row + 0.13 * (np.arange(len(values)) % 3 - 1) * (len(values) > 1)
    failed = np.array([cell.failed for cell in cells])
    axes.plot(
        values[~failed],
        heights[~failed],
        "o",
        color=colour,
        markersize=4.2,
        markeredgecolor=GROUND,
        markeredgewidth=0.6,
    )
    axes.plot(values[failed], heights[failed], "x", color=_VERDICTS["worse"], markersize=5, markeredgewidth=1.6)


def _majority(axes: Axes, values: set[float | None], scale: float) -> None:
    """Draw the score of the majority class where it is near the runs', and say it where it would push them aside."""
    low, high = axes.get_xlim()
    for value in sorted(value * scale for value in values if value is not None):
        if low - 0.3 * (high - low) < value < high + 0.3 * (high - low):
            axes.axvline(value, color=_VERDICTS["worse"], linestyle=(0, (3, 3)), linewidth=1)
        else:
            side, arrow = (0.99, "\N{RIGHTWARDS ARROW}") if value > high else (0.01, "\N{LEFTWARDS ARROW}")
            said = f"{arrow} majority class {value:.4g}"
            place, align = (side, 1.0), "right" if value > high else "left"
            axes.annotate(
                said, place, xycoords="axes fraction", ha=align, va="top", fontsize=8, color=_VERDICTS["worse"]
            )


def _rows(axes: Axes, names: Sequence[str]) -> None:
    """Give every row its name, the first on top."""
    axes.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.45, -0.55))
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def curves(table: Standings) -> str:
    """Draw the main metric against the step or round, task by task: the mean over seeds, and a band from the worst to the best."""
    tasks = [task for task in table.results.tasks if any(c.curve for c in table.results.cells if c.task == task)]
    palette, federated = Palette(table), is_federated(table.results)
    if not tasks:
        return ""
    from matplotlib.ticker import MaxNLocator

    columns = min(2, len(tasks))
    with drawing(WIDTH if columns > 1 else 7.6, 2.9 * -(-len(tasks) // columns), "curves", "Learning curves") as drawn:
        for axes, task in zip(drawn.panels(len(tasks), columns), tasks, strict=True):
            for method in table.results.methods:
                steps, low, mean, high = _band([cell.curve for cell in table.results.of(task, method) if cell.curve])
                scale, colour = table.scale[task], palette.colour(method)
                axes.fill_between(steps, low * scale, high * scale, color=colour, alpha=0.1, linewidth=0)
                axes.plot(
                    steps, mean * scale, color=colour, linewidth=1.7, marker=palette.marker(method), markersize=3.5
                )
            axes.grid()
            metric = next(cell.main_metric for cell in table.results.cells if cell.task == task)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set(xlabel="round" if federated else "optimizer step", title=f"{task}, {metric.replace('_', ' ')}")
    return drawn.text


def _band(runs: Sequence[Sequence[tuple[int, float]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return steps, lowest, mean and highest value; of the steps that at least half of the runs evaluated at."""
    by_step: dict[int, list[float]] = {}
    for run in runs:
        for step, value in run:
            by_step.setdefault(step, []).append(value)
    kept = sorted(step for step, values in by_step.items() if 2 * len(values) >= len(runs))
    columns = [(min(by_step[s]), float(np.mean(by_step[s])), max(by_step[s])) for s in kept]
    low, mean, high = np.array(columns, dtype=float).reshape(-1, 3).T
    return np.array(kept), low, mean, high
