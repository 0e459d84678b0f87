"""Where more pre-training begins to do harm: found where planted, and nowhere else."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tunery.benchmarks.studies.inflection import findings, simulate
from tunery.benchmarks.studies.report import Run
from tunery.core.inflection import find_inflection, first_rise, lower_is_better, sensitivity, short

POINTS = (0.5e12, 1.5e12, 1.9e12, 2.4e12, 3.1e12)


def draws(curve: list[float], count: int = 8, noise: float = 0.05) -> np.ndarray:
    """Return the curve with noise, shape (points, draws)."""
    return np.array(curve)[:, None] + noise * np.random.default_rng(1).standard_normal((len(curve), count))


def test_a_planted_inflection_is_found():
    """The best point, an interval around it, and the sentence a user reads."""
    found = find_inflection(POINTS, draws([5.0, 3.0, 2.0, 1.9, 2.5]))
    assert (found.at, found.last, found.steady) == (2.4e12, 3.1e12, True)
    assert found.low <= found.at <= found.high
    sharp = find_inflection(POINTS, draws([5.0, 3.0, 2.0, 2.3, 2.5], noise=0.01))
    assert sharp.sentence("tokens") == "degrades beyond 1.9T tokens, 95 % 1.9T-1.9T"


def test_the_interval_widens_with_the_noise():
    """Two points nearly as good as each other cannot be told apart by noisy draws."""
    found = find_inflection(POINTS, draws([9.0, 3.0, 1.95, 1.9, 4.0], noise=0.3))
    assert (found.low, found.high) == (1.9e12, 2.4e12)


@pytest.mark.parametrize("curve", [[5.0, 4.0, 3.0, 2.0, 1.0], [2.0] * 5], ids=["monotone", "flat"])
def test_no_inflection(curve: list[float]):
    """A series that falls all the way, or only wavers, gives none."""
    found = find_inflection(POINTS, draws(curve))
    assert found.at is None
    assert found.sentence("tokens") == "none up to 3.1T tokens"


def test_one_draw_says_nothing_and_says_so():
    """A rise of one draw may be chance."""
    found = find_inflection([1, 2, 3], [[3.0], [1.0], [5.0]])
    assert found.at is None and math.isnan(found.p_value)
    assert "one draw" in found.sentence("steps")


def test_without_noise_any_rise_is_one():
    """Definition 4.2 itself: constants have no standard error to compare with."""
    assert find_inflection([1, 2, 3], [[3.0, 3.0], [1.0, 1.0], [1.5, 1.5]]).at == 2
    assert find_inflection([1, 2, 3], [[3.0, 3.0], [1.0, 1.0], [1.0, 1.0]]).at is None


def test_higher_may_be_better():
    """Accuracy degrades by falling."""
    values = -draws([5.0, 3.0, 2.0, 2.3, 2.5])
    assert find_inflection(POINTS, values, higher_is_better=True).at == 1.9e12
    assert find_inflection(POINTS, values).at is not None
    assert lower_is_better("eval_perplexity") and not lower_is_better("accuracy")


def test_diverged_points_are_left_out_and_named():
    """A perplexity of infinity has no mean."""
    values = draws([5.0, 3.0, 2.0, 2.3, 2.5], noise=0.01)
    values[0, 2] = math.inf
    found = find_inflection(POINTS, values)
    assert found.at == 1.9e12
    assert found.sentence("tokens").endswith("; not finite and left out: 500B")
    assert find_inflection([1, 2], [[math.nan] * 2] * 2).at is None


@pytest.mark.parametrize("points", [[1, 2], [1, 1, 2], [3, 2, 1], []])
def test_points_ascend(points: list[float]):
    """Everything else is a mistake of the caller."""
    with pytest.raises(ValueError, match="ascending points"):
        find_inflection(points, np.zeros((3, 2)))


@pytest.mark.parametrize("curve", ["noise alone", "monotone"])
def test_false_alarms_are_rare(curve: str):
    """At most 5 %: 300 series of pure noise give 15 on average, and more than 28 once in a thousand."""
    alarms = sum(at is not None for at, _ in simulate(curve, draws=5, series=300, seed=1))
    assert alarms <= 28


def test_the_study_prints_its_rates():
    """The rate of false alarms stands in the verdict."""
    (found,) = findings(Run(quick=True))
    assert found.verdict.startswith("False alarms on noise alone: at most ")
    rates = dict(
        zip(zip(found.column("series"), found.column("draws"), strict=True), found.column("found"), strict=True)
    )
    assert rates["planted at 4", 10] == 1.0


def test_sensitivity_is_a_mean_difference():
    """Perturbed minus base, with its standard error over draws."""
    mean, error = sensitivity(10.0, [11.0, 12.0, 16.0])
    assert mean == pytest.approx(3.0)
    assert error == pytest.approx(np.std([1, 2, 6], ddof=1) / math.sqrt(3))
    assert math.isnan(sensitivity(1.0, [2.0])[1])


def test_first_rise():
    """The r of Definition 4.2, from 0."""
    assert first_rise([22.69, 11.49, 9.89, 10.09, 10.44]) == 2
    assert first_rise([3.0, 2.0, 2.0]) is None


def test_counts_are_written_briefly():
    """As the field writes token budgets."""
    assert [short(n) for n in (2.4e12, 4.1e10, 1.2e6, 12_000, 300)] == ["2.4T", "41B", "1.2M", "12k", "300"]
