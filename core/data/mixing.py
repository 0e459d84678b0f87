"""Several tasks in one training run: their rows end to end, and the order in which a run takes them.

Every task keeps its rows, labels and lengths; a row says in ``task_ids`` whose it is. How often a task's rows come is the
mixing:

* ``proportional``: every row once an epoch;
* ``temperature``: task i with probability proportional to n_i^(1/T) (Devlin's multilingual BERT; T=1 is proportional, a
  large T equal shares), as many rows an epoch as there are;
* ``size_capped``: proportional to min(n_i, cap), that many rows an epoch (T5's examples-proportional mixing, Raffel et al.
  2020, section 3.5.2);
* ``round_robin``: one row of each task in turn, so that a batch of a multiple of k rows holds equally many of each; an
  epoch ends when the largest task's rows are through, and smaller ones begin again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, Sampler

from ...registry.context import Task, TaskKind
from ...registry.errors import DataError
from .encoding import IGNORE_INDEX, EncodedData, encode
from .tasks import TaskData

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """How often the rows of each task come.

    Attributes:
        name: ``proportional``, ``temperature``, ``size_capped`` or ``round_robin``.
        temperature: T of ``temperature``.
        cap: rows of ``size_capped``.
    """

    name: str = "proportional"
    temperature: float = 2.0
    cap: int = 1000

    def counts(self, sizes: Sequence[int]) -> list[int]:
        """Return how many rows of each task an epoch takes, from how many each task has."""
        if self.name == "round_robin":
            return [max(sizes)] * len(sizes)
        if self.name == "size_capped":
            return [min(size, self.cap) for size in sizes]
        if self.name == "proportional":
            return list(sizes)
        weights = [size ** (1 / self.temperature) for size in sizes]
        return _shared_out(sum(sizes), weights)


def _shared_out(total: int, weights: Sequence[float]) -> list[int]:
    """Cut ``total`` in whole numbers by weight: the largest remainders get what rounding down leaves."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts


class JointRows(Dataset[dict[str, Any]]):
    """The rows of several tasks, end to end; each has a ``task_ids``, the number of its task.

    Args:
        parts: each task's rows, in the order of the tasks' numbers.
        mixing: how a training run takes them.
    """

    def __init__(self, parts: Sequence[Any], mixing: Mixing) -> None:
        self.parts = parts
        self.mixing = mixing
        self.sizes = [len(part) for part in parts]

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row of the task that position ``index`` falls into."""
        for number, size in enumerate(self.sizes):
            if index < size:
                return {**self.parts[number][index], "task_ids": number}
            index -= size
        raise IndexError(index)

    def sampler(self, seed: int) -> MixingSampler:
        """Return what a Trainer draws training rows by."""
        return MixingSampler(self.sizes, self.mixing, seed)


class MixingSampler(Sampler[int]):
    """Positions of :class:`JointRows`, epoch by epoch; the same seed and epoch give the same ones.

    A task gives every row once before any comes again.

    Args:
        sizes: rows of each task.
        mixing: how often each task's come.
        seed: of the order.
    """

    def __init__(self, sizes: Sequence[int], mixing: Mixing, seed: int) -> None:
        self.sizes = list(sizes)
        self.mixing = mixing
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose positions come next."""
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(self.mixing.counts(self.sizes))

    def __iter__(self) -> Iterator[int]:
        import numpy as np

        random = np.random.default_rng((self.seed, self.epoch))
        starts = np.cumsum([0, *self.sizes[:-1]])
        drawn = [
            start + _passes(size, count, random)
            for start, size, count in zip(starts, self.sizes, self.mixing.counts(self.sizes), strict=True)
        ]
        if self.mixing.name == "round_robin":
            order = np.stack(drawn, axis=1).reshape(-1)
        else:
            order = random.permutation(np.concatenate(drawn))
        yield from (int(position) for position in order)


def _passes(size: int, count: int, random: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return ``count`` of the numbers below ``size``, in passes that each hold every number once."""
    import numpy as np

    passes = [random.permutation(size) for _ in range(-(-count // size))]
    return np.concatenate(passes)[:count]


@dataclass(frozen=True)
class JointCollator:
    """Makes a batch of several tasks' rows, task by task, so that each task's rows lie together.

    Where some tasks model language, ``labels`` has a position for every token, and a row of another task has its label in
    the first one and -100 in the others.

    Args:
        collate: makes a batch of rows of any of the tasks.
        float_labels: whether one of the tasks is a regression, whose labels are no whole numbers.
        words: the numbers of the tasks that model language, where others do not.
    """

    collate: Callable[[list[Any]], Mapping[str, Any]]
    float_labels: bool
    words: frozenset[int] = frozenset()

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch, with ``task_ids`` of shape (rows,)."""
        ordered = sorted(rows, key=lambda row: int(row["task_ids"]))
        numbers = [int(row["task_ids"]) for row in ordered]
        batch = dict(self.collate([self._own(row) for row in ordered]))
        batch["task_ids"] = torch.tensor(numbers)
        if self.float_labels:
            batch["labels"] = batch["labels"].float()
        for position, (number, row) in enumerate(zip(numbers, ordered, strict=True)):
            if self.words and number not in self.words:
                batch["labels"][position, 0] = row["labels"]
        return batch

    def _own(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a row gives to the batch; beside language modelling just what that has too, and no label yet."""
        if not self.words:
            return {key: row[key] for key in row if key != "task_ids"}
        own = {key: row[key] for key in ("input_ids", "attention_mask", "labels")}
        return own if int(row["task_ids"]) in self.words else {**own, "labels": [IGNORE_INDEX] * len(own["input_ids"])}


def encode_jointly(data: Sequence[TaskData], processing_class: Any, mixing: Mixing) -> EncodedData:
    """Encode several tasks for one run: every split holds the rows of all.

    Raises:
        DataError: tasks that no one model can be called for at once, or that cannot be encoded.
    """
    check_kinds([item.task for item in data])
    encoded = [encode(item, processing_class) for item in data]
    collate = encoded[0].data_collator
    kinds = [item.task.kind for item in data]
    words = frozenset(number for number, kind in enumerate(kinds) if kind is TaskKind.CAUSAL_LM)
    if words:
        from transformers import DataCollatorForSeq2Seq

        # One task's blocks are as long as another's rows only by chance.
        collate = DataCollatorForSeq2Seq(processing_class, label_pad_token_id=IGNORE_INDEX)
    tests = [item.test for item in encoded]
    return EncodedData(
        train=JointRows([item.train for item in encoded], mixing),
        validation=JointRows([item.validation for item in encoded], mixing),
        test=None if any(rows is None for rows in tests) else JointRows(tests, mixing),
        data_collator=JointCollator(
            collate, TaskKind.REGRESSION in kinds, words if len(words) < len(kinds) else frozenset()
        ),
    )


def check_kinds(tasks: Sequence[Task]) -> None:
    """Refuse tasks that no one model can be called for at once.

    Raises:
        DataError: two tasks of one name; or text and images.
    """
    names = [task.name for task in tasks]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"two tasks are called {name!r}", known=names, remedy="give one of them another name")
    if len({task.kind is TaskKind.IMAGE_CLASSIFICATION for task in tasks}) > 1:
        known = [f"{task.name} ({task.kind.value})" for task in tasks]
        raise DataError(
            "tasks that need different models", known=known, remedy="train them in one run for each kind of model"
        )
