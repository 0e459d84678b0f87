"""Classifiers beside a language-modelling head: one forward pass, and each row goes on to the head of its task.

The base model is a decoder as ``AutoModelForCausalLM`` loads it. Its head stays frozen, and all tasks of kind ``causal_lm``
share it; every other task has a linear layer of its own on the hidden state of a row's last token, the one that
``AutoModelForSequenceClassification`` puts in that place, so that either leaves as what those two load.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import set_zero3_state
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from ....registry.context import Task, TaskKind
from ....registry.errors import CompatibilityError, DataError
from .heads import TaskHeads, outside_backbone
from .routing import Groups


class LastTokenReader:
    """Lets only language modelling through to the head of the base model, and gives the other rows their task's classifier.

    Args:
        model: the base model.
        heads: the classifiers, a module of the base model.
        tasks: all tasks, in the order of their numbers; the list may change.
    """

    def __init__(self, model: Any, heads: TaskHeads, tasks: Sequence[Task]) -> None:
        self.model = model
        self.heads = heads
        self.tasks = tasks
        self._held: tuple[torch.Tensor, Groups] | None = None
        self._hook = model.get_output_embeddings().register_forward_pre_hook(self._part)

    def _part(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self._held = None
        hidden, *others = args
        groups = self.heads.router.groups_of(hidden, self.heads.name)
        words = [
            rows
            for number, rows in zip(groups.tasks, groups.split(hidden), strict=True)
            if self.tasks[number].kind.is_language_modelling
        ]
        if len(words) == len(groups.tasks):
            return None
        self._held = hidden, groups
        return (torch.cat(words) if words else hidden[:0], *others)

    def read(self, logits: torch.Tensor, input_ids: torch.Tensor | None) -> dict[int, torch.Tensor] | None:
        """Return each task's logits after a forward pass of the base model; ``None`` where no classifier took part.

        Args:
            logits: the base model's, shape (rows of language modelling, positions, vocabulary).
            input_ids: shape (rows, positions); ``None`` for a model called with embeddings, whose last position counts.

        Returns:
            Task number -> (its rows, positions, vocabulary), or (its rows, labels).

        Raises:
            DataError: rows of a classifier with ``logits_to_keep``, or several without a pad token to tell their end by.
        """
        if self._held is None:
            return None
        (hidden, groups), self._held = self._held, None
        last = self._last(hidden, input_ids, groups)
        found, start = {}, 0
        for number, size, rows, ends in zip(
            groups.tasks, groups.sizes, groups.split(hidden), groups.split(last), strict=True
        ):
            if self.tasks[number].kind.is_language_modelling:
                found[number] = logits[start : start + size]
                start += size
            else:
                read: torch.Tensor = rows[torch.arange(size, device=rows.device), ends]
                found[number] = self.heads.of(self.tasks[number].name)(read)
        return found

    def _last(self, hidden: torch.Tensor, input_ids: torch.Tensor | None, groups: Groups) -> torch.Tensor:
        """Return the position of each row's last token that is no pad, shape (rows,), as transformers' classifiers find it."""
        pad = self.model.config.get_text_config().pad_token_id
        read = sum(
            size
            for number, size in zip(groups.tasks, groups.sizes, strict=True)
            if not self.tasks[number].kind.is_language_modelling
        )
        if read and input_ids is not None and input_ids.shape[1] != hidden.shape[1]:
            raise DataError("logits_to_keep with rows of a classifier", remedy="leave it out")
        if read > 1 and pad is None:
            raise DataError("rows of a classifier and no pad token", remedy="set model.config.pad_token_id")
        if input_ids is None or pad is None:
            return torch.full((len(hidden),), hidden.shape[1] - 1, device=hidden.device)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device, dtype=torch.int32)
        return (positions * input_ids.ne(pad)).argmax(dim=-1)

    def leave(self, task: Task) -> Any:
        """Take the classifiers off; return the base model, or for a classifier the one of its kind with the same backbone."""
        self._hook.remove()
        delattr(self.model, self.heads.name)
        if task.kind.is_language_modelling:
            return self.model
        made = classifier_like(self.model)
        setattr(made, made.base_model_prefix, self.model.base_model)
        setattr(made, self.heads.name, self.heads.plain(task.name, merge=False))
        return made.train(self.model.training)


def models_language(model: Any) -> bool:
    """Whether a model comes with a language-modelling head."""
    return hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is not None


def add_classifier(model: Any) -> str:
    """Give a language model the fresh linear layer that its architecture's sequence classifier has; return its name.

    Raises:
        CompatibilityError: see :func:`classifier_like`.
    """
    (name,) = outside_backbone(classifier := classifier_like(model))
    like, weight = classifier.get_submodule(name), model.get_output_embeddings().weight
    made = nn.Linear(
        like.in_features, like.out_features, bias=like.bias is not None, device=weight.device, dtype=weight.dtype
    )
    model._init_weights(made)
    setattr(model, name, made)
    return str(name)


def classifier_like(model: Any) -> Any:
    """Return the sequence classifier of a language model's architecture, on the meta device: names and shapes alone.

    Raises:
        CompatibilityError: there is none, or it is no linear layer on the last token of the same backbone, as an encoder's.
    """
    cls: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(model.config), None)
    made = None
    if cls is not None:
        with set_zero3_state(), torch.device("meta"):  # which is not to be cut into shards
            made = cls(copy.deepcopy(model.config))
        heads = [made.get_submodule(name) for name in outside_backbone(made)]
        ours, theirs = (
            [(name, getattr(value, "ds_shape", value.shape)) for name, value in whole.base_model.named_parameters()]
            for whole in (model, made)
        )
        made = made if len(heads) == 1 and isinstance(heads[0], nn.Linear) and ours == theirs else None
    if made is None:
        raise CompatibilityError(
            f"{type(model).__name__} has no classifier that reads the last token of the same backbone",
            remedy="name a decoder, or train language modelling and the other tasks in two runs",
        )
    return made


def in_one(found: Mapping[int, torch.Tensor], groups: Groups) -> torch.Tensor:
    """Return all tasks' logits as one tensor in the batch's order, filled up with -inf.

    Its shape is (rows, widest label space); with rows of language modelling (rows, positions, widest), where a classifier's
    row has its logits in the first position.
    """
    pieces = [rows for number in groups.tasks if len(rows := found[number])]
    positions = max((rows.shape[1] for rows in pieces if rows.dim() == 3), default=0)
    width = max(rows.shape[-1] for rows in pieces)
    filled = []
    for rows in pieces:
        down = 0
        if positions and rows.dim() == 2:
            rows, down = rows[:, None], positions - 1
        pad = (0, width - rows.shape[-1], 0, down)
        filled.append(functional.pad(rows, pad[: 2 * (rows.dim() - 1)], value=-torch.inf))
    return groups.joined(filled)


def give_labels(config: Any, task: Task) -> None:
    """Write a task's labels into the config of a model that has its head now."""
    if task.kind.is_language_modelling:
        return
    names = task.label_names or ("LABEL_0",)
    config.id2label = dict(enumerate(names))
    config.label2id = {name: index for index, name in enumerate(names)}
    config.problem_type = "regression" if task.kind is TaskKind.REGRESSION else "single_label_classification"
