"""Stand-ins of one owner: brought closer to the model before they train, and made whole again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from transformers.trainer_utils import set_seed

from ..registry.proxy import ProxyStrategy
from .memory import give_back

if TYPE_CHECKING:
    from torch import nn

    from ..registry.context import RunContext
    from ..registry.contracts import Strategy
    from .trainer import PluginTrainerMixin


class Batches:
    """The run's training rows in global batches, in the order the seed gives; every rank gets all of each."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        args, rows = self._trainer.args, self._trainer.train_dataset
        collate = self._trainer._get_collator_with_removed_columns(self._trainer.data_collator)
        streamed = not hasattr(rows, "__len__")
        loader: DataLoader[Any] = DataLoader(
            rows,
            batch_size=args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            shuffle=not streamed,
            generator=torch.Generator().manual_seed(args.seed),
            collate_fn=collate,
        )
        for batch in loader:
            yield {key: value.to(args.device) if hasattr(value, "to") else value for key, value in batch.items()}


def align(trainer: PluginTrainerMixin) -> Mapping[str, float]:
    """Have the strategy of a run align its stand-in; return what it measured.

    Regularizers are off the model meanwhile and start from what was learnt. The run's own randomness starts from the seed
    again, as after an earlier stage.
    """
    strategy, model = trainer.recipe.strategy, trainer._equipped
    assert isinstance(strategy, ProxyStrategy)
    trainer.detach()
    model.to(trainer.args.device)
    measured = strategy.distill(None, model, Batches(trainer), trainer.run)
    give_back()
    set_seed(trainer.args.seed)
    for regularizer in trainer.recipe.regularizers:
        regularizer.attach(model, trainer.run)
    return measured


def whole_of(
    strategy: Strategy | None, model: nn.Module, run: RunContext
) -> Callable[[], AbstractContextManager[nn.Module]] | None:
    """Return what makes a stand-in the full model for a while; ``None`` where the strategy trains the model itself."""
    return (lambda: strategy.whole(model, run)) if isinstance(strategy, ProxyStrategy) else None


def evaluate_whole(trainer: PluginTrainerMixin) -> dict[str, float]:
    """Return the metrics of the full model with the stand-in's adapter in it; nothing where no stand-in trains.

    Nor under ZeRO-3, whose modules keep the parameters they began with: there the export has to be evaluated.
    """
    whole = whole_of(trainer.recipe.strategy, trainer._equipped, trainer.run)
    if whole is None:
        return {}
    if trainer.run.sharding.zero_stage == 3:
        trainer.run.logger.warning(
            "metrics are the stand-in's: under ZeRO-3 the full model is evaluated from its export"
        )
        return {}
    with whole():
        return dict(trainer._evaluate_quietly())
