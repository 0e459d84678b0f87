"""What ``tunery report`` writes and prints."""

from __future__ import annotations

import os
from pathlib import Path

from ...core.console import plain_console
from ...registry.errors import TuneryError
from ..comparison import compare_runs, standings
from ..results import Results
from . import rounds, sweep
from .page import page
from .sheets import pairs_csv, rounds_csv, runs_csv, statistics_csv, sweep_csv
from .tables import against_rows, against_table, console_table, latex, latex_section, markdown, markdown_section
from .words import READING, conclusions, overview


def write_report(
    results: Results, output_dir: Path, *, baseline: str | None = None, other: Results | None = None
) -> None:
    """Print what the results come to, and write it as HTML, Markdown, LaTeX and CSV.

    Args:
        results: a suite's cells.
        output_dir: folder of the files; earlier ones are replaced.
        baseline: the method to compare with; default: the suite's first.
        other: earlier results, each cell of which is compared with the same one here.

    Raises:
        ResultError: the results cannot be compared.
        TuneryError: the folder cannot be written.
    """
    table = standings(results, baseline)
    versus = None if other is None else compare_runs(results, other)
    said = [*overview(table), *map(str, conclusions(table))]
    console = plain_console()
    for path, why in {**results.damaged, **(other.damaged if other else {})}.items():
        console.print(f"damaged: {why}; moved to {path}", soft_wrap=True)
    console.print(console_table(table))
    for line in said:
        console.print(line, soft_wrap=True)
    text, typeset = markdown(table, [*said, READING]), latex(table, [READING])
    if versus is not None and other is not None:
        title = f"against the same cells in {other.folder}"
        console.print(against_table(versus, table.scale, title))
        text += markdown_section(against_rows(versus, table.scale), title)
    sheets = {"statistics.csv": statistics_csv(table), "runs.csv": runs_csv(table)}
    if len(table.results.methods) > 2:
        sheets["pairs.csv"] = pairs_csv(table)
    along = sweep.sweep(table)
    if along is not None:
        title, points = f"Against {along.axis.name}", sweep.rows(table, along)
        text += markdown_section(points, title, sweep.note(along))
        typeset += latex_section(points, title, sweep.note(along))
        sheets["sweep.csv"] = sweep_csv(along)
    if federated := rounds.rows(table):
        text += markdown_section(federated, "Rounds and traffic", rounds.READING)
        sheets["rounds.csv"] = rounds_csv(table)
    files = {
        "report.html": page(table, sheets, versus, "" if other is None else str(other.folder)),
        "report.md": text,
        "report.tex": typeset,
        **sheets,
    }
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            _write(output_dir / name, content)
    except OSError as error:
        raise TuneryError(f"cannot write {output_dir}: {error.strerror}", remedy="name another --output_dir") from None
    console.print(f"{output_dir}/ holds {', '.join(files)}", soft_wrap=True)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
