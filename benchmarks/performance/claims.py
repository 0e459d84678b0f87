"""Claims: what a script of this folder measured, the goal it is held to, and the one line that says both."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from ...registry.errors import TuneryError
from .paired import WARM_UP, Estimate, Times, interleave, keep_freed_memory


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One measured number, and the largest it may be.

    Attributes:
        name: what is claimed.
        value: the number; it meets the claim up to and with ``goal``.
        goal: the largest good value.
        unit: empty for a ratio.
        low, high: 99 % interval of the value, where there is one.
        detail: what the number comes from.
    """

    name: str
    value: float
    goal: float
    unit: str = ""
    low: float | None = None
    high: float | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the goal is met; what cannot be measured (nan) does not meet it."""
        return self.value <= self.goal

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        line = f"{self.name}: {self.value:.4g}{unit} (<= {self.goal:g}{unit}) {'ok' if self.ok else 'short'}"
        interval = "" if self.low is None else f"{self.low:.4g} to {self.high:.4g}"
        return "; ".join(part for part in (line, interval, self.detail) if part)


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
    keep_freed_memory()
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
        report = {
            "claims": [{**asdict(claim), "ok": claim.ok} for claim in done],
            "quick": asked.quick,
            "environment": environment(),
        }
        asked.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if done and all(claim.ok for claim in done) else 1


@contextmanager
def _progress() -> Iterator[Progress]:
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        yield progress


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
