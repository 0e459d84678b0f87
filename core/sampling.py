"""Training rows in an order that gives every micro-batch every class: what ``Regularizer.stratified`` asks for."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Sampler

from ..registry.contracts import Regularizer
from ..registry.errors import CompatibilityError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class StratifiedSampler(Sampler[int]):
    """Every row once an epoch, in a random order in which each window of rows has its share of each class.

    Of a class with k rows every whole window has floor(k / m) or one more, where m is the number of whole windows. Rows that
    fill no window come last: drawn at random of the k mod m that each class has beyond its equal shares. Where these are
    fewer than the rows left over, the classes with the most rows give the others, and some windows have less of them.

    Args:
        classes: the class of each row.
        window: rows that belong together: one micro-batch, all ranks' together.
        seed: of the order; each epoch has its own.
    """

    def __init__(self, classes: Sequence[int], window: int, seed: int) -> None:
        self.classes = np.asarray(classes)
        self.window = window
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.classes)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch; a resumed run finds its own again."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        random = np.random.default_rng([self.seed, self.epoch])
        rows = random.permutation(len(self.classes))
        windows = len(rows) // self.window
        left_over = np.zeros(len(rows), dtype=bool)
        left_over[self._giving(rows, windows)[: len(rows) - windows * self.window]] = True
        whole, rest = rows[~left_over], rows[left_over]
        # Dealt out one after the other, the rows of a class come to windows that differ, and every window gets as many.
        dealt = whole[np.argsort(self.classes[whole], kind="stable")].reshape(self.window, windows)
        order = random.permuted(dealt.T, axis=1)[random.permutation(windows)] if windows else dealt
        return iter([*map(int, order.reshape(-1)), *map(int, rest)])

    def _giving(self, rows: NDArray[np.int64], windows: int) -> NDArray[np.int64]:
        """Return the places of ``rows`` in the order in which they are left over: what is beyond equal shares comes first."""
        _, classes, counts = np.unique(self.classes[rows], return_inverse=True, return_counts=True)
        rank = np.empty(len(rows), dtype=np.int64)  # of a row in its class
        rank[np.argsort(classes, kind="stable")] = np.concatenate([np.arange(0), *map(np.arange, counts)])
        beyond = rank >= (counts - counts % max(windows, 1))[classes]
        return np.lexsort((np.where(beyond, 0, -rank), ~beyond))

    def rare_classes(self) -> list[int]:
        """Return the classes with fewer rows than there are windows, which some of these go without."""
        names, counts = np.unique(self.classes, return_counts=True)
        return [int(name) for name, count in zip(names, counts, strict=True) if count < len(self) // self.window]


def classes_of(dataset: Any) -> list[int]:
    """Return the class of each row of a dataset.

    Raises:
        CompatibilityError: it has no length, or a row has no single class.
    """
    try:
        columns = getattr(getattr(dataset, "split", dataset), "column_names", None)
        if columns is not None:
            labels = list(getattr(dataset, "split", dataset)["labels"])
        else:
            labels = [dataset[index]["labels"] for index in range(len(dataset))]
        return [int(label) for label in labels]
    except (KeyError, TypeError, ValueError):
        raise CompatibilityError(
            f"stratified sampling takes rows with one class in 'labels', not those of {type(dataset).__name__}",
            remedy="leave it out",
        ) from None


def asked_sampler(
    dataset: Any, regularizers: Sequence[Regularizer], args: Any, batch_size: int, logger: logging.Logger
) -> Any:
    """Return the training sampler that a dataset brings, or a regularizer asks for; ``None`` for transformers' own.

    Args:
        dataset: one that mixes tasks has a method ``sampler``, which takes the seed.
        regularizers: those of the run.
        args: the training arguments.
        batch_size: rows of a micro-batch on one rank.
        logger: told of classes that are too rare to be everywhere.

    Raises:
        CompatibilityError: the rows have no classes to stratify by, or ``train_sampling_strategy`` asks for another order.
    """
    seed = args.seed if args.data_seed is None else args.data_seed
    own = getattr(dataset, "sampler", None)
    asking = [regularizer for regularizer in regularizers if regularizer.stratified]
    if not callable(own) and not asking:
        return None
    strategy = getattr(args, "train_sampling_strategy", "random")
    if strategy != "random":
        other = (
            "several tasks, whose rows are mixed" if callable(own) else f"{asking[0].name}, which stratifies the rows"
        )
        raise CompatibilityError(f"train_sampling_strategy={strategy!r} beside {other}", remedy="leave one of them out")
    if callable(own):
        return own(seed)
    ranks = 1 if args.accelerator_config.split_batches else args.world_size
    sampler = StratifiedSampler(classes_of(dataset), batch_size * ranks, seed)
    if rare := sampler.rare_classes():
        logger.warning("%s: too few rows of class %s for every micro-batch", asking[0].name, rare)
    return sampler
