"""Starting NVFLARE's own server and site processes on a kit, and submitting the one job there is."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from ....registry.errors import FederationError
from ...artifacts import write_json
from ..arguments import FederatedOptions, read_federated_options
from ..site import refuse_probes
from .provision import CONTROLLER, EXECUTOR, RECIPE, check_kit, need_flare, own_state

_PROCESSES = "nvflare.private.fed.app"


def run_server(kit: Path, recipe: Path) -> NoReturn:
    """Become the federation's server.

    Args:
        kit: the server's.
        recipe: model, data that evaluates it and rounds; the sites bring the training rows.

    Raises:
        RecipeError: no such kit, or a recipe that cannot be read.
    """
    check_kit(kit, "fed_server.json")
    _take(recipe, kit)
    own_state(kit)
    _become("server.server_train", kit, "fed_server.json", [])


def run_site(kit: Path, recipe: Path) -> NoReturn:
    """Become one of the federation's sites.

    Args:
        kit: the site's.
        recipe: model, strategy, the site's own rows, and what its worker does to its numbers.

    Raises:
        RecipeError: no such kit, or a recipe that cannot be read.
    """
    name = check_kit(kit, "fed_client.json")["client"]["fqsn"]
    _take(recipe, kit, refuse_probes)
    _become("client.client_train", kit, "fed_client.json", [f"uid={name}"])


def _take(recipe: Path, kit: Path, check: Callable[[FederatedOptions], None] = lambda options: None) -> None:
    need_flare()
    check(read_federated_options(recipe, []))
    temporary = kit / "local" / f".{RECIPE}.{os.getpid()}"
    shutil.copyfile(recipe, temporary)
    temporary.replace(kit / "local" / RECIPE)


def _become(module: str, kit: Path, start: str, more: Sequence[str]) -> NoReturn:
    settings = ["secure_train=true", "org=tunery", "config_folder=config", *more]
    command = [sys.executable, "-u", "-m", f"{_PROCESSES}.{module}", "-m", str(kit.absolute()), "-s", start]
    os.execv(sys.executable, [*command, "--set", *settings])


def write_job(folder: Path, name: str, sites: int) -> Path:
    """Write the job: two classes by name, no code, no arguments; it begins when that many sites are there."""
    job = folder / name
    app = job / "app" / "config"
    app.mkdir(parents=True)
    write_json(
        job / "meta.json", {"name": name, "resource_spec": {}, "min_clients": sites, "deploy_map": {"app": ["@ALL"]}}
    )
    write_json(
        app / "config_fed_server.json",
        {"format_version": 2, "workflows": [{"id": "rounds", "path": CONTROLLER, "args": {}}], "components": []},
    )
    executor = {"tasks": ["*"], "executor": {"path": EXECUTOR, "args": {}}}
    write_json(app / "config_fed_client.json", {"format_version": 2, "executors": [executor], "components": []})
    return job


def submit(kit: Path, sites: int) -> str:
    """Submit the job with the admin's kit and wait for its end; return its number.

    Args:
        kit: the admin's.
        sites: how many sites must be there for the rounds to begin.

    Raises:
        RecipeError: no such kit.
        FederationError: the server is out of reach, refuses the job, or the job did not end well.
    """
    need_flare()
    user = check_kit(kit, "fed_admin.json")["admin"]["username"]
    with tempfile.TemporaryDirectory() as folder:
        return submit_job(kit, user, write_job(Path(folder), "rounds", sites), wait=True)


def submit_job(kit: Path, user: str, job: Path, wait: bool) -> str:
    """Submit a job folder; see :func:`submit`."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    try:
        session = new_secure_session(user, str(kit.absolute()), timeout=30.0)
    except Exception as error:  # noqa: BLE001  # the engine raises many kinds of its own
        raise FederationError(
            f"cannot reach the server: {error}", remedy="is tunery federate server running?"
        ) from None
    try:
        number = str(session.submit_job(str(job.absolute())))
        if wait:
            _, meta = session.monitor_job_and_return_job_meta(number)
            status = str((meta or {}).get("status"))
            if not status.endswith("COMPLETED"):
                raise FederationError(f"job {number} ended as {status}", remedy="see the server's log")
        return number
    except FederationError:
        raise
    except Exception as error:  # noqa: BLE001  # the engine raises many kinds of its own
        raise FederationError(f"the server refuses the job: {error}") from None
    finally:
        session.close()
