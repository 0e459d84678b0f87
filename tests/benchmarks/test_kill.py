"""Suites that are stopped and gone on with, and workers that share one: the bits of an unbroken run, no cell done twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tunery.benchmarks import cells as one_cell
from tunery.benchmarks.claims import is_claimed
from tunery.benchmarks.results import read_results

MOMENT = 0.4  # seconds that a cell takes longer where it is to be killed amid its work


def measured(folder: Path) -> Mapping[str, Any]:
    """Return what has to be the same to the bit, by cell."""
    return {
        str(cell.key): (cell.metrics, cell.curve, cell.train_info["train_loss"], cell.inputs)
        for cell in read_results(folder).cells
    }


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """What a shell starts in the background ignores Ctrl-C, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def lasting(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], float]], None]:
    """Let cells take so many seconds longer from now on."""
    measure = one_cell.measure

    def let(seconds: Callable[[Any], float]) -> None:
        def measure_slowly(cell: Any, place: Path) -> Any:
            time.sleep(seconds(cell) / 2)
            found = measure(cell, place)
            time.sleep(seconds(cell) / 2)
            return found

        monkeypatch.setattr(one_cell, "measure", measure_slowly)

    return let


def children(pid: int) -> list[int]:
    """Return the processes that one has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill_group(pid: int) -> None:
    """Kill a worker and the cells it started, as a power cut does."""
    found = children(pid)
    os.kill(pid, signal.SIGKILL)
    for child in found:
        os.kill(child, signal.SIGKILL)
    os.waitpid(pid, 0)


def until(happened: Callable[[], Any], seconds: float) -> None:
    """Wait for something that has to happen."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("moments", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_kill_and_restart(place: Any, forked: Any, lasting: Callable[[Callable[[Any], float]], None], moments: int):
    """Killed at random moments and restarted: the results of an unbroken run, bit for bit, and no cell completed twice."""
    pick = random.Random(4)
    cells = place.cells()[: 2 + moments // 3]
    forked.work(cells, place.folder / "unbroken")
    forked.note.write_text("", encoding="utf-8")
    broken = place.folder / "broken"
    lasting(lambda _: MOMENT)
    for number in range(moments):
        done = len(list(broken.glob("*.json")))
        pid = forked.worker(cells, broken)
        if number % 3 == 2:  # amid a later cell; else amid the first, or before
            until(lambda: len(list(broken.glob("*.json"))) > done, 60)  # noqa: B023
        time.sleep(pick.uniform(0, 0.75 * MOMENT))
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)  # it was at work
        kill_group(pid)
    lasting(lambda _: 0)
    forked.work(cells, broken)
    assert measured(broken) == measured(place.folder / "unbroken")
    assert len(set(forked.completed)) == len(forked.completed)
    left = list((broken / ".work").iterdir())
    assert not [path for path in left if path.is_dir()]
    # A worker killed between its result and the end of its claim leaves the claim: of a cell that is done, nobody asks for it.
    assert {path.stem for path in left if path.suffix == ".claim"} <= {cell.name for cell in cells}


def test_interrupt(place: Any, forked: Any, lasting: Callable[[Callable[[Any], float]], None]):
    """Ctrl-C amid cells ends a worker soon, with its cells and their claims, and it can be gone on with."""
    cells = place.cells()[:4]
    broken, unbroken = place.folder / "broken", place.folder / "unbroken"
    forked.work(cells, unbroken)
    forked.note.write_text("", encoding="utf-8")
    lasting(lambda cell: 600 * cell.seed)
    pid = forked.worker(cells, broken, jobs=2)
    until(lambda: len(list(broken.glob(".work/*seed1.run-*"))) == 2, 60)
    started = children(pid)
    assert len(started) == 2
    os.kill(pid, signal.SIGINT)
    until(lambda: os.waitpid(pid, os.WNOHANG)[0], 8)
    assert not [child for child in started if Path(f"/proc/{child}").exists()]
    assert not [path for path in (broken / ".work").iterdir() if path.is_dir() or path.suffix == ".claim"]
    assert len(forked.completed) == 2
    lasting(lambda _: 0)
    forked.work(cells, broken, jobs=2)
    assert measured(broken) == measured(unbroken)
    assert sorted(forked.completed) == sorted(cell.name for cell in cells)


def test_two_workers_share_the_cells(place: Any, forked: Any):
    """Each cell is done once, by one or the other; both end when all are done; the bits are those of one worker."""
    cells = place.cells()[:4]
    together = place.folder / "together"
    together.mkdir()
    pids = [forked.worker(cells, together) for _ in range(2)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    assert sorted(forked.completed) == sorted(cell.name for cell in cells)
    forked.work(cells, place.folder / "alone")
    forked.work(cells, place.folder / "two-jobs", jobs=2)
    assert measured(together) == measured(place.folder / "alone") == measured(place.folder / "two-jobs")


@pytest.mark.slow
def test_real_processes(place: Any, run: Callable[..., Any]):
    """``tunery bench`` itself: killed, interrupted, then run to the end with two jobs; the bits are those of cells run here."""
    words = [sys.executable, "-m", "tunery", "bench", str(place.suite(seeds=1)), "--data_dir", str(place.data)]
    words += ["--jobs", "2", "--results", str(place.folder / "broken"), "--only"]
    work, cells = place.folder / "broken" / "tiny" / ".work", place.cells(seeds=1)[:2]
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
        process = subprocess.Popen([*words, cells[0].name], cwd=place.folder, start_new_session=True)
        until(lambda: is_claimed(work, cells[0].name), 200)
        time.sleep(1)
        os.killpg(process.pid, number)
        assert process.wait(60) == code
    ran = subprocess.run([*words, "first--*"], cwd=place.folder, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for cell in cells:
        run(cell, place.folder / "here")
    assert not [path for path in work.iterdir() if path.is_dir() or path.suffix == ".claim"]
    assert measured(work.parent) == measured(place.folder / "here")
    assert len(measured(work.parent)) == 2
