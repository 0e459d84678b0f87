"""Which rows of a batch belong to which task: told once a forward pass, read by every adapted module of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from ....registry.errors import DataError

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Groups:
    """The rows of one batch, task by task.

    Attributes:
        tasks: numbers of the tasks that take part, ascending.
        sizes: rows of each of them; 0 for a task that takes part for its gradient's sake alone.
        order: the rows' numbers, those of the first task first; ``None`` where they come in that order already.
        place: the position in ``tasks`` of each row's task, shape (rows,); ``None`` where one task takes part, and for
            rows that are tokens.
    """

    tasks: tuple[int, ...]
    sizes: tuple[int, ...]
    order: torch.Tensor | None = None
    place: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return sum(self.sizes)

    def repeated(self, times: int) -> Groups:
        """Return the groups of a batch in which every row stands ``times`` times, as beam search makes it."""
        if times == 1:
            return self
        place = None if self.place is None else self.place.repeat_interleave(times)
        order = None if place is None else torch.argsort(place, stable=True)
        return Groups(self.tasks, tuple(size * times for size in self.sizes), order, place)

    def of_tokens(self, lengths: Sequence[int]) -> Groups:
        """Return the groups of a batch whose rows are the tokens of this one's rows, those of the first task first.

        Args:
            lengths: tokens of each row, in that order.
        """
        ends = [0, *accumulate(self.sizes)]
        return Groups(self.tasks, tuple(sum(lengths[start:end]) for start, end in pairwise(ends)))

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return each task's rows of ``x``, shape (rows, ...)."""
        return torch.split(x if self.order is None else x.index_select(0, self.order), list(self.sizes))

    def joined(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Put what was computed for each task's rows back into the batch's order."""
        x = pieces[0] if len(pieces) == 1 else torch.cat(tuple(pieces))
        return x if self.order is None else x.index_select(0, torch.argsort(self.order))


class Router:
    """Says for one model which task each row belongs to, and keeps saying it until the next forward pass.

    Layers that are run again in the backward pass (activation checkpointing) so find what they found the first time.

    Args:
        tasks: the names of the tasks.

    Attributes:
        tasks: the same.
        active: the task of rows that come without one; ``None`` if there is none.
        everyone: whether tasks without a row take part too and get a gradient of zero: ranks that share work in the
            backward pass must all do the same work, and penalties on weights count all of them in every micro-batch.
        prompts: the tasks of what is being generated from, shape (prompts,); ``None`` where nothing is.
        groups: those of the batch at hand.
    """

    def __init__(self, tasks: Sequence[str]) -> None:
        self.tasks = list(tasks)
        self.active: str | None = self.tasks[0] if len(self.tasks) == 1 else None
        self.everyone = False
        self.prompts: torch.Tensor | None = None
        self.groups: Groups | None = None

    def number(self, task: str) -> int:
        """Return a task's number.

        Raises:
            DataError: there is no such task.
        """
        if task not in self.tasks:
            raise DataError(f"no task {task!r}", known=self.tasks)
        return self.tasks.index(task)

    def route(self, task_ids: torch.Tensor | None, rows: int) -> Groups:
        """Take in the tasks of a batch.

        Args:
            task_ids: integers of shape (rows,), each row's position among the tasks; ``None`` for what is being generated
                from, each prompt repeated as beam search does, or else for the active task.
            rows: rows of the batch.

        Raises:
            DataError: a row of an unknown task, rows without a task where none is active, or ``task_ids`` that do not say
                one for each row.
        """
        if task_ids is None and self.prompts is not None:
            task_ids = self.prompts.repeat_interleave(rows // len(self.prompts))
        if task_ids is None:
            if self.active is None:
                remedy = "pass task_ids, or choose one with set_task"
                raise DataError("a batch without task_ids", known=self.tasks, remedy=remedy)
            task_ids = torch.full((rows,), self.number(self.active))
        if not isinstance(task_ids, torch.Tensor) or task_ids.dtype not in _INTEGERS:
            kind = task_ids.dtype if isinstance(task_ids, torch.Tensor) else type(task_ids).__name__
            raise DataError(f"task_ids of type {kind}", known=self._numbered(), remedy="give a tensor of integers")
        if task_ids.numel() != rows:
            raise DataError(
                f"{task_ids.numel()} task_ids for {rows} rows", known=self._numbered(), remedy="give every row one"
            )
        self.groups = self._grouped(task_ids.reshape(-1))
        return self.groups

    @contextmanager
    def generating(self, task_ids: torch.Tensor | None, prompts: int) -> Iterator[None]:
        """Inside, rows that come without a task are those of so many prompts of these tasks, each prompt repeated.

        Raises:
            DataError: see :meth:`route`.
        """
        if task_ids is not None:
            self.route(task_ids, prompts)
        before, self.prompts = self.prompts, task_ids
        try:
            yield
        finally:
            self.prompts = before

    def _grouped(self, task_ids: torch.Tensor) -> Groups:
        numbers = task_ids.tolist()
        counts = [0] * len(self.tasks)
        for number in numbers:
            if not 0 <= number < len(counts):
                raise DataError(f"a row with task id {number}", known=self._numbered())
            counts[number] += 1
        tasks = tuple(number for number, count in enumerate(counts) if count or self.everyone)
        sizes = tuple(counts[number] for number in tasks)
        if len(tasks) == 1:
            return Groups(tasks, sizes)
        place = torch.searchsorted(torch.tensor(tasks, device=task_ids.device), task_ids)
        order = None if numbers == sorted(numbers) else torch.argsort(task_ids, stable=True)
        return Groups(tasks, sizes, order, place)

    def _numbered(self) -> list[str]:
        return [f"{index} ({name})" for index, name in enumerate(self.tasks)]

    def groups_of(self, x: torch.Tensor, module: str) -> Groups:
        """Return the groups of the rows of ``x``, shape (rows, ...).

        Raises:
            DataError: ``x`` does not keep the rows of the batch apart.
        """
        if self.groups is None:
            self.route(None, len(x))
        assert self.groups is not None
        times, rest = divmod(len(x), max(self.groups.rows, 1))
        if rest or not times:
            raise DataError(
                f"module {module!r} gets {len(x)} rows where the batch has {self.groups.rows}",
                remedy="adapt modules that keep a batch's rows apart",
            )
        return self.groups.repeated(times)
