"""What a client does to its numbers before they leave it: clipping and Gaussian noise, whatever engine carries them.

With clip norm C and noise multiplier z, what a client changed becomes (McMahan et al. 2018, DP-FedAvg, section 3, with the
noise added by each client itself)

    delta * min(1, C / ||delta||) + N(0, (z C)^2 I)

The norm is over all tensors together. Statistics are treated the same way with a clip norm of their own. What stays as it is: how
many rows a client has, its mean loss and its seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...registry.errors import RecipeError
from .arguments import FederatedArguments

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Protection:
    """Clip norms and noise; ``None`` and 0 leave numbers as they are.

    Attributes:
        clip_norm: of what a client changed in the adapter.
        statistics_clip_norm: of the statistics it tells.
        noise_multiplier: standard deviation of the noise, in clip norms.
    """

    clip_norm: float | None = None
    statistics_clip_norm: float | None = None
    noise_multiplier: float = 0.0

    def adapter(self, received: Tensors, trained: Tensors, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Return what to send instead of ``trained``, given what training began with."""
        if self.clip_norm is None:
            return dict(trained)
        deltas = {name: trained[name].double() - received[name].double() for name in trained}
        kept = _clipped(deltas, self.clip_norm, self.noise_multiplier, generator)
        return {name: (received[name].double() + kept[name]).to(trained[name].dtype) for name in trained}

    def statistics(self, told: Tensors, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Return what to send instead of the statistics ``told``."""
        if self.statistics_clip_norm is None or not told:
            return dict(told)
        return _clipped(told, self.statistics_clip_norm, self.noise_multiplier, generator)


def protection_of(federated: FederatedArguments, tells_statistics: bool) -> Protection:
    """Return what the arguments ask for.

    Raises:
        RecipeError: noise, and statistics without a clip norm for it to count in.
    """
    if tells_statistics and federated.noise_multiplier and federated.statistics_clip_norm is None:
        raise RecipeError("noise on statistics counts in clip norms", remedy="give statistics_clip_norm")
    return Protection(
        clip_norm=federated.clip_norm,
        statistics_clip_norm=federated.statistics_clip_norm,
        noise_multiplier=federated.noise_multiplier,
    )


def _clipped(values: Tensors, norm: float, multiplier: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
    length = torch.stack([value.double().square().sum() for value in values.values()]).sum().sqrt().item()
    scale = min(1.0, norm / length) if length > 0 else 1.0
    return {
        name: value.double() * scale
        + multiplier * norm * torch.randn(value.shape, generator=generator, dtype=torch.float64)
        for name, value in values.items()
    }
