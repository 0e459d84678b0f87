"""Several tasks in one batch: what would mix them is refused, gradients are clipped and scores kept task by task; one alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..registry.context import RunContext, Task
from ..registry.errors import CompatibilityError, DataError
from .data.metrics import MEAN, compute_joint_metrics, compute_metrics, main_metrics, row_scores
from .inflection import lower_is_better


def check_joint(run: RunContext, args: Any) -> None:
    """Refuse arguments that do not go with several tasks in one batch.

    Raises:
        CompatibilityError: DeepSpeed's clipping, or label smoothing, which would mix the tasks.
    """
    if len(run.tasks) < 2:
        return
    if run.sharding.zero_stage and args.max_grad_norm:
        raise CompatibilityError(
            f"max_grad_norm={args.max_grad_norm} with {len(run.tasks)} tasks on DeepSpeed, which clips all tasks as one",
            remedy="set max_grad_norm to 0",
        )
    if args.label_smoothing_factor:
        raise CompatibilityError(
            f"label_smoothing_factor={args.label_smoothing_factor} with {len(run.tasks)} tasks",
            remedy="set it to 0: transformers smooths over all label spaces at once",
        )
    if run.sharding.zero_stage:
        run.logger.warning(
            "on DeepSpeed a task without rows in a step still takes the optimizer's momentum and weight decay: "
            "mixing=round_robin, with a row of every task in a batch, leaves none out"
        )


def head_task(tasks: Sequence[Task]) -> Task:
    """Return the task whose head the base model is loaded with: one that models language, if any, else the first.

    The head that models language comes with the base model; a strategy of several tasks draws the others' beside it.
    """
    return next((task for task in tasks if task.kind.is_language_modelling), tasks[0])


def scoring(tasks: Sequence[Task], best_metric: str | None) -> dict[str, Any]:
    """Return the Trainer's arguments that say how evaluations are scored.

    Args:
        tasks: the run's.
        best_metric: the metric that chooses a checkpoint.

    Raises:
        DataError: it is a mean that these tasks have not.
    """
    if len(tasks) == 1:
        return {"compute_metrics": compute_metrics(tasks[0])}
    known = main_metrics(tasks)
    if best_metric is not None and best_metric.removeprefix("eval_") == MEAN and MEAN not in known:
        raise DataError(
            f"metric_for_best_model={best_metric!r} of tasks of which one should grow and another shrink", known=known
        )
    words = any(task.kind.is_language_modelling for task in tasks)
    return {
        "compute_metrics": compute_joint_metrics(tasks),
        "preprocess_logits_for_metrics": partial(row_scores, tasks=tasks) if words else None,
    }


def on_device(prepared: dict[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch that transformers has moved to the device, its labels in the precision they came in.

    On DeepSpeed it rounds what is a float to the weights' precision; beside a regression, token ids are floats too.
    """
    labels = inputs.get("labels")
    return prepared | {"labels": labels.to(prepared["labels"].device)} if isinstance(labels, torch.Tensor) else prepared


def best_alone(task: Task, joint: str) -> dict[str, Any]:
    """Return by which metric a run on one task alone chooses its best model, where a joint one chooses by ``joint``.

    That is the task's own part of it; else its main metric, or the loss where that is only known after training.
    """
    own = joint.removeprefix("eval_").removeprefix(f"{task.name}_")
    text = task.kind.is_language_modelling
    if own == "loss" or (own in task.metrics and not text):
        return {"metric_for_best_model": own}
    main = "loss" if text else task.metrics[0]
    return {"metric_for_best_model": main, "greater_is_better": not lower_is_better(main)}


def clip_each(accelerator: Any, groups: Sequence[Sequence[nn.Parameter]], max_norm: float) -> torch.Tensor:
    """Clip the gradient of every group of parameters by itself; return the norm of all before, a scalar tensor."""
    accelerator.unscale_gradients()
    norms = [nn.utils.clip_grad_norm_(list(group), max_norm) for group in groups]
    total: torch.Tensor = torch.stack(norms).norm()
    return total
