"""The loss along one line through the weights, and the parabola its derivatives predict (overtraining paper, appendix D).

    L(theta + lambda eps)     beside     L(theta) + lambda g'eps + lambda^2 / 2 eps'H eps

eps is one Gaussian draw, eps ~ N(0, Sigma) with Sigma that of the initialisation, the same for every lambda; or the way that
fine-tuning went, theta - theta_0, where lambda = -1 is the pre-trained model and lambda = 0 the model as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, MinLen

from ...registry.context import Measurement, Subject, Support
from ...registry.contracts import Probe
from ...registry.hookspecs import hookimpl
from ..landscape import Landscape, dot, method_for
from ..perturbation import Direction, FineTuningDirection, GaussianDirection, Sigma, gaussian_stds, shifted

if TYPE_CHECKING:
    import torch


class Interpolation(Probe):
    """Evaluate the loss at points of a line through the weights."""

    name = "interpolation"
    summary = "the loss along a line through the weights, with the parabola from its Hessian"
    reference = "Springer et al., overtrained language models are harder to fine-tune, appendix D and figure 9"
    supports = Support()

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of the line.

        Attributes:
            direction: ``gaussian`` for one draw of noise, ``fine_tuning`` for the way from the pre-trained weights to these.
            lambdas: the points, in lengths of the direction; 0 is the model as it is.
            sigma: of the Gaussian direction, see probe ``gaussian``.
            quadratic: whether the parabola is measured too, by a product with the Hessian.
            method: how that is had: ``exact`` differentiates twice, ``finite_difference`` takes gradients at two points;
                ``auto`` is ``exact``, and ``finite_difference`` under ZeRO-3 and with flash attention.
            seed: of the draw; default: the run's.
        """

        direction: Literal["gaussian", "fine_tuning"] = "gaussian"
        lambdas: Annotated[tuple[float, ...], MinLen(1)] = (-1.0, -0.3, -0.1, 0.0, 0.1, 0.3, 1.0)
        sigma: Sigma = "init"
        quadratic: bool = True
        method: Literal["auto", "exact", "finite_difference"] = "auto"
        seed: Annotated[int, Ge(0)] | None = None

    config: Config

    def measure(self, subject: Subject) -> Iterable[Measurement]:
        """Yield ``loss`` for every ``lambda``, then ``slope`` g'eps, ``curvature`` eps'H eps, and the ``quadratic`` they make.

        Raises:
            CompatibilityError: no evaluation set, no labels, a model without second derivative, or one that does not say
                how it was initialised.
        """
        direction = self._direction(subject)
        landscape = Landscape(subject, direction.names(), self.name)
        for point in self.config.lambdas:
            with shifted(subject, direction, point):
                loss = landscape.value()
            yield Measurement(name="loss", value=loss, unit="nat", where={"lambda": point})
        if not self.config.quadratic:
            return
        method = method_for(subject) if self.config.method == "auto" else self.config.method
        vector: dict[str, torch.Tensor] = {}
        for name, parameter in landscape.parameters.items():
            with subject.run.sharding.gathered([parameter]):
                vector[name] = direction.of(name, parameter)
        base, slope = landscape.value(), dot(landscape.gradient(), vector)
        curvature = dot(landscape.product(vector, method), vector)
        yield Measurement(name="slope", value=slope)
        yield Measurement(name="curvature", value=curvature)
        for point in self.config.lambdas:
            value = base + point * slope + point**2 / 2 * curvature
            yield Measurement(name="quadratic", value=value, unit="nat", where={"lambda": point, "method": method})

    def _direction(self, subject: Subject) -> Direction:
        if self.config.direction == "fine_tuning":
            return FineTuningDirection(subject)
        seed = subject.run.seed if self.config.seed is None else self.config.seed
        return GaussianDirection(std=gaussian_stds(subject, self.config.sigma, self.name), seed=seed)


@hookimpl
def tunery_probes() -> list[type[Probe]]:
    """Offer :class:`Interpolation`."""
    return [Interpolation]
