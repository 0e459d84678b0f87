"""The loss of k tasks over one shared block and k blocks of their own, and its derivatives put together task by task.

Anonymous, "Parameter-efficient fine-tuning via partially decomposable loss analysis and sharing", section 4. Shapes: ``d``
numbers are shared (``x``), every one of ``k`` tasks has ``m`` of its own (``y``). A task's loss takes ``[x; y_i]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import grad, jacrev

TaskLoss = Callable[[Tensor], Tensor]


def hessian(loss: TaskLoss) -> Callable[[Tensor], Tensor]:
    """Return the function that gives the Hessian of a scalar function of one vector, by autograd."""
    return jacrev(grad(loss))  # torch.func.hessian warns: its forward mode still goes through TorchScript


def joint_loss(losses: Sequence[TaskLoss], x_d: Tensor, y_km: Tensor) -> Tensor:
    """Return sum_i L_i([x; y_i]), the global loss of Definition 4.1; each task may have a loss of its own."""
    return torch.stack([loss(torch.cat([x_d, y])) for loss, y in zip(losses, y_km, strict=True)]).sum()


def flat_joint_loss(losses: Sequence[TaskLoss], z: Tensor, d: int) -> Tensor:
    """Return the global loss as a function of one vector ``[x; y_1; ...; y_k]``, for autograd."""
    return joint_loss(losses, z[:d], z[d:].reshape(len(losses), -1))


def decomposed_gradient(losses: Sequence[TaskLoss], x_d: Tensor, y_km: Tensor) -> Tensor:
    """Return [sum_i dL_i/dx; dL_1/dy_1; ...; dL_k/dy_k] (Claim 4.2), shape (d + k m,), from one gradient a task."""
    gradients = [grad(loss)(torch.cat([x_d, y])) for loss, y in zip(losses, y_km, strict=True)]
    d = len(x_d)
    shared = torch.stack([gradient[:d] for gradient in gradients]).sum(0)
    return torch.cat([shared, *(gradient[d:] for gradient in gradients)])


def decomposed_hessian(losses: Sequence[TaskLoss], x_d: Tensor, y_km: Tensor) -> Tensor:
    """Return the Hessian of the global loss, shape (d + k m, d + k m), from one Hessian a task.

    The shared block is the **sum** of the tasks' shared blocks; blocks of two different tasks are zero. The paper's proof
    of Lemma 4.8 and its Lemma A.1 write one copy there instead.
    """
    d, (k, m) = len(x_d), y_km.shape
    total = x_d.new_zeros(d + k * m, d + k * m)
    for i, (loss, y) in enumerate(zip(losses, y_km, strict=True)):
        own = torch.cat([torch.arange(d), torch.arange(d + i * m, d + (i + 1) * m)])
        total[own[:, None], own] += hessian(loss)(torch.cat([x_d, y]))
    return total


def condition_of_lemma_4_8(k: int, alpha_0: float, alpha: float) -> bool:
    """Return whether (k - 1)(alpha_0 - alpha) <= alpha / 2, which the paper asks for before it grants strong convexity.

    Args:
        k: tasks.
        alpha_0: largest eigenvalue of the shared block of a task's Hessian.
        alpha: smallest eigenvalue of a task's whole Hessian.
    """
    return (k - 1) * (alpha_0 - alpha) <= alpha / 2


def counterexample_matrix(k: int) -> Tensor:
    """Return the matrix of Lemma A.1, shape (k + 1, k + 1): 4 on the diagonal, -3 between the first index and the others.

    Its smallest eigenvalue is 4 - 3 sqrt(k), negative from k = 2 on.
    """
    matrix = 4 * torch.eye(k + 1, dtype=torch.float64)
    matrix[0, 1:] = matrix[1:, 0] = -3
    return matrix


def counterexample_loss(z: Tensor) -> Tensor:
    """Return z^T [[4, -3], [-3, 4]] z / 2, the task loss Lemma A.1 has in mind: 1-strongly convex and 7-smooth."""
    return 2 * z[0] ** 2 + 2 * z[1] ** 2 - 3 * z[0] * z[1]


def counterexample_minimum(k: int) -> float:
    """Return the smallest eigenvalue of the Hessian that k such tasks really have: its shared entry is 4k, not 4.

    (4k + 4 - sqrt((4k - 4)^2 + 36 k)) / 2, which is 1 for one task, 1.443 for three and tends to 1.75.
    """
    return (4 * k + 4 - math.sqrt((4 * k - 4) ** 2 + 36 * k)) / 2


def hyperbola(direction: Tensor) -> TaskLoss:
    """Return L(z) = sqrt(1 + <a, z>^2) for a unit vector ``a``: 1-Lipschitz and 1-smooth, and nothing less will do."""

    def loss(z: Tensor) -> Tensor:
        return (1 + (direction @ z) ** 2).sqrt()

    return loss


def exact_lipschitz(k: int, share: float, *, frozen: bool = False) -> float:
    """Return the least Lipschitz constant of k equal hyperbolas; Lemma 4.4 grants k gamma with gamma = 1.

    The gradient is largest where every task's is: k a_x in the shared block and a_y in each other.

    Args:
        k: tasks.
        share: squared norm of the part of ``a`` that meets the shared block, 0 to 1.
        frozen: whether only the tasks' own blocks move, as in Algorithm 1: then k gamma is sqrt(k) gamma at most.
    """
    return math.sqrt((0 if frozen else k**2 * share) + k * (1 - share))


def exact_smoothness(k: int, share: float, *, frozen: bool = False) -> float:
    """Return the least smoothness constant of k equal hyperbolas; Lemma 4.6 grants k beta with beta = 1.

    At 0 the Hessian is sum_i v_i v_i^T with v_i = [a_x; 0; ...; a_y; ...; 0], whose Gram matrix is share + (1 - share) I.
    With the shared block frozen it is block diagonal and no larger than one task's, whatever k.
    """
    return 1 - share if frozen else k * share + 1 - share


def largest_slope(function: Callable[[Tensor], Tensor], starts: Tensor, ends: Tensor) -> float:
    """Return the largest |f(u) - f(v)| / |u - v| over pairs of rows; ``function`` takes (pairs, n)."""
    change = (function(ends) - function(starts)).reshape(len(starts), -1)
    return float((change.norm(dim=1) / (ends - starts).norm(dim=1)).max())
