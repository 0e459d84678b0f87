"""A paper's table, as the suite quotes it: shown beside what was run, in a table of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ResultError
from ..results import Results
from .layout import Cell, Grid, steadier
from .words import NONE, number

QUOTED = "as printed; not run here"


@dataclass(frozen=True)
class Reference:
    """A quoted table.

    Attributes:
        title: which table of which paper.
        grid: its cells, marked like ours.
    """

    title: str
    grid: Grid


def read_reference(results: Results, baseline: str) -> Reference | None:
    """Read what the suite quotes: ``title``, ``columns`` and ``rows``, by method a cell a column.

    A cell is a number in points, a text like ``59.21±2.32``, a list of mean and standard deviation, or null. The columns of
    which less is better, such as rounds to a score, stand in ``lower_is_better``.

    Raises:
        ResultError: it is written differently.
    """
    quoted = results.suite.get("reference")
    if not quoted:
        return None
    try:
        columns = tuple(str(name) for name in quoted["columns"])
        numbers = {str(method): [_read(cell) for cell in row] for method, row in quoted["rows"].items()}
        title, lower = str(quoted["title"]), [str(name) for name in quoted.get("lower_is_better", ())]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _error(results, f"{type(error).__name__}: {error}") from None
    for method, row in numbers.items():
        if len(row) != len(columns):
            raise _error(results, f"row {method!r} has {len(row)} cells for {len(columns)} columns")
    for name in lower:
        if name not in columns:
            raise _error(results, f"lower_is_better: no column {name!r}")
    order = [method for method in results.methods if method in numbers]
    order += [method for method in numbers if method not in order]
    base = numbers.get(baseline)
    drawn = [
        _column([numbers[method][place] for method in order], None if base is None else base[place], name in lower)
        for place, name in enumerate(columns)
    ]
    rows = {method: tuple(column[place] for column in drawn) for place, method in enumerate(order)}
    return Reference(title, Grid(columns, rows))


def _read(cell: Any) -> tuple[float | None, float | None]:
    if cell is None or cell == NONE or cell == "-":
        return None, None
    parts = cell.split("±") if isinstance(cell, str) else cell if isinstance(cell, (list, tuple)) else [cell]
    mean, sd = (*parts, None) if len(parts) == 1 else parts
    return float(mean), None if sd is None else float(sd)


def _column(
    cells: list[tuple[float | None, float | None]], base: tuple[float | None, float | None] | None, lower: bool
) -> list[Cell]:
    order = sorted({mean for mean, _ in cells if mean is not None}, reverse=not lower)
    column = []
    for mean, sd in cells:
        if mean is None:
            column.append(Cell(text=NONE))
            continue
        other = base if base != (mean, sd) else None
        delta = None if other is None or other[0] is None else (mean - other[0]) * (-1 if lower else 1)
        column.append(
            Cell(
                text=number(mean, 1, 2) if sd is None else f"{number(mean, 1, 2)}±{number(sd, 1, 2)}",
                place=order.index(mean) + 1 if order.index(mean) < 2 and len(order) > 1 else 0,
                steadier=steadier(sd, other[1]) if other else None,
                delta="" if delta is None else number(delta, 1, 2, sign=True),
            )
        )
    return column


def _error(results: Results, why: str) -> ResultError:
    remedy = "it has title, columns, and rows with a cell a column by method"
    return ResultError(f"cannot read the suite's reference: {why}", owner=str(results.folder), remedy=remedy)
