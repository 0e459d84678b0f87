"""Runs the cells of a suite, each in a process of its own: what is done stays done, what fails does not stop the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from .cells import WORK, State, as_spec, failure, result_path, state_of, write_result
from .claims import claimed, is_claimed
from .errors import ResultError
from .results import read_cell
from .suite import Cell

CELL_COMMAND = "bench-cell"
DONE, FAILED, BUSY = 0, 4, 3  # 1 and 2 are what Python and tunery end with where a process has come to grief
_POLL_SECONDS = 0.2
_RECHECK_SECONDS = 3.0


@dataclass
class Job:
    """A cell that is still to do.

    Attributes:
        cell: the cell.
        inputs: what its result will depend on.
        seen: what lay in the folder when the runner began.
        not_before: when to look again, of one that another worker has.
    """

    cell: Cell
    inputs: Mapping[str, Any]
    seen: State
    not_before: float = 0.0


@dataclass
class Outcome:
    """How a runner ended.

    Attributes:
        done, failed: names of the cells, of other workers too; of failed ones, with their error.
    """

    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[str]
    log: IO[str]


def run_jobs(queue: Sequence[Job], folder: Path, jobs: int, tell: Callable[[Outcome, str], None]) -> Outcome:
    """Run every job, at most ``jobs`` at a time, and wait for those that other workers have.

    Args:
        queue: the jobs, in order.
        folder: of the suite's results.
        jobs: processes at a time.
        tell: called with the outcome so far and a line about a cell that ended.

    Returns:
        What was done and what failed.
    """
    (folder / WORK).mkdir(parents=True, exist_ok=True)
    waiting, outcome = list(queue), Outcome()
    running: list[_Running] = []
    with _stopping(running):
        while waiting or running:
            while len(running) < jobs and (job := _next(waiting, folder)):
                waiting.remove(job)
                running.append(_start(job, folder))
            for item in [item for item in running if item.process.poll() is not None]:
                running.remove(item)
                item.log.close()
                _settle(item.job, folder, item.process.returncode, waiting, outcome, tell)
            for job in [job for job in waiting if job.not_before and job.not_before <= time.monotonic()]:
                if state_of(folder, job.cell, job.inputs).seal != job.seen.seal:
                    waiting.remove(job)
                    _settle(job, folder, BUSY, waiting, outcome, tell)
            time.sleep(_POLL_SECONDS if running else min(_POLL_SECONDS, 0.05 * len(waiting)))
    return outcome


def _next(waiting: Sequence[Job], folder: Path) -> Job | None:
    """Return the first job that nobody is at work on."""
    now = time.monotonic()
    for job in waiting:
        if job.not_before > now:
            continue
        if not is_claimed(folder / WORK, job.cell.name):
            return job
        job.not_before = now + _RECHECK_SECONDS
    return None


def _start(job: Job, folder: Path) -> _Running:
    """Start the process of a cell: this Python, its threads counted, what it prints in a log beside the claims."""
    spec = {"cell": as_spec(job.cell), "folder": str(folder), "inputs": job.inputs, "replaces": job.seen.seal}
    threads = {name: str(job.cell.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    log = log_path(folder, job.cell).open("w", encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "tunery", CELL_COMMAND, job.cell.name],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **threads, "TOKENIZERS_PARALLELISM": "false"},
        text=True,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stream:  # one that died before it read is recorded like any other
        stream.write(json.dumps(spec))
    return _Running(job, process, log)


def log_path(folder: Path, cell: Cell) -> Path:
    """Return the file that holds what a cell's process printed; it is kept only of a failed one."""
    return folder / WORK / f"{cell.name}.log"


def _settle(
    job: Job,
    folder: Path,
    code: int,
    waiting: list[Job],
    outcome: Outcome,
    tell: Callable[[Outcome, str], None],
) -> None:
    """Note how a cell ended: by its result file, which this runner or another worker wrote."""
    name = job.cell.name
    state = state_of(folder, job.cell, job.inputs)
    if state.seal == job.seen.seal and code not in (BUSY, DONE, FAILED):
        state = _record_death(job, folder, code)
    if state.seal == job.seen.seal:  # another worker has it
        waiting.append(Job(job.cell, job.inputs, job.seen, time.monotonic() + _RECHECK_SECONDS))
        return
    if state.status == "done":
        outcome.done.append(name)
        log_path(folder, job.cell).unlink(missing_ok=True)
        found = read_cell(result_path(folder, job.cell))
        score = "no score" if found.score is None else f"{found.main_metric} {found.score:.4f}"
        by = "" if code == DONE else " by another worker"
        tell(outcome, f"{name}: {score}, {found.train_info['seconds']:.0f} s of training{by}")
    else:
        outcome.failed[name] = state.why
        tell(outcome, f"{name}: failed: {state.why} (see {log_path(folder, job.cell)})")


def _record_death(job: Job, folder: Path, code: int) -> State:
    """Record a cell whose process ended without a word, as one that the system kills for memory does.

    Raises:
        ResultError: the result file cannot be written.
    """
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    started = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    try:
        with claimed(folder / WORK, job.cell.name) as claim:
            if claim is not None and state_of(folder, job.cell, job.inputs).seal == job.seen.seal:
                write_result(job.cell, folder, job.inputs, failure(f"its process ended by {how}"), started)
    except OSError as error:
        raise ResultError(f"cannot write {result_path(folder, job.cell)}: {error.strerror}") from None
    return state_of(folder, job.cell, job.inputs)


@contextmanager
def _stopping(running: Sequence[_Running]) -> Iterator[None]:
    """Stop the processes of cells when the runner is told to stop; a terminal has told them too."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except BaseException:
        for item in running:
            item.process.send_signal(signal.SIGINT)
        for item in running:
            try:
                item.process.wait(10)
            except subprocess.TimeoutExpired:
                item.process.kill()
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
