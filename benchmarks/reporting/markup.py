"""Pieces of HTML the page is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ..comparison import AVERAGE, Standings
from .layout import Cell, Grid, failures

_PLACES = {0: "", 1: "first", 2: "second"}
_SHAPES = {  # of matplotlib's markers, in a box from -5 to 5
    "o": '<circle r="4"/>',
    "D": '<path d="M0-4.6 4.6 0 0 4.6-4.6 0Z"/>',
    "s": '<path d="M-3.7-3.7H3.7V3.7H-3.7Z"/>',
    "^": '<path d="M0-4.2 4.2 3.6H-4.2Z"/>',
    "v": '<path d="M0 4.2 4.2-3.6H-4.2Z"/>',
    "P": '<path d="M-1.5-4.2h3v2.7h2.7v3h-2.7v2.7h-3v-2.7h-2.7v-3h2.7Z"/>',
    "X": '<path transform="rotate(45)" d="M-1.5-4.2h3v2.7h2.7v3h-2.7v2.7h-3v-2.7h-2.7v-3h2.7Z"/>',
    "p": '<path d="M0-4.4 4.2-1.4 2.6 3.6H-2.6L-4.2-1.4Z"/>',
    "<": '<path d="M-4.2 0 3.6-4.2V4.2Z"/>',
    ">": '<path d="M4.2 0-3.6-4.2V4.2Z"/>',
}


def chip(colour: str, marker: str) -> str:
    """Return a legend's mark: the method's colour and marker, as the pictures draw it."""
    return f'<svg class="chip" viewBox="-5 -5 10 10" fill="{colour}" aria-hidden="true">{_SHAPES[marker]}</svg>'


def html_table(rows: Sequence[Sequence[str]], *, text: int, wrap: int | None = None) -> str:
    """Return a table; the first row is its header.

    Args:
        rows: cells as plain text.
        text: how many leading columns are text; the rest is numbers.
        wrap: position of a column of long text that may break.
    """
    header, *body = rows

    def kind(place: int) -> str:
        return ' class="wrap text"' if place == wrap else ' class="text"' if place < text else ""

    head = "".join(f"<th{kind(place)}>{escape(cell)}</th>" for place, cell in enumerate(header))
    lines = (
        f"<tr>{''.join(f'<td{kind(place)}>{escape(cell)}</td>' for place, cell in enumerate(row))}</tr>" for row in body
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def html_score_table(laid: Grid, caption: str, table: Standings | None = None) -> str:
    """Return a score table, shaded by how much steadier each cell is than the baseline's.

    Args:
        laid: its cells.
        caption: above it, as HTML.
        table: of our own results: adds how many runs failed.
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in ("method", *laid.columns))
    head += "<th>failed</th>" if table else ""
    lines = []
    for method, cells in laid.rows.items():
        drawn = "".join(_cell(cell, name) for cell, name in zip(cells, laid.columns, strict=True))
        failed = f"<td>{failures(table, method)}</td>" if table else ""
        lines.append(f"<tr><th>{escape(method)}</th>{drawn}{failed}</tr>")
    dense = " class=dense" if len(laid.columns) > 8 else ""
    return f"<table{dense}><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _cell(cell: Cell, column: str) -> str:
    names = " ".join(
        filter(None, [_PLACES[cell.place], "mean-of-tasks" if column.lower() in (AVERAGE, "avg", "avg.") else ""])
    )
    shade = ""
    if cell.steadier:
        colour = "--green" if cell.steadier > 0 else "--red"
        shade = f' style="background: rgba(var({colour}),calc(var(--depth) * {abs(cell.steadier):.3f}))"'
    mean, _, sd = cell.text.partition("±")
    spread = f'<span class="sd">±{sd}</span>' if sd else ""
    small = f"<small>{cell.delta}</small>" if cell.delta else ""
    return f'<td{f" class={chr(34)}{names}{chr(34)}" if names else ""}{shade}><span class="mean">{mean}</span>{spread}{small}</td>'


def joined(items: Iterable[str]) -> str:
    """Return texts joined by commas, each once, in order."""
    return ", ".join(dict.fromkeys(items))
