"""The command line. Our own sub-commands come in through ``tunery_commands``, the hook anyone's come in through.

Everything heavy is imported inside the commands, so that ``tunery --help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..registry.errors import RecipeError, TuneryError
from ..registry.hookspecs import hookimpl
from ..registry.loading import load_plugins

_UsageError: Any = typer.BadParameter.__base__  # typer names only this kind of what it raises for wrong grammar
_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}
RunFolder = Annotated[Path, typer.Argument(help="A run or checkpoint folder that tunery wrote.")]


def main() -> None:
    """Run the command line; an error a user can mend is one line on standard error and exit code 2."""
    app = typer.Typer(
        name="tunery",
        help="Fine-tuning methods as plugins: strategies, regularizers and probes by name.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    code = 0
    try:
        load_plugins().manager.hook.tunery_commands(app=app)
        result = app(standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except _UsageError as error:
        message = " ".join(error.format_message().split())
        if message:  # without arguments, typer has printed the help
            print(f"tunery: {message}", file=sys.stderr)
        code = 2
    except typer.Exit as stop:
        code = stop.exit_code
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except TuneryError as error:
        print(f"tunery: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("tunery: interrupted", file=sys.stderr)
        code = 130
    _leave(code)


def _leave(code: int) -> None:
    """Exit; where processes work together, part in an orderly way first."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        sys.exit(code)
    if code == 0:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads may otherwise abort a process whose work is done, or keep a failed one waiting


@hookimpl
def tunery_commands(app: typer.Typer) -> None:
    """Add tunery's own sub-commands."""
    app.command(context_settings=_FLAGS)(train)
    app.command()(export)
    app.command(context_settings=_FLAGS)(probe)
    app.command()(env)
    tasks = typer.Typer(help="The tasks of a run on several.", no_args_is_help=True)
    tasks.command("list")(tasks_list)
    tasks.command("keep")(tasks_keep)
    app.add_typer(tasks, name="tasks")
    plugins = typer.Typer(help="What is installed, and where it comes from.", no_args_is_help=True)
    plugins.command("list")(plugins_list)
    plugins.command("show")(plugins_show)
    plugins.command("new")(plugins_new)
    app.add_typer(plugins, name="plugins")


def train(
    context: typer.Context,
    recipe: Annotated[Path | None, typer.Argument(help="A YAML file with the same keys as the flags.")] = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every key a recipe may hold, and exit.")] = False,
) -> None:
    """Fine-tune a model: tunery train recipe.yaml --learning_rate 2e-5. Flags are the keys of a recipe, and win."""
    from .console import calm, show_result
    from .keys import help_text
    from .options import read_options

    if keys:
        print(help_text())
        return
    flags = list(context.args)
    if recipe is not None and str(recipe).startswith("--"):
        flags, recipe = [str(recipe), *flags], None
    calm()
    options = read_options(recipe, flags)
    from .run import train as run_train

    result = run_train(options)
    if options.training.process_index == 0:
        show_result(result, options.output_dir)


def export(
    run: RunFolder,
    output_dir: Annotated[Path, typer.Option("--output_dir", help="A new folder to write.")],
    merge: Annotated[bool, typer.Option(help="Fold an adapter into its base model.")] = False,
    task: Annotated[str | None, typer.Option(help="Of a run on several tasks, the one to write.")] = None,
    wise_ft: Annotated[
        float | None,
        typer.Option("--wise_ft", help="Share of the trained weights in a mean with the pre-trained ones, 0 to 1."),
    ] = None,
) -> None:
    """Write a run as what transformers or PEFT load where tunery is not installed."""
    from .console import calm

    calm()
    from .finished import export_run

    print(export_run(run, output_dir, merge=merge, task=task, wise_ft=wise_ft))


def tasks_list(run: RunFolder) -> None:
    """List the tasks of a run: name, kind, labels and metrics."""
    from .artifacts import read_manifest, tasks_of
    from .console import show_measurements

    rows = [
        {"task": t.name, "kind": t.kind.value, "labels": ", ".join(t.label_names), "metrics": ", ".join(t.metrics)}
        for t in tasks_of(read_manifest(run))
    ]
    show_measurements(rows)


def tasks_keep(
    run: RunFolder,
    task: Annotated[
        list[str], typer.Option("--task", help="A task to keep; OLD=NEW gives it another name. Several may be given.")
    ],
    output_dir: Annotated[Path, typer.Option("--output_dir", help="A new folder to write.")],
) -> None:
    """Write a run on several tasks once more with some of them: dropping and renaming tasks."""
    from .console import calm

    calm()
    from .finished import keep_tasks

    names: dict[str, str] = {}
    for old, _, new in (item.partition("=") for item in task):
        if old in names:
            raise RecipeError(f"--task {old!r} twice", remedy="a task is kept once, under one name")
        names[old] = new or old
    print(keep_tasks(run, output_dir, names))


def probe(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The probe, for example weight_distance or name:key=value.")] = "",
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="A run, checkpoint or model folder, or a hub name; several may be given."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines instead of a table.")] = False,
    keys: Annotated[bool, typer.Option("--keys", help="List every further key, and exit.")] = False,
) -> None:
    """Measure models, without training: tunery probe gaussian --models A B C --dataset_name python_docs.

    Also --model X --revisions r1,r2,... or --runs "out/*/checkpoint-*", with --tokens or --steps where names do not tell
    them; the data keys of a recipe; and --output_dir, which keeps what is measured, so that it is not measured again.
    """
    from .console import calm
    from .probe_command import help_text, probe_points, read_flags

    if keys:
        print(help_text())
        return
    calm()
    asked = read_flags(name, context.args, model or [])
    if probe_points(name, asked, as_json=as_json):
        raise typer.Exit(1)


def env() -> None:
    """Print versions, accelerators and plugins: what a bug report needs."""
    import torch

    from .artifacts import versions
    from .console import show_mapping

    facts: dict[str, Any] = dict(versions())
    facts["platform"] = sys.platform
    facts["accelerators"] = torch.cuda.device_count() if torch.cuda.is_available() else "none"
    catalog = load_plugins().catalog
    facts["plugins"] = ", ".join(entry.name for entry in catalog)
    if catalog.broken:
        facts["broken plugins"] = ", ".join(broken.name for broken in catalog.broken)
    show_mapping(facts)


def plugins_list(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List every plugin: kind, name, distribution, version, file and summary; broken ones with their error."""
    from .console import list_plugins

    list_plugins(load_plugins().catalog, as_json)


def plugins_show(
    name: Annotated[str, typer.Argument(help="The plugin's name.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show one plugin: its options with types and defaults, its source, what it works with."""
    from .console import show_plugin

    show_plugin(load_plugins().catalog, name, as_json)


def plugins_new(
    name: Annotated[str, typer.Argument(help="The plugin's name: lower case letters, digits, underscores.")],
    kind: Annotated[str, typer.Option(help="strategy, regularizer or probe.")] = "strategy",
    output_dir: Annotated[Path, typer.Option("--output_dir", help="Where to put the new folder.")] = Path("."),
) -> None:
    """Write the skeleton of a new plugin distribution: one class, one entry point, its conformance tests."""
    from .scaffold import write_plugin_skeleton

    for path in write_plugin_skeleton(name, kind, output_dir):
        print(path)
