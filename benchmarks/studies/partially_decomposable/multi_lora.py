"""Low-rank adapters of k tasks that share one A, on one linear layer, trained by gradient descent."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

ROWS, INPUTS, CLASSES, RANK = 32, 12, 5, 3
LEARNING_RATE = 0.1


def joint_training_gap(k: int, steps: int, generator: torch.Generator, *, train_a: bool) -> float:
    """Train k tasks jointly and each alone from the same start; return the largest difference of any entry of any B_i.

    The layer computes h = W0 x + B_i A x, A (rank, inputs) starts as a Gaussian, B_i (classes, rank) at 0 (Algorithm 1, with
    A on the input's side as in section 5). The joint loss is the sum of the tasks' mean cross entropies (Definition 4.1).

    Args:
        k: tasks, each with rows and labels of its own.
        steps: of gradient descent.
        generator: of data, W0 and A.
        train_a: whether A moves too.
    """
    x = torch.randn(k, ROWS, INPUTS, dtype=torch.float64, generator=generator)
    labels = torch.randint(CLASSES, (k, ROWS), generator=generator)
    w0 = torch.randn(CLASSES, INPUTS, dtype=torch.float64, generator=generator)
    a = torch.randn(RANK, INPUTS, dtype=torch.float64, generator=generator)
    joint = _train(w0, a, x, labels, steps, train_a)
    alone = [_train(w0, a, x[i : i + 1], labels[i : i + 1], steps, train_a) for i in range(k)]
    return float((joint - torch.cat(alone)).abs().max())


def _train(w0: Tensor, a: Tensor, x: Tensor, labels: Tensor, steps: int, train_a: bool) -> Tensor:
    """Return every B_i, shape (k, classes, rank), after ``steps`` steps on the sum of the tasks' losses."""
    a = a.clone().requires_grad_(train_a)
    adapters = [torch.zeros(CLASSES, RANK, dtype=torch.float64, requires_grad=True) for _ in x]
    trained = [*adapters, a] if train_a else adapters
    for _ in range(steps):
        losses = [
            cross_entropy(rows @ w0.T + rows @ a.T @ b.T, label)
            for rows, label, b in zip(x, labels, adapters, strict=True)
        ]
        gradients = torch.autograd.grad(torch.stack(losses).sum(), trained)
        with torch.no_grad():
            for weight, gradient in zip(trained, gradients, strict=True):
                weight -= LEARNING_RATE * gradient
    return torch.stack(adapters).detach()
