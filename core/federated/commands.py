"""``tunery federate``: federated rounds from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...registry.hookspecs import hookimpl

_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}


@hookimpl
def tunery_commands(app: typer.Typer) -> None:
    """Add ``tunery federate``."""
    app.command(context_settings=_FLAGS)(federate)


def federate(
    context: typer.Context,
    recipe: Annotated[Path | None, typer.Argument(help="A YAML file with the same keys as the flags.")] = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every key a recipe may hold, and exit.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what a round costs a client, and do not train.")
    ] = False,
) -> None:
    """Fine-tune in federated rounds: tunery federate recipe.yaml --num_clients 20. Flags are the keys of a recipe, and win."""
    from ..console import calm
    from .arguments import federated_help, read_federated_options

    if keys:
        print(federated_help())
        return
    flags = list(context.args)
    if recipe is not None and str(recipe).startswith("--"):
        flags, recipe = [str(recipe), *flags], None
    calm()
    options = read_federated_options(recipe, flags)
    from .run import assemble
    from .run import federate as run_federation
    from .show import show_cost, show_federation

    if dry_run:
        show_cost(assemble(options).cost(options))
        return
    show_federation(run_federation(options), options.output_dir)
