"""``tunery bench --check``: did a method get worse than a saved baseline, beyond what its seeds scatter by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.artifacts import write_json
from .comparison import directions, scores_of
from .results import FORMAT, ResultError, Results, digest, sealed
from .statistics import holm, worse_p

LEVEL = 0.05


@dataclass(frozen=True, kw_only=True)
class Check:
    """One method on one task, against the baseline.

    Attributes:
        task, method: which.
        seeds: how many seeds both have a score of.
        difference: mean over these seeds, positive where it got better; ``None`` without any.
        p: one-sided, of the paired t test for "worse", corrected by Holm's method for how many are checked; ``None`` where
            the seeds say nothing about noise.
        lost: seeds that had a score in the baseline and ran without one now.
    """

    task: str
    method: str
    seeds: int
    difference: float | None
    p: float | None
    lost: Sequence[int] = ()

    @property
    def worse(self) -> bool:
        """Whether it got worse beyond noise.

        That is: p below 0.05; or every one of three or more seeds lost exactly as much, which is no noise at all; or a seed
        fails that did not.
        """
        steady = self.p is None and self.seeds > 2 and self.difference is not None and self.difference < 0
        return bool(self.lost) or steady or (self.p is not None and self.p < LEVEL)

    @property
    def verdict(self) -> str:
        """What to say of it."""
        if self.lost:
            return f"worse: no score any more with seed {', '.join(map(str, self.lost))}"
        if self.worse:
            return "worse"
        if self.difference == 0:
            return "the same"
        return "within noise or better" if self.p is not None else "too few seeds to say"


def save_baseline(results: Results, path: Path) -> None:
    """Write the scores of a suite as a baseline, atomically.

    Raises:
        ResultError: the runs of a task have different main metrics.
    """
    higher = directions(results)
    scores: dict[str, dict[str, dict[str, float]]] = {}
    for (task, method), found in scores_of(results).items():
        scores.setdefault(task, {})[method] = {str(seed): score for seed, score in found.items()}
    content = {"format": FORMAT, "suite": results.name, "higher_is_better": higher, "scores": scores}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, sealed(content))


def check(results: Results, path: Path) -> list[Check]:
    """Compare a suite's results with a baseline, by task, method and seed.

    Args:
        results: what ran now.
        path: what :func:`save_baseline` wrote.

    Raises:
        ResultError: the baseline cannot be read, is damaged, or shares no cell with the results.
    """
    baseline = _read(path)
    ours, higher = scores_of(results), directions(results)
    ran = {cell.key for cell in results.cells}
    checks, p_values = [], []
    for task, methods in baseline["scores"].items():
        sign = 1 if higher.get(task, True) else -1
        for method, theirs in methods.items():
            before = {int(seed): float(score) for seed, score in theirs.items()}
            now = ours.get((task, method), {})
            shared = sorted(before.keys() & now.keys())
            lost = [seed for seed in sorted(before) if seed not in now and (task, method, seed) in ran]
            if not shared and not lost:
                continue
            differences = [sign * (now[seed] - before[seed]) for seed in shared]
            mean = sum(differences) / len(differences) if differences else None
            checks.append(Check(task=task, method=method, seeds=len(shared), difference=mean, p=None, lost=tuple(lost)))
            p_values.append(worse_p(differences))
    if not checks:
        raise ResultError(f"{path} shares no task, method and seed with {results.folder}")
    corrected = holm(p_values)
    return [
        Check(task=one.task, method=one.method, seeds=one.seeds, difference=one.difference, p=p, lost=one.lost)
        for one, p in zip(checks, corrected, strict=True)
    ]


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ResultError(f"no baseline {path}", remedy="write one with --save_baseline") from None
    except (OSError, ValueError) as error:
        raise ResultError(f"cannot read baseline {path}: {error}") from None
    if not isinstance(content, dict) or not {"scores", "sha256"} <= content.keys():
        raise ResultError(f"{path} is no baseline", remedy="write one with --save_baseline")
    if content["sha256"] != digest(content):
        raise ResultError(f"baseline {path} does not match its hash", remedy="it is damaged: write it again")
    return content
