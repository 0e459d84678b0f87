"""``tunery report``: what a suite's results say, on the console and in files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...registry.hookspecs import hookimpl

if TYPE_CHECKING:
    from ..results import Results


@hookimpl
def tunery_commands(app: typer.Typer) -> None:
    """Add ``tunery report``."""
    app.command()(report)


def report(
    results: Annotated[
        Path, typer.Argument(help="A suite's folder of results, or one that holds a single suite.")
    ] = Path("results"),
    baseline: Annotated[
        str | None, typer.Option(help="The method to compare with. Default: the suite's first.")
    ] = None,
    against: Annotated[Path | None, typer.Option(help="An earlier folder of results, compared cell by cell.")] = None,
    write_baseline: Annotated[
        Path | None,
        typer.Option("--write_baseline", help="Also keep the scores in this file, for tunery bench --check."),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output_dir", help="Where the files go. Default: report/ in the suite's folder.")
    ] = None,
) -> None:
    """Say what the results of a suite come to: tables, tests, and one HTML page that opens offline."""
    from .writing import write_report

    found = read_suite_folder(results)
    other = None if against is None else read_suite_folder(against)
    if write_baseline is not None:
        from ..regression import write_baseline as keep

        keep(found, write_baseline)
    write_report(found, found.folder / "report" if output_dir is None else output_dir, baseline=baseline, other=other)


def read_suite_folder(folder: Path) -> Results:
    """Read a suite's results; of a folder without any that holds one suite's folder, those.

    Raises:
        ResultError: there are none, several suites' folders, or some that cannot be read.
    """
    from ..results import read_results
    from ..suite_file import SUITE

    inner = sorted(path.parent for path in folder.glob(f"*/{SUITE}")) if not (folder / SUITE).exists() else []
    return read_results(inner[0] if len(inner) == 1 else folder)
