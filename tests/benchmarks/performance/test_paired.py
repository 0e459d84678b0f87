"""The arithmetic of paired measurements, on clocks that only the tests move."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import cycle, repeat

import pytest
import torch
from scipy.stats import binom

from tunery.benchmarks.performance.paired import MIB, Estimate, Memory, Times, interleave, peak_memory

only_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="how memory is kept is glibc's")

WORKERS = """
import resource
import torch
from tunery.benchmarks.performance.paired import MIB, keep_freed_memory

def zeros(size):
    return torch.zeros(int(size), dtype=torch.uint8)

def scatter():
    "Hold 64 MiB, free every other one, then hold 48 MiB more, none of which fits into a gap."
    zeros(MIB)
    held = [zeros(MIB) for _ in range(64)]
    del held[::2]
    held += [zeros(1.5 * MIB) for _ in range(32)]

def pages_cleared():
    "Return how many pages the system clears for 40 MiB, just after 48 MiB were freed."
    keep_freed_memory()
    zeros(48 * MIB)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    zeros(40 * MIB)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""


class Machine:
    """A clock, and work that moves it; what is called is remembered."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def clock(self) -> float:
        return self.now

    def work(self, name: str, seconds: Iterator[float]) -> Callable[[], None]:
        def call() -> None:
            self.calls.append(name)
            self.now += next(seconds)

        return call


def drifting(factor: float) -> Iterator[float]:
    """A call of ``factor`` seconds on a machine that gets slower and faster again."""
    return (factor * slow for slow in cycle([1.0, 3.0, 10.0, 2.0]))


def test_ratio_is_that_of_the_same_round():
    """A machine that drifts tenfold leaves a ratio of 1.02 at exactly that."""
    machine = Machine()
    variants = {"peer": machine.work("peer", drifting(1.0)), "ours": machine.work("ours", drifting(1.02))}
    times = interleave(variants, 12, clock=machine.clock)
    ratio = times.ratio("ours", "peer")
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.02, 1.02, 1.02))


def test_extra_is_the_difference_within_a_round():
    """Ours takes 0.25 s more in every round, however long the peer takes."""
    times = Times({"peer": [1.0, 5.0, 2.0, 9.0] * 2, "ours": [1.25, 5.25, 2.25, 9.25] * 2})
    assert times.extra("ours", "peer").value == 0.25


def test_a_burst_of_noise_does_not_move_the_median():
    """Three disturbed rounds of twenty leave ratio and interval where they were."""
    times = Times({"peer": [1.0] * 20, "ours": [1.01] * 17 + [50.0] * 3})
    ratio = times.ratio("ours", "peer")
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.01, 1.01, 1.01))


@pytest.mark.parametrize("count", [8, 9, 20, 101])
def test_interval_holds_the_median_with_99_percent(count):
    """Its ends are the innermost pair of order statistics that a fair coin leaves 99 % between."""
    estimate = Estimate.of([float(rank) for rank in range(1, count + 1)])
    below = max(rank for rank in range(1, count) if binom.cdf(rank - 1, count, 0.5) <= 0.005)
    assert (estimate.low, estimate.high) == (below, count + 1 - below)
    assert estimate.value == (count + 1) / 2


def test_median_and_spread():
    """The spread is the distance of the quartiles."""
    times = Times({"peer": [7.0, 1.0, 3.0, 2.0, 5.0, 4.0, 6.0]})
    assert (times.median("peer"), times.spread("peer")) == (4.0, 4.0)
    assert str(times) == "peer 4000 ms (+-2e+03), 7 rounds"


def test_every_round_calls_every_variant_once_in_changing_order():
    """Each variant goes first about as often as the others, and the seed says when."""

    def order(seed: int) -> list[tuple[str, ...]]:
        machine = Machine()
        variants = {name: machine.work(name, repeat(1.0)) for name in ("a", "b", "c")}
        interleave(variants, 297, warm_up=3, seed=seed, clock=machine.clock)
        return list(zip(*[iter(machine.calls)] * 3, strict=True))

    rounds = order(seed=1)
    assert len(rounds) == 300
    assert all(sorted(round_) == ["a", "b", "c"] for round_ in rounds)
    assert all(70 < sum(round_[0] == name for round_ in rounds) < 130 for name in "abc")
    assert rounds == order(seed=1) != order(seed=2)


def test_warm_up_does_not_count():
    """The first rounds, slow as first rounds are, leave no trace in the times."""
    machine = Machine()
    slow_start = iter([100.0, 100.0] + [1.0] * 8)
    times = interleave({"only": machine.work("only", slow_start)}, 8, warm_up=2, clock=machine.clock)
    assert times.seconds["only"] == [1.0] * 8


def test_rounds_end_when_they_are_enough_but_not_before_the_eighth():
    """``until`` sees the times so far; ``advance`` hears of every round, warm-up included."""
    machine, advanced = Machine(), []
    asked: list[int] = []

    def enough(times: Times) -> bool:
        asked.append(len(times.seconds["only"]))
        return len(times.seconds["only"]) >= 10

    variants = {"only": machine.work("only", repeat(1.0))}
    times = interleave(
        variants, 50, warm_up=1, clock=machine.clock, until=enough, advance=lambda: advanced.append(None)
    )
    assert len(times.seconds["only"]) == 10
    assert asked == [8, 9, 10]
    assert len(advanced) == 11


def test_too_few_rounds_are_refused():
    """Seven rounds have no interval of 99 %."""
    with pytest.raises(ValueError, match="7 rounds give no interval; at least 8 do"):
        interleave({}, 7)


def test_width_says_nothing_of_where_the_interval_lies():
    """Rounds that end by it end at no lucky moment."""
    assert Estimate(value=1.0, low=0.75, high=1.25).width == Estimate(value=5.0, low=4.75, high=5.25).width == 0.5


def test_peak_memory_counts_tensors_that_are_gone_again():
    """64 MiB of numbers, allocated and dropped, show; what this process holds does not."""
    memory = peak_memory(partial(torch.randn, 16 * MIB))
    assert 60 * MIB < memory.host < 120 * MIB
    assert memory.total == memory.host + memory.device


@pytest.fixture
def workers(tmp_path, monkeypatch):
    """Functions that another process finds by name."""
    (tmp_path / "memory_workers.py").write_text(WORKERS)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("memory_workers")
    del sys.modules["memory_workers"]


@only_glibc
def test_peak_memory_leaves_gaps_out_on_demand(workers):
    """What lives is 80 MiB; with 32 MiB of gaps it takes 112."""
    living, all_of_it = (peak_memory(workers.scatter, gaps=gaps).host for gaps in (False, True))
    assert 78 * MIB < living < 90 * MIB
    assert all_of_it > 105 * MIB


@only_glibc
def test_memory_that_is_kept_is_not_cleared_again(workers):
    """A step's memory is there for the next one, where by default all of it is cleared anew."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        cleared = pool.submit(workers.pages_cleared).result()
    assert cleared < 0.1 * 40 * MIB / resource.getpagesize()


def test_a_process_that_dies_is_an_error():
    """It is not started again and again."""
    with pytest.raises(BrokenProcessPool):
        peak_memory(partial(os._exit, 3))


def test_memory_names_the_gpu_only_where_it_is_used():
    """One number on the CPU, two on a GPU."""
    assert str(Memory(host=3 * MIB, device=0)) == "3 MiB"
    assert str(Memory(host=3 * MIB, device=2 * MIB)) == "3 MiB + 2 MiB on the GPU"
