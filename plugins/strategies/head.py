"""Head tuning, also called linear probing: the pre-trained encoder is frozen, only the fresh head trains (stability paper, section 3.3).

The frozen encoder runs once for each row, not once for each epoch, seed and head: see :mod:`..feature_cache`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ...registry.context import Support, TaskKind
from ...registry.contracts import Strategy
from ...registry.hookspecs import hookimpl
from ..feature_cache import FeatureCache, can_cache
from ..freezing import train_head_alone

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from ...registry.context import RunContext

_caches: WeakSet[FeatureCache] = WeakSet()


class Head(Strategy):
    """Train the fresh task head on features of the frozen encoder, which stays in eval mode: no dropout, fixed statistics."""

    name = "head"
    summary = "train the task head alone; the encoder is frozen and in eval mode"
    reference = "Fu et al., stability of fine-tuning, section 3.3 (head tuning); Kumar et al. 2022 (linear probing)"
    supports = Support(
        tasks=frozenset({TaskKind.CLASSIFICATION, TaskKind.REGRESSION, TaskKind.IMAGE_CLASSIFICATION, TaskKind.OTHER})
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of head tuning.

        Attributes:
            cache: run the encoder once for each row and keep what the head reads of it, three vectors at most, in memory;
                the next run of the process on the same encoder finds it. Architectures whose head is not known to read so
                little run the encoder every time.
            cache_dir: a folder for the same in files, which later processes find; ranks and processes may share it.
        """

        cache: bool = True
        cache_dir: str | None = field(default=None, metadata={"recorded": False, "cache": True})

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._hook: RemovableHandle | None = None
        self._cache: FeatureCache | None = None

    def prepare(self, model: nn.Module, run: RunContext) -> nn.Module:
        """Freeze what is pre-trained and keep it in eval mode whatever the trainer sets.

        Raises:
            CompatibilityError: the model has no fresh head to train.
        """
        self._hook = train_head_alone(model, run, self.name)
        if self.config.cache:
            self._keep_features(model, run)
        return model

    def _keep_features(self, model: Any, run: RunContext) -> None:
        if not can_cache(model) or any(parameter.requires_grad for parameter in model.base_model.parameters()):
            run.logger.info(
                "strategy 'head' runs the encoder every time: the head of %s is not known", type(model).__name__
            )
            return
        self._cache = FeatureCache(model, run, Path(self.config.cache_dir) if self.config.cache_dir else None)
        _caches.add(self._cache)

    def export(self, model: nn.Module, run: RunContext, *, merge: bool = False) -> nn.Module:
        """Return the whole model, with nothing in the encoder's way."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._cache is not None:
            self._cache.remove()
            self._cache = None
        return model


@hookimpl
def tunery_strategies() -> list[type[Strategy]]:
    """Offer :class:`Head`."""
    return [Head]


@hookimpl
def tunery_run_end(run: RunContext, result: Mapping[str, Any]) -> None:
    """File the features of the run that ends."""
    for cache in _caches:
        if cache.run is run:
            cache.flush()
