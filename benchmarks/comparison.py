"""Who did better, and by how much more than the seeds' noise: methods of one suite, or two runs of one suite.

A method is compared with another by the same seeds: on each task, and on average, where a seed's value is its mean over the
tasks. p-values are corrected by Holm's method within each of the two families, all tasks x methods and all averages, and what
the seeds could have shown is meant after that correction: at alpha / m, the level of the smallest of m p-values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from ..registry.errors import did_you_mean
from .errors import ResultError
from .results import Results
from .statistics import ALPHA, Comparison, Summary, compare, detectable_difference, holm, summarize, variance_p

AVERAGE = "average"
Scores = Mapping[tuple[str, str], Mapping[int, float]]


@dataclass(frozen=True, kw_only=True)
class Versus:
    """One method against another (or an earlier self), on one task or on average.

    Attributes:
        task: the task, or ``average``.
        method: the method; positive differences favour it.
        other: what it is compared with, in :func:`every_pair`.
        comparison: by seed, in the metric's own unit; ``detectable`` at 0.05 over the number of tests in the family.
        p: of the paired t test, corrected by Holm's method; ``None`` of too few seeds.
        variance_p: of Brown and Forsythe's test, corrected likewise; ``None`` also on average.
    """

    task: str
    method: str
    comparison: Comparison
    other: str = ""
    p: float | None = None
    variance_p: float | None = None


@dataclass(frozen=True, kw_only=True)
class Standings:
    """A suite's results, summarized.

    Attributes:
        results: every cell.
        baseline: the method the others are compared with.
        scale: by task, what a score is multiplied by to be shown: 100, in points; 1 of a loss, of which less is better.
        summaries: by task and method, of those that have a score.
        failed: by task and method, how many runs failed or were degenerate.
        averages: by method, mean and standard deviation over seeds averaged over tasks, as papers print them; of methods
            with a score on every task, where all tasks are scored in points.
        versus: by task (or ``average``) and method, the comparison with the baseline.
    """

    results: Results
    baseline: str
    scale: Mapping[str, float]
    summaries: Mapping[tuple[str, str], Summary]
    failed: Mapping[tuple[str, str], int]
    averages: Mapping[str, tuple[float, float | None]]
    versus: Mapping[tuple[str, str], Versus]


def standings(results: Results, baseline: str | None = None) -> Standings:
    """Summarize a suite's results and compare every method with one of them.

    Args:
        results: the suite's cells.
        baseline: a method; default: the suite's first.

    Raises:
        ResultError: no method is called so, nothing has run, or the runs of a task have different main metrics.
    """
    methods = results.methods
    if not methods:
        raise ResultError(f"{results.folder} holds no whole result", remedy="run tunery bench again")
    if baseline is not None and baseline not in methods:
        raise ResultError(f"no method {baseline!r}", known=methods, remedy=did_you_mean(baseline, methods))
    chosen = baseline or methods[0]
    higher = directions(results)
    scores = scores_of(results)
    cells = {(task, method): results.of(task, method) for task in results.tasks for method in methods}
    failed = {key: sum(cell.failed for cell in runs) for key, runs in cells.items() if runs}
    summaries = {
        (task, method): summarize(
            list(found.values()),
            failed=failed[task, method],
            runs=len(cells[task, method]),
            higher=higher[task],
        )
        for (task, method), found in scores.items()
    }
    scale = {task: 100.0 if higher[task] else 1.0 for task in results.tasks}
    averages = {}
    average = in_points(results.tasks, higher)
    if average:
        for method in methods:
            found = [summaries.get((task, method)) for task in results.tasks]
            whole = [summary for summary in found if summary is not None]
            if len(whole) == len(found):
                spreads = [summary.sd for summary in whole if summary.sd is not None]
                spread = sum(spreads) / len(spreads) if len(spreads) == len(whole) else None
                averages[method] = (sum(summary.mean for summary in whole) / len(whole), spread)
    others = [method for method in methods if method != chosen]
    theirs = {(task, method): scores.get((task, chosen), {}) for task in results.tasks for method in others}
    versus = compare_scores(scores, theirs, results.tasks, others, higher, average=average)
    return Standings(
        results=results,
        baseline=chosen,
        scale=scale,
        summaries=summaries,
        failed=failed,
        averages=averages,
        versus={(one.task, one.method): one for one in versus},
    )


def every_pair(table: Standings) -> list[Versus]:
    """Compare every method with every other by seed: on average, or on each task where there is no average over tasks.

    The k (k - 1) / 2 comparisons of k methods are one family of Holm's correction, each task's on its own. Of two methods
    there is nothing that :func:`standings` does not compare.
    """
    results, scores, higher = table.results, scores_of(table.results), directions(table.results)
    if len(results.methods) < 3:
        return []
    by_group = {task: {method: scores.get((task, method), {}) for method in results.methods} for task in results.tasks}
    if len(results.tasks) > 1 and in_points(results.tasks, higher):
        by_group = {AVERAGE: {method: seed_averages(scores, method, results.tasks) for method in results.methods}}
    found = []
    for group, runs in by_group.items():
        pairs = ((b, _versus(group, a, runs[a], runs[b], higher.get(group, True))) for a, b in combinations(runs, 2))
        found += _corrected([replace(one, other=other) for other, one in pairs if one])
    return found


def compare_runs(results: Results, other: Results) -> list[Versus]:
    """Compare each method with itself in another folder of results, by task and seed.

    Raises:
        ResultError: the two share no cell that ran, or their tasks have different main metrics.
    """
    higher, before = directions(results), directions(other)
    tasks = [task for task in results.tasks if task in before]
    for task in tasks:
        check_metric(results, task, metric_of(other, task)[0], "there", str(other.folder))
    ours, theirs = scores_of(results), scores_of(other)
    average = in_points(tasks, higher)
    found = compare_scores(ours, theirs, tasks, results.methods, higher, average=average)
    if not found:
        raise ResultError(f"{results.folder} and {other.folder} share no task, method and seed that ran in both")
    return found


def compare_scores(
    ours: Scores,
    theirs: Scores,
    tasks: Sequence[str],
    methods: Iterable[str],
    higher: Mapping[str, bool],
    *,
    average: bool = True,
) -> list[Versus]:
    """Compare scores by (task, method) and seed with others of the same (task, method) and seed.

    Args:
        ours: scores of the methods in question.
        theirs: what each is compared with.
        tasks: tasks to compare on.
        methods: methods to compare.
        higher: by task, whether a higher score is better.
        average: whether scores of different tasks may be averaged.
    """
    by_task, by_method = [], []
    for method in methods:
        for task in tasks:
            a, b = ours.get((task, method), {}), theirs.get((task, method), {})
            one = _versus(task, method, a, b, higher[task])
            if one:
                by_task.append(replace(one, variance_p=variance_p(list(a.values()), list(b.values()))))
        if average and len(tasks) > 1:
            one = _versus(
                AVERAGE, method, seed_averages(ours, method, tasks), seed_averages(theirs, method, tasks), True
            )
            by_method += [one] if one else []
    spreads = holm([one.variance_p for one in by_task])
    by_task = [replace(one, variance_p=p) for one, p in zip(by_task, spreads, strict=True)]
    return [*_corrected(by_method), *_corrected(by_task)]


def _versus(
    task: str, method: str, ours: Mapping[int, float], theirs: Mapping[int, float], higher: bool
) -> Versus | None:
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    pair = [ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]
    return Versus(task=task, method=method, comparison=compare(*pair, higher=higher))


def _corrected(family: Sequence[Versus]) -> list[Versus]:
    """Correct the p-values of a family, and what its seeds could have shown: at the level Holm's first step asks for."""
    corrected = holm([one.comparison.p for one in family])
    level = ALPHA / max(1, sum(p is not None for p in corrected))
    return [
        replace(one, p=p, comparison=_at_level(one.comparison, level)) for one, p in zip(family, corrected, strict=True)
    ]


def _at_level(found: Comparison, alpha: float) -> Comparison:
    if found.detectable is None or found.sd is None:
        return found
    return replace(found, detectable=detectable_difference(found.sd, found.count, alpha=alpha))


def scores_of(results: Results) -> dict[tuple[str, str], dict[int, float]]:
    """Return the scores by (task, method) and seed; runs without one are left out, degenerate ones are not."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for cell in results.cells:
        if cell.score is not None:
            found.setdefault((cell.task, cell.method), {})[cell.seed] = cell.score
    return found


def seed_averages(scores: Scores, method: str, tasks: Sequence[str]) -> dict[int, float]:
    """Return a method's mean over the tasks, by seed; of seeds that have a score on every task."""
    columns = [scores.get((task, method), {}) for task in tasks]
    seeds = set.intersection(*(set(column) for column in columns)) if columns else set()
    return {seed: sum(column[seed] for column in columns) / len(columns) for seed in sorted(seeds)}


def directions(results: Results) -> dict[str, bool]:
    """Return by task whether a higher value of its main metric is better.

    Raises:
        ResultError: the runs of a task have different main metrics.
    """
    return {task: metric_of(results, task)[1] for task in results.tasks}


def metric_of(results: Results, task: str) -> tuple[str, bool]:
    """Return a task's main metric and whether a higher value is better; no name where all its runs failed.

    Raises:
        ResultError: its runs have different ones.
    """
    cells = [cell for cell in results.cells if cell.task == task and cell.main_metric]
    found = {(cell.main_metric, cell.higher_is_better) for cell in cells}
    if len(found) > 1:
        names = sorted(name for name, _ in found)
        raise ResultError(
            f"the runs of task {task!r} have different main metrics", known=names, owner=str(results.folder)
        )
    return found.pop() if found else ("", True)


def check_metric(results: Results, task: str, other: str, where: str, owner: str) -> None:
    """Refuse to compare a task's scores with those of another metric; where all its runs failed, there is none to differ.

    Args:
        results: what ran here.
        task: the task.
        other: its main metric elsewhere, empty for none.
        where: that place, in words.
        owner: its folder or file.

    Raises:
        ResultError: the two are different.
    """
    name = metric_of(results, task)[0]
    if name and other and name != other:
        raise ResultError(f"task {task!r} is scored by {name} here and by {other} {where}", owner=owner)


def in_points(tasks: Iterable[str], higher: Mapping[str, bool]) -> bool:
    """Whether every task is scored in points, so that there is a mean over tasks: no metric is a loss."""
    return all(higher[task] for task in tasks)
