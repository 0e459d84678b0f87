"""The score table on a console, in Markdown and in LaTeX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from ..comparison import Standings, Versus
from .layout import Grid, failures, grid
from .reference import QUOTED, read_reference
from .words import MINUS, NONE, number, span

_LATEX = {
    "_": r"\_",
    "%": r"\%",
    "&": r"\&",
    "#": r"\#",
    "$": r"\$",
    "±": r"$\pm$",
    MINUS: "$-$",
    NONE: "--",
    "^": r"\^{}",
}
_MARKDOWN = str.maketrans({"|": r"\|", "_": r"\_", "*": r"\*", "<": "&lt;"})
_DARKEST = 55  # per cent of the colour in the deepest shade of a LaTeX cell


def console_table(table: Standings) -> Table:
    """Return the score table for a terminal: best bold, second underlined, green where steadier than the baseline."""
    laid = grid(table)
    drawn = Table(title=Text(f"{table.results.name}, against {table.baseline}"), title_justify="left")
    drawn.add_column("method")
    for name in laid.columns:
        drawn.add_column(Text(name), justify="right")
    drawn.add_column("failed", justify="right")
    for method, cells in laid.rows.items():
        styled = []
        for cell in cells:
            style = {1: "bold", 2: "underline"}.get(cell.place, "")
            colour = "" if not cell.steadier else ("green" if cell.steadier > 0 else "red")
            styled.append(Text(cell.text, style=" ".join(filter(None, (style, colour)))))
        drawn.add_row(Text(method), *styled, failures(table, method))
    return drawn


def against_table(versus: Iterable[Versus], scale: Mapping[str, float], title: str) -> Table:
    """Return a table of differences for a terminal."""
    drawn = Table(title=Text(title), title_justify="left")
    header, *rows = against_rows(versus, scale)
    for name in header:
        drawn.add_column(name, justify="left" if name in ("method", "task") else "right")
    for row in rows:
        drawn.add_row(*map(Text, row))
    return drawn


def against_rows(versus: Iterable[Versus], scale: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Return a header and a row for each comparison, as text."""
    rows: list[tuple[str, ...]] = [
        ("method", "task", "seeds", "difference", "95 %", "p", "p (Holm)", "Wilcoxon", "spread p (Holm)", "can show")
    ]
    for one in versus:
        by, found = scale.get(one.task, 100), one.comparison
        tests = (_p(p) for p in (found.p, one.p, found.wilcoxon, one.variance_p))
        size = number(found.difference, by, sign=True)
        rows.append(
            (
                one.method,
                one.task,
                str(found.count),
                size,
                span(found.interval, by),
                *tests,
                number(found.detectable, by),
            )
        )
    return rows


def pair_rows(pairs: Sequence[Versus], scale: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Return a header and a row for each pair of methods, as text; spreads are compared with the baseline's only."""
    against = ["against", *(one.other for one in pairs)]
    return [
        (method, other, *rest[:-2], rest[-1])
        for (method, *rest), other in zip(against_rows(pairs, scale), against, strict=True)
    ]


def summary_rows(table: Standings) -> list[tuple[str, ...]]:
    """Return a header and a row for each task and method, as text: what the score table has no room for."""
    rows: list[tuple[str, ...]] = [
        ("task", "method", "runs", "failed", "mean", "sd", "median", "worst", "95 % of the mean", "bootstrap (BCa)")
    ]
    for (task, method), one in table.summaries.items():
        by = table.scale[task]
        numbers = (number(value, by) for value in (one.mean, one.sd, one.median, one.worst))
        runs = len(table.results.of(task, method))
        rows.append(
            (task, method, str(runs), f"{one.failed:.0%}", *numbers, span(one.interval, by), span(one.bootstrap, by))
        )
    return rows


def _p(value: float | None) -> str:
    return NONE if value is None else "< 0.001" if value < 0.001 else f"{value:.3g}"


def markdown(table: Standings, notes: Sequence[str]) -> str:
    """Return the score table in Markdown: best bold, second in italics, the difference to the baseline in brackets.

    What the suite quotes of a paper stands below it, in a table of its own.

    Raises:
        ResultError: that cannot be read.
    """
    lines = [f"# {table.results.name}".translate(_MARKDOWN), "", *(f"- {note}" for note in notes), ""]
    lines += _markdown_grid(grid(table), table)
    quoted = read_reference(table.results, table.baseline)
    if quoted:
        lines += ["", f"## {quoted.title}".translate(_MARKDOWN), "", f"{QUOTED}.", "", *_markdown_grid(quoted.grid)]
    return "\n".join([*lines, ""])


def _markdown_grid(laid: Grid, table: Standings | None = None) -> list[str]:
    header = ["method", *laid.columns, *(["failed"] if table else [])]
    lines = [_row(name.translate(_MARKDOWN) for name in header), _row(["---", *("---:" for _ in header[1:])])]
    for method, cells in laid.rows.items():
        marked = []
        for cell in cells:
            mark = {1: "**", 2: "*"}.get(cell.place, "")
            marked.append(f"{mark}{cell.text}{mark}" + (f" ({cell.delta})" if cell.delta else ""))
        lines.append(_row([method.translate(_MARKDOWN), *marked, *([failures(table, method)] if table else [])]))
    return lines


def markdown_section(found: Sequence[Sequence[str]], title: str, note: str = "") -> str:
    """Return a heading, a note and a table whose first two columns are text, in Markdown; its first row is the header."""
    header, *rows = found
    lines = [f"## {title}".translate(_MARKDOWN), "", *([note, ""] if note else [])]
    lines += [_row(header), _row(["---", "---", *("---:" for _ in header[2:])])]
    return "\n".join(["", *lines, *(_row([cell.translate(_MARKDOWN) for cell in row]) for row in rows), ""])


def latex_section(found: Sequence[Sequence[str]], title: str, note: str) -> str:
    """Return a table whose first row is the header, in LaTeX, below a comment that says what it is."""
    header, *rows = (" & ".join(map(_tex, row)) + r" \\" for row in found)
    columns = rf"\begin{{tabular}}{{l{'r' * (len(found[0]) - 1)}}}"
    lines = ["", f"% {title}. {note}", columns, r"\toprule", header, r"\midrule", *rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def latex(table: Standings, notes: Sequence[str]) -> str:
    r"""Return the score table in LaTeX: best bold, second underlined, shaded green where steadier and red where less so.

    What the suite quotes of a paper stands below it, in a table of its own.

    Raises:
        ResultError: that cannot be read.
    """
    lines = [f"% {note}" for note in ("needs booktabs, and xcolor with its option table", *notes)]
    lines += _latex_grid(grid(table), table)
    quoted = read_reference(table.results, table.baseline)
    if quoted:
        lines += ["", f"% {quoted.title}: {QUOTED}", *_latex_grid(quoted.grid)]
    return "\n".join([*lines, ""])


def _latex_grid(laid: Grid, table: Standings | None = None) -> list[str]:
    header = ["method", *laid.columns, *(["failed"] if table else [])]
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}", r"\toprule"]
    lines += [" & ".join(map(_tex, header)) + r" \\", r"\midrule"]
    for method, cells in laid.rows.items():
        marked = []
        for cell in cells:
            mark = {1: r"\textbf{%s}", 2: r"\underline{%s}"}.get(cell.place, "%s") % _tex(cell.text)
            depth = round(_DARKEST * abs(cell.steadier or 0))
            colour = "green" if (cell.steadier or 0) > 0 else "red"
            marked.append(rf"\cellcolor{{{colour}!{depth}}}{mark}" if depth else mark)
        lines.append(" & ".join([_tex(method), *marked, *([failures(table, method)] if table else [])]) + r" \\")
    return [*lines, r"\bottomrule", r"\end{tabular}"]


def _tex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)
