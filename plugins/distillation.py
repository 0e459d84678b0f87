"""What stand-ins share that learn from the model on unlabelled rows: its hidden states, and the steps they are followed in.

Every rank takes the same steps on the same batches, so that stand-ins stay equal without talking.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .readings import reading

if TYPE_CHECKING:
    import torch
    from torch import nn

UNSEEN = ("labels", "task_ids")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the steps are taken: AdamW, linear warm-up, linear decay.

    Attributes:
        steps: optimizer steps at most.
        learning_rate: peak.
        weight_decay: AdamW's.
        warmup_ratio: share of the steps that warm up.
        max_grad_norm: the gradient is clipped to it.
        seed: of dropout.
    """

    steps: int
    learning_rate: float
    weight_decay: float
    warmup_ratio: float
    max_grad_norm: float
    seed: int


def hidden_states(model: nn.Module, layers: Sequence[str], batch: Mapping[str, Any]) -> list[torch.Tensor]:
    """Run ``model`` on a batch without labels; return what its modules ``layers`` gave, each (B, T, D)."""
    found: dict[int, torch.Tensor] = {}
    with reading(model, layers, found.__setitem__):
        model(**{key: value for key, value in batch.items() if key not in UNSEEN})
    return [found[place] for place in range(len(layers))]


def state_distance(state: torch.Tensor, taught: torch.Tensor, real: torch.Tensor, objective: str) -> torch.Tensor:
    """Return how far two layers' outputs (B, T, D) are apart over real tokens (B, T).

    ``paper``: the squared norm of a row's difference, averaged over rows. ``normalised``: the mean square of the elements of
    the difference over the root mean square of what is taught.
    """
    difference, aim = (state - taught)[real].float(), taught[real].float()
    if objective == "paper":
        return difference.square().sum() / len(state)
    return difference.square().mean() / aim.square().mean()


@contextmanager
def modes_kept(*models: nn.Module) -> Iterator[None]:
    """Give every module its train/eval mode back, and every parameter its ``requires_grad``."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for model in models for parameter in model.parameters()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def follow(
    parameters: Sequence[nn.Parameter],
    loss_of: Callable[[Mapping[str, Any]], torch.Tensor],
    batches: Iterable[Mapping[str, Any]],
    schedule: Schedule,
    masks: Sequence[torch.Tensor] | None = None,
) -> dict[str, float]:
    """Minimise ``loss_of`` over batches, again from the first after the last; return steps, and first and last loss.

    Args:
        parameters: what trains.
        loss_of: a batch's loss.
        batches: rows; a pass without any ends it.
        schedule: how.
        masks: for each parameter, which of its elements may change at all (bool, broadcast to its shape).
    """
    import torch
    from tqdm.auto import tqdm  # type: ignore[import-untyped]
    from transformers import get_linear_schedule_with_warmup

    linear: Any = get_linear_schedule_with_warmup
    optimizer = torch.optim.AdamW(parameters, lr=schedule.learning_rate, weight_decay=schedule.weight_decay)
    warmup = math.ceil(schedule.warmup_ratio * schedule.steps)
    rates = linear(optimizer, warmup, schedule.steps)
    losses: list[float] = []
    with torch.random.fork_rng(), torch.enable_grad(), tqdm(total=schedule.steps, desc="align", disable=None) as bar:
        torch.manual_seed(schedule.seed)
        for batch in _again(batches, schedule.steps):
            loss = loss_of(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            before = [] if masks is None else [parameter.detach().clone() for parameter in parameters]
            for parameter, mask in zip(parameters, masks or (), strict=False):
                if parameter.grad is not None:
                    parameter.grad *= mask  # before it is clipped: only what may change counts
            torch.nn.utils.clip_grad_norm_(parameters, schedule.max_grad_norm)
            optimizer.step()
            for parameter, mask, value in zip(parameters, masks or (), before, strict=False):
                parameter.data = torch.where(mask, parameter.data, value)  # weight decay knows no mask
            rates.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(float(loss.detach()))
            bar.update()
    if not losses:
        return {}
    return {"alignment_steps": len(losses), "alignment_loss_first": losses[0], "alignment_loss": losses[-1]}


def _again(batches: Iterable[Mapping[str, Any]], count: int) -> Iterator[Mapping[str, Any]]:
    given = 0
    while given < count:
        start = given
        for batch in batches:
            if given == count:
                return
            given += 1
            yield batch
        if given == start:
            return
