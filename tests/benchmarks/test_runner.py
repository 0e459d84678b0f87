"""What a runner makes of cells that fail and of processes that die: it is recorded, and the other cells are run."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from typing import Any

import pytest

from tunery.benchmarks import runner
from tunery.benchmarks.cells import State
from tunery.registry.errors import TuneryError


def test_a_failing_cell_stops_no_other(place: Any, forked: Any):
    """It is recorded with its error and tried again by the next call, and the rest is done."""
    methods = {"full": {"strategy": "full"}, "broken": {"strategy": "full", "regularizers": ["lnsr:layer=7"]}}
    cells = [cell for cell in place.cells(methods=methods, seeds=1) if cell.task == "first"]
    outcome = forked.work(cells, place.folder / "results")
    assert outcome.done == ["first--full--seed0"]
    assert "layer=7" in outcome.failed["first--broken--seed0"]
    again = forked.queue(cells, place.folder / "results")
    assert [(job.cell.method, job.seen.status) for job in again] == [("broken", "failed")]


def test_a_process_that_dies_is_recorded(place: Any, forked: Any):
    """The system kills one for memory, say: the cell failed, by which signal, and the others go on."""
    cells = [cell for cell in place.cells(seeds=1) if cell.task == "first"]
    forked.body = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    outcome = forked.work(cells, place.folder / "results")
    assert outcome.failed == {cell.name: "its process ended by signal SIGKILL" for cell in cells}


def test_a_process_that_crashes_is_recorded(place: Any, forked: Any):
    """Python ends with 1 where a module cannot be imported, say: that is no cell that recorded its own failure."""
    cells = [cell for cell in place.cells(seeds=1) if cell.task == "first"]
    forked.body = lambda _: 1
    outcome = forked.work(cells, place.folder / "results")
    assert outcome.failed == {cell.name: "its process ended by exit code 1" for cell in cells}


def test_a_process_that_dies_before_it_reads(place: Any, monkeypatch: pytest.MonkeyPatch):
    """The pipe to it breaks, and that is recorded like any other death."""
    monkeypatch.setattr("sys.executable", shutil.which("false"))
    inputs = {"fingerprint": "x" * 10**6}  # more than a pipe holds
    jobs = [runner.Job(cell, inputs, State("missing")) for cell in place.cells()[:2]]
    outcome = runner.run_jobs(jobs, place.folder, 1, lambda *_: None)
    assert outcome.failed == {job.cell.name: "its process ended by exit code 1" for job in jobs}


def test_a_death_that_cannot_be_recorded(place: Any, forked: Any, monkeypatch: pytest.MonkeyPatch):
    """A full disk ends the runner with one line, not with a traceback."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    forked.body = lambda _: 1
    monkeypatch.setattr(runner, "write_result", full)
    with pytest.raises(TuneryError, match=r"cannot write .*first--full--seed0.json: No space left on device"):
        forked.work(place.cells()[:1], place.folder / "results")
