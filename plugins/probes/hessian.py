"""Curvature of the loss: trace of its Hessian and its largest eigenvalue (overtraining paper, appendix D).

Hutchinson's estimate with Rademacher vectors v, whose entries are 1 or -1, is the mean of v'Hv, since E[v v'] = I. Proposition
D.1 needs no derivative: for z ~ N(0, I), E[L(theta + lambda z) - L(theta)] = lambda^2 / 2 Tr H up to higher orders. Taken at
z and -z, the gradient's part cancels in every draw:

    Tr H ~ mean of (L(theta + lambda z) + L(theta - lambda z) - 2 L(theta)) / lambda^2

The Hessian is that of the loss on the evaluation set, over the parameters that train.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt

from ...registry.context import Measurement, Subject, Support
from ...registry.contracts import Probe
from ...registry.errors import CompatibilityError
from ...registry.hookspecs import hookimpl
from ..landscape import STEP, Landscape, dot, method_for
from ..perturbation import GaussianDirection, random_signs, shifted, standard_normal

if TYPE_CHECKING:
    import torch

    Product = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]

LOSS_STEP = 1e-2  # of a difference of losses, in norms of the weights: what a shorter one changes is lost in rounding


class Hessian(Probe):
    """Estimate the trace by Hutchinson's method, and the largest eigenvalue in magnitude by power iteration."""

    name = "hessian"
    summary = "trace of the loss's Hessian, and its largest eigenvalue"
    reference = "Springer et al., overtrained language models are harder to fine-tune, appendix D; Hutchinson 1990"
    supports = Support()

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of the estimate; the defaults are tunery's own.

        Attributes:
            draws: random vectors for the trace.
            iterations: at most so many steps of power iteration; 0 leaves the eigenvalue out.
            tolerance: relative change of the eigenvalue at which power iteration ends.
            method: how products with the Hessian are had: ``exact`` differentiates twice, ``finite_difference`` takes
                gradients at two points; ``forward`` needs no gradients, but gives the trace only (Proposition D.1);
                ``auto`` is ``exact``, and ``finite_difference`` under ZeRO-3 and with flash attention, which have no second
                derivative.
            step: length of a finite difference, in norms of the weights; default: 2e-4, and 1e-2 for ``forward``. Longer ones
                suffer less from rounding, and more from how the curvature changes.
            seed: of the random vectors; default: the run's.
        """

        draws: Annotated[int, Ge(2)] = 10
        iterations: Annotated[int, Ge(0)] = 20
        tolerance: Annotated[float, Gt(0)] = 1e-3
        method: Literal["auto", "exact", "finite_difference", "forward"] = "auto"
        step: Annotated[float, Gt(0)] | None = None
        seed: Annotated[int, Ge(0)] | None = None

    config: Config

    def measure(self, subject: Subject) -> Iterable[Measurement]:
        """Yield every draw of the trace, with the ``method`` that gave it, then ``trace``, its standard error, and
        ``top_eigenvalue``.

        Raises:
            CompatibilityError: no evaluation set, no labels, nothing that trains, or a model without second derivative.
        """
        names = frozenset(name for name, p in subject.model.named_parameters() if p.requires_grad)
        if not names:
            raise CompatibilityError("probe 'hessian' finds no parameter that trains", remedy="choose a strategy")
        landscape = Landscape(subject, names, self.name)
        seed = subject.run.seed if self.config.seed is None else self.config.seed
        method = method_for(subject) if self.config.method == "auto" else self.config.method
        product: Product | None = None
        if method == "forward":
            step = self.config.step or LOSS_STEP
            samples = _without_gradients(subject, landscape, names, self.config.draws, seed, step)
        else:
            product = partial(landscape.product, method=method, share=self.config.step or STEP)
            samples = _with_products(landscape, product, self.config.draws, seed)
        traces = []
        for draw, trace in enumerate(samples):
            traces.append(trace)
            yield Measurement(name="trace", value=trace, where={"draw": draw, "method": method})
        yield Measurement(name="trace", value=statistics.fmean(traces))
        yield Measurement(name="trace_standard_error", value=statistics.stdev(traces) / math.sqrt(len(traces)))
        if product is not None and self.config.iterations:
            yield Measurement(name="top_eigenvalue", value=self._power_iteration(landscape, product, seed))

    def _power_iteration(self, landscape: Landscape, product: Product, seed: int) -> float:
        vector = {name: standard_normal(p, f"{seed} start {name}") for name, p in landscape.parameters.items()}
        eigenvalue = 0.0
        for _ in range(self.config.iterations):
            size = math.sqrt(dot(vector, vector))
            if not size:
                return 0.0
            vector = {name: part / size for name, part in vector.items()}
            image = product(vector)
            before, eigenvalue = eigenvalue, dot(vector, image)
            vector = image
            if abs(eigenvalue - before) <= self.config.tolerance * abs(eigenvalue):
                break
        return eigenvalue


def _with_products(landscape: Landscape, product: Product, draws: int, seed: int) -> Iterable[float]:
    for draw in range(draws):
        signs = {name: random_signs(p, f"{seed} {draw} {name}") for name, p in landscape.parameters.items()}
        yield dot(signs, product(signs))


def _without_gradients(
    subject: Subject, landscape: Landscape, names: frozenset[str], draws: int, seed: int, share: float
) -> Iterable[float]:
    base = landscape.value()
    numel = sum(int(getattr(p, "ds_numel", p.numel())) for p in landscape.parameters.values())
    step = landscape.step(math.sqrt(numel), share)
    for draw in range(draws):
        direction = GaussianDirection(std=dict.fromkeys(names, 1.0), seed=seed, draw=draw)
        losses = []
        for sign in (1, -1):
            with shifted(subject, direction, sign * step):
                losses.append(landscape.value())
        yield (sum(losses) - 2 * base) / step**2


@hookimpl
def tunery_probes() -> list[type[Probe]]:
    """Offer :class:`Hessian`."""
    return [Hessian]
