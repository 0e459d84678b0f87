"""Appendix B of the Multi-LoRA paper: derivatives against autograd, and what Table 3's columns are judged by."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.func import grad, jacrev, vmap

from tunery.benchmarks.studies.partially_decomposable import softmax_regression as regression
from tunery.benchmarks.studies.partially_decomposable import table3

SIZES = [(4, 3), (10, 5), (3, 8)]


def problems(n: int, d: int, points: int = 20) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random A, b and x, a batch of each."""
    generator = torch.Generator().manual_seed(1)
    return tuple(table3.normal(generator, (points, *shape)) for shape in ((n, d), (n,), (d,)))


def test_loss_by_hand():
    """Two equal logits: f = (1/2, 1/2), so against (1, 0) the loss is 1/4."""
    a, b, x = torch.ones(2, 1), torch.tensor([1.0, 0.0]), torch.tensor([3.0])
    assert regression.loss(a, b, x) == 0.25


@pytest.mark.parametrize(("n", "d"), SIZES)
def test_gradient_against_autograd(n, d):
    """Lemma B.3 is right."""
    a, b, x = problems(n, d)
    truth = vmap(grad(regression.loss, argnums=2))(a, b, x)
    torch.testing.assert_close(regression.gradient(a, b, x), truth, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("n", "d"), SIZES)
def test_hessians_against_autograd(n, d):
    """The corrected Hessian is right; Lemma B.4 as printed is far off at every point."""
    a, b, x = problems(n, d)
    truth = vmap(jacrev(grad(regression.loss, argnums=2), argnums=2))(a, b, x)
    torch.testing.assert_close(regression.corrected_hessian(a, b, x), truth, rtol=1e-10, atol=1e-13)
    printed = (regression.printed_hessian(a, b, x) - truth).flatten(1).abs().amax(1)
    assert printed.min() > 0.1 * truth.abs().max() or printed.median() > truth.abs().max()


def test_corrected_hessian_by_hand():
    """n = 2, d = 1, A = (1, -1)/2, b = 0, x = 0: L = (s^2 + (1-s)^2)/2 with s = sigmoid(x), and L'' = 2 s'^2 = 1/8."""
    a, b, x = torch.tensor([[0.5], [-0.5]]), torch.zeros(2), torch.zeros(1)
    assert regression.corrected_hessian(a, b, x).item() == pytest.approx(1 / 8)
    assert regression.printed_hessian(a, b, x).item() != pytest.approx(1 / 8, rel=0.5)


@pytest.mark.parametrize("sampler", [table3.simplex, table3.one_hot])
def test_probability_vectors(sampler):
    """Entries are not negative and sum to 1."""
    sample = sampler(torch.Generator().manual_seed(0), (50, 7))
    assert sample.min() >= 0
    torch.testing.assert_close(sample.sum(-1), torch.ones(50, dtype=torch.float64))


def test_constants_are_those_of_autograd():
    """One estimate, redone with autograd from the same random numbers."""
    found = table3.measure(4, 3, 5, table3.Sampling(), regression.corrected_hessian, torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    a, b, x, y = (table3.normal(generator, (5, *shape)) for shape in ((4, 3), (4,), (3,), (3,)))
    one = vmap(jacrev(grad(regression.loss, argnums=2), argnums=2))
    at_x, at_y = one(a, b, x), one(a, b, y)
    norms = torch.linalg.matrix_norm
    assert found.alpha == pytest.approx(torch.linalg.eigvalsh(at_x).amin(1).mean().item())
    assert found.beta == pytest.approx(norms(at_x, ord=2).mean().item())
    assert found.m == pytest.approx((norms(at_x - at_y, ord=2) / (x - y).norm(dim=1)).mean().item())
    assert found.gamma == pytest.approx(vmap(grad(regression.loss, argnums=2))(a, b, x).norm(dim=1).mean().item())


def test_deviation_forgives_rounding_and_reports_the_worst_cell():
    """A value that prints as the table does is not off; one wrong cell decides a column."""
    cells = list(table3.TABLE_3.values())
    rounded = [dataclasses.replace(cell, gamma=cell.gamma + 0.004, alpha=-0.004) for cell in cells]
    assert table3.deviation(rounded, "gamma") == table3.deviation(rounded, "alpha") == 0
    assert table3.deviation(
        [dataclasses.replace(cells[0], beta=2 * cells[0].beta), *cells[1:]], "beta"
    ) == pytest.approx(1, abs=1e-4)
