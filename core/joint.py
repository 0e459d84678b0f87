"""Several tasks in one batch: what would mix them is refused, and gradients are clipped task by task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..registry.context import RunContext
from ..registry.errors import CompatibilityError


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


def clip_each(accelerator: Any, groups: Sequence[Sequence[nn.Parameter]], max_norm: float) -> torch.Tensor:
    """Clip the gradient of every group of parameters by itself; return the norm of all before, a scalar tensor."""
    accelerator.unscale_gradients()
    norms = [nn.utils.clip_grad_norm_(list(group), max_norm) for group in groups]
    total: torch.Tensor = torch.stack(norms).norm()
    return total
