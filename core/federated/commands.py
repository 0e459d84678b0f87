"""``tunery federate``: federated rounds from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...registry.errors import RecipeError, did_you_mean
from ...registry.hookspecs import hookimpl

_PARTS = ("provision", "server", "site", "submit")
_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}


@hookimpl(trylast=True)  # after the commands of every run
def tunery_commands(app: typer.Typer) -> None:
    """Add ``tunery federate``."""
    app.command(context_settings=_FLAGS)(federate)


def federate(
    context: typer.Context,
    recipe: Annotated[
        Path | None,
        typer.Argument(help="A YAML file with the same keys as the flags; or provision, server, site, submit."),
    ] = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every key a recipe may hold, and exit.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what a round costs a client, and do not train.")
    ] = False,
) -> None:
    """Fine-tune in federated rounds: tunery federate recipe.yaml --num_clients 20. Flags are the keys of a recipe, and win.

    All clients are in this process. Real ones, over NVFLARE: tunery federate provision project.yaml --output_dir kits, then
    tunery federate server KIT RECIPE, tunery federate site KIT RECIPE on each site, and tunery federate submit KIT --sites NUMBER.
    """
    from ..console import calm
    from .arguments import federated_help, read_federated_options

    if keys:
        print(federated_help())
        return
    flags = list(context.args)
    if str(recipe) in _PARTS:
        calm()
        _part(str(recipe), flags)
        return
    if recipe is not None and not recipe.exists() and (nearest := did_you_mean(str(recipe), _PARTS)):
        raise RecipeError(f"no recipe {recipe}", known=_PARTS, remedy=nearest)
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


def _part(action: str, given: list[str]) -> None:
    """Do one party's part in a federation over NVFLARE."""
    from .flare.launch import run_server, run_site, submit
    from .flare.provision import provision, read_project

    usage = {
        "provision": "provision PROJECT --output_dir FOLDER",
        "server": "server KIT RECIPE",
        "site": "site KIT RECIPE",
        "submit": "submit KIT --sites NUMBER",
    }
    match action, given:
        case "provision", [project, "--output_dir", folder] | ["--output_dir", folder, project]:
            for kit in provision(read_project(Path(project)), Path(folder)):
                print(kit)
        case "server", [kit, recipe]:
            run_server(Path(kit), Path(recipe))
        case "site", [kit, recipe]:
            run_site(Path(kit), Path(recipe))
        case "submit", [kit, "--sites", sites] if sites.isdecimal():
            print(f"job {submit(Path(kit), int(sites))} is done")
        case _:
            raise RecipeError(f"cannot read {' '.join([action, *given])!r}", remedy=f"tunery federate {usage[action]}")
