"""The ``RunContext`` of a run: its task told from the model, its sharding service, its pre-trained parameters."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from peft import PeftModel
from torch import nn
from transformers.models.auto import modeling_auto as auto

from ..registry.context import RunContext, Task, TaskKind
from ..registry.errors import AnatomyError
from .anatomy import new_parameters
from .arguments import checkpoints_activations
from .recipe import anatomy_finder
from .sharding import ModelSharding

_KINDS = (
    (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, TaskKind.CAUSAL_LM),
    (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, TaskKind.MASKED_LM),
    (auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, TaskKind.IMAGE_CLASSIFICATION),
    (auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, TaskKind.CLASSIFICATION),
)


def infer_task(model: nn.Module) -> Task:
    """Tell the task from the model's class and config: a classifier with one label is a regression."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    config = getattr(base, "config", None)
    kind = TaskKind.OTHER
    for mapping, candidate in _KINDS:
        names = [name for value in mapping.values() for name in ([value] if isinstance(value, str) else value)]
        if type(base).__name__ in names:
            kind = candidate
            break
    labels: tuple[str, ...] = ()
    if kind in (TaskKind.CLASSIFICATION, TaskKind.IMAGE_CLASSIFICATION):
        if getattr(config, "problem_type", None) == "regression" or getattr(config, "num_labels", 0) == 1:
            kind = TaskKind.REGRESSION
        else:
            id2label = getattr(config, "id2label", None) or {}
            labels = tuple(str(id2label[index]) for index in sorted(id2label))
    return Task(name="task", kind=kind, label_names=labels)


def make_context(model: nn.Module, args: Any, tasks: Sequence[Task], revision: str | None = None) -> RunContext:
    """Return what plugins may know about a run of ``model``, of that revision, on ``tasks`` with training arguments ``args``."""
    try:
        fresh = new_parameters(model, tasks[0])
    except AnatomyError:
        fresh = frozenset()  # a plain nn.Module: nothing tells its head from its body
    return RunContext(
        tasks=tuple(tasks),
        seed=args.seed,
        sharding=ModelSharding(_zero_stage(args)),
        pretrained_parameters=frozenset(name for name, _ in model.named_parameters()) - fresh,
        logger=logging.getLogger("tunery"),
        activation_checkpointing=checkpoints_activations(args),
        revision=revision,
        find_anatomy=anatomy_finder(),
    )


def optimizer_name(args: Any, given: Mapping[str, Any]) -> str:
    """Return what a run's optimizer is called, in lower case.

    Args:
        args: the training arguments.
        given: what else the Trainer was given, by keyword.
    """
    made, _ = given.get("optimizers") or (None, None)
    if made is not None:
        return type(made).__name__.lower()
    if given.get("optimizer_cls_and_kwargs"):
        return str(given["optimizer_cls_and_kwargs"][0].__name__).lower()
    plugin = getattr(args, "deepspeed_plugin", None)
    configured = plugin.hf_ds_config.config.get("optimizer", {}) if plugin is not None else {}
    return str(configured.get("type") or getattr(args.optim, "value", args.optim)).lower()


def _zero_stage(args: Any) -> int:
    plugin = getattr(args, "deepspeed_plugin", None)
    return int(plugin.zero_stage or 0) if plugin is not None else 0
