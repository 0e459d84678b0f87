"""A stand-in is brought closer to the model before one owner trains it: on the run's own training inputs, without labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from transformers.trainer_utils import set_seed

from ..registry.proxy import ProxyStrategy

if TYPE_CHECKING:
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

    Regularizers are off the model meanwhile and start from what was learnt. The run's own randomness goes on as if nothing
    had been.
    """
    strategy, model = trainer.recipe.strategy, trainer._equipped
    assert isinstance(strategy, ProxyStrategy)
    trainer.detach()
    model.to(trainer.args.device)
    measured = strategy.distill(None, model, Batches(trainer), trainer.run)
    set_seed(trainer.args.seed)
    for regularizer in trainer.recipe.regularizers:
        regularizer.attach(model, trainer.run)
    return measured
