"""Claims: one holder at a time, free again when the holder is gone, and no two heirs."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tunery.benchmarks import claims
from tunery.benchmarks.claims import claim_path, claimed, is_claimed


def test_one_holder(tmp_path: Path):
    with claimed(tmp_path, "cell") as first, claimed(tmp_path, "cell") as second:
        assert first is not None
        assert second is None
        assert is_claimed(tmp_path, "cell")
        with claimed(tmp_path, "other") as other:
            assert other is not None
    assert not is_claimed(tmp_path, "cell")
    assert not claim_path(tmp_path, "cell").exists()


def _foreign(folder: Path, age: float) -> Path:
    path = claim_path(folder, "cell")
    path.write_text(json.dumps({"token": "theirs", "machine": "another one"}), encoding="utf-8")
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_lease_of_another_machine(tmp_path: Path):
    """Its claim holds for the time of a lease and no longer, and the heir's is its own."""
    _foreign(tmp_path, age=50)
    with claimed(tmp_path, "cell", lease=60) as claim:
        assert claim is None
    with claimed(tmp_path, "cell", lease=40) as claim:
        assert claim is not None
        assert claim.still_held


@pytest.mark.parametrize("wrong", [-1000, 1000])
def test_a_clock_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: float):
    """A lease is counted by the clock that stamps the files: this machine's may be another."""
    now = time.time()
    _foreign(tmp_path, age=50)
    monkeypatch.setattr(claims, "time", SimpleNamespace(time=lambda: now + wrong, time_ns=time.time_ns))
    assert is_claimed(tmp_path, "cell", lease=60)
    assert not is_claimed(tmp_path, "cell", lease=40)


def test_heartbeat(tmp_path: Path):
    """A holder touches its claim, so that it outlives the lease."""
    with claimed(tmp_path, "cell", lease=0.2):
        path = claim_path(tmp_path, "cell")
        os.utime(path, (0, 0))
        deadline = time.monotonic() + 5
        while path.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert path.stat().st_mtime > time.time() - 5


def test_loss_is_noticed(tmp_path: Path):
    """Who slept through its lease and was succeeded knows, and leaves the successor's claim alone."""
    with claimed(tmp_path, "cell") as claim:
        assert claim is not None
        path = _foreign(tmp_path, age=0)
        assert not claim.still_held
    assert path.exists()


def _hold(folder: Path, ready: Any) -> None:
    with claimed(folder, "cell"):
        ready.set()
        time.sleep(60)


def test_killed_holder(tmp_path: Path):
    """A process that is killed holds nothing, and its own machine knows within a second or two."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_hold, args=(tmp_path, ready))
    process.start()
    assert ready.wait(20)
    assert process.pid
    assert is_claimed(tmp_path, "cell")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    time.sleep(1.1)
    assert not is_claimed(tmp_path, "cell")
    with claimed(tmp_path, "cell") as claim:
        assert claim is not None


def _race(folder: Path, start: Any, wins: Any) -> None:
    start.wait()
    with claimed(folder, "cell", lease=10) as claim:
        if claim is not None:
            with wins.get_lock():
                wins.value += 1
            time.sleep(0.5)


@pytest.mark.parametrize("abandoned", [False, True])
def test_race(tmp_path: Path, abandoned: bool):
    """Of eight processes that want a cell at once, free or abandoned, exactly one gets it."""
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        if abandoned:
            _foreign(tmp_path, age=100)
        start, wins = context.Barrier(8), context.Value("i", 0)
        racers = [context.Process(target=_race, args=(tmp_path, start, wins)) for _ in range(8)]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join()
        assert wins.value == 1


def test_heirs_take_turns(tmp_path: Path):
    """Who finds a claim abandoned waits while another is about to take it over, and then sees it taken."""
    path = _foreign(tmp_path, age=100)
    seen: list[bool] = []

    def inherit() -> None:
        with claimed(tmp_path, "cell", lease=10) as claim:
            seen.append(claim is not None)

    with (tmp_path / ".guard").open("a") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        heir = threading.Thread(target=inherit)
        heir.start()
        heir.join(0.3)
        assert heir.is_alive()
        os.utime(path)  # the other one's claim now
    heir.join(10)
    assert seen == [False]
