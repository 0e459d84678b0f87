"""The stability bounds: numbers worked out by hand, limits, and the lemmas against the runs they speak of."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tunery.benchmarks.studies.head_tuning import bounds, heads
from tunery.benchmarks.studies.head_tuning.full_tuning import BETA, largest_gap, quadratics


def test_theorem_2_2_by_hand():
    """q = (1 - 15/16)^(1/4) = 1/2: sqrt(2 * 4 * 2 / 1) / (10 * (2 - 1)) = 0.4, and twice that with the step at t = 0."""
    told = {"n": 10, "lipschitz": 4.0, "beta": 1.0, "mu": 15 / 16, "distance": 2.0}
    assert bounds.theorem_2_2(**told) == pytest.approx(0.4)
    assert bounds.theorem_2_2_corrected(**told) == pytest.approx(0.8)


def test_theorem_2_2_sums_the_proof():
    """The printed bound is the proof's sum from t = 1, the corrected one from t = 0."""
    told = {"n": 7, "lipschitz": 1.3, "beta": 2.0, "mu": 0.5, "distance": 0.9}
    terms = [math.sqrt(2 * 1.3 * 0.9 / 2) / 7 * (1 - 0.5 / 2) ** (t / 4) for t in range(2000)]
    assert bounds.theorem_2_2(**told) == pytest.approx(sum(terms[1:]))
    assert bounds.theorem_2_2_corrected(**told) == pytest.approx(sum(terms))


@pytest.mark.parametrize(("ratio", "printed_holds"), [(0.1, True), (0.9, True), (0.99, False), (1.0, False)])
def test_theorem_2_2_against_runs(ratio, printed_holds):
    """At mu = beta one step ends the whole run at w* and leaves the other |w0 - w*| / n away, where the printed bound is 0."""
    hessians = quadratics(20, ratio * BETA, torch.Generator().manual_seed(0))
    away = torch.full((6,), 6**-0.5, dtype=torch.float64)
    told = {"n": 20, "lipschitz": BETA, "beta": BETA, "mu": ratio * BETA, "distance": 1.0}
    gap = largest_gap(hessians, away, 100)
    assert (gap <= bounds.theorem_2_2(**told)) is printed_holds
    assert gap <= bounds.theorem_2_2_corrected(**told)
    if ratio == 1:
        assert gap == pytest.approx(1 / 20)


def test_quadratics_have_the_curvatures_asked_for():
    """Every Hessian reaches from mu to beta."""
    values = torch.linalg.eigvalsh(quadratics(9, 0.2, torch.Generator().manual_seed(0)))
    torch.testing.assert_close(values[:, 0], torch.full((9,), 0.2, dtype=torch.float64))
    torch.testing.assert_close(values[:, -1], torch.full((9,), BETA, dtype=torch.float64))


def test_convergence_rate():
    """At t = e^e it is 1 / e; below 3 it has no meaning."""
    assert bounds.convergence_rate(15) == pytest.approx(math.log(math.log(15)) / math.log(15))
    assert bounds.convergence_rate(10**12) < bounds.convergence_rate(10**6) < bounds.convergence_rate(100)
    with pytest.raises(ValueError, match="t is 2"):
        bounds.convergence_rate(2)


def test_svm_distance_by_hand():
    """n = 2, lambda = 1/4, B = gamma = 1: sqrt(8) = 2.83 against (1 + sqrt(1 + 8)) / 1 = 4."""
    assert bounds.svm_distance(n=2, regularization=0.25, bound=1, margin=1) == pytest.approx(4)


@given(*[st.floats(1e-3, 1e3)] * 3, st.integers(1, 10**6))
def test_the_second_of_the_maximum_is_the_larger(regularization, bound, margin, n):
    """So the maximum in eq. 6 is never the first."""
    first = math.sqrt(2 * (1 + bound / margin) / (regularization * n))
    assert bounds.svm_distance(n=n, regularization=regularization, bound=bound, margin=margin) >= first * (1 - 1e-12)


def test_bounds_of_head_tuning_are_the_sum_of_their_terms():
    """Theorem 2.4 and Corollaries 2.5 and 3.1 by hand, all at log log t / log t = 1 / 2.7."""
    t, told = 100, {"n": 2, "regularization": 0.25}
    rate = math.log(math.log(100)) / math.log(100)
    assert bounds.theorem_2_4(t=t, c=3, nu=2, bound=1, margin=1, **told) == pytest.approx(3 * rate + 2 * 4)
    assert bounds.corollary_2_5(t=t, c=3, nu=2, lipschitz=5, **told) == pytest.approx(3 * rate + 2 * 5 / 0.5)
    delta = math.exp(-1)
    assert bounds.corollary_3_1_rate(heads=40, t=t, c=3, xi=1.5, delta=delta) == pytest.approx(0.5 * 3 * 1.5 * rate)


def test_corollary_3_1_needs_heads():
    """At delta = 0.05 it takes 26; a quarter as many heads would double the bound."""
    told = {"t": 100, "c": 1, "xi": 1, "delta": 0.05}
    assert bounds.corollary_3_1_rate(heads=26, **told) == pytest.approx(
        2 * bounds.corollary_3_1_rate(heads=104, **told)
    )
    with pytest.raises(ValueError, match=r"more than 25\.97 heads at delta = 0\.05, and H is 25"):
        bounds.corollary_3_1_rate(heads=25, **told)
    with pytest.raises(ValueError, match="delta lies between 0 and 1"):
        bounds.corollary_3_1_rate(heads=100, t=100, c=1, xi=1, delta=1)


def test_direction_constant_bounds_normalisation():
    """Lemma A.2.1: |x/|x| - y/|y|| <= nu |x - y| for random vectors no shorter than r."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1000, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    norms = torch.minimum(x.norm(dim=1), y.norm(dim=1))
    gaps = (heads.directions(x) - heads.directions(y)).norm(dim=1)
    constants = torch.tensor([bounds.direction_constant(float(norm)) for norm in norms])
    assert bool((gaps <= constants * (x - y).norm(dim=1)).all())
    assert bounds.direction_constant(4) == 0.5


def test_lemma_a_2_5_covers_every_sample_left_out():
    """With the largest lambda at which it speaks of both machines, the distance of the two is below the bound."""
    z = heads.clusters(1, 40, torch.Generator().manual_seed(5))[0]
    whole = heads.machine(z)
    for position in range(40):
        less = heads.machine(heads.without(z, position))
        told = {
            "n": 40,
            "regularization": min(whole.largest_regularization(40), less.largest_regularization(39)),
            "bound": float(heads.sample_bound(z[None])),
            "margin": whole.margin,
        }
        assert float((whole.weights - less.weights).norm()) <= bounds.svm_distance(**told)


def test_step_limit_scales_as_a_step_must():
    """Twice the features, a quarter of the step; at the limit a quadratic with the loss's largest curvature only oscillates."""
    assert bounds.step_limit(2.0, 10) == bounds.step_limit(1.0, 10) / 4
    curvature = 0.25 * 3.0**2 / 10
    assert 1 - bounds.step_limit(3.0, 10) * curvature == pytest.approx(-1)


def test_corollary_3_1_adds_how_far_the_machine_moves():
    """Its second term is Theorem 2.4's: whatever the number of heads, and all there is with C = 0."""
    machine = {"n": 200, "nu": 1.5, "regularization": 0.02, "bound": 3.0, "margin": 0.5}
    told = {"t": 50, "xi": 1.5, "delta": 0.05}
    second = bounds.corollary_3_1(heads=40, c=0, **told, **machine)
    assert second == pytest.approx(bounds.theorem_2_4(t=50, c=0, **machine))
    for count in (40, 80):
        first = bounds.corollary_3_1_rate(heads=count, c=3, **told)
        assert bounds.corollary_3_1(heads=count, c=3, **told, **machine) == pytest.approx(first + second)
