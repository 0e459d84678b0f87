"""Full fine-tuning: every parameter trains (Devlin et al. 2019, BERT, section 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.contracts import Strategy
from ...registry.hookspecs import hookimpl
from ..freezing import train_everything

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
        train_everything(model)
        return model


@hookimpl
def tunery_strategies() -> list[type[Strategy]]:
    """Offer :class:`Full`."""
    return [Full]
