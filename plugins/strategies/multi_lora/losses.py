"""The loss of a batch whose rows belong to several tasks: each task's own, by its own rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional

from ....registry.context import Task, TaskKind
from .routing import Groups

_IGNORED = -100


def task_losses(
    logits: Mapping[int, torch.Tensor], labels: torch.Tensor, tasks: Sequence[Task], groups: Groups
) -> dict[int, torch.Tensor]:
    """Return the mean loss of every task that takes part, over its own rows; 0 for one without a row.

    Args:
        logits: task number -> shape (its rows, its labels or more), or for language modelling (its rows, positions,
            vocabulary).
        labels: class numbers or targets of shape (rows,), or with language modelling (rows, positions): token ids, -100 not
            counted, and in the first position a classifier's class number or target.
        tasks: all tasks, in the order of their numbers.
        groups: which rows are whose.

    Returns:
        Task number -> scalar in float32 or more: cross-entropy in nats, or the squared error for regression.
    """
    pieces = zip(groups.tasks, groups.split(labels), strict=True)
    return {number: _loss(tasks[number], logits[number], targets) for number, targets in pieces}


def _loss(task: Task, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if task.kind is not TaskKind.CAUSAL_LM and labels.dim() > 1:
        labels = labels[:, 0]
    if task.kind is TaskKind.REGRESSION:
        errors = (logits[:, 0] - labels.to(logits.dtype)).square()
        return errors.sum() / max(len(errors), 1)
    if task.kind is TaskKind.CAUSAL_LM:
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    else:
        logits = logits[:, : task.num_labels]
    count = labels.ne(_IGNORED).sum().clamp(min=1)
    return functional.cross_entropy(logits, labels.long(), ignore_index=_IGNORED, reduction="sum") / count
