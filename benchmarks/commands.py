"""``tunery bench``: the cells of a suite, what is not done of them, and the process of a single one."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..registry.errors import RecipeError
from ..registry.hookspecs import hookimpl

if TYPE_CHECKING:
    from .runner import Job

_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}
_METHODS = "--methods lora, or a method in the suite's file"
_INSTEAD = {  # of keys that a cell has from its suite
    "tasks": "--only 'TASK--*' chooses cells by their names",
    "seed": "--seeds 5 says how many, --seeds 0,4,7 which",
    "output_dir": "--results FOLDER says where results go",
    "strategy": _METHODS,
    "regularizers": _METHODS,
}


@hookimpl
def tunery_commands(app: typer.Typer) -> None:
    """Add ``tunery bench``."""
    app.command(context_settings=_FLAGS)(bench)
    app.command("bench-cell", hidden=True)(bench_cell)


def bench(
    context: typer.Context,
    suite: Annotated[str, typer.Argument(help="A suite's name, for example smoke, or its YAML file.")],
    results: Annotated[Path, typer.Option(help="Folder of results; a suite has a folder in it.")] = Path("results"),
    only: Annotated[list[str] | None, typer.Option(help="Only cells like this: 'rte--*', '*--mixout--seed?'.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Cells at a time. Default: as many as there are CPUs, up to 4; 1 on a GPU."),
    ] = None,
    as_list: Annotated[
        bool, typer.Option("--list", help="Print one command a line for what is not done, and exit.")
    ] = False,
    shard: Annotated[str | None, typer.Option(help="i/n: every n-th cell from the i-th on.")] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Methods to run: of the suite, or any plugin's name; '+mine' adds it to the suite's."),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="How many seeds, or which: 3, or 0,4,7.")] = None,
    check: Annotated[
        Path | None, typer.Option(help="Exit with 1 if a method is worse than this baseline beyond its seeds' noise.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option("--data_dir", help="What {data_dir} stands for in the suite.")
    ] = None,
) -> None:
    """Run tasks x methods x seeds. What is done stays done; further flags are recipe keys for every cell."""
    from ..core.console import calm
    from ..core.federated.arguments import FederatedArguments
    from ..core.options import read_flags
    from ..registry.loading import load_plugins
    from .choosing import select, with_methods
    from .regression import read_baseline
    from .suite import read_suite
    from .suite_file import write_suite

    calm()
    catalog = load_plugins().catalog
    whole = read_suite(suite)
    flags = read_flags(context.args, more=(FederatedArguments,) if whole.command == "federate" else ())
    for key in flags.keys() & _INSTEAD.keys():
        raise RecipeError(f"--{key} is no flag of a suite", remedy=_INSTEAD[key])
    chosen, names = with_methods(whole, _split(methods), catalog)
    ran = chosen.model_copy(update={"seeds": _seeds(seeds)} if seeds else {})
    place = None if data_dir is None else str(data_dir.expanduser().resolve())
    if place is not None and not Path(place).is_dir():
        raise RecipeError(f"no folder {data_dir}", owner="--data_dir")
    if check is not None:
        read_baseline(check)  # rather now than when every cell has run
    cells = [cell for cell in ran.cells(flags, place) if cell.method in names]
    cells = select(cells, only or (), shard)
    searching = [cell.name for cell in cells if cell.protocol.learning_rates]
    if "learning_rate" in flags and searching:
        remedy = "change the grid of learning_rate_search in the suite, or choose others by --only"
        raise RecipeError(f"--learning_rate for {searching[0]}, which searches for its own", remedy=remedy)
    folder = results / chosen.name
    queue = _queue(cells, folder)
    if as_list:
        repeated = _repeated(context, {"results": results, "methods": methods, "seeds": seeds, "data_dir": place})
        for job in queue:
            print(shlex.join(["tunery", "bench", suite, "--only", job.cell.name, *repeated]))
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_suite(ran, folder)
    except OSError as error:
        raise RecipeError(f"cannot write {folder}: {error.strerror}", remedy="name another --results") from None
    failed = _run(queue, folder, jobs or _usual_jobs(ran.threads), len(cells))
    if check is not None:
        failed |= _check(folder, check)
    if failed:
        raise typer.Exit(1)


def bench_cell(name: Annotated[str, typer.Argument(help="Name of the cell; standard input describes it.")]) -> None:
    """Run one cell in this process; what `tunery bench` starts."""
    import signal

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        spec = json.load(sys.stdin)
    except ValueError:
        raise RecipeError(
            f"no description of cell {name}", remedy="run it with tunery bench SUITE --only CELL"
        ) from None
    import torch

    from ..core.console import calm
    from .cells import from_spec, run_cell
    from .runner import BUSY, FAILED

    calm()
    cell = from_spec(spec["cell"])
    torch.set_num_threads(cell.threads)
    result = run_cell(cell, Path(spec["folder"]), spec["inputs"], spec["replaces"])
    if result is None:
        raise typer.Exit(BUSY)
    if result["status"] == "failed":
        raise typer.Exit(FAILED)


def _queue(cells: Sequence[Any], folder: Path) -> list[Job]:
    """Return what is not done, and say on standard error why a cell with a result is among it."""
    from ..registry.loading import load_plugins
    from .cells import state_of
    from .inputs import inputs_of
    from .runner import Job

    catalog = load_plugins().catalog
    queue = []
    for cell in cells:
        inputs = inputs_of(cell, catalog)
        state = state_of(folder, cell, inputs)
        if state.status == "done":
            continue
        if state.why:
            print(f"{cell.name}: {state.status}: {state.why}", file=sys.stderr)
        queue.append(Job(cell, inputs, state))
    return queue


def _run(queue: Sequence[Job], folder: Path, jobs: int, total: int) -> bool:
    """Run the queue with progress on a terminal, one line a cell elsewhere; return whether a cell failed."""
    from ..core.console import plain_console
    from .progress import progress
    from .runner import run_jobs

    console = plain_console()
    if not queue:
        console.print(f"{total} cells of {folder} are done")
        return False
    with progress(len(queue), total) as tell:
        outcome = run_jobs(queue, folder, jobs, tell)
    done = total - len(outcome.failed)
    console.print(f"{done} of {total} cells are done in {folder}", soft_wrap=True)
    return bool(outcome.failed)


def _check(folder: Path, baseline: Path) -> bool:
    """Print every method beside the baseline; return whether one got worse."""
    from .regression import compare_to_baseline
    from .results import read_results

    results = read_results(folder)
    for path, why in results.damaged.items():
        print(f"damaged: {why}; moved to {path}")
    found = compare_to_baseline(results, baseline)
    for change in found.changes:
        print(change)
    for name in found.missing:
        print(f"{name} is in the baseline and has not run")
    return not found.ok


def _usual_jobs(threads: int) -> int:
    import torch

    return 1 if torch.cuda.is_available() else max(1, min(4, (os.cpu_count() or 1) // threads))


def _split(text: str | None) -> list[str]:
    """Return the names in ``a,b`` or ``+a``; a comma inside options belongs to them."""
    if text is None:
        return []
    names: list[str] = []
    for part in text.split(","):
        if names and "=" in part and ":" not in part:
            names[-1] += f",{part}"
        else:
            names.append(part.strip())
    return names


def _seeds(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    chosen = numbers if "," in text or not numbers else list(range(numbers[0]))
    if not chosen or min(chosen) < 0:
        raise RecipeError(f"--seeds {text}", remedy="give how many, for example 5, or which: 0,4,7 (one alone: 3,)")
    return chosen


def _repeated(context: typer.Context, options: dict[str, Any]) -> list[str]:
    """Return the options of this call that each single command needs too."""
    given = [[f"--{name}", str(value)] for name, value in options.items() if value is not None]
    return [*(word for pair in given for word in pair), *context.args]
