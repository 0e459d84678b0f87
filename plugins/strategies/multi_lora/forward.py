"""A forward pass of rows that belong to several tasks: each through its task's B and head, then the tasks' losses."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from transformers.utils.generic import ModelOutput

from .last_token import in_one, models_language
from .losses import task_losses
from .packing import can_pack, packed
from .splitting import pieces

if TYPE_CHECKING:
    from .routing import Groups
    from .tuner import MultiLoraModel


@dataclass
class JointOutput(ModelOutput):
    """What a model of several tasks returns where it was given labels.

    Attributes:
        loss: the sum of the tasks' mean losses.
        logits: shape (rows, widest label space), or (rows, positions, vocabulary); rows of both kinds together are as wide
            as the vocabulary, a classifier's with its logits in the first position and -inf elsewhere, and while training
            they are left out.
        task_losses: each task's mean loss over its own rows, shape (tasks,), 0 without a row; while training only.
        past_key_values, hidden_states, attentions: the base model's.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    task_losses: torch.Tensor | None = None
    past_key_values: Any = None
    hidden_states: Any = None
    attentions: Any = None


class JointForward:
    """The ``forward`` of a base model whose rows belong to several tasks; to who asks, it has the base model's signature.

    Args:
        tuner: what adapts the base model; see :class:`MultiLoraModel`.
    """

    def __init__(self, tuner: MultiLoraModel) -> None:
        self.tuner = tuner
        self.__signature__ = inspect.signature(tuner.model.forward)

    def __call__(self, *args: Any, task_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Run the base model on rows of several tasks.

        Raises:
            DataError: a row of an unknown task, or rows without a task where none was chosen.
        """
        tuner, model = self.tuner, self.tuner.model
        base = partial(type(model).forward, model)
        if len(tuner.tasks) == 1 and task_ids is None and tuner.reader is None:
            tuner.router.groups = None  # one task: the base model's own loss is the task's
            return base(*args, **kwargs)
        labels = kwargs.pop("labels", None)
        batch = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        groups = tuner.router.route(task_ids, len(batch))
        mask = None if args or task_ids is None else self._padding(kwargs)
        output: Any
        if mask is None:
            output = base(*args, **kwargs)
        elif can_pack(model, mask):
            with packed(model, tuner.router, mask):
                output = base(**kwargs)
        else:
            output = self._in_pieces(base, task_ids, kwargs, mask)
        if labels is None and tuner.reader is None:
            return output
        logits: torch.Tensor | None = output.logits
        apart = None
        if tuner.reader is not None:
            apart = tuner.reader.read(output.logits, kwargs.get("input_ids", args[0] if args else None))
        if apart is not None:
            logits = None if model.training and labels is not None else in_one(apart, groups)
        kept = {name: output.get(name) for name in ("past_key_values", "hidden_states", "attentions")}
        if labels is None:
            return output if apart is None else JointOutput(logits=logits, **kept)
        losses = self._losses(
            apart or dict(zip(groups.tasks, groups.split(output.logits), strict=True)), labels, groups
        )
        total = losses.sum()
        if model.training and not total.requires_grad:  # no row of a task that trains
            total = total + torch.zeros_like(total, requires_grad=True)
            losses = losses + total * 0
        return JointOutput(loss=total, logits=logits, task_losses=losses if model.training else None, **kept)

    def _losses(self, logits: dict[int, torch.Tensor], labels: torch.Tensor, groups: Groups) -> torch.Tensor:
        found = task_losses(logits, labels, self.tuner.tasks, groups)
        zero = torch.zeros_like(next(iter(found.values())))
        return torch.stack([found.get(number, zero) for number in range(len(self.tuner.tasks))])

    def _padding(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        """Return the attention mask of a batch that need not run as it came, ``None`` for one that must."""
        tuner, model = self.tuner, self.tuner.model
        mask = inputs.get("attention_mask")
        if not tuner.split or tuner.router.everyone or models_language(model):
            return None
        # Layers that run again in the backward pass would find the rows of the last piece.
        if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            return None
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return None
        shown = ("output_hidden_states", "output_attentions")  # as wide as the whole batch
        if any(inputs.get(name) or getattr(model.config, name, False) for name in shown):
            return None
        # Who looks on at an evaluation must see the batch as it came.
        if not model.training and any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
            return None
        return mask

    def _in_pieces(self, base: Any, task_ids: Any, inputs: dict[str, Any], mask: torch.Tensor) -> Any:
        """Run a batch in the pieces it is fastest in."""
        tuner, found = self.tuner, pieces(mask)
        if not found:
            return base(**inputs)
        logits = []
        for piece in found:
            tuner.router.route(task_ids.index_select(0, piece.rows), len(piece.rows))
            logits.append(base(**piece.of(inputs, *mask.shape)).logits)
        width = max(part.shape[-1] for part in logits)
        filled = [functional.pad(part, (0, width - part.shape[-1]), value=-torch.inf) for part in logits]
        order = torch.cat([piece.rows for piece in found])
        return JointOutput(logits=torch.cat(filled).index_select(0, torch.argsort(order)))
