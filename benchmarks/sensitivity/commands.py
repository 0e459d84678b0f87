"""``tunery sensitivity``: a recipe's cells, what is not done of them, and what they show."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...registry.hookspecs import hookimpl

if TYPE_CHECKING:
    from .analysis import Analysis
    from .plan import Plan

RESULTS = "results.json"
_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}


@hookimpl
def tunery_commands(app: typer.Typer) -> None:
    """Add ``tunery sensitivity``."""
    app.command(context_settings=_FLAGS)(sensitivity)


def sensitivity(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A recipe that tunery brings, for example olmo_1b, or a YAML file.")],
    output_dir: Annotated[
        Path, typer.Option("--output_dir", help="Folder of results; what is in it is not done again.")
    ] = Path("results/sensitivity"),
    learning_rates: Annotated[
        str | None, typer.Option("--learning_rates", help="Instead of the recipe's: 1e-4,2e-4.")
    ] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="Instead of the recipe's: 0,1,2.")] = None,
) -> None:
    """Fine-tune checkpoints with several learning rates and seeds. Further flags are recipe keys of every run."""
    from ...core.console import calm
    from ...core.options import read_flags
    from .plan import make_plan, read_plan

    calm()
    changes: dict[str, Any] = {}
    for key, given in (("learning_rates", learning_rates), ("seeds", seeds)):
        if given is not None:
            changes[key] = [part for part in given.split(",") if part]
    plan = read_plan(recipe, changes)
    training = {**plan.training, **read_flags(context.args)}
    plan = make_plan({**plan.model_dump(), "training": training}, Path(recipe).name)
    if study(plan, output_dir / plan.name)[1]:
        raise typer.Exit(1)


def study(plan: Plan, folder: Path) -> tuple[Analysis | None, Mapping[str, str]]:
    """Do a plan's cells, print and draw what they show, and write ``results.json``; return it, and what failed.

    Raises:
        TuneryError: the plan's data or checkpoints cannot be used, or the folder not be written.
    """
    from rich.console import Console
    from rich.progress import Progress

    from ...core.artifacts import write_json
    from ...core.console import show_measurements
    from ...core.run import check_writable
    from .analysis import analyse
    from .cells import Scores, Study, run_cells
    from .pictures import draw_all

    check_writable(folder)
    points = plan.points()
    cells = plan.cells(points)
    folder.mkdir(parents=True, exist_ok=True)
    scores, failed = {}, {}
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(plan.name, total=len(cells))
        work = Study(plan, folder)
        for cell, found in run_cells(work, cells, lambda line: print(line, file=sys.stderr)):
            bar.advance(task)
            if isinstance(found, Scores):
                scores[cell] = found
            else:
                failed[cell.name] = found
                print(f"tunery: {cell.name}: {found}", file=sys.stderr)
    analysis = analyse(scores, points, plan.scored)
    said = analysis.sentences() if analysis else []
    drawn = draw_all(analysis, folder, plan.name) if analysis else []
    if analysis:
        show_measurements(analysis.table())
    for sentence in said:
        print(sentence)
    table = analysis.table() if analysis else []
    write_json(folder / RESULTS, {"plan": plan.model_dump(), "table": table, "findings": said, "failed": failed})
    print(f"{folder}/ holds {RESULTS}, {len(scores)} cells and {len(drawn)} pictures")
    return analysis, failed
