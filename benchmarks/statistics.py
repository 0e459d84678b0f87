"""What a handful of seeds can say: spread, intervals, paired tests, and the smallest difference they could have shown.

Standard deviations are those of a sample (ddof = 1). Intervals of a mean are Student's: with five seeds they cover what
they promise, which the bootstrap (given beside) does not; ``python -m tunery.benchmarks.studies.coverage`` measures both.
Two methods are compared seed by seed with the paired t test. Wilcoxon's signed-rank test is given beside; it cannot get
below p = 0.0625 with five seeds, however large the difference. Spreads are compared by Brown and Forsythe's test.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

LEVEL = 0.95
ALPHA = 0.05
POWER = 0.8
FEWEST = 3  # values an interval or a test needs: with two, it would hang on one degree of freedom
_RESAMPLES = 9999
Values = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Interval:
    """A 95 % interval."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Scores of one method on one task over seeds.

    Attributes:
        count: how many runs have a score.
        mean, median: of the scores.
        sd: their standard deviation, ddof = 1; ``None`` of fewer than two.
        worst: the score of the worst seed.
        failed: share of all runs without a score, or no better than the majority class.
        interval: of the mean, Student's t; ``None`` of fewer than three.
        bootstrap: of the mean, BCa; ``None`` of fewer than three.
    """

    count: int
    mean: float
    sd: float | None
    median: float
    worst: float
    failed: float
    interval: Interval | None
    bootstrap: Interval | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One method against another, seed by seed; positive differences favour the first.

    Attributes:
        count: pairs.
        difference: mean of the paired differences.
        sd: their standard deviation, ddof = 1; ``None`` of one pair.
        interval: of the mean difference, Student's t; ``None`` of fewer than three pairs.
        p: two-sided, of the paired t test; of Wilcoxon's where all differences are equal. ``None`` of fewer than three.
        wilcoxon: two-sided p of Wilcoxon's signed-rank test.
        detectable: smallest true difference that this many seeds show with probability 0.8 at alpha = 0.05, of one test
            alone; ``None`` where the differences say nothing about noise: fewer than three, or all equal.
    """

    count: int
    difference: float
    sd: float | None
    interval: Interval | None
    p: float | None
    wilcoxon: float | None
    detectable: float | None


def summarize(scores: Values, *, failed: int = 0, runs: int | None = None, higher: bool = True) -> Summary:
    """Summarize the scores of one method on one task.

    Args:
        scores: of the runs that have one; degenerate runs count like any other.
        failed: how many runs failed or were degenerate.
        runs: how many there were in all; default: as many as scores.
        higher: whether a higher score is better.
    """
    values = np.asarray(scores, dtype=float)
    return Summary(
        count=len(values),
        mean=float(values.mean()),
        sd=standard_deviation(values),
        median=float(np.median(values)),
        worst=float(values.min() if higher else values.max()),
        failed=failed / (len(values) if runs is None else runs),
        interval=t_interval(values),
        bootstrap=bootstrap_interval(values),
    )


def standard_deviation(values: Values) -> float | None:
    """Return the standard deviation of a sample, ddof = 1; exactly 0 of equal values, ``None`` of fewer than two."""
    if len(values) < 2:
        return None
    return 0.0 if _constant(values) else float(np.std(values, ddof=1))


def t_interval(values: Values, level: float = LEVEL) -> Interval | None:
    """Return Student's interval of the mean: mean +- t(1 - alpha/2, n - 1) sd / sqrt(n); ``None`` of fewer than three."""
    sd = standard_deviation(values)
    if sd is None or len(values) < FEWEST:
        return None
    half = float(stats.t.ppf((1 + level) / 2, len(values) - 1)) * sd / math.sqrt(len(values))
    mean = float(np.mean(values))
    return Interval(mean - half, mean + half)


def sd_interval(values: Values, level: float = LEVEL) -> Interval | None:
    """Return the interval of the standard deviation, sd sqrt((n - 1) / chi2) at both quantiles of n - 1 degrees of freedom.

    Exact of normal values only. ``None`` of fewer than three, and of equal ones, which say nothing about noise.
    """
    sd = standard_deviation(values)
    if not sd or len(values) < FEWEST:
        return None
    freedom = len(values) - 1
    low, high = (sd * math.sqrt(freedom / stats.chi2.ppf((1 + sign * level) / 2, freedom)) for sign in (1, -1))
    return Interval(float(low), float(high))


def bootstrap_interval(values: Values, level: float = LEVEL, resamples: int = _RESAMPLES) -> Interval | None:
    """Return the bias-corrected and accelerated bootstrap interval of the mean (Efron 1987), the same at every call.

    ``None`` of fewer than three values; of equal values, the value itself.
    """
    if len(values) < FEWEST:
        return None
    if _constant(values):
        return Interval(float(values[0]), float(values[0]))
    found = stats.bootstrap(
        (np.asarray(values, dtype=float),),
        np.mean,
        confidence_level=level,
        n_resamples=resamples,
        method="BCa",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    return Interval(float(found.low), float(found.high))


def compare(ours: Values, theirs: Values, *, higher: bool = True) -> Comparison:
    """Compare two methods' scores, paired: the i-th of each come from one seed.

    Args:
        ours: scores of the method in question.
        theirs: scores of what it is compared with, as many.
        higher: whether a higher score is better; if not, differences change their sign.
    """
    differences = (1 if higher else -1) * (np.asarray(ours, dtype=float) - np.asarray(theirs, dtype=float))
    sd = standard_deviation(differences)
    few = len(differences) < FEWEST
    wilcoxon = None if few else wilcoxon_p(differences)
    return Comparison(
        count=len(differences),
        difference=float(differences.mean()),
        sd=sd,
        interval=t_interval(differences),
        p=None if few else (wilcoxon if sd == 0 else float(stats.ttest_1samp(differences, 0).pvalue)),
        wilcoxon=wilcoxon,
        detectable=None if few or not sd else detectable_difference(sd, len(differences)),
    )


def worse_p(differences: Values) -> float | None:
    """Return the one-sided p of the paired t test for "the mean difference is below 0".

    ``None`` where the values say nothing about noise: fewer than three, or all equal.
    """
    if len(differences) < FEWEST or _constant(differences):
        return None
    return float(stats.ttest_1samp(differences, 0, alternative="less").pvalue)


def wilcoxon_p(differences: Values) -> float:
    """Return the two-sided p of Wilcoxon's signed-rank test; 1 where every difference is 0."""
    kept = np.asarray(differences)[np.asarray(differences) != 0]
    if not len(kept):
        return 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # ties among few values make it approximate, and it says so
        return float(stats.wilcoxon(kept).pvalue)


def variance_p(ours: Values, theirs: Values) -> float | None:
    """Return the two-sided p of Brown and Forsythe's test for equal spread; ``None`` where either has fewer than three."""
    if min(len(ours), len(theirs)) < FEWEST:
        return None
    if _constant(ours) and _constant(theirs):
        return 1.0
    p = float(stats.levene(ours, theirs, center="median").pvalue)
    return None if math.isnan(p) else p


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values corrected for how many there are (Holm 1979); those that could not be computed do not count."""
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        corrected[place] = largest
    return corrected


def detectable_difference(sd: float, count: int, power: float = POWER, alpha: float = ALPHA) -> float:
    """Return the smallest true mean difference that a two-sided paired t test shows with probability ``power``.

    Under a true difference d, t is noncentral with count - 1 degrees of freedom and noncentrality d sqrt(count) / sd;
    the chance of a significant difference in the wrong direction (below 1e-5) is not counted.

    Args:
        sd: standard deviation of the paired differences.
        count: pairs, at least two.
        power: probability of p < alpha.
        alpha: level of the test; of one among m, 0.05 / m is what Holm's method asks of the smallest p-value.
    """
    freedom = count - 1
    critical = float(stats.t.ppf(1 - alpha / 2, freedom))

    def lacking(noncentrality: float) -> float:
        return float(stats.nct.sf(critical, freedom, noncentrality)) - power

    return float(optimize.brentq(lacking, 0.0, 3 * critical + 3)) * sd / math.sqrt(count)


def _constant(values: Values) -> bool:
    """Whether all values are equal, up to the rounding of their own arithmetic."""
    spread = float(np.ptp(values))
    return spread <= 1e-12 * max(1.0, float(np.max(np.abs(values))))
