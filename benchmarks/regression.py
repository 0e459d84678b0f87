"""A baseline kept in a file, and whether a method got worse than it beyond noise.

A method got worse where its scores, paired by seed with the baseline's, fell by more than a margin that matters and, by a
one-sided paired t test corrected by Holm's method, by more than the seeds' noise. One or two seeds, or differences that are
all equal, say nothing about noise: there the margin alone decides. A run that had a score and now has none is worse too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core.artifacts import write_json
from .comparison import AVERAGE, check_metric, in_points, metric_of, scores_of, seed_averages
from .errors import ResultError
from .results import Results, digest
from .statistics import ALPHA, holm, worse_p

FORMAT = 1
MARGIN = 0.005


@dataclass(frozen=True, kw_only=True)
class Change:
    """One method on one task, or on average, now and in the baseline.

    Attributes:
        task: the task, or ``average``.
        method: the method.
        count: seeds with a score in both.
        difference: mean paired difference; negative is worse.
        p: one-sided, for "worse", corrected by Holm's method; ``None`` where the seeds say nothing about noise.
        lost: seeds that had a score and failed now.
        worse: the verdict.
    """

    task: str
    method: str
    count: int
    difference: float
    p: float | None
    lost: tuple[int, ...]
    worse: bool

    def __str__(self) -> str:
        parts = (
            [] if not self.count else [f"{self.difference:+.4f} over {self.count} seed{'' if self.count == 1 else 's'}"]
        )
        if self.count:
            parts.append(
                "no noise to judge by: the margin decides"
                if self.p is None
                else f"one-sided p = {self.p:.2g} after Holm"
            )
        if self.lost:
            parts.append(f"no score any more with seed {', '.join(map(str, self.lost))}")
        return f"{self.method} on {self.task}: {'worse' if self.worse else 'not worse'}; {'; '.join(parts)}"


@dataclass(frozen=True)
class Check:
    """Results against a baseline.

    Attributes:
        changes: every method on average, then on every task.
        missing: cells of the baseline that have not run.
    """

    changes: tuple[Change, ...]
    missing: tuple[str, ...]

    @property
    def worse(self) -> tuple[Change, ...]:
        """What got worse."""
        return tuple(change for change in self.changes if change.worse)

    @property
    def ok(self) -> bool:
        """Whether nothing did."""
        return not self.worse


def write_baseline(results: Results, path: Path) -> None:
    """Write the scores of every cell as a baseline for :func:`compare_to_baseline`.

    Raises:
        ResultError: no cell has a score, the runs of a task have different main metrics, or the file cannot be written.
    """
    scores = scores_of(results)
    if not scores:
        raise ResultError(f"{results.folder} holds no score to keep as a baseline")
    scored = [task for task in results.tasks if any(task == other for other, _ in scores)]
    tasks = {task: dict(zip(("metric", "higher_is_better"), metric_of(results, task), strict=True)) for task in scored}
    named = [
        {"task": task, "method": method, "scores": {str(seed): score for seed, score in found.items()}}
        for (task, method), found in scores.items()
    ]
    content: dict[str, Any] = {"format": FORMAT, "suite": results.name, "tasks": tasks, "cells": named}
    try:
        write_json(path, {**content, "sha256": digest(content)})
    except OSError as error:
        raise ResultError(f"cannot write {path}: {error.strerror}") from None


def compare_to_baseline(results: Results, baseline: Path, margin: float = MARGIN) -> Check:
    """Compare a suite's results with a baseline that :func:`write_baseline` wrote.

    Args:
        results: what ran now.
        baseline: the file.
        margin: how much worse a mean may be before it matters: of scores in 0..1 (BLEU / 100), or of a loss.

    Raises:
        ResultError: the file cannot be read, is of another metric, or shares no cell with the results.
    """
    content = read_baseline(baseline)
    higher = {task: there["higher_is_better"] for task, there in content["tasks"].items()}
    for task in results.tasks:
        there = content["tasks"].get(task, {"metric": ""})
        check_metric(results, task, there["metric"], "in the baseline", str(baseline))
    before = {
        (cell["task"], cell["method"]): {int(seed): float(score) for seed, score in cell["scores"].items()}
        for cell in content["cells"]
    }
    now = scores_of(results)
    ran = {cell.key for cell in results.cells}
    missing = [f"{t}--{m}--seed{s}" for (t, m), found in before.items() for s in found if (t, m, s) not in ran]
    by_task = [
        _change(task, method, now.get((task, method), {}), found, ran, higher[task])
        for (task, method), found in before.items()
        if any((task, method, seed) in ran for seed in found)
    ]
    if not by_task:
        raise ResultError(f"{results.folder} and {baseline} share no task, method and seed")
    by_method = []
    tasks = list(dict.fromkeys(change.task for change in by_task))
    if len(tasks) > 1 and in_points(tasks, higher):
        for method in dict.fromkeys(change.method for change in by_task):
            pair = seed_averages(now, method, tasks), seed_averages(before, method, tasks)
            if pair[0].keys() & pair[1].keys():
                by_method.append(_change(AVERAGE, method, *pair, set(), True))
    return Check((*_judged(by_method, margin), *_judged(by_task, margin)), tuple(missing))


def _change(
    task: str,
    method: str,
    now: Mapping[int, float],
    before: Mapping[int, float],
    ran: set[tuple[str, str, int]],
    higher: bool,
) -> Change:
    seeds = sorted(now.keys() & before.keys())
    differences = [(now[seed] - before[seed]) * (1 if higher else -1) for seed in seeds]
    lost = tuple(sorted(seed for seed in before.keys() - now.keys() if (task, method, seed) in ran))
    mean = sum(differences) / len(differences) if differences else 0.0
    return Change(
        task=task,
        method=method,
        count=len(seeds),
        difference=mean,
        p=worse_p(differences) if seeds else None,
        lost=lost,
        worse=False,
    )


def _judged(family: Sequence[Change], margin: float) -> list[Change]:
    corrected = holm([change.p for change in family])
    return [
        replace(change, p=p, worse=bool(change.lost) or (change.difference < -margin and (p is None or p < ALPHA)))
        for change, p in zip(family, corrected, strict=True)
    ]


def read_baseline(path: Path) -> dict[str, Any]:
    """Read what :func:`write_baseline` wrote.

    Raises:
        ResultError: it cannot be read, is damaged or something else, or comes from a newer tunery.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ResultError(
            f"cannot read {path}: {error.strerror}", remedy="tunery report RESULTS --write_baseline FILE writes one"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ResultError(f"{path} is no baseline: {error}") from None
    if not isinstance(content, dict) or not {"format", "tasks", "cells", "sha256"} <= content.keys():
        raise ResultError(f"{path} is no baseline")
    if content["sha256"] != digest(content):
        raise ResultError(f"{path} does not match its hash", remedy="it is damaged or was edited: write it again")
    if content["format"] != FORMAT:
        raise ResultError(
            f"{path} has format {content['format']!r}", known=[str(FORMAT)], remedy="pip install --upgrade tunery"
        )
    return content
