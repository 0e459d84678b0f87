"""Data, heads and support vector machines of the head-tuning study, each against an oracle of its own."""

from __future__ import annotations

import pytest
import torch
from sklearn.svm import LinearSVC
from torch.nn.functional import softplus

from tunery.benchmarks.studies.head_tuning import heads
from tunery.benchmarks.studies.head_tuning.multi_head import imbalance, mean_direction
from tunery.benchmarks.studies.head_tuning.trials import REPEATS, measure


def generator(seed: int = 0) -> torch.Generator:
    """Return a source of random numbers."""
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("distance", "radius", "stretch"), [(3.0, 1.0, 1.0), (9.0, 4.0, 1.0), (3.0, 1.0, 5.0)])
def test_clusters_keep_their_distance(distance, radius, stretch):
    """Every sample lies in its ball, so the classes are at least distance - 2 radius apart, stretched or not."""
    z = heads.clusters(3, 200, generator(), distance=distance, radius=radius, stretch=stretch)
    assert z.shape == (3, 200, heads.FEATURES + 1)
    labels = -z[..., -1:]
    assert labels[:, :100].eq(1).all() and labels[:, 100:].eq(-1).all()
    x = z[..., :-1] * labels
    x[..., :1] -= labels * distance / 2
    x[..., 1:] /= stretch
    assert x.norm(dim=-1).max() <= radius * (1 + 1e-12)
    assert x.norm(dim=-1).max() > 0.9 * radius
    for one in z:
        assert heads.machine(one).margin >= distance / 2 - radius


def test_sample_bound():
    """The intercept's input does not count."""
    z = torch.tensor([[[3.0, 4.0, -1.0], [0.0, 1.0, 1.0]]])
    assert heads.sample_bound(z).tolist() == [5]


def test_machine_of_two_samples():
    """(2, 0) against (-2, 0): w = (1/2, 0), no intercept, margin 2, and each sample carries 1/8."""
    z = torch.tensor([[2.0, 0.0, -1.0], [2.0, 0.0, 1.0]], dtype=torch.float64)
    found = heads.machine(z)
    torch.testing.assert_close(found.weights, torch.tensor([0.5, 0.0, 0.0], dtype=torch.float64))
    assert found.margin == pytest.approx(2)
    assert found.largest_dual == pytest.approx(1 / 8)
    assert found.largest_regularization(2) == pytest.approx(2)


def test_machine_against_scikit_learn():
    """A soft-margin machine with the smallest C that leaves no slack has the same weights; with half of it, others."""
    z = heads.clusters(1, 60, generator(3))[0]
    found = heads.machine(z)
    assert (z @ found.weights).min() == pytest.approx(1)
    for share, same in ((1.0001, True), (0.5, False)):
        inputs, labels = torch.cat([z, -z]).numpy(), [1] * 60 + [-1] * 60
        cost = share * found.largest_dual / 2  # every sample stands there twice
        peer = LinearSVC(C=cost, loss="hinge", fit_intercept=False, max_iter=10**6, tol=1e-9, random_state=0)
        weights = torch.from_numpy(peer.fit(inputs, labels).coef_[0])
        assert torch.allclose(weights, found.weights, atol=1e-5) is same


def test_descent_against_autograd():
    """Three steps of every head, with and without a sample, are those of gradient descent on the mean logistic loss."""
    z = heads.clusters(2, 12, generator())
    w = heads.start(2, 3, generator(1))
    left_out = torch.tensor([[-1, 0, 5], [11, -1, 2]])
    found = heads.descend(z, w, 3, 0.7, left_out)
    for s in range(2):
        for r in range(3):
            samples = z[s] if left_out[s, r] < 0 else heads.without(z[s], int(left_out[s, r]))
            head = w[s, :, r]
            for _ in range(3):
                head = head.detach().requires_grad_(True)
                (slope,) = torch.autograd.grad(softplus(-(samples @ head)).mean(), head)
                head = head - 0.7 * slope
            torch.testing.assert_close(found[s, :, r], head.detach(), rtol=1e-12, atol=1e-14)


def test_descent_leaves_its_start_and_ignores_how_sets_are_grouped():
    """The caller's heads stay; a data set's result does not depend on its neighbours."""
    z, w = heads.clusters(45, 10, generator()), heads.start(45, 2, generator(1))
    before = w.clone()
    found = heads.descend(z, w, 4, 0.5)
    assert torch.equal(w, before)
    torch.testing.assert_close(heads.descend(z[41:43], w[41:43], 4, 0.5), found[41:43], rtol=1e-12, atol=0)


def test_leave_one_out():
    """The first head sees everything."""
    chosen = heads.leave_one_out(5, 7, 3, generator())
    assert chosen.shape == (5, 4)
    assert chosen[:, 0].eq(-1).all()
    assert chosen[:, 1:].min() >= 0 and chosen[:, 1:].max() < 7
    z = torch.arange(6.0).reshape(3, 2)
    assert heads.without(z, 1).tolist() == [[0, 1], [4, 5]]


def test_descent_nears_the_machine():
    """Heads from anywhere turn towards the machine with a weighed intercept (Soudry et al. 2018), whose margin none exceeds."""
    z, w = heads.clusters(1, 20, generator(2), distance=4.0), heads.start(1, 30, generator())
    machine = heads.machine(z[0])
    target, gaps, margins = heads.directions(machine.weights[None])[..., None], [], []
    for steps in (10, 90, 900, 9000):
        w = heads.descend(z, w, steps, 1.0)
        gaps.append(float((heads.directions(w) - target).norm(dim=1).mean()))
        margins.append(float((z @ heads.directions(w)).amin(1).max()))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < gaps[0] / 2
    assert margins == sorted(margins)
    assert margins[-1] <= 1 / float(machine.weights.norm())


def test_mean_direction_and_imbalance():
    """Heads (2, 0) and (0, 2) mean (1, 1); along (1, 0) the longest has 2 and the mean 1."""
    w = torch.tensor([[[2.0, 0.0], [0.0, 2.0]]], dtype=torch.float64)
    half = 0.5**0.5
    torch.testing.assert_close(mean_direction(w, 2), torch.tensor([[half, half]], dtype=torch.float64))
    assert mean_direction(w, 1).tolist() == [[1, 0]]
    assert imbalance(w, torch.tensor([[1.0, 0.0]], dtype=torch.float64)) == 2


def test_trial_is_what_its_parts_say():
    """Stability and the machines' own, recomputed one by one for the samples that were left out."""
    z, w = heads.clusters(3, 30, generator()), heads.start(3, 1, generator(1))[..., 0]
    trial = measure(z, w, 20, generator(7))
    left_out = heads.leave_one_out(3, 30, REPEATS, generator(7))
    for s in range(3):
        whole = heads.descend(z[s : s + 1], w[s : s + 1, :, None], 20, 0.25)[..., 0]
        moved, machines = [], []
        for position in left_out[s, 1:].tolist():
            less = heads.without(z[s], position)
            alone = heads.descend(less[None], w[s : s + 1, :, None], 20, 0.25)[..., 0]
            moved.append(float((heads.directions(alone) - heads.directions(whole)).norm()))
            pair = [heads.directions(heads.machine(one).weights[None]) for one in (less, z[s])]
            machines.append(float((pair[0] - pair[1]).norm()))
        assert trial.stability[s] == pytest.approx(sum(moved) / REPEATS)
        assert trial.machine_stability[s] == pytest.approx(sum(machines) / REPEATS, abs=1e-9)
    assert all(share < 1 for share in trial.step_share)
    assert trial.mean <= min(trial.theorem_2_4(trial.c), trial.corollary_2_5(trial.c))
    assert trial.theorem_2_4(trial.c) - trial.theorem_2_4(0) == pytest.approx(sum(trial.approach) / 3)
    slopes = [
        nu * (b**2 + 1) ** 0.5 / lam for nu, b, lam in zip(trial.nu, trial.bound, trial.regularization, strict=True)
    ]
    assert trial.corollary_2_5(0) == pytest.approx(sum(slopes) / 3 / 30)
