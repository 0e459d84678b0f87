"""One cell: whether it is done, and its run, from a flat recipe to one sealed result file."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import shutil
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..core.artifacts import versions, write_json
from ..registry.errors import TuneryError
from .claims import claimed
from .errors import DamagedResultError
from .inputs import differences
from .measuring import measure
from .results import FORMAT, file_name, read_cell, sealed, set_aside
from .suite import Cell

WORK = ".work"
_CACHE = "cache"  # in it


@dataclass(frozen=True)
class State:
    """What lies in the folder of a cell.

    Attributes:
        status: of its result file, against the inputs it would have now.
        why: what changed, of a stale one; the error, of a failed one; why it was moved aside, of a damaged one.
        seal: the hash the file carries, ``None`` where there is none.
    """

    status: Literal["missing", "stale", "failed", "done"]
    why: str = ""
    seal: str | None = None


def result_path(folder: Path, cell: Cell) -> Path:
    """Return the result file of a cell."""
    return folder / file_name(cell.task, cell.method, cell.seed)


def state_of(folder: Path, cell: Cell, inputs: Mapping[str, Any]) -> State:
    """Look at the result file of a cell; a damaged one is moved aside, and the cell counts as not run."""
    path = result_path(folder, cell)
    if not path.is_file():
        return State("missing")
    try:
        found = read_cell(path)
    except DamagedResultError as error:
        aside = set_aside(path)
        return State("missing", f"{error}; moved to {aside.parent.name}/{aside.name}")
    seal = found.seal
    if found.inputs.get("fingerprint") != inputs["fingerprint"]:
        return State("stale", ", ".join(differences(found.inputs, inputs)), seal)
    if found.status == "failed":
        return State("failed", str(found.error), seal)
    return State("done", seal=seal)


def run_cell(cell: Cell, folder: Path, inputs: Mapping[str, Any], replaces: str | None) -> dict[str, Any] | None:
    """Run a cell in this process and write its result file; return its content.

    Args:
        cell: the cell.
        folder: of the suite's results.
        inputs: what :func:`.inputs.inputs_of` says.
        replaces: the hash of the result file that is to be replaced, ``None`` for none.

    Returns:
        What was written; ``None`` where another worker has the cell, or has done it meanwhile.
    """
    work = folder / WORK
    work.mkdir(parents=True, exist_ok=True)
    with claimed(work, cell.name) as claim:
        if claim is None or state_of(folder, cell, inputs).seal != replaces:
            return None
        for left_behind in work.glob(f"{cell.name}.run-*"):
            shutil.rmtree(left_behind, ignore_errors=True)
        place = Path(tempfile.mkdtemp(prefix=f"{cell.name}.run-", dir=work))
        started = _now()
        try:
            content = measure(dataclasses.replace(cell, cache_dir=str((work / _CACHE).resolve())), place)
        except Exception as error:  # noqa: BLE001  # whatever it is, the other cells go on
            traceback.print_exc()
            name = "" if isinstance(error, TuneryError) else f"{type(error).__name__}: "
            lines = str(error).strip().splitlines() or [""]
            content = failure(f"{name}{lines[0]}")
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return write_result(cell, folder, inputs, content, started) if claim.still_held else None


def write_result(
    cell: Cell, folder: Path, inputs: Mapping[str, Any], content: Mapping[str, Any], started: str
) -> dict[str, Any]:
    """Seal and write what a cell left, atomically; return it."""
    result = {
        "format": FORMAT,
        "suite": cell.suite,
        "task": cell.task,
        "method": cell.method,
        "seed": cell.seed,
        "inputs": dict(inputs),
        **content,
    }
    result["meta_info"] = {**result["meta_info"], **_circumstances(), "started": started, "finished": _now()}
    # As it will be read back: the hash is of what JSON makes of it, which has no word for what is not a finite number.
    result = sealed(json.loads(json.dumps(result), parse_constant=lambda _: None))
    write_json(result_path(folder, cell), result)
    return result


def failure(error: str) -> dict[str, Any]:
    """Return the content of a failed cell's result."""
    return {
        "status": "failed",
        "error": error,
        "metrics": {},
        "main_metric": "",
        "higher_is_better": True,
        "majority": None,
        "curve": [],
        "train_info": {},
        "run_info": {},
        "meta_info": {},
    }


def _circumstances() -> dict[str, Any]:
    """Return what a result may be read with, and does not depend on by itself; nothing that names a machine."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"versions": versions(), "cpu": platform.machine(), "gpu": gpu}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def as_spec(cell: Cell) -> dict[str, Any]:
    """Return a cell as plain data, for the process that runs it."""
    return dataclasses.asdict(cell)


def from_spec(spec: Mapping[str, Any]) -> Cell:
    """Return the cell that :func:`as_spec` made data of."""
    return Cell(**spec)
