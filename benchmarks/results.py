"""Result files: one JSON per cell (task x method x seed), sealed with a hash; damaged ones are named and moved aside.

A suite's folder holds ``<task>--<method>--seed<k>.json`` files and ``suite.json``. A file's ``sha256`` is that of the
canonical JSON (sorted keys, no spaces) of all its other keys, so that a bit that flips on a disk is noticed before it
enters an average. ``null`` is a number that is not finite, as a model that diverged has them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .errors import DamagedResultError, ResultError
from .joint import by_task, curve_of
from .suite_file import SUITE, position, read_suite_file

FORMAT = 1
QUARANTINE = "damaged"
STATUSES = ("done", "failed")
OUT_OF_100 = ("bleu", "chrf")  # of core.data.metrics, which is slow to import
_KINDS: dict[str, type | tuple[type, ...]] = {
    "suite": str,
    "task": str,
    "method": str,
    "seed": int,
    "status": str,
    "error": (str, type(None)),
    "inputs": dict,
    "metrics": dict,
    "main_metric": str,
    "higher_is_better": bool,
    "majority": (int, float, type(None)),
    "curve": list,
    "train_info": dict,
    "run_info": dict,
    "meta_info": dict,
}


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """What one cell left: one method on one task with one seed.

    Attributes:
        suite, task, method, seed: which cell.
        status: ``done`` or ``failed``.
        error: of a failed cell, what went wrong.
        inputs: what the result depends on, with their ``fingerprint``.
        metrics: by name, as they were measured.
        main_metric: the one that is compared; empty of a cell that failed, unless done ones of its task say which it is.
        higher_is_better: whether a larger value of it is better.
        majority: its value for the majority class; a score that is not better is of a degenerate run.
        curve: (optimizer step, or federated round; value of the main metric) of every evaluation.
        train_info: seconds, peak memory in bytes, steps, training loss, parameter counts.
        run_info: strategy, regularizers, learning rate, recipe.
        meta_info: versions, provenance of every plugin, start and end.
        seal: the hash the file carries.
        joint: of a part of a run of several tasks, the suite's task that stands for all of them; see :mod:`.joint`.
    """

    suite: str
    task: str
    method: str
    seed: int
    status: str
    error: str | None
    inputs: Mapping[str, Any]
    metrics: Mapping[str, float]
    main_metric: str
    higher_is_better: bool
    majority: float | None
    curve: Sequence[tuple[int, float]]
    train_info: Mapping[str, Any]
    run_info: Mapping[str, Any]
    meta_info: Mapping[str, Any]
    seal: str = ""
    joint: str = ""

    @property
    def score(self) -> float | None:
        """Value of the main metric, BLEU's and chrF's in 0..1 too; ``None`` of a cell that failed or has no finite one."""
        value = self.metrics.get(self.main_metric) if self.status == "done" else None
        of = 100 if self.main_metric in OUT_OF_100 else 1
        return float(value) / of if value is not None and math.isfinite(value) else None

    @property
    def degenerate(self) -> bool:
        """Whether the run trained and is no better than answering with the majority class."""
        if self.score is None or self.majority is None:
            return False
        return self.score <= self.majority if self.higher_is_better else self.score >= self.majority

    @property
    def failed(self) -> bool:
        """Whether the run counts as failed: it has no score, or is degenerate."""
        return self.score is None or self.degenerate

    @property
    def key(self) -> tuple[str, str, int]:
        """Task, method and seed: what two suites are paired by."""
        return self.task, self.method, self.seed

    @property
    def run(self) -> tuple[str, str, int]:
        """Task, method and seed of the cell that ran: where it had several tasks, all their parts have the same one."""
        return self.joint or self.task, self.method, self.seed


@dataclass(frozen=True)
class Results:
    """Every cell of one suite's folder.

    Attributes:
        folder: where they were read from.
        suite: what ``suite.json`` says; empty without one.
        cells: in the suite's order of tasks and methods, then by seed; a run of several tasks is one cell a task.
        damaged: why each file that was moved aside is not among them, by its new path.
    """

    folder: Path
    suite: Mapping[str, Any]
    cells: tuple[CellResult, ...]
    damaged: Mapping[Path, str]

    @property
    def name(self) -> str:
        """The suite's name; of a folder without ``suite.json``, the folder's."""
        return str(self.suite.get("name") or (self.cells[0].suite if self.cells else self.folder.name))

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks of the cells, in the suite's order."""
        return tuple(dict.fromkeys(cell.task for cell in self.cells))

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods of the cells, in the suite's order."""
        found = {cell.method for cell in self.cells}
        return tuple(sorted(found, key=position(self.suite, "methods")))

    @property
    def seeds(self) -> tuple[int, ...]:
        """Every seed any cell ran with."""
        return tuple(sorted({cell.seed for cell in self.cells}))

    def of(self, task: str, method: str) -> tuple[CellResult, ...]:
        """Return the cells of one method on one task, by seed."""
        return tuple(cell for cell in self.cells if (cell.task, cell.method) == (task, method))


def file_name(task: str, method: str, seed: int) -> str:
    """Return the name of a cell's result file."""
    return f"{task}--{method}--seed{seed}.json"


def digest(content: Mapping[str, Any]) -> str:
    """Return the hash a result file carries: of the canonical JSON of every key but ``sha256``."""
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a result file with its hash."""
    return {**content, "sha256": digest(content)}


def read_cell(path: Path) -> CellResult:
    """Read one result file.

    Raises:
        DamagedResultError: it is not JSON, does not match its hash, lacks a key, or is another cell's under this name.
        ResultError: it cannot be read, or comes from a newer tunery.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ResultError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedResultError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(content, dict) or "sha256" not in content:
        raise DamagedResultError(f"{path.name} is no result file")
    if content["sha256"] != digest(content):
        raise DamagedResultError(f"{path.name} does not match its hash")
    if content.get("format") != FORMAT:
        remedy = "pip install --upgrade tunery"
        raise ResultError(f"{path} has format {content.get('format')!r}", known=[str(FORMAT)], remedy=remedy)
    for key, kind in _KINDS.items():
        if key not in content:
            raise DamagedResultError(f"{path.name} lacks {key!r}")
        if not isinstance(content[key], kind):
            raise DamagedResultError(f"{path.name} has {key} = {content[key]!r}")
    if content["status"] not in STATUSES:
        raise DamagedResultError(f"{path.name} has status {content['status']!r}", known=STATUSES)
    name = file_name(content["task"], content["method"], content["seed"])
    if path.name != name:
        raise DamagedResultError(f"{path.name} holds what belongs in {name}")
    try:
        curve = curve_of(content["curve"])
    except (TypeError, ValueError):
        raise DamagedResultError(f"{path.name} has a curve that is no list of (step, value)") from None
    metrics = {name: math.nan if value is None else value for name, value in content["metrics"].items()}
    kept = {key: content[key] for key in _KINDS}
    return CellResult(**{**kept, "metrics": metrics, "curve": curve, "seal": content["sha256"]})


def read_results(folder: Path) -> Results:
    """Read every result file of a suite's folder; damaged ones go to ``damaged/`` in it and are told about.

    Raises:
        ResultError: there is no such folder, no result in it, one that cannot be read, or no readable ``suite.json``.
    """
    if not folder.is_dir():
        raise ResultError(f"no folder {folder}", remedy="tunery bench SUITE writes one")
    suite = read_suite_file(folder / SUITE)
    cells, damaged = [], {}
    for path in sorted(folder.glob("*--*--seed*.json")):
        try:
            cells.append(read_cell(path))
        except DamagedResultError as error:
            damaged[set_aside(path)] = str(error)
    if not cells and not damaged:
        inner = [inside.parent.name for inside in sorted(folder.glob(f"*/{SUITE}"))]
        remedy = "name one of the suites in it" if inner else "tunery bench SUITE writes them"
        raise ResultError(f"{folder} holds no results", known=inner, remedy=remedy)
    task, method = position(suite, "tasks"), position(suite, "methods")
    cells = sorted(by_task(cells), key=lambda cell: (task(cell.task), method(cell.method), cell.seed))
    return Results(folder, suite, tuple(_with_metrics(cells)), damaged)


def _with_metrics(cells: Sequence[CellResult]) -> Iterator[CellResult]:
    """Give cells that failed before they had a metric the one that the done cells of their task agree on."""
    known: dict[str, set[tuple[str, bool]]] = {}
    for cell in cells:
        if cell.main_metric:
            known.setdefault(cell.task, set()).add((cell.main_metric, cell.higher_is_better))
    for cell in cells:
        found = known.get(cell.task, set())
        if not cell.main_metric and len(found) == 1:
            name, higher = next(iter(found))
            cell = replace(cell, main_metric=name, higher_is_better=higher)
        yield cell


def set_aside(path: Path) -> Path:
    """Move a damaged file into the quarantine folder under a name that is free, and return where it is.

    Raises:
        ResultError: it cannot be moved.
    """
    home = path.parent / QUARANTINE
    names = (home / f"{path.stem}{'' if n == 1 else f'.{n}'}{path.suffix}" for n in itertools.count(1))
    try:
        home.mkdir(exist_ok=True)
        return path.rename(next(name for name in names if not name.exists()))
    except OSError as error:
        raise ResultError(f"cannot move {path.name} to {home}: {error.strerror}") from None
