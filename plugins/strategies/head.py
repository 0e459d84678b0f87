"""Head tuning, also called linear probing: the pre-trained encoder is frozen, only the fresh head trains (stability paper, section 3.3).

The frozen encoder runs once for each row, not once for each epoch, seed and head: see :mod:`..feature_cache`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...registry.context import Support, TaskKind
from ...registry.contracts import Strategy
from ...registry.hookspecs import hookimpl
from ..head_tuning import CacheOptions, HeadTuning, file_features

if TYPE_CHECKING:
    from torch import nn

    from ...registry.context import RunContext


class Head(Strategy):
    """Train the fresh task head on features of the frozen encoder, which stays in eval mode: no dropout, fixed statistics."""

    name = "head"
    summary = "train the task head alone; the encoder is frozen and in eval mode"
    reference = "Fu et al., stability of fine-tuning, section 3.3 (head tuning); Kumar et al. 2022 (linear probing)"
    supports = Support(
        tasks=frozenset({TaskKind.CLASSIFICATION, TaskKind.REGRESSION, TaskKind.IMAGE_CLASSIFICATION, TaskKind.OTHER})
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(CacheOptions):
        """Options of head tuning: those of the cache."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._tuning: HeadTuning | None = None

    def prepare(self, model: nn.Module, run: RunContext) -> nn.Module:
        """Freeze what is pre-trained and keep it in eval mode whatever the trainer sets.

        Raises:
            CompatibilityError: the model has no fresh head to train.
        """
        self._tuning = HeadTuning(model, run, self.config, self.name)
        return model

    def export(self, model: nn.Module, run: RunContext, *, merge: bool = False) -> nn.Module:
        """Return the whole model, with nothing in the encoder's way."""
        if self._tuning is not None:
            self._tuning.end()
            self._tuning = None
        return model


@hookimpl
def tunery_strategies() -> list[type[Strategy]]:
    """Offer :class:`Head`."""
    return [Head]


@hookimpl
def tunery_run_end(run: RunContext, result: Mapping[str, Any]) -> None:
    """File the features of the run that ends."""
    file_features(run)
