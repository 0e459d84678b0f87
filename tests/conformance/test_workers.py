"""A worker group gives answers or errors, never hangs, and leaves no process behind."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Iterator

import pytest

from tunery.registry.conformance.workers import RANKS, WorkerError, WorkerGroup
from tunery.registry.errors import SelectionError
from tunery.registry.selection import parse_selection


@pytest.fixture
def group() -> Iterator[WorkerGroup]:
    """A group whose jobs may take a few seconds."""
    group = WorkerGroup(seconds=3.0)
    assert group.run(os.getenv, "RANK") == "0"
    yield group
    group.close()
    assert not any(process.is_alive() for process in group.processes)


def test_every_rank_does_the_job_and_rank_0_answers(group: WorkerGroup) -> None:
    assert group.run(operator.add, 2, 3) == 5
    assert group.run(os.getenv, "WORLD_SIZE") == str(RANKS)
    group.close()
    assert [process.exitcode for process in group.processes] == [0] * RANKS


def test_what_tunery_refuses_is_raised_as_it_is_and_the_group_goes_on(group: WorkerGroup) -> None:
    with pytest.raises(SelectionError, match="cannot read probe 3"):
        group.run(parse_selection, 3, "probe")
    assert not group.broken
    assert group.run(operator.add, 2, 3) == 5


def test_any_other_error_comes_with_its_traceback_from_every_rank(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError) as caught:
        group.run(operator.truediv, 1, 0)
    assert str(caught.value).count("ZeroDivisionError") == RANKS
    assert group.broken


def test_a_worker_that_dies_is_reported_with_its_exit_code(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match="rank 1: exited with 3"):
        group.run(os._exit, 3)
    assert group.broken


def test_a_worker_that_hangs_is_killed_when_its_time_is_over(group: WorkerGroup) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerError, match="no answer in time"):
        group.run(time.sleep, 600)
    group.close()
    assert time.monotonic() - began < 60


def test_a_dead_group_refuses_further_jobs_without_hanging(group: WorkerGroup) -> None:
    group.processes[1].kill()
    group.processes[1].join()
    with pytest.raises(WorkerError, match="rank 1: exited with -9"):
        group.run(time.sleep, 0)
