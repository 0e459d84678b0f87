"""Paired, interleaved measurements: what the scripts of this folder share.

Machines drift: other programs come and go, clocks throttle, caches warm. Two variants timed one after the other differ
by all of that. Here they take turns instead, one call each a round, in an order drawn anew every round, so that what
slows a while down slows both. The claim is about the **median of the rounds' ratios**, ours over the peer's; its 95 %
interval is the exact one of order statistics, which assumes nothing about the noise. Peak memory cannot be told apart
within one process: every variant gets a fresh one.

A script is a generator of :class:`Claim` handed to :func:`main`::

    def claims(run: Run) -> Iterator[Claim]:
        times = run.interleave({"peer": peer_step, "ours": our_step}, rounds=300, quick_rounds=60)
        yield ratio_claim("step", times.ratio("ours", "peer"), goal=1.01)

    if __name__ == "__main__":
        sys.exit(main(claims, __doc__))
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from scipy.stats import quantile_test

from ...registry.errors import TuneryError

CONFIDENCE = 0.95
MIN_ROUNDS = 6  # below, no interval of that confidence exists
WARM_UP = 3
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A median and the interval it lies in with 95 % confidence."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Estimate:
        """Estimate the median of at least six samples."""
        interval = quantile_test(samples, q=0, p=0.5).confidence_interval(CONFIDENCE)
        return cls(value=statistics.median(samples), low=float(interval.low), high=float(interval.high))


@dataclass(frozen=True)
class Times:
    """Seconds of every round, by variant; entry ``i`` of all variants belongs to the same round."""

    seconds: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        """Seconds a call of ``name`` takes."""
        return statistics.median(self.seconds[name])

    def spread(self, name: str) -> float:
        """Interquartile range in seconds: half of all calls lie this close together."""
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
        return ", ".join(
            f"{name} {self.median(name) * 1e3:.4g} ms (quartiles {self.spread(name) * 1e3:.2g} ms apart)"
            for name in self.seconds
        )


def interleave(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm_up: int = WARM_UP,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    advance: Callable[[], object] = lambda: None,
) -> Times:
    """Call every variant once a round, in a random order, and time each call to the end of its work on the GPU.

    Args:
        variants: by name, what to time; each call does the same work.
        rounds: how many timed rounds, at least six.
        warm_up: rounds before them that do not count.
        seed: of the order.
        clock: seconds; ``time.process_time`` leaves other programs out, and waiting too.
        advance: called after every round, for showing progress.
    """
    if rounds < MIN_ROUNDS:
        raise ValueError(f"{rounds} rounds give no interval; at least {MIN_ROUNDS} do")
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
    return Times(seconds)


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


def peak_memory(work: Callable[[], object]) -> Memory:
    """Run ``work`` in a fresh process and return the peak of its resident memory, which counts every CPU tensor.

    Args:
        work: a module's function, or a ``functools.partial`` of one: it travels by name.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure_memory, (work,))


def _measure_memory(work: Callable[[], object]) -> Memory:
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


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One measured number, and the largest it may be.

    Attributes:
        name: what is claimed.
        value: the number; it meets the claim up to and with ``goal``.
        goal: the largest good value.
        unit: empty for a ratio.
        low, high: 95 % interval of the value, where there is one.
        detail: what the number comes from.
    """

    name: str
    value: float
    goal: float
    unit: str = ""
    low: float = math.nan
    high: float = math.nan
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the goal is met; what cannot be measured (nan) does not meet it."""
        return self.value <= self.goal

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        interval = "" if math.isnan(self.low) else f" [{self.low:.4g}, {self.high:.4g}]"
        detail = f" {self.detail}" if self.detail else ""
        return f"{self.name}: {self.value:.4g}{unit} (<= {self.goal:g}{unit}) {'ok' if self.ok else 'short'}{interval}{detail}"


def ratio_claim(name: str, ratio: Estimate, goal: float, detail: object = "") -> Claim:
    """Claim that a ratio is at most ``goal``."""
    return Claim(name=name, value=ratio.value, goal=goal, low=ratio.low, high=ratio.high, detail=str(detail))


@dataclass(frozen=True)
class Run:
    """One run of a script.

    Attributes:
        quick: whether fewer rounds will do.
        progress: shows on stderr how far the rounds are; silent where that is no terminal.
    """

    quick: bool
    progress: Progress = field(default_factory=lambda: Progress(disable=True))

    def interleave(
        self, variants: Mapping[str, Callable[[], object]], *, rounds: int, quick_rounds: int, **options: Any
    ) -> Times:
        """Time ``variants`` over as many rounds as this run is worth; see :func:`interleave`."""
        count = quick_rounds if self.quick else rounds
        total = count + options.get("warm_up", WARM_UP)
        bar = self.progress.add_task(", ".join(variants), total=total)
        try:
            return interleave(variants, count, advance=lambda: self.progress.advance(bar), **options)
        finally:
            self.progress.remove_task(bar)


def main(claims: Callable[[Run], Iterable[Claim]], description: str, argv: Sequence[str] | None = None) -> int:
    """Run a script: print one line a claim as it is measured; return 1 when one is short, 2 on an error, else 0."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: minutes become seconds, intervals wider")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the claims and the environment here")
    asked = parser.parse_args(argv)
    if asked.json and not asked.json.parent.is_dir():
        parser.error(f"--json: there is no folder {asked.json.parent}")
    done: list[Claim] = []
    try:
        with _progress() as progress:
            for claim in claims(Run(asked.quick, progress)):
                done.append(claim)
                print(claim, flush=True)
    except TuneryError as error:
        print(error, file=sys.stderr)
        return 2
    if asked.json:
        report = {"claims": [_as_json(claim) for claim in done], "quick": asked.quick, "environment": environment()}
        asked.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if done and all(claim.ok for claim in done) else 1


@contextmanager
def _progress() -> Iterator[Progress]:
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        yield progress


def _as_json(claim: Claim) -> dict[str, Any]:
    fields = {key: None if value != value else value for key, value in asdict(claim).items()}  # JSON knows no nan
    return {**fields, "ok": claim.ok}


def environment() -> dict[str, Any]:
    """Return what a number depends on besides the code."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **{name: version(name) for name in ("tunery", "torch", "transformers", "accelerate", "peft")},
    }
