"""Figures 6 to 9: how samples, margin, starting point and bound move the stability of a linear head."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from scipy.stats import linregress, spearmanr

from ..report import Cell, Finding, Run
from . import heads
from .bounds import convergence_rate
from .full_tuning import full_tuning
from .multi_head import multi_head
from .trials import RATE, Trial, measure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURED = ("margin", "B", "stability", "standard error", "machine's stability")
BOUNDS = ("Theorem 2.4", "Corollary 2.5", "step / limit")
STEPS = (300, 100)  # in full, quick
NOTHING = 2.0  # no two directions are farther apart


def findings(run: Run) -> Iterator[Finding]:
    """Measure everything."""
    yield multi_head(run)
    yield sample_count(run)
    yield sample_margin(run)
    yield start_distance(run)
    yield sample_bound(run)
    yield full_tuning(run)


def _trial(run: Run, n: int, generator: torch.Generator, **shape: float) -> Trial:
    sets = run.count(200, 20)
    z = heads.clusters(sets, n, generator, **shape)
    return measure(z, heads.start(sets, 1, generator)[..., 0], run.count(*STEPS), generator)


def _samples(run: Run) -> int:
    return run.count(500, 100)


def sample_count(run: Run) -> Finding:
    """Figure 6: more samples, more stability."""
    generator = run.generator()
    counts = (50, 100, 200, 500, 1000, *([] if run.quick else [2000]))
    trials = {n: _trial(run, n, generator) for n in counts}
    c, held = _least_c(trials.values()), min(trials[counts[0]].regularization)
    at_held = [trial.theorem_2_4(c, held) for trial in trials.values()]
    rows = [
        (n, *_row(trial, c), bound, n * trial.mean) for (n, trial), bound in zip(trials.items(), at_held, strict=True)
    ]
    means = [trial.mean for trial in trials.values()]
    fastest = c * convergence_rate(run.count(*STEPS))
    power, power_held = _slope(counts, means), _slope(counts, [bound - fastest for bound in at_held])
    power_allowed = _slope(counts, [trial.theorem_2_4(0) for trial in trials.values()])

    def draw(axes: Axes) -> None:
        _line(axes, counts, list(trials.values()), "measured", "o-")
        axes.plot(counts, [means[0] * counts[0] / n for n in counts], ":", color="C7", label="1 / n")
        axes.plot(counts, [means[0] * (counts[0] / n) ** 0.5 for n in counts], "--", color="C7", label="1 / sqrt(n)")
        axes.set(xlabel="samples n", xscale="log", yscale="log")

    return Finding(
        name="figure_6",
        title=_title("Figure 6: sample count", trials.values()),
        columns=("n", *MEASURED, *BOUNDS, f"Theorem 2.4, lambda held at {held:.1g}", "n x stability"),
        rows=rows,
        verdict=f"{_said(power < -0.3)}: stability goes as n^{power:.2f}. {_bounds(trials.values(), c)} "
        f"With lambda held, the second term of Theorem 2.4 goes as n^{power_held:.2f}; with the largest lambda that Lemma "
        f"A.2.5 allows for these machines it goes as n^{power_allowed:.2f}.",
        draw=draw,
    )


def sample_margin(run: Run) -> Finding:
    """Figure 7: a larger margin, more stability."""
    generator = run.generator()
    trials = {
        distance: _trial(run, _samples(run), generator, distance=distance)
        for distance in (2.2, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
    }
    c = _least_c(trials.values())
    rows = [(distance, *_row(trial, c)) for distance, trial in trials.items()]

    def draw(axes: Axes) -> None:
        for trial in trials.values():
            axes.plot(trial.margin, trial.stability, ".", color="C0", alpha=0.15, markersize=4)
        _line(axes, [statistics.fmean(one.margin) for one in trials.values()], list(trials.values()), "mean", "s-")
        axes.set(xlabel="margin", yscale="log")

    rank = _rank([one.margin for one in trials.values()], trials.values())
    return Finding(
        name="figure_7",
        title=_title("Figure 7: margin", trials.values()),
        columns=("distance of centres", *MEASURED, *BOUNDS),
        rows=rows,
        verdict=f"{_said(rank < -0.3)}: margin and stability have rank correlation {rank:.2f} over all data sets. "
        f"{_bounds(trials.values(), c)}",
        draw=draw,
    )


def start_distance(run: Run) -> Finding:
    """Figure 8: a start nearer to where training ends, more stability."""
    generator = run.generator()
    sets, steps = run.count(200, 20), run.count(*STEPS)
    z = heads.clusters(sets, _samples(run), generator)
    nothing = torch.zeros(sets, heads.FEATURES + 1, 1, dtype=torch.float64)
    optimum = heads.descend(z, nothing, 10 * steps, RATE)[..., 0]
    trials = {}
    for distance in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0):
        away = heads.directions(heads.start(sets, 1, generator)[..., 0])
        trials[distance] = measure(z, optimum + distance * away, steps, generator)
    c = _least_c(trials.values())
    rows = [(distance, *_row(trial, c)) for distance, trial in trials.items()]

    def draw(axes: Axes) -> None:
        _line(axes, list(trials), list(trials.values()), "measured", "o-")
        axes.set(xlabel="distance of the start from w*")

    rank = _rank([[distance] * sets for distance in trials], trials.values())
    near, far = trials[0.0].mean, trials[16.0].mean
    return Finding(
        name="figure_8",
        title=_title(f"Figure 8: start at a distance from w*, which {10 * steps} steps from 0 reach", trials.values()),
        columns=("|w0 - w*|", *MEASURED, *BOUNDS),
        rows=rows,
        verdict=f"{_said(rank > 0.3)}: from distance 0 to 16 stability goes from {near:.2g} to {far:.2g}, rank correlation "
        f"{rank:.2f}. Theorem 2.4 knows no starting point; its bound is one number here.",
        draw=draw,
    )


def sample_bound(run: Run) -> Finding:
    """Figure 9: longer samples, less stability; told apart by why they are longer."""
    generator, n = run.generator(), _samples(run)
    ways: dict[str, dict[float, Mapping[str, float]]] = {
        "noise grows": {size: {"distance": 9.0, "radius": size} for size in (0.5, 1.0, 2.0, 3.0, 4.0)},
        "noise grows, margin held": {size: {"stretch": size} for size in (0.5, 1.0, 2.0, 4.0, 6.0)},
        "features rescaled": {size: {"distance": 3 * size, "radius": size} for size in (0.25, 0.5, 1.0, 2.0, 3.0)},
    }
    trials = {
        way: {size: _trial(run, n, generator, **shape) for size, shape in sizes.items()} for way, sizes in ways.items()
    }
    every = [trial for of_way in trials.values() for trial in of_way.values()]
    c = _least_c(every)
    rows = [(way, *_row(trial, c)) for way, of_way in trials.items() for trial in of_way.values()]

    def draw(axes: Axes) -> None:
        for (way, of_way), style in zip(trials.items(), ("o-", "s-", "^-"), strict=True):
            _line(axes, [statistics.fmean(one.bound) for one in of_way.values()], list(of_way.values()), way, style)
        axes.set(xlabel="largest norm of a sample, B", yscale="log")

    said = []
    for way, of_way in trials.items():
        means = [one.mean for one in of_way.values()]
        steady = means in (sorted(means), sorted(means, reverse=True))
        rank = _rank([one.bound for one in of_way.values()], of_way.values())
        said.append(f"{way}: {rank:+.2f}{'' if steady else ', not monotone'}")
    return Finding(
        name="figure_9",
        title=_title("Figure 9: sample bound B", every),
        columns=("why B grows", *MEASURED, *BOUNDS),
        rows=rows,
        verdict=f"Rank correlation of B and stability by why B grows, which the paper does not say: "
        f"{'; '.join(said)}. Figure 9 shows a positive one. {_bounds(every, c)}",
        draw=draw,
    )


def _row(trial: Trial, c: float) -> tuple[Cell, ...]:
    return (
        statistics.fmean(trial.margin),
        statistics.fmean(trial.bound),
        trial.mean,
        trial.error,
        statistics.fmean(trial.machine_stability),
        trial.theorem_2_4(c),
        trial.corollary_2_5(c),
        max(trial.step_share),
    )


def _least_c(trials: Iterable[Trial]) -> float:
    """Return the least C that will do for every setting: the theorems' C depends on none of them."""
    return max(trial.c for trial in trials)


def _title(what: str, trials: Iterable[Trial]) -> str:
    one = next(iter(trials))
    return f"{what}; {len(one.stability)} data sets a row, {one.steps} steps of {RATE}"


def _bounds(trials: Iterable[Trial], c: float) -> str:
    """Say whether the bounds hold, and whether they say anything."""
    pairs = [(trial.mean, min(trial.theorem_2_4(c), trial.corollary_2_5(c))) for trial in trials]
    least = min(bound for _, bound in pairs)
    if any(bound < mean for mean, bound in pairs):
        return "A bound fails."
    if least >= NOTHING:
        return f"The bounds hold and say nothing: all are at least {least:.3g}, and no distance is above 2."
    return "The bounds hold."


def _said(reproduces: bool) -> str:
    return "Reproduces" if reproduces else "Does not reproduce"


def _slope(x: Iterable[float], y: Iterable[float]) -> float:
    """Return the power of x that y follows, by least squares on the logarithms."""
    return float(linregress([math.log(value) for value in x], [math.log(value) for value in y]).slope)


def _rank(x: Iterable[Sequence[float]], trials: Iterable[Trial]) -> float:
    """Return the rank correlation of a number of each data set with its stability, over all settings."""
    stability = [value for trial in trials for value in trial.stability]
    return float(spearmanr([value for row in x for value in row], stability).statistic)


def _line(axes: Axes, x: Iterable[float], trials: Iterable[Trial], label: str, style: str) -> None:
    means, errors = zip(*((trial.mean, trial.error) for trial in trials), strict=True)
    axes.errorbar(list(x), means, yerr=errors, fmt=style, label=label)
    axes.set_ylabel("stability (distance of directions)")
