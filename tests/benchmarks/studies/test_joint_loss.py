"""Section 4 of the Multi-LoRA paper: derivatives against autograd, constants against closed forms."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.autograd.functional import hessian
from torch.func import grad, vmap

from tunery.benchmarks.studies.partially_decomposable import joint_loss as joint
from tunery.benchmarks.studies.partially_decomposable.multi_lora import joint_training_gap

D, M = 3, 2


def tasks(k: int, seed: int = 0) -> tuple[list[joint.TaskLoss], torch.Tensor, torch.Tensor]:
    """Return k different quartic losses, and a point."""
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, dtype=torch.float64, generator=generator)
    matrices = [normal(4, D + M) for _ in range(k)]
    losses = [lambda z, a=a: ((a @ z) ** 4).sum() for a in matrices]
    return losses, normal(D), normal(k, M)


def test_joint_loss_is_the_sum():
    """Definition 4.1, with numbers: 2 * 3 + 2 * 5."""
    x, y = torch.tensor([2.0]), torch.tensor([[3.0], [5.0]])
    assert joint.joint_loss([lambda z: z[0] * z[1]] * 2, x, y) == 16


@pytest.mark.parametrize("k", [1, 2, 5])
def test_derivatives_against_autograd(k):
    """The gradient of Claim 4.2 and the Hessian put together from the tasks' are those of the joint loss."""
    losses, x, y = tasks(k)
    flat = partial(joint.flat_joint_loss, losses, d=D)
    z = torch.cat([x, y.flatten()])
    torch.testing.assert_close(joint.decomposed_gradient(losses, x, y), grad(flat)(z), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(joint.decomposed_hessian(losses, x, y), hessian(flat, z), rtol=1e-12, atol=1e-12)


def test_gradient_puts_the_sum_first_and_then_each_task():
    """Claim 4.2 by hand, for L(x, y) = x y: [y_1 + y_2; x; x]."""
    x, y = torch.tensor([2.0]), torch.tensor([[3.0], [5.0]])
    assert joint.decomposed_gradient([lambda z: z[0] * z[1]] * 2, x, y).tolist() == [8, 2, 2]


@pytest.mark.parametrize("k", [1, 2, 3, 9, 64])
def test_counterexample_spectra(k):
    """The paper's matrix has 4 - 3 sqrt(k), the Hessian autograd finds has the closed form, and at k = 3 -1.196 and +1.443."""
    flat = partial(joint.flat_joint_loss, [joint.counterexample_loss] * k, d=1)
    true = hessian(flat, torch.ones(k + 1, dtype=torch.float64))
    assert torch.linalg.eigvalsh(joint.counterexample_matrix(k))[0] == pytest.approx(4 - 3 * math.sqrt(k), abs=1e-12)
    assert torch.linalg.eigvalsh(true)[0] == pytest.approx(joint.counterexample_minimum(k), abs=1e-12)
    assert joint.counterexample_minimum(k) >= 1
    if k == 3:
        assert 4 - 3 * math.sqrt(k) == pytest.approx(-1.196, abs=5e-4)
        assert joint.counterexample_minimum(k) == pytest.approx(1.443, abs=5e-4)


def test_counterexample_is_what_the_lemma_says_of_it():
    """Part 1: its entries sum to 4 - 2k; part 2: one task's block is that of the loss."""
    assert joint.counterexample_matrix(7).sum() == 4 - 2 * 7
    block = hessian(joint.counterexample_loss, torch.zeros(2, dtype=torch.float64))
    assert torch.equal(block, joint.counterexample_matrix(1))


@pytest.mark.parametrize(("k", "alpha_0", "alpha", "met"), [(1, 9, 1, True), (2, 1.5, 1, True), (2, 1.6, 1, False)])
def test_condition(k, alpha_0, alpha, met):
    """(k - 1)(alpha_0 - alpha) <= alpha / 2: one task always meets it, and equality counts."""
    assert joint.condition_of_lemma_4_8(k, alpha_0, alpha) is met


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_exact_constants(k, share):
    """They are what autograd finds far out (gradient) and at 0 (Hessian), and never above the lemmas' k."""
    direction = torch.tensor([share**0.5, (1 - share) ** 0.5], dtype=torch.float64)
    flat = partial(joint.flat_joint_loss, [joint.hyperbola(direction)] * k, d=1)
    far = 1e8 * torch.cat([direction[:1], direction[1:].repeat(k)])
    assert grad(flat)(far).norm() == pytest.approx(joint.exact_lipschitz(k, share), rel=1e-9)
    assert grad(flat)(far)[1:].norm() == pytest.approx(joint.exact_lipschitz(k, share, frozen=True), abs=1e-9)
    curvature = hessian(flat, torch.zeros(1 + k, dtype=torch.float64))
    assert torch.linalg.eigvalsh(curvature)[-1] == pytest.approx(joint.exact_smoothness(k, share), rel=1e-9)
    own = torch.linalg.eigvalsh(curvature[1:, 1:])[-1]
    assert own == pytest.approx(joint.exact_smoothness(k, share, frozen=True), abs=1e-9)
    assert max(joint.exact_lipschitz(k, share), joint.exact_smoothness(k, share)) <= k + 1e-12


def test_largest_slope():
    """The steepest of the pairs counts, and vector-valued functions are measured by their norm."""
    starts = torch.tensor([[0.0], [1.0]])
    ends = torch.tensor([[1.0], [3.0]])
    assert joint.largest_slope(lambda x: x[:, 0] ** 2, starts, ends) == 4
    assert joint.largest_slope(lambda x: torch.cat([3 * x, 4 * x], 1), starts, ends) == 5


def test_frozen_a_decouples_the_tasks_and_a_trained_one_does_not():
    """Joint training equals training alone to the last bit, only when A is frozen."""
    gaps = [joint_training_gap(3, 10, torch.Generator().manual_seed(0), train_a=train_a) for train_a in (False, True)]
    assert gaps[0] == 0
    assert gaps[1] > 1e-3


def test_vmap_takes_the_joint_loss():
    """The study evaluates it for many points at once."""
    losses, x, y = tasks(2)
    z = torch.cat([x, y.flatten()])
    values = vmap(partial(joint.flat_joint_loss, losses, d=D))(torch.stack([z, 2 * z]))
    torch.testing.assert_close(values[1], 16 * values[0])
