"""Data, heads and support vector machines.

Shapes: ``s`` data sets of ``n`` samples, inputs ``[x, -1]`` of ``D`` numbers so that the last weight is the intercept
(section 2.3), ``r`` heads a data set. A sample is stored as ``y [x, -1]``: a head ``w`` is right about it when the product
is positive.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

FEATURES = 10
_AT_ONCE = 20  # data sets, so that what a step makes stays in the cache


def clusters(
    sets: int, n: int, generator: torch.Generator, *, distance: float = 3.0, radius: float = 1.0, stretch: float = 1.0
) -> Tensor:
    """Draw two classes of n / 2 samples each, uniform in balls, shape (s, n, D).

    Bounded noise keeps them separable: the margin is at least ``distance / 2 - radius``.

    Args:
        sets: how many data sets.
        n: samples of each.
        generator: of all samples.
        distance: of the two centres, along the first feature.
        radius: of the balls.
        stretch: of the other features, which makes samples longer and leaves the margin.
    """
    labels = torch.ones(n, 1, dtype=torch.float64)
    labels[n // 2 :] = -1
    direction = torch.randn(sets, n, FEATURES, dtype=torch.float64, generator=generator)
    length = torch.rand(sets, n, 1, dtype=torch.float64, generator=generator) ** (1 / FEATURES)
    x = radius * length * direction / direction.norm(dim=-1, keepdim=True)
    x[..., 1:] *= stretch
    x[..., :1] += labels * distance / 2
    inputs = torch.cat([x, -torch.ones(sets, n, 1, dtype=torch.float64)], -1)
    inputs *= labels
    return inputs


def sample_bound(z_snD: Tensor) -> Tensor:
    """Return B, the largest norm of a sample's features in each data set, shape (s,)."""
    norms: Tensor = torch.linalg.vector_norm(z_snD[..., :-1], dim=-1)
    return norms.amax(1)


def start(sets: int, heads: int, generator: torch.Generator) -> Tensor:
    """Draw heads from N(0, 1), independently, shape (s, D, r)."""
    return torch.randn(sets, FEATURES + 1, heads, dtype=torch.float64, generator=generator)


def descend(z_snD: Tensor, w_sDr: Tensor, steps: int, rate: float, left_out_sr: Tensor | None = None) -> Tensor:
    """Run gradient descent on the mean logistic loss of every head by itself, shape (s, D, r).

    Args:
        z_snD: samples.
        w_sDr: heads at the start; left as they are.
        steps: full-batch steps.
        rate: step size.
        left_out_sr: the sample each head does not see, by its position, or -1 where it sees all.
    """
    if left_out_sr is None:
        left_out_sr = torch.full((len(w_sDr), w_sDr.shape[2]), -1)
    parts = zip(*(torch.split(whole, _AT_ONCE) for whole in (z_snD, w_sDr, left_out_sr)), strict=True)
    return torch.cat([_descend(z, w, steps, rate, left_out) for z, w, left_out in parts])


def _descend(z_snD: Tensor, w_sDr: Tensor, steps: int, rate: float, left_out_sr: Tensor) -> Tensor:
    seen = (left_out_sr < 0)[:, None]
    position = left_out_sr.clamp(min=0)[..., None].expand(-1, -1, z_snD.shape[2])
    removed_sDr = torch.gather(z_snD, 1, position).mT.masked_fill(seen, 0)
    count = z_snD.shape[1] - 1 + seen.double()
    for _ in range(steps):
        pull = (z_snD @ w_sDr).neg_().sigmoid_()
        own = torch.sigmoid(-(removed_sDr * w_sDr).sum(1, keepdim=True))
        w_sDr = w_sDr + rate * (z_snD.mT @ pull - removed_sDr * own) / count
    return w_sDr


def directions(w: Tensor) -> Tensor:
    """Divide weights by their norm, which runs over the second dimension."""
    return torch.nn.functional.normalize(w, dim=1)


def leave_one_out(sets: int, n: int, repeats: int, generator: torch.Generator) -> Tensor:
    """Choose what heads do not see, shape (s, 1 + repeats): the first sees everything, each other lacks a random sample."""
    lacking = torch.randint(n, (sets, repeats), generator=generator)
    return torch.cat([torch.full((sets, 1), -1), lacking], 1)


@dataclass(frozen=True)
class Machine:
    """A hard-margin support vector machine.

    Attributes:
        weights: shape (D,), intercept last; every sample's product with them is at least 1.
        largest_dual: the largest multiplier of a sample.
    """

    weights: Tensor
    largest_dual: float

    @property
    def margin(self) -> float:
        """Return gamma = 1 / |v|, without the intercept (section 2.3)."""
        return 1 / float(self.weights[:-1].norm())

    def largest_regularization(self, n: int) -> float:
        """Return the largest lambda at which lambda |w|^2 + mean hinge loss still has this minimum: 1 / (2 n max dual).

        Lemma A.2.5 argues with the soft-margin machine and concludes about the hard-margin one; up to here they are one.
        """
        return 1 / (2 * n * self.largest_dual)


def machine(z_nD: Tensor) -> Machine:
    """Minimise |w|^2 so that every product with a sample is at least 1; the intercept counts as a weight.

    That is where gradient descent on [x, -1] goes (Soudry et al. 2018); eq. 13 of the paper leaves the intercept out of the
    norm. Solved exactly as a least-distance problem by non-negative least squares (Lawson and Hanson, chapter 23).
    """
    rows = np.vstack([z_nD.T.numpy(), np.ones(len(z_nD))])
    target = np.zeros(len(rows))
    target[-1] = 1
    duals, _ = nnls(rows, target, maxiter=30 * len(z_nD))
    residual = rows @ duals - target
    return Machine(torch.from_numpy(-residual[:-1] / residual[-1]), float(duals.max() / -residual[-1]))


def without(z_nD: Tensor, position: int) -> Tensor:
    """Return the samples but one."""
    return torch.cat([z_nD[:position], z_nD[position + 1 :]])
