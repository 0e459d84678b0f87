"""One setting of a figure: many data sets, a head on each, the same head without one sample, and the theorems' numbers."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from . import bounds, heads

RATE = 0.25
REPEATS = 4  # samples left out of each data set, one at a time


@dataclass(frozen=True)
class Trial:
    """What one setting gives, one entry a data set, means over the samples left out.

    Attributes:
        n: samples of each data set.
        steps: of gradient descent.
        stability: distance of the head's direction from the one without a sample (Definition 2.3).
        machine_stability: the same of the support vector machines.
        approach: distance of either head's direction from its machine's, both added.
        margin: gamma.
        bound: B.
        nu: of Lemma A.2.1, for these machines.
        regularization: largest lambda at which Lemma A.2.5 speaks of these machines.
        step_share: step size over the limit of Theorem 2.4.
    """

    n: int
    steps: int
    stability: list[float]
    machine_stability: list[float]
    approach: list[float]
    margin: list[float]
    bound: list[float]
    nu: list[float]
    regularization: list[float]
    step_share: list[float]

    @property
    def mean(self) -> float:
        """Mean stability over the data sets."""
        return statistics.fmean(self.stability)

    @property
    def error(self) -> float:
        """Standard error of the mean stability."""
        return statistics.stdev(self.stability) / math.sqrt(len(self.stability))

    @property
    def c(self) -> float:
        """Return the least C with which C log log t / log t covers the heads' mean distance from their machines."""
        return statistics.fmean(self.approach) / bounds.convergence_rate(self.steps)

    def theorem_2_4(self, c: float, regularization: float | None = None) -> float:
        """Return the bound's mean over the data sets, with each one's largest lambda unless one is given."""
        return statistics.fmean(
            bounds.theorem_2_4(
                n=self.n, t=self.steps, c=c, nu=nu, regularization=regularization or lam, bound=bound, margin=margin
            )
            for nu, lam, bound, margin in zip(self.nu, self.regularization, self.bound, self.margin, strict=True)
        )

    def corollary_2_5(self, c: float) -> float:
        """Return the bound's mean over the data sets, with L = sqrt(B^2 + 1), the hinge loss's."""
        return statistics.fmean(
            bounds.corollary_2_5(n=self.n, t=self.steps, c=c, nu=nu, regularization=lam, lipschitz=math.hypot(b, 1))
            for nu, lam, b in zip(self.nu, self.regularization, self.bound, strict=True)
        )


def measure(z_snD: Tensor, w_sD: Tensor, steps: int, generator: torch.Generator) -> Trial:
    """Train a head on every data set, and again without each of a few samples, from the same start.

    Args:
        z_snD: samples.
        w_sD: the heads at the start.
        steps: of gradient descent.
        generator: of the samples left out.
    """
    sets, n, _ = z_snD.shape
    left_out = heads.leave_one_out(sets, n, REPEATS, generator)
    w_sDr = heads.descend(z_snD, w_sD[..., None].expand(-1, -1, 1 + REPEATS), steps, RATE, left_out)
    trained = heads.directions(w_sDr)
    whole = [heads.machine(z) for z in z_snD]
    reduced = torch.stack(
        [
            torch.stack([weights_without(z, machine, position) for position in lacking], -1)
            for z, machine, lacking in zip(z_snD, whole, left_out[:, 1:].tolist(), strict=True)
        ]
    )
    target_sD1 = heads.directions(torch.stack([machine.weights for machine in whole]))[..., None]
    moved = heads.directions(reduced)
    approach = (trained[..., :1] - target_sD1).norm(dim=1) + (trained[..., 1:] - moved).norm(dim=1)
    norms = torch.minimum(reduced.norm(dim=1).amin(1), torch.stack([machine.weights.norm() for machine in whole]))
    singular = torch.linalg.matrix_norm(z_snD, ord=2)
    return Trial(
        n=n,
        steps=steps,
        stability=(trained[..., 1:] - trained[..., :1]).norm(dim=1).mean(1).tolist(),
        machine_stability=(moved - target_sD1).norm(dim=1).mean(1).tolist(),
        approach=approach.mean(1).tolist(),
        margin=[machine.margin for machine in whole],
        bound=heads.sample_bound(z_snD).tolist(),
        nu=[bounds.direction_constant(norm) for norm in norms.tolist()],
        regularization=[machine.largest_regularization(n) for machine in whole],
        step_share=[RATE / bounds.step_limit(value, n) for value in singular.tolist()],
    )


def weights_without(z_nD: Tensor, machine: heads.Machine, position: int) -> Tensor:
    """Return the machine's weights without a sample: the same, unless it supports the margin."""
    if z_nD[position] @ machine.weights > 1 + 1e-6:
        return machine.weights
    return heads.machine(heads.without(z_nD, position)).weights
