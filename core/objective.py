"""Task loss + penalties -> one scalar and its named terms, exact under accumulation, world size and ragged batches.

The gradient of an optimizer step is that of

    (sum of task loss over all valid labels) / (number of valid labels) + sum_k weight_k * (mean of penalty_k over rows)

where sums run over every micro-batch and rank of the step. transformers' loop averages over ranks (DDP, DeepSpeed) and
divides by the number of micro-batches unless the loss is already normalised by ``num_items_in_batch``; a micro-batch
mean is therefore multiplied by its share of the step. transformers takes every model whose forward accepts ``**kwargs``
for normalised, which inflates classifiers by accumulation x world size (transformers#47688): here only the causal-LM
loss, which really divides by ``num_items_in_batch``, counts as normalised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.trainer_pt_utils import find_batch_size

from ..registry.context import Batch, Task, TaskKind
from ..registry.contracts import Regularizer
from ..registry.errors import DataError

_IGNORED = -100


@dataclass(frozen=True)
class Share:
    """The weight of one micro-batch in its optimizer step, such that equal micro-batches all have 1.

    Attributes:
        items: by valid labels, for the task loss; one number per task, shape (tasks,).
        rows: by examples, for penalties; a scalar tensor.
        count: number of micro-batches of the step on this rank.
    """

    items: torch.Tensor
    rows: torch.Tensor
    count: int


class Objective:
    """The loss of a run: its regularizers, the shares of the step at hand, and the terms to log."""

    def __init__(self, regularizers: Sequence[Regularizer], tasks: Sequence[Task]) -> None:
        self.regularizers = regularizers
        self.tasks = tasks
        self._shares: list[Share] = []
        self._terms: dict[str, torch.Tensor] = {}
        self._steps = 0
        self._step = 0

    @property
    def names(self) -> list[str]:
        """Names of the terms, in the order they are added."""
        several = [task.name for task in self.tasks] if len(self.tasks) > 1 else []
        return ["task", *several, *(regularizer.name for regularizer in self.regularizers)]

    def plan(
        self, batches: Sequence[Any], shifts_labels: bool, accelerator: Any, across_ranks: bool, step: int = 0
    ) -> None:
        """Weigh the micro-batches of the coming optimizer step, and tell every regularizer that it is coming.

        Args:
            batches: this rank's micro-batches.
            shifts_labels: whether the model, as transformers knows it, predicts ``labels[..., 1:]``.
            accelerator: sums the counts over ranks.
            across_ranks: whether a label counts the same on every rank, or every rank the same.
            step: optimizer steps done.
        """
        self._step = step
        for regularizer in self.regularizers:
            regularizer.begin_step(step)
        self._steps += 1
        self._shares = []
        if not batches or not isinstance(batches[0], Mapping):
            return
        shifts = [predicts_next(task, shifts_labels) for task in self.tasks]
        counts = torch.stack([_count(batch, shifts) for batch in batches])
        total, world = counts.sum(dim=0), 1
        if across_ranks and accelerator.num_processes > 1:
            total = accelerator.reduce(total.to(accelerator.device), reduction="sum").to(counts.device)
            world = accelerator.num_processes
        shares = (counts * (len(batches) * world) / total.clamp(min=1)).float()
        self._shares = [Share(items=share[:-1], rows=share[-1], count=len(batches)) for share in reversed(shares)]

    def next_share(self) -> Share | None:
        """Return the share of the next micro-batch; ``None`` outside the training loop."""
        return self._shares.pop() if self._shares else None

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Tell every regularizer that a forward pass of training is coming."""
        for regularizer in self.regularizers:
            regularizer.begin(inputs)

    def total(
        self,
        loss: torch.Tensor,
        outputs: Any,
        inputs: Mapping[str, Any],
        model: nn.Module,
        share: Share | None,
        normalised: bool,
    ) -> torch.Tensor:
        """Return the scalar to back-propagate.

        Args:
            loss: the task loss as ``Trainer.compute_loss`` returned it.
            outputs: the model's outputs.
            inputs: what the model was called with, labels included.
            model: the model as called.
            share: the micro-batch's share of the step.
            normalised: whether ``loss`` is already a share of the step's sum; otherwise it is a micro-batch mean.
        """
        # The loop divides what is not normalised by the number of micro-batches; what is, it leaves alone.
        by_mean = 1.0 if share is None or not normalised else 1.0 / share.count
        batch = Batch(inputs=inputs, outputs=outputs, model=model, task=self.tasks[0], step=self._step)
        replaced = next((new for r in self.regularizers if (new := r.task_loss(batch)) is not None), None)
        if replaced is not None:
            total = replaced * _on(share.items[0], replaced) * by_mean if share else replaced
        elif len(self.tasks) > 1:
            total = self._joint(outputs["task_losses"], share)
        elif share is None or normalised:
            total = loss
        else:
            total = loss * _on(share.items[0], loss)
        if self._logs_terms:
            self._keep("task", total, share, normalised)
        for regularizer in self.regularizers:
            penalty = regularizer.penalty(batch)
            if penalty is not None:
                rows = _on(share.rows, penalty) if share else 1.0
                term = penalty * (rows * by_mean * regularizer.config.weight)
                self._keep(regularizer.name, term, share, normalised)
                total = total + term.to(total.dtype)
        return total

    def _joint(self, losses: torch.Tensor, share: Share | None) -> torch.Tensor:
        """Return the sum of the tasks' losses, each task weighed by its own labels in the step.

        Behind those of the run stand those that its artefact held before, which have no rows.
        """
        losses = losses[: len(self.tasks)]
        if share is not None:
            losses = losses * _on(share.items, losses)
        for task, loss in zip(self.tasks, losses, strict=True):
            self._keep(task.name, loss, share, normalised=False)
        return losses.sum()

    @property
    def _logs_terms(self) -> bool:
        return bool(self.regularizers) or len(self.tasks) > 1

    def _keep(self, name: str, term: torch.Tensor, share: Share | None, normalised: bool) -> None:
        value = term.detach().float() / (share.count if share is not None and not normalised else 1)
        self._terms[name] = self._terms[name] + value if name in self._terms else value

    def drain(self, accelerator: Any) -> dict[str, float]:
        """Return the mean of every named term per optimizer step since the last call; a collective operation."""
        steps, self._steps = max(self._steps, 1), 0
        terms, self._terms = self._terms, {}
        if not self._logs_terms:
            return {}
        # Every rank reduces the same terms, also one that a regularizer left out on this rank.
        zero = torch.zeros((), device=accelerator.device)
        values = torch.stack([terms.get(name, zero).to(zero.device) for name in self.names])
        means = accelerator.reduce(values, reduction="mean") / steps
        return {f"loss/{name}": value for name, value in zip(self.names, means.tolist(), strict=True)}


@contextmanager
def last_output(model: nn.Module) -> Iterator[list[Any]]:
    """Yield a list that holds what the last forward pass with gradients returned.

    ``return_outputs`` would say it too, but trl runs the model once more for that, which moves dropout's random state.
    """
    seen: list[Any] = []

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            seen[:] = [output]

    hook = model.register_forward_hook(keep)
    try:
        yield seen
    finally:
        hook.remove()


def predicts_next(task: Task, model_does: bool) -> bool:
    """Whether a task's labels are the tokens themselves, the first of which nothing predicts.

    transformers does not know of GPT-2's loss that it shifts, and a language model may classify beside; the task says both.
    """
    return task.kind is TaskKind.CAUSAL_LM or (task.kind is TaskKind.OTHER and model_does)


def _count(batch: Mapping[str, Any], shifts: Sequence[bool]) -> torch.Tensor:
    """Count each task's valid labels, and rows, of one micro-batch: (tasks + 1,) where the labels are, no synchronisation."""
    rows = find_batch_size(batch) or 1  # type: ignore[no-untyped-call]
    labels = batch.get("shift_labels", batch.get("labels"))
    if not isinstance(labels, torch.Tensor):
        return torch.tensor([rows, rows], dtype=torch.float64)
    shifts = [shift and "shift_labels" not in batch for shift in shifts]
    exact = torch.float32 if labels.device.type == "mps" else torch.float64
    tasks = len(shifts)
    if tasks > 1:
        if "task_ids" not in batch:
            raise DataError(f"a batch without task_ids in a run on {tasks} tasks", remedy="give every row one")
        valid = labels.ne(_IGNORED).reshape(rows, -1)
        # One out of range counts anywhere: the model refuses it in words, before any weight moves.
        numbers = batch["task_ids"].clamp(0, tasks - 1)
        if any(shifts):
            valid[:, 0] &= ~torch.tensor(shifts, device=valid.device)[numbers]
        items = torch.zeros(tasks, device=valid.device, dtype=exact).index_add_(0, numbers, valid.sum(dim=1).to(exact))
    else:
        items = (labels[..., 1:] if shifts[0] else labels).ne(_IGNORED).sum().to(exact).reshape(1)
    return torch.cat([items, items.new_full((1,), rows)])


def _on(share: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return share.to(device=like.device, dtype=like.dtype)
