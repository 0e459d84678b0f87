"""How far the report's statistics keep their promises at a few seeds, by simulation.

Scores are drawn from shapes that fine-tuning runs show: normal; skewed (most seeds good, a tail of bad ones); and normal
with one run in ten that falls to the majority class. Measured are how often the 95 % intervals of the mean hold the true
mean, how often the paired tests see a difference where there is none, and how often the t test sees one of the size the
report calls detectable (the promise is 0.8).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from ..statistics import ALPHA, LEVEL, POWER, bootstrap_interval, compare, detectable_difference, t_interval
from .report import Cell, Finding, Run, main

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Draw = Callable[[np.random.Generator, int], np.ndarray]
SEEDS = (3, 5, 10, 20)
_RESAMPLES = 999


def _with_failures(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.where(rng.random(count) < 0.1, -8.0, rng.normal(size=count))


SHAPES: dict[str, tuple[Draw, float]] = {
    "normal": (lambda rng, count: rng.normal(size=count), 0.0),
    "skewed": (lambda rng, count: -rng.exponential(size=count), -1.0),
    "one in ten fails": (_with_failures, -0.8),
}


def findings(run: Run) -> Iterator[Finding]:
    """Yield the findings of the study."""
    yield _intervals(run)
    yield _tests(run)


def _intervals(run: Run) -> Finding:
    samples = run.count(4000, 100)
    rows: list[tuple[Cell, ...]] = []
    for shape, (draw, mean) in SHAPES.items():
        for count in SEEDS:
            rng = np.random.default_rng(run.seed)
            drawn = [draw(rng, count) for _ in range(samples)]
            student = [t_interval(values) for values in drawn]
            bootstrap = [bootstrap_interval(values, resamples=_RESAMPLES) for values in drawn]
            rows.append(
                (
                    shape,
                    count,
                    *(
                        float(np.mean([i is not None and i.low <= mean <= i.high for i in s]))
                        for s in (student, bootstrap)
                    ),
                )
            )
    columns = ("scores", "seeds", "Student's t", "BCa bootstrap")
    five = next(row for row in rows if row[:2] == ("normal", 5))
    return Finding(
        name="coverage",
        title=f"share of {LEVEL:.0%} intervals of the mean that hold it, {samples} samples a row",
        columns=columns,
        rows=rows,
        verdict=f"With 5 normal seeds Student's interval covers {five[2]:.1%}, the bootstrap's {five[3]:.1%}.",
        draw=lambda axes: _draw(axes, rows, columns[2:]),
    )


def _draw(axes: Axes, rows: Sequence[Sequence[object]], names: Sequence[str]) -> None:
    for colour, shape in enumerate(SHAPES):
        for column, style in enumerate(("o-", "s--"), 2):
            points = [(row[1], row[column]) for row in rows if row[0] == shape]
            label = f"{names[column - 2]}, {shape}"
            axes.plot(*zip(*points, strict=True), style, color=f"C{colour}", label=label)
    axes.axhline(LEVEL, color="0.5", linewidth=1)
    axes.set(xlabel="seeds", ylabel="share that hold the mean", xticks=SEEDS)


def _tests(run: Run) -> Finding:
    samples = run.count(4000, 100)
    rows: list[tuple[Cell, ...]] = []
    for count in SEEDS:
        rng = np.random.default_rng(run.seed)
        null = [compare(rng.normal(size=count), rng.normal(size=count)) for _ in range(samples)]
        shift = detectable_difference(2**0.5, count)
        shifted = [rng.normal(shift, size=count) - rng.normal(size=count) for _ in range(samples)]
        rows.append(
            (
                count,
                float(np.mean([found.p is not None and found.p < ALPHA for found in null])),
                float(np.mean([found.wilcoxon is not None and found.wilcoxon < ALPHA for found in null])),
                shift / 2**0.5,
                float(np.mean([stats.ttest_1samp(values, 0).pvalue < ALPHA for values in shifted])),
            )
        )
    return Finding(
        name="tests",
        title=f"share of comparisons with p < {ALPHA:g}, {samples} samples a row",
        columns=(
            "seeds",
            "t, no difference",
            "Wilcoxon, no difference",
            "detectable, in sd of the differences",
            "t, detectable difference",
        ),
        rows=rows,
        verdict=f"A difference called detectable is seen in {rows[1][4]:.1%} of comparisons at 5 seeds; {POWER:.0%} is the promise.",
    )


if __name__ == "__main__":
    sys.exit(main(findings, "coverage", __doc__ or "", None))
