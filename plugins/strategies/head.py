"""Head tuning, also called linear probing: the pre-trained encoder is frozen, only the fresh head trains (stability paper, section 3.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...registry.context import Support, TaskKind
from ...registry.contracts import Strategy
from ...registry.hookspecs import hookimpl
from ..freezing import train_head_alone

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from ...registry.context import RunContext


class Head(Strategy):
    """Train the fresh task head on features of the frozen encoder, which stays in eval mode: no dropout, fixed statistics."""

    name = "head"
    summary = "train the task head alone; the encoder is frozen and in eval mode"
    reference = "Fu et al., stability of fine-tuning, section 3.3 (head tuning); Kumar et al. 2022 (linear probing)"
    supports = Support(
        tasks=frozenset({TaskKind.CLASSIFICATION, TaskKind.REGRESSION, TaskKind.IMAGE_CLASSIFICATION, TaskKind.OTHER})
    )

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._hook: RemovableHandle | None = None

    def prepare(self, model: nn.Module, run: RunContext) -> nn.Module:
        """Freeze what is pre-trained and keep it in eval mode whatever the trainer sets.

        Raises:
            CompatibilityError: the model has no fresh head to train.
        """
        self._hook = train_head_alone(model, run, self.name)
        return model

    def export(self, model: nn.Module, run: RunContext, *, merge: bool = False) -> nn.Module:
        """Return the whole model, its hook removed."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        return model


@hookimpl
def tunery_strategies() -> list[type[Strategy]]:
    """Offer :class:`Head`."""
    return [Head]
