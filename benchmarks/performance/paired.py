"""Paired, interleaved measurements: what the scripts of this folder share.

Machines drift: other programs come and go, clocks throttle, caches warm. Two variants timed one after the other differ
by all of that. Here they take turns instead, one call each a round, in an order drawn anew every round, so that what
slows a while down slows both. The claim is about the **median of the rounds' ratios**, ours over the peer's; its 99 %
interval is the exact one of order statistics, which assumes nothing about the shape of the noise. Rounds may
end early when the interval is narrow enough: few on a quiet machine, many on a busy one. They must not end because it lies
on the right side of a goal, which would stop at lucky moments and report luck. Peak memory cannot be told apart within
one process: every variant gets a fresh one.

Nor can times be told apart from what the C library does with freed memory: it gives some of a step's back to the system, how
much depends on the order of allocations, and the next step waits until the system has cleared it anew. That can be a tenth
of a small step, now for one variant and now for the other. A script's process keeps what it frees.

A script is a generator of :class:`~.claims.Claim` handed to :func:`~.claims.main`::

    def claims(run: Run) -> Iterator[Claim]:
        times = run.interleave({"peer": peer_step, "ours": our_step}, rounds=300, quick_rounds=60)
        yield ratio_claim("step", times.ratio("ours", "peer"), goal=1.01, detail=times)

    sys.exit(main(claims, __doc__))
"""

from __future__ import annotations

import ctypes
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from scipy.stats import quantile_test

CONFIDENCE = 0.99  # a look after every round takes some of it away
MIN_ROUNDS = 8  # below, no interval of that confidence exists
WARM_UP = 3
MIB = 2**20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8  # of glibc's malloc.h


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A median and the interval it lies in with 99 % confidence."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Estimate:
        """Estimate the median of at least eight samples."""
        interval = quantile_test(samples, q=0, p=0.5).confidence_interval(CONFIDENCE)
        return cls(value=statistics.median(samples), low=float(interval.low), high=float(interval.high))

    @property
    def width(self) -> float:
        """Length of the interval."""
        return self.high - self.low


@dataclass(frozen=True)
class Times:
    """Seconds of every round, by variant; entry ``i`` of all variants belongs to the same round."""

    seconds: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        """Seconds a call of ``name`` takes."""
        return statistics.median(self.seconds[name])

    def spread(self, name: str) -> float:
        """Interquartile range in seconds: the middle half of all calls lies this close together."""
        low, _, high = statistics.quantiles(self.seconds[name], n=4)
        return high - low

    def ratio(self, ours: str, peer: str) -> Estimate:
        """How many times as long ``ours`` takes, paired by round."""
        return Estimate.of([a / b for a, b in self._pairs(ours, peer)])

    def extra(self, ours: str, peer: str) -> Estimate:
        """How many seconds more ``ours`` takes, paired by round."""
        return Estimate.of([a - b for a, b in self._pairs(ours, peer)])

    def _pairs(self, ours: str, peer: str) -> Iterator[tuple[float, float]]:
        return zip(self.seconds[ours], self.seconds[peer], strict=True)

    def __str__(self) -> str:
        rounds = max(map(len, self.seconds.values()))
        medians = (
            f"{name} {self.median(name) * 1e3:.4g} ms (+-{self.spread(name) / 2 * 1e3:.2g})" for name in self.seconds
        )
        return f"{', '.join(medians)}, {rounds} rounds"


def interleave(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm_up: int = WARM_UP,
    seed: int = 0,
    clock: Callable[[], float] | None = None,
    until: Callable[[Times], bool] = lambda times: False,
    advance: Callable[[], object] = lambda: None,
) -> Times:
    """Call every variant once a round, in a random order, and time each call to the end of its work on the GPU.

    Args:
        variants: by name, what to time; each call does the same work.
        rounds: how many timed rounds, at least eight.
        warm_up: rounds before them that do not count.
        seed: of the order.
        clock: seconds; default: :func:`clock_of_device`.
        until: asked after every round from the eighth on whether the times so far are enough; it looks at the width of an
            interval, never at where that lies.
        advance: called after every round, for showing progress.
    """
    if rounds < MIN_ROUNDS:
        raise ValueError(f"{rounds} rounds give no interval; at least {MIN_ROUNDS} do")
    clock = clock or clock_of_device()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    order, shuffle = list(variants), random.Random(seed).shuffle
    for number in range(warm_up + rounds):
        shuffle(order)
        for name in order:
            _finish_device()
            start = clock()
            variants[name]()
            _finish_device()
            if number >= warm_up:
                seconds[name].append(clock() - start)
        advance()
        if number >= warm_up + MIN_ROUNDS - 1 and until(Times(seconds)):
            break
    return Times(seconds)


def clock_of_device() -> Callable[[], float]:
    """Return wall time where a GPU works, else this process's processor time.

    With one torch thread on an idle machine the two are the same; on a busy one the latter leaves the others' work out.
    """
    return time.perf_counter if torch.cuda.is_available() else time.process_time


def keep_freed_memory() -> None:
    """Have the C library keep what this process frees, for its own next use."""
    _malloc_option(_M_ARENA_MAX, 1)
    _malloc_option(_M_MMAP_MAX, 0)
    _malloc_option(_M_TRIM_THRESHOLD, 2**31 - 1)


def _malloc_option(option: int, value: int) -> None:
    """Set an option of glibc's mallopt(3); other C libraries have no such thing."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(option, value)


def _finish_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peak memory of one variant in bytes: of the process beyond its imports, and of tensors on the GPU."""

    host: int
    device: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.host + self.device

    def __str__(self) -> str:
        device = f" + {self.device / MIB:.0f} MiB on the GPU" if self.device else ""
        return f"{self.host / MIB:.0f} MiB{device}"


def peak_memory(work: Callable[[], object], *, gaps: bool = True) -> Memory:
    """Run ``work`` in a fresh process and return the peak of its resident memory, which counts every CPU tensor.

    Args:
        work: a module's function, or a ``functools.partial`` of one: it travels by name.
        gaps: whether free memory between what lives counts, which the next big tensor does not fit into: users do have it,
            a little more or less from one program to the next.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure_memory, work, gaps).result()


def _measure_memory(work: Callable[[], object], gaps: bool) -> Memory:
    if not gaps:
        _malloc_option(_M_MMAP_THRESHOLD, 2**16)  # bytes: what is larger gets pages of its own, and gives them back
    floor = _peak_resident()
    work()
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return Memory(host=_peak_resident() - floor, device=device)


def _peak_resident() -> int:
    """Bytes. On Linux not from ``getrusage``, where a fresh process inherits the peak of the one that started it."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
