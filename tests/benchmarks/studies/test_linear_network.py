"""The linear network's closed forms against the notes' numbers, simulation and gradient descent."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch

from tunery.benchmarks.studies.linear_network import (
    FT,
    PRE,
    STRENGTHS,
    degradation,
    descend,
    findings,
    finetuned,
    finetuning_inflection,
    gaussian_inflection,
    increment,
    loss,
    perturbed_loss,
)
from tunery.benchmarks.studies.report import main


def test_perturbed_loss_of_the_worked_example():
    """d = 4, sigma = (4, 2, 1, 0.5), gamma^2 = 0.15."""
    found = [perturbed_loss(PRE, n, 0.15) for n in range(5)]
    assert found == pytest.approx([22.69, 11.49, 9.89, 10.09, 10.44])
    assert [b - a for a, b in itertools.pairwise(found)] == pytest.approx(
        [increment(PRE, n, 0.15) for n in range(1, 5)]
    )
    assert gaussian_inflection(PRE, 0.15) == 2


def test_perturbed_loss_is_the_expectation():
    """Monte-Carlo with factors that are rotated against each other: only product and norms matter."""
    random = np.random.default_rng(0)
    u, v, q = (np.linalg.qr(random.standard_normal((3, 3)))[0] for _ in range(3))
    sigma = np.array([2.0, 1.0, 0.4])
    root = np.diag(np.sqrt(np.where(np.arange(3) < 2, sigma, 0.0)))
    z = 0.5 * random.standard_normal((2, 100_000, 3, 3))
    values = (((u @ root @ q + z[0]) @ (q.T @ root @ v.T + z[1]) - u @ np.diag(sigma) @ v.T) ** 2).sum(axis=(1, 2))
    error = values.std() / math.sqrt(len(values))
    assert values.mean() == pytest.approx(perturbed_loss(sigma.tolist(), 2, 0.25), abs=4 * error)


def test_inflection_moves_out_with_regularization():
    """r_lambda = 2, 2, 3, 4 for lambda = 0, 1, 3, 5, and the threshold is sigma_ft > (2 + lambda) sigma_pre."""
    assert [finetuning_inflection(PRE, FT, strength) for strength in STRENGTHS] == [2, 2, 3, 4]
    for strength in STRENGTHS:
        for n in range(1, 5):
            rises = loss(finetuned(PRE, FT, n, strength), PRE) > loss(finetuned(PRE, FT, n - 1, strength), PRE)
            assert rises == (FT[n - 1] > (2 + strength) * PRE[n - 1])


@pytest.mark.parametrize("strength", [0.0, 2.0])
def test_fine_tuning_ends_where_the_formula_says(strength: float):
    """Autograd's own descent on the regularized loss, in rotated singular vectors, all features learnt."""
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=generator)).Q for _ in range(2))
    root = torch.tensor(PRE, dtype=torch.float64).sqrt().diag()
    w1, w2 = (u @ root).requires_grad_(), (root @ v.T).requires_grad_()
    start, target = (w1 @ w2).detach(), u @ torch.tensor(FT, dtype=torch.float64).diag() @ v.T
    path = torch.matmul(*descend(w1.detach(), w2.detach(), target, strength, steps=2000))
    for _ in range(3):  # the hand-written slope is the gradient
        theta = w1 @ w2
        objective = (theta - target).square().sum() + strength * (theta - start).square().sum()
        slopes = torch.autograd.grad(objective, (w1, w2))
        w1, w2 = ((w - 0.01 * slope).detach().requires_grad_() for w, slope in zip((w1, w2), slopes, strict=True))
    torch.testing.assert_close(path[3], (w1 @ w2).detach())
    expected = u @ torch.tensor(finetuned(PRE, FT, 4, strength), dtype=torch.float64).diag() @ v.T
    torch.testing.assert_close(path[-1], expected, atol=1e-6, rtol=0)


def test_degradation_is_what_the_loss_rises_by():
    """Theorem 4.6 from the losses themselves; it grows with n though sigma_ft < sigma_pre at first."""
    for strength in STRENGTHS:
        rises = []
        for n in range(5):
            before = loss([value if i < n else 0.0 for i, value in enumerate(PRE)], PRE)
            rises.append(loss(finetuned(PRE, FT, n, strength), PRE) - before)
        assert rises == pytest.approx([degradation(PRE, FT, n, strength) for n in range(5)])
        assert rises == sorted(rises)


def test_the_study_as_a_user_runs_it(tmp_path):
    """Every statement is printed beside its correction, with a picture each."""
    assert main(findings, "linear_network", "", ["--quick", "--output_dir", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "results.json").read_text())["findings"]
    names = ["theorem_4_1", "proposition_4_3", "theorem_4_4", "theorem_4_6", "theorem_4_7"]
    assert list(result) == sorted(names)
    assert all((tmp_path / f"{name}.png").is_file() for name in names)
    corrected = ("theorem_4_1", "theorem_4_4", "theorem_4_6", "theorem_4_7")
    assert all("Corrected" in result[name]["verdict"] for name in corrected)
    learnt = result["theorem_4_1"]["rows"]
    assert {row["singular vectors"] for row in learnt} == {"U = V", "any"}
    assert all(row["||W1 - U Sigma_:n^1/2|| there"] > 1 for row in learnt)
    assert all(row["distance there"] < 0.1 for row in learnt if row["tau"] == 6)
    (noisy,) = (row for row in result["theorem_4_4"]["rows"] if row["gamma^2"] == 0.15)
    assert (noisy["r of Definition 4.2"], noisy["s of A.3"]) == (2, 4)
    assert noisy["section 4.2: first n with 2 d gamma^2 > sigma_n"] == 3
    for row in result["proposition_4_3"]["rows"]:
        assert row["simulated"] == pytest.approx(row["exact"], abs=4 * row["standard error"])
