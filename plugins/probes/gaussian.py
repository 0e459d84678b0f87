"""Sensitivity to Gaussian noise in the weights (overtraining paper, section 3.3 and appendix C.2).

    theta~ = theta + eps,     eps ~ N(0, gamma^2 Sigma),     sensitivity = PPL(theta~) - PPL(theta)

Sigma is diagonal: the covariance of the distribution the parameters were drawn from before pre-training. Every gamma gets the
same draws, scaled, so that a curve over gamma is not noise of its own. At gamma = 0.01 a weight that was drawn with standard
deviation 0.02 moves by 2e-4.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated

from annotated_types import Ge, Gt, MinLen

from ...registry.context import Measurement, Subject, Support
from ...registry.contracts import Probe
from ...registry.hookspecs import hookimpl
from ..perturbation import GaussianDirection, Sigma, evaluated, gaussian_stds, shifted


class Gaussian(Probe):
    """Evaluate the model with noise in its pre-trained weights; tied weights once, a fresh head not at all.

    Of a model with adapters, the frozen pre-trained weights get the noise, as they would without; what the adapters add stays.
    """

    name = "gaussian"
    summary = "evaluation with Gaussian noise in the weights, scaled as they were initialised"
    reference = "Springer et al., overtrained language models are harder to fine-tune, section 3.3"
    supports = Support(several_tasks=True)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of the noise; the paper states neither values of gamma nor a number of draws.

        Attributes:
            gammas: standard deviations of the noise, in those of the initialisation.
            draws: how many draws of the noise; each is used for every gamma.
            sigma: ``init`` for the covariance of the initialisation, which leaves constants (biases, norms) alone;
                ``layer_rms`` for the size a parameter had at initialisation, whatever it was drawn from.
            seed: of the noise; default: the run's.
        """

        gammas: Annotated[tuple[Annotated[float, Gt(0)], ...], MinLen(1)] = (0.01, 0.03, 0.1)
        draws: Annotated[int, Ge(1)] = 3
        sigma: Sigma = "init"
        seed: Annotated[int, Ge(0)] | None = None

    config: Config

    def measure(self, subject: Subject) -> Iterable[Measurement]:
        """Yield every metric of every evaluation, each gamma's change of every metric, then ``sensitivity``.

        A metric belongs to ``gamma`` and ``draw``; both are 0 for the weights as they are. ``<metric>_change`` belongs to
        ``gamma``: mean over its draws, less what the weights have as they are. ``sensitivity`` is how much the perplexity (of
        other tasks: the loss) rises at the largest gamma.

        Raises:
            CompatibilityError: no evaluation set, or a model that does not say how it was initialised.
        """
        base = evaluated(subject, self.name)
        yield from _rows(base, 0.0, 0)
        stds = gaussian_stds(subject, self.config.sigma, self.name)
        seed = subject.run.seed if self.config.seed is None else self.config.seed
        changes: dict[str, float] = {}
        for gamma in sorted(self.config.gammas):
            draws = []
            for draw in range(self.config.draws):
                with shifted(subject, GaussianDirection(std=stds, seed=seed, draw=draw), gamma):
                    draws.append(evaluated(subject, self.name))
                yield from _rows(draws[-1], gamma, draw)
            changes = {name: fmean(found[name] for found in draws) - before for name, before in base.items()}
            for name, change in changes.items():
                yield Measurement(name=f"{name}_change", value=change, where={"gamma": gamma})
        main = "perplexity" if "perplexity" in base else "loss"
        yield Measurement(name="sensitivity", value=changes[main], unit="nat" if main == "loss" else "")


def _rows(metrics: dict[str, float], gamma: float, draw: int) -> Iterable[Measurement]:
    for name, value in metrics.items():
        yield Measurement(name=name, value=value, where={"gamma": gamma, "draw": draw})


@hookimpl
def tunery_probes() -> list[type[Probe]]:
    """Offer :class:`Gaussian`."""
    return [Gaussian]
