"""The score table before it is drawn: what each cell says, which are best, how their spread compares with the baseline's."""

from __future__ import annotations

from dataclasses import dataclass

from ..comparison import AVERAGE, Standings
from .words import NONE, mean_and_sd, number


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of the score table.

    Attributes:
        text: mean±sd, or a dash.
        place: 1 of the best mean of its column, 2 of the second, else 0.
        steadier: by how much its sd is smaller than the baseline's, in parts of the larger one: -1..1; ``None`` without one.
        delta: its mean less the baseline's, positive where better, as text; empty for the baseline.
    """

    text: str
    place: int = 0
    steadier: float | None = None
    delta: str = ""


@dataclass(frozen=True)
class Grid:
    """The score table.

    Attributes:
        columns: tasks, and the average where there is one.
        rows: cells by method.
    """

    columns: tuple[str, ...]
    rows: dict[str, tuple[Cell, ...]]


def grid(table: Standings) -> Grid:
    """Lay out the score table: methods by tasks and their average."""
    methods = table.results.methods
    columns = [_task_column(table, task) for task in table.results.tasks]
    names = [*table.results.tasks]
    if len(names) > 1 and table.averages:
        columns.append(_average_column(table))
        names.append(AVERAGE)
    return Grid(tuple(names), {method: tuple(column[row] for column in columns) for row, method in enumerate(methods)})


def failures(table: Standings, method: str) -> str:
    """Return how many of a method's runs failed or were degenerate, of how many."""
    runs = [cell for cell in table.results.cells if cell.method == method]
    return f"{sum(cell.failed for cell in runs)} of {len(runs)}"


def _task_column(table: Standings, task: str) -> list[Cell]:
    scale = table.scale[task]
    found = {method: table.summaries.get((task, method)) for method in table.results.methods}
    higher = next(cell.higher_is_better for cell in table.results.cells if cell.task == task)
    places = _places({m: s.mean for m, s in found.items() if s}, 2 if scale == 100 else 6, higher)
    base = found[table.baseline]
    column = []
    for method, summary in found.items():
        if summary is None:
            column.append(Cell(text=NONE))
            continue
        other = method != table.baseline and base is not None
        gain = (summary.mean - base.mean) * (1 if higher else -1) if other and base else None
        column.append(
            Cell(
                text=mean_and_sd(summary.mean, summary.sd, scale),
                place=places[method],
                steadier=steadier(summary.sd, base.sd) if other and base else None,
                delta="" if gain is None else number(gain, scale, sign=True),
            )
        )
    return column


def _average_column(table: Standings) -> list[Cell]:
    places = _places({method: mean for method, (mean, _) in table.averages.items()}, 2, True)
    base = table.averages.get(table.baseline)
    column = []
    for method in table.results.methods:
        if method not in table.averages:
            column.append(Cell(text=NONE))
            continue
        mean, sd = table.averages[method]
        other = base if method != table.baseline else None
        column.append(
            Cell(
                text=mean_and_sd(mean, sd, 100),
                place=places[method],
                steadier=steadier(sd, other[1]) if other else None,
                delta=number(mean - other[0], 100, sign=True) if other else "",
            )
        )
    return column


def _places(means: dict[str, float], digits: int, higher: bool) -> dict[str, int]:
    """Return 1 for the best means and 2 for the second, of what is printed alike both; 0 for the rest."""
    shown = {method: round(mean * 100, digits) for method, mean in means.items()}
    order = sorted(set(shown.values()), reverse=higher)
    if len(shown) < 2:
        return dict.fromkeys(shown, 0)
    return {method: order.index(value) + 1 if order.index(value) < 2 else 0 for method, value in shown.items()}


def steadier(ours: float | None, theirs: float | None) -> float | None:
    """Return by how much a standard deviation is smaller than another, in parts of the larger one: -1..1."""
    if ours is None or theirs is None:
        return None
    return (theirs - ours) / max(ours, theirs) if max(ours, theirs) > 0 else 0.0
