"""Section 4 and appendix A: what a joint loss inherits from the losses of its tasks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import grad, vmap

from ..report import Finding, Run
from . import counts, softmax_regression, table3
from . import joint_loss as joint
from .multi_lora import joint_training_gap

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHARED, OWN = 4, 3  # numbers in x and in each y_i
KS = (1, 2, 4, 8, 16)
ALPHA = 0.1  # strong convexity of the random tasks


def findings(run: Run) -> Iterator[Finding]:
    """Measure everything."""
    yield gradient_decomposition(run)
    yield frozen_a(run)
    yield constants(run)
    yield pointwise_bounds(run)
    yield counterexample()
    yield strong_convexity(run)
    yield counts.finding()
    yield from table3.findings(run)


def gradient_decomposition(run: Run) -> Finding:
    """Compare Claim 4.2 to autograd of the joint loss, for tasks of different losses."""
    generator, rows = run.generator(), []
    for k in KS:
        losses, x, y = _softmax_tasks(k, generator)
        flat = partial(joint.flat_joint_loss, losses, d=SHARED)
        z = torch.cat([x, y.flatten()])
        first, second = grad(flat)(z), joint.hessian(flat)(z)
        own = second[SHARED:, SHARED:].reshape(k, OWN, k, OWN)
        across = own[~torch.eye(k, dtype=torch.bool)[:, None, :, None].expand_as(own)]
        rows.append(
            (
                k,
                _gap(first, joint.decomposed_gradient(losses, x, y)),
                _gap(second, joint.decomposed_hessian(losses, x, y)),
                float(across.abs().max()) if k > 1 else 0.0,
                float(second[:SHARED, SHARED:].abs().max()),
            )
        )
    _, gradient_errors, _, across_tasks, _ = zip(*rows, strict=True)
    exact = max(gradient_errors) < 1e-12 and max(across_tasks) == 0
    said = "Claim 4.2 holds; tasks meet only in x" if exact else "Claim 4.2 does not hold"
    return Finding(
        name="gradient_decomposition",
        title="Claim 4.2: the joint gradient put together task by task, against autograd",
        columns=(
            "k",
            "gradient: largest error",
            "Hessian: largest error",
            "largest d2/dy_i dy_j",
            "largest d2/dx dy_i",
        ),
        rows=rows,
        verdict=f"{said}: freeze it, as Multi-LoRA freezes A, and nothing is left in common.",
    )


def frozen_a(run: Run) -> Finding:
    """Train k low-rank adapters jointly and one by one, with A frozen and with A trained."""
    steps = run.count(50, 10)
    rows = [
        (k, *(joint_training_gap(k, steps, run.generator(), train_a=train_a) for train_a in (False, True)))
        for k in (2, 4, 8)
    ]
    _, frozen, trained = zip(*rows, strict=True)
    said = "to the last bit" if max(frozen) == 0 else f"to {max(frozen):.1g}"
    return Finding(
        name="frozen_a",
        title=f"h = W0 x + B_i A x, k classification tasks, {steps} joint steps against {steps} alone",
        columns=("k", "A frozen: largest difference of any B_i", "A trained: largest difference of any B_i"),
        rows=rows,
        verdict=f"With A frozen, joint training is each task's own training {said}; "
        f"with A trained it is not (at least {min(trained):.2g}).",
    )


def constants(run: Run) -> Finding:
    """Compare Lemmas 4.4 and 4.6 to a loss whose constants are known exactly."""
    generator, pairs, rows = run.generator(), run.count(20_000, 500), []
    for share in (0.0, 0.5, 1.0):
        direction = torch.zeros(SHARED + OWN, dtype=torch.float64)
        direction[0], direction[-1] = share**0.5, (1 - share) ** 0.5
        for k in (1, 4, 16):
            losses = [joint.hyperbola(direction)] * k
            function = partial(joint.flat_joint_loss, losses, d=SHARED)
            starts, ends = _pairs(direction, k, pairs, generator)
            rows.append(
                (
                    share,
                    k,
                    joint.exact_lipschitz(k, share),
                    joint.largest_slope(vmap(function), starts, ends),
                    joint.exact_lipschitz(k, share, frozen=True),
                    joint.exact_smoothness(k, share),
                    joint.largest_slope(vmap(grad(function)), starts, ends),
                    joint.exact_smoothness(k, share, frozen=True),
                )
            )
    kept = all(max(lipschitz, smooth) <= k * (1 + 1e-9) for _, k, _, lipschitz, _, _, smooth, _ in rows)
    return Finding(
        name="constants",
        title="Lemmas 4.4 and 4.6: L(z) = sqrt(1 + <a, z>^2), gamma = beta = 1, so both lemmas grant k",
        columns=(
            "share of a in x",
            "k, the bound",
            "Lipschitz: exact",
            "Lipschitz: largest measured",
            "Lipschitz: x frozen",
            "smooth: exact",
            "smooth: largest measured",
            "smooth: x frozen",
        ),
        rows=rows,
        verdict=f"Both bounds {'hold' if kept else 'fail'} and are reached when only x matters. With x frozen, as in "
        "Multi-LoRA, they are far too large: sqrt(k) gamma and beta do.",
    )


def pointwise_bounds(run: Run) -> Finding:
    """Hold the derivatives of joint softmax regressions to k times the largest of the tasks'."""
    generator, points, rows = run.generator(), run.count(100, 10), []
    for k in KS:
        first, second = 0.0, 0.0
        for _ in range(points):
            losses, x, y = _softmax_tasks(k, generator)
            each = [torch.cat([x, row]) for row in y]
            gradients = [grad(loss)(z).norm() for loss, z in zip(losses, each, strict=True)]
            curvatures = [_norm(joint.hessian(loss)(z)) for loss, z in zip(losses, each, strict=True)]
            first = max(first, float(joint.decomposed_gradient(losses, x, y).norm() / (k * max(gradients))))
            second = max(second, float(_norm(joint.decomposed_hessian(losses, x, y)) / (k * max(curvatures))))
        rows.append((k, first, second))
    largest = max(max(row[1:]) for row in rows)
    said = "hold" if largest <= 1 + 1e-9 else "fail"
    return Finding(
        name="pointwise_bounds",
        title=f"Lemmas 4.4 and 4.6 at {points} points each: k softmax regressions over [x; y_i]",
        columns=("k", "|gradient| / (k max_i |gradient_i|)", "|Hessian| / (k max_i |Hessian_i|)"),
        rows=rows,
        verdict=f"The bounds {said} point by point; the largest ratio is {largest:.3g}.",
    )


def counterexample() -> Finding:
    """Print the matrix of Lemma A.1 beside the Hessian of the loss it is meant to be."""
    ks, rows = (1, 2, 3, 4, 8, 16, 32, 64), []
    for k in ks:
        nowhere = torch.zeros(1 + k, dtype=torch.float64)  # the Hessian is the same everywhere
        true = joint.decomposed_hessian([joint.counterexample_loss] * k, nowhere[:1], nowhere[1:, None])
        rows.append(
            (
                k,
                joint.condition_of_lemma_4_8(k, alpha_0=4, alpha=1),
                _lowest(joint.counterexample_matrix(k)),
                _lowest(true),
            )
        )

    def draw(axes: Axes) -> None:
        axes.plot(ks, [row[2] for row in rows], "o-", color="C3", label="matrix of Lemma A.1")
        axes.plot(ks, [row[3] for row in rows], "s-", color="C0", label="Hessian of the joint loss")
        axes.axhline(1, color="C2", linestyle="--", label="alpha of one task")
        axes.set(xlabel="tasks k", ylabel="smallest eigenvalue", xscale="log")

    paper, true_3 = rows[2][2:]
    convex = all(true >= 1 - 1e-9 for *_, true in rows)
    said = "No counterexample: the joint loss is alpha-strongly convex for every k" if convex else "A counterexample"
    return Finding(
        name="counterexample",
        title="Lemma A.1: is the joint loss of k tasks convex? L = z^T [[4, -3], [-3, 4]] z / 2, alpha = 1, alpha_0 = 4",
        columns=(
            "k",
            "condition of Lemma 4.8 met",
            "paper's matrix: smallest eigenvalue",
            "true Hessian: smallest eigenvalue",
        ),
        rows=rows,
        verdict=f"At k = 3 the paper's matrix has {paper:+.3f}, the Hessian {true_3:+.3f}: its shared entry is the sum "
        f"4k, not 4. {said}.",
        draw=draw,
    )


def strong_convexity(run: Run) -> Finding:
    """Look for strongly convex tasks whose joint loss is less convex than they are, where the condition fails."""
    generator, points, rows = run.generator(), run.count(100, 10), []
    for k in KS:
        lowest, met = float("inf"), 0
        for _ in range(points):
            losses = [_convex_task(generator) for _ in range(k)]
            x, y = _normal(generator, SHARED), _normal(generator, k, OWN)
            each = [joint.hessian(loss)(torch.cat([x, row])) for loss, row in zip(losses, y, strict=True)]
            alpha_0 = max(float(torch.linalg.eigvalsh(one[:SHARED, :SHARED])[-1]) for one in each)
            alpha = min(_lowest(one) for one in each)
            met += joint.condition_of_lemma_4_8(k, alpha_0, alpha)
            lowest = min(lowest, _lowest(joint.decomposed_hessian(losses, x, y)) / alpha)
        rows.append((k, met / points, lowest))
    least = min(row[2] for row in rows)
    return Finding(
        name="strong_convexity",
        title=f"Lemma 4.8: random tasks logsumexp(C_i z) + {ALPHA} |z|^2 / 2, {points} points each",
        columns=("k", "points that meet the condition", "smallest eigenvalue of the joint Hessian / alpha"),
        rows=rows,
        verdict=f"The condition is unnecessary: where it fails, the joint loss is alpha-strongly convex all the same "
        f"(smallest ratio {least:.4g}), twice what the lemma promises."
        if least >= 1 - 1e-9
        else f"The joint loss falls below alpha: ratio {least:.4g}.",
    )


def _softmax_tasks(k: int, generator: torch.Generator) -> tuple[list[joint.TaskLoss], Tensor, Tensor]:
    """Return k softmax regressions of their own data over [x; y_i], and a point."""
    losses: list[joint.TaskLoss] = [
        partial(softmax_regression.loss, _normal(generator, 10, SHARED + OWN), _normal(generator, 10)) for _ in range(k)
    ]
    return losses, _normal(generator, SHARED), _normal(generator, k, OWN)


def _convex_task(generator: torch.Generator) -> joint.TaskLoss:
    c = _normal(generator, 8, SHARED + OWN)
    return lambda z: torch.logsumexp(c @ z, 0) + ALPHA / 2 * (z @ z)


def _pairs(direction: Tensor, k: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random pairs, and pairs along the steepest direction: across 0, where curvature is, and far out."""
    n = SHARED + k * OWN
    starts = 3 * _normal(generator, count, n)
    ends = starts + _normal(generator, count, n)
    steepest = torch.cat([k * direction[:SHARED], direction[SHARED:].repeat(k)])
    steepest = steepest / steepest.norm()
    along = torch.tensor([[-1e-4, 1e-4], [-1.0, 1.0], [1e2, 1.1e2], [1e4, 1.1e4]], dtype=torch.float64)
    starts = torch.cat([starts, along[:, :1] * steepest])
    return starts, torch.cat([ends, along[:, 1:] * steepest])


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def _gap(u: Tensor, v: Tensor) -> float:
    return float((u - v).abs().max())


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.eigvalsh(matrix).abs().max())


def _lowest(matrix: Tensor) -> float:
    return float(torch.linalg.eigvalsh(matrix)[0])
