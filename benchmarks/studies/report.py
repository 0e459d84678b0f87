"""Findings: what a study measured beside what its paper says, as a table, a picture and numbers in a file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from rich.text import Text

from ...core.artifacts import versions, write_json
from ...core.console import plain_console

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Cell = str | bool | int | float | None
RESULTS = "results.json"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One table, and what it says in a sentence.

    Attributes:
        name: key in the results file, and the picture's file name.
        title: what is measured, with the paper's number for it.
        columns: what the cells of a row are, with units.
        rows: the numbers.
        verdict: what they say about the paper, computed from them.
        draw: draws them.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    verdict: str
    draw: Callable[[Axes], None] | None = None

    def column(self, name: str) -> list[Any]:
        """Return one column's cells, top to bottom."""
        position = list(self.columns).index(name)
        return [row[position] for row in self.rows]


@dataclass(frozen=True)
class Run:
    """One run of a study.

    Attributes:
        quick: whether small samples will do.
        seed: of every random number.
    """

    quick: bool
    seed: int = 0

    def count(self, full: int, quick: int) -> int:
        """Return how many samples this run is worth."""
        return quick if self.quick else full

    def generator(self) -> torch.Generator:
        """Return a fresh source of random numbers: no finding depends on those measured before it."""
        return torch.Generator().manual_seed(self.seed)


def main(findings: Callable[[Run], Iterable[Finding]], name: str, description: str, argv: Sequence[str] | None) -> int:
    """Run a study: print a table a finding as it is measured, write pictures and ``results.json``; return 0."""
    parser = argparse.ArgumentParser(
        prog=f"python -m tunery.benchmarks.studies.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="small samples: seconds instead of minutes, noisier numbers"
    )
    parser.add_argument("--seed", type=int, default=0, help="of every random number; default 0")
    parser.add_argument("--output_dir", type=Path, default=Path("results/studies") / name, metavar="DIR")
    asked = parser.parse_args(argv)
    out: Path = asked.output_dir
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output_dir: {out} cannot be made: {error.strerror}")
    console = plain_console()
    done = []
    with _one_thread():
        for finding in findings(Run(asked.quick, asked.seed)):
            done.append(finding)
            console.print(_table(finding), f"{finding.verdict}\n", sep="\n", soft_wrap=True)
            if finding.draw:
                _picture(finding, out / f"{finding.name}.png")
    write_json(
        out / RESULTS,
        {
            "study": name,
            "quick": asked.quick,
            "seed": asked.seed,
            "findings": {finding.name: _plain(finding) for finding in done},
            "versions": versions(),
        },
    )
    console.print(f"{out}/ holds {RESULTS} and {sum(f.draw is not None for f in done)} pictures", soft_wrap=True)
    return 0


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep sums in one order, whatever the machine's number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _plain(finding: Finding) -> dict[str, Any]:
    rows = [dict(zip(finding.columns, row, strict=True)) for row in finding.rows]
    return {"title": finding.title, "rows": rows, "verdict": finding.verdict}


def _table(finding: Finding) -> Table:
    table = Table(title=Text(finding.title), title_justify="left")
    for column in finding.columns:
        table.add_column(Text(column), justify="right", overflow="fold")
    for row in finding.rows:
        table.add_row(*(Text(_text(cell)) for cell in row))
    return table


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _picture(finding: Finding, path: Path) -> None:
    """Draw under a temporary name and rename, without pyplot: no window system is looked for, no figure stays open."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    assert finding.draw is not None
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    axes.set_title(finding.title, fontsize="medium", wrap=True)
    finding.draw(axes)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, dpi=150, format="png")
    temporary.replace(path)
