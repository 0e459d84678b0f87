"""What probes that disturb weights share: a Gaussian direction that is never stored, and what the evaluation says."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from ..registry.context import plain_name
from ..registry.errors import CompatibilityError
from .initialization import initial_distributions

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..registry.context import Subject

Sigma = Literal["init", "layer_rms"]

_TIMING = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "jit_compilation_time")


class Direction(Protocol):
    """A direction in the space of weights."""

    def names(self) -> frozenset[str]:
        """Return the parameters it is not zero in."""
        ...

    def of(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        """Return its part for a parameter that is gathered: same shape and device, float32 or wider."""
        ...


@dataclass(frozen=True, kw_only=True)
class GaussianDirection:
    """eps ~ N(0, Sigma), Sigma diagonal: drawn anew from the seed whenever it is asked for, the same numbers each time.

    Attributes:
        std: standard deviation by parameter name; all positive.
        seed: of the run or the probe.
        draw: which of several draws.
    """

    std: Mapping[str, float]
    seed: int
    draw: int = 0

    def names(self) -> frozenset[str]:
        """Return the parameters with noise."""
        return frozenset(self.std)

    def of(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        """Return the noise of one parameter, which depends on its plain name: not on ranks, adapters or order."""
        return standard_normal(parameter, f"{self.seed} {self.draw} {plain_name(name)}").mul_(self.std[name])


class FineTuningDirection:
    """The way from the pre-trained weights to these: theta - theta_0, of weights that are theta when it is asked for.

    Args:
        subject: what is measured.
    """

    def __init__(self, subject: Subject) -> None:
        self._start = {name: piece for name, _, piece in subject.reference.pieces()}
        self._sharding = subject.run.sharding

    def names(self) -> frozenset[str]:
        """Return the parameters that train."""
        return frozenset(self._start)

    def of(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        """Return how far one parameter has come."""
        import torch

        wide = torch.promote_types(parameter.dtype, torch.float32)
        return parameter.detach().to(wide) - self.start(name, parameter).to(wide)

    def start(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        """Return the pre-trained value of a parameter that is gathered."""
        import torch

        start = self._start[name].to(parameter.device)
        if self._sharding.zero_stage == 3:
            places = self._sharding.local_of(parameter, torch.arange(parameter.numel(), device=parameter.device))
            whole = torch.zeros(parameter.numel(), dtype=start.dtype, device=parameter.device)
            whole[places] = start
            start = self._sharding.sum_shards(whole)
        return start.view(parameter.shape)


def standard_normal(parameter: torch.Tensor, key: str) -> torch.Tensor:
    """Return standard normal numbers of a parameter's full shape, the same whenever ``key`` and the device are the same."""
    import torch

    shape, dtype = _like(parameter)
    return torch.randn(shape, generator=_generator(parameter, key), device=parameter.device, dtype=dtype)


def random_signs(parameter: torch.Tensor, key: str) -> torch.Tensor:
    """Return Rademacher numbers, 1 or -1, of a parameter's full shape, the same whenever key and device are the same."""
    import torch

    shape, dtype = _like(parameter)
    generator = _generator(parameter, key)
    bits = torch.randint(2, shape, generator=generator, device=parameter.device, dtype=torch.int8)
    return bits.to(dtype).mul_(2).sub_(1)


def _like(parameter: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    import torch

    return tuple(getattr(parameter, "ds_shape", parameter.shape)), torch.promote_types(parameter.dtype, torch.float32)


def _generator(parameter: torch.Tensor, key: str) -> torch.Generator:
    import torch

    return torch.Generator(parameter.device).manual_seed(seed_of(key))


def seed_of(key: str) -> int:
    """Return a seed that depends on a text alone."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) % 2**63


def gaussian_stds(subject: Subject, sigma: Sigma, probe: str) -> dict[str, float]:
    """Return the standard deviation of the noise at gamma = 1 of every parameter that gets some.

    Pre-trained parameters get noise; fresh heads and what adapters add do not. A tied weight has one name. Where weights
    are too coarse for small noise, a warning says so.

    Args:
        subject: what is measured.
        sigma: ``init`` for the standard deviation of the initialisation: none for constants, so none for biases and norms;
            ``layer_rms`` for the root mean square at initialisation, which gives norms that begin at 1 a standard deviation
            of 1.
        probe: who asks, for the message.

    Raises:
        CompatibilityError: the model does not say how it was initialised, or nothing would get noise.
    """
    import torch

    drawn = initial_distributions(subject.model)
    wanted = [name for name, _ in subject.model.named_parameters() if subject.run.is_pretrained(name)]
    unknown = [name for name in wanted if plain_name(name) not in drawn]
    if unknown:
        subject.run.logger.warning(
            "probe %r gives no noise to %d parameters that no initialiser sets, such as %s",
            probe,
            len(unknown),
            unknown[0],
        )
    found = {name: drawn[plain_name(name)] for name in wanted if plain_name(name) in drawn}
    stds = {name: one.std if sigma == "init" else one.rms for name, one in found.items()}
    stds = {name: std for name, std in stds.items() if std > 0}
    if not stds:
        raise CompatibilityError(
            f"probe {probe!r} finds no pre-trained parameter to disturb", remedy="probe a model with a pre-trained body"
        )
    for dtype in {p.dtype for name, p in subject.model.named_parameters() if name in stds and p.dtype.itemsize < 4}:
        lost = torch.finfo(dtype).eps / 2
        subject.run.logger.warning(
            "probe %r: %s weights round off noise below %.2g of a weight; float32 ones keep it", probe, dtype, lost
        )
    return stds


@contextmanager
def shifted(subject: Subject, direction: Direction, amount: float) -> Iterator[None]:
    """Inside, the model's weights are theta + amount * direction; one copy of this rank's pieces is kept meanwhile."""
    import torch

    sharding, names = subject.run.sharding, direction.names()
    moving = {name: parameter for name, parameter in subject.model.named_parameters() if name in names}
    with sharding.perturbed(moving.values()):
        for name, parameter in moving.items():
            with sharding.written([parameter]), torch.no_grad():
                parameter.add_(direction.of(name, parameter), alpha=amount)
        yield


@contextmanager
def pretrained(subject: Subject) -> Iterator[None]:
    """Inside, the parameters that train have their pre-trained values, to the bit."""
    import torch

    sharding, way = subject.run.sharding, FineTuningDirection(subject)
    moving = {name: parameter for name, parameter in subject.model.named_parameters() if name in way.names()}
    with sharding.perturbed(moving.values()):
        for name, parameter in moving.items():
            with sharding.written([parameter]), torch.no_grad():
                parameter.copy_(way.start(name, parameter))
        yield


def evaluated(subject: Subject, probe: str) -> dict[str, float]:
    """Return the evaluation's metrics, ``eval_`` and timing left out; ``perplexity`` beside the loss of a language model.

    Raises:
        CompatibilityError: there is no evaluation set.
    """
    if subject.evaluate is None:
        raise CompatibilityError(
            f"probe {probe!r} has no evaluation set", remedy="give the run validation rows (eval_dataset)"
        )
    found = {name.removeprefix("eval_"): float(value) for name, value in subject.evaluate().items()}
    found = {name: value for name, value in found.items() if name not in _TIMING}
    if len(subject.run.tasks) == 1 and subject.run.task.kind.is_language_modelling and "loss" in found:
        found["perplexity"] = _exp(found["loss"])
    return found


def _exp(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
