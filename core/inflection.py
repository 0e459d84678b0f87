"""Sensitivity and the inflection point of a metric over checkpoints: where more pre-training begins to do harm.

Springer et al., "Overtrained language models are harder to fine-tune", section 3.3 and Definition 4.2: after a modification
the metric at point r is L(r); the inflection point is the smallest r with L(r) < L(r + 1) from which on L keeps degrading.
What is measured is a mean over draws (of noise, or of fine-tuning seeds), so a rise may be chance. Here an inflection point
is the best point of the mean curve, and it is reported only where the last point is worse than an earlier one beyond noise:
paired t-tests over draws of the last point against every earlier one, at the significance level divided by their number
(Bonferroni). A flat curve of pure noise so gives a false alarm in at most 5 % of cases, a monotone one in fewer. The noise is
that of the draws: all points share the evaluation rows, and another set of rows may say otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

LOWER_IS_BETTER = ("loss", "perplexity", "mse")


def lower_is_better(metric: str) -> bool:
    """Whether less of ``metric`` is better, with or without a prefix: ``loss``, ``perplexity``, ``mse``."""
    return metric.rsplit("_", 1)[-1] in LOWER_IS_BETTER


@dataclass(frozen=True, kw_only=True)
class Inflection:
    """Whether and where a curve turns for the worse.

    Attributes:
        at: the point beyond which the metric degrades; ``None`` where no degradation is beyond noise.
        low, high: the interval of ``at``, from resampled draws; ``None`` without ``at``.
        last: the last point measured.
        draws: how many draws each mean is of.
        p_value: of the last point against the earlier ones, corrected for their number; ``nan`` with fewer than two draws.
        steady: whether the mean gets worse at every step beyond ``at``.
        confidence: of the interval, and one minus the significance level.
        left_out: points with a value that is not finite, which were not looked at.
    """

    at: float | None
    low: float | None
    high: float | None
    last: float
    draws: int
    p_value: float
    steady: bool
    confidence: float
    left_out: tuple[float, ...] = ()

    def sentence(self, unit: str) -> str:
        """Say it in words, the points in ``unit``: ``tokens`` or ``steps``."""
        if self.at is None:
            said = f"none up to {short(self.last)} {unit}"
            if self.draws < 2:
                said += " that could be told from noise: one draw"
        else:
            assert self.low is not None and self.high is not None
            between = f"{self.confidence:.0%} {short(self.low)}-{short(self.high)}".replace("%", " %")
            said = f"degrades beyond {short(self.at)} {unit}, {between}"
            said += "" if self.steady else ", not at every step"
        if self.left_out:
            said += f"; not finite and left out: {', '.join(map(short, self.left_out))}"
        return said


def short(number: float) -> str:
    """Write a count briefly: 2.4T, 41B, 500M, 12k, 300."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.4g}{letter}"
    return f"{number:g}"


def sensitivity(base: float, draws: ArrayLike) -> tuple[float, float]:
    """Return the mean difference that a modification makes, and its standard error over draws.

    Args:
        base: the metric before.
        draws: the metric after, one value a draw, shape (draws,).

    Returns:
        Mean of after - before, and its standard error; ``nan`` for one draw.
    """
    after = np.asarray(draws, dtype=float)
    error = after.std(ddof=1) / np.sqrt(len(after)) if len(after) > 1 and np.isfinite(after).all() else np.nan
    return float(after.mean() - base), float(error)


def first_rise(losses: Sequence[float]) -> int | None:
    """Return Definition 4.2's r for a curve without noise, counted from 0: the first one that the next exceeds."""
    return next((r for r in range(len(losses) - 1) if losses[r] < losses[r + 1]), None)


def find_inflection(
    points: Sequence[float],
    values: ArrayLike,
    *,
    higher_is_better: bool = False,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Inflection:
    """Find the inflection point of a measured curve.

    Args:
        points: tokens, steps or places of the points, ascending.
        values: the metric after the modification, shape (points, draws). Column d is the same draw at every point where
            draws are shared, which makes differences between points sharper; independent draws do as well.
        higher_is_better: whether degrading means falling.
        confidence: of the interval, and one minus the rate of false alarms on a flat curve.
        resamples: bootstrap resamples of draws.
        seed: of the resampling.

    Raises:
        ValueError: not one row of values a point, or points that do not ascend.
    """
    worse, places = np.atleast_2d(np.asarray(values, dtype=float)), np.asarray(points, dtype=float)
    if worse.shape[0] != len(places) or not len(places) or (np.diff(places) <= 0).any():
        raise ValueError(f"{len(places)} ascending points for values of shape {worse.shape}")
    worse = -worse if higher_is_better else worse
    finite = np.isfinite(worse).all(axis=1)
    left_out = tuple(float(place) for place in places[~finite])
    worse, places = worse[finite], places[finite]
    last, draws = float(places[-1]) if len(places) else float(points[-1]), worse.shape[1]
    p_value = _rise_p_value(worse)
    common: dict[str, Any] = {
        "last": last,
        "draws": draws,
        "p_value": p_value,
        "confidence": confidence,
        "left_out": left_out,
    }
    if not p_value < 1 - confidence:
        return Inflection(at=None, low=None, high=None, steady=False, **common)
    means = worse.mean(axis=1)
    best = int(means.argmin())
    chosen = np.random.default_rng(seed).integers(draws, size=(resamples, draws))
    turned = places[worse[:, chosen].mean(axis=2).argmin(axis=0)]
    tail = (1 - confidence) / 2
    low, high = np.quantile(turned, [tail, 1 - tail], method="inverted_cdf")
    return Inflection(
        at=float(places[best]),
        low=float(low),
        high=float(high),
        steady=bool((np.diff(means[best:]) > 0).all()),
        **common,
    )


def _rise_p_value(worse: NDArray[np.float64]) -> float:
    """Return the chance of so clear a rise to the last point where there is none, shape of ``worse`` (points, draws)."""
    from scipy.stats import t

    points, draws = worse.shape
    if points < 2 or draws < 2:
        return float("nan")
    rises = worse[-1] - worse[:-1]
    with np.errstate(divide="ignore", invalid="ignore"):  # no noise at all: any rise is certain
        statistics = rises.mean(axis=1) / (rises.std(axis=1, ddof=1) / np.sqrt(draws))
    least = t.sf(np.nan_to_num(statistics, nan=0.0, posinf=np.inf, neginf=-np.inf), draws - 1).min()
    return float(min(1.0, (points - 1) * least))
