"""Softmax regression, L(x) = |f(x) - b|^2 / 2 with f(x) = softmax(A x), and two forms of its Hessian.

Definitions B.1 and B.2, Lemmas B.3 and B.4 of the paper. Shapes: ``A`` (..., n, d), ``b`` (..., n), ``x`` (..., d); every
function takes leading batch dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def loss(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """Return |softmax(A x) - b|^2 / 2 (Definition B.1)."""
    return ((probabilities(a, x) - b) ** 2).sum(-1) / 2


def probabilities(a: Tensor, x: Tensor) -> Tensor:
    """Return f(x) = softmax(A x) (Definition B.2), shape (..., n)."""
    return torch.softmax((a @ x[..., None])[..., 0], dim=-1)


def gradient(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """Return A^T (f o c - <c, f> f) with c = f - b (Lemma B.3, which is right), shape (..., d)."""
    f = probabilities(a, x)
    c = f - b
    return (a.mT @ (f * c - _dot(c, f) * f)[..., None])[..., 0]


def printed_hessian(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """Return A^T B A as Lemma B.4 prints it, shape (..., d, d). It is not the Hessian.

    B = <3f - 2b, f> f f^T + (b o f) f^T + f (b o f)^T + <f - b, f> diag(f) + diag((2f - b) o f)
    """
    f = probabilities(a, x)
    bf = b * f
    inner = (
        _dot(3 * f - 2 * b, f)[..., None] * _outer(f, f)
        + _outer(bf, f)
        + _outer(f, bf)
        + torch.diag_embed(_dot(f - b, f) * f + (2 * f - b) * f)
    )
    return a.mT @ inner @ a


def corrected_hessian(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """Return the Hessian, shape (..., d, d).

    B = <3f - 2b, f> f f^T - q f^T - f q^T - <c, f> diag(f) + diag(q) with q = (2f - b) o f and c = f - b. Against Lemma B.4,
    the rank-one terms hold q with a minus instead of b o f with a plus, and <c, f> diag(f) changes its sign.
    """
    f = probabilities(a, x)
    q = (2 * f - b) * f
    inner = (
        _dot(3 * f - 2 * b, f)[..., None] * _outer(f, f)
        - _outer(q, f)
        - _outer(f, q)
        + torch.diag_embed(q - _dot(f - b, f) * f)
    )
    return a.mT @ inner @ a


def _dot(u: Tensor, v: Tensor) -> Tensor:
    return (u * v).sum(-1, keepdim=True)


def _outer(u: Tensor, v: Tensor) -> Tensor:
    return u[..., :, None] * v[..., None, :]
