"""Full fine-tuning: every parameter trains (Devlin et al. 2019, BERT, section 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.contracts import Strategy
from ...registry.hookspecs import hookimpl

if TYPE_CHECKING:
    from torch import nn

    from ...registry.context import RunContext


class Full(Strategy):
    """Train every parameter; the artefact is an ordinary transformers model."""

    name = "full"
    summary = "train every parameter"
    reference = "Devlin et al. 2019, BERT, section 3.2"

    def prepare(self, model: nn.Module, run: RunContext) -> nn.Module:
        """Let every floating-point parameter train."""
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        return model


@hookimpl
def tunery_strategies() -> list[type[Strategy]]:
    """Offer :class:`Full`."""
    return [Full]
