"""The configuration of Multi-LoRA as a PEFT method: what ``adapter_config.json`` holds, its tasks among it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn

from ....registry.context import Task, TaskKind
from ....registry.errors import CompatibilityError, DataError

PEFT_TYPE = "MULTI_LORA"
_ALLOWED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "r": ("an integer, 1 or more", lambda value: isinstance(value, int) and value >= 1),
    "lora_alpha": ("a number above 0", lambda value: isinstance(value, int | float) and value > 0),
    "lora_dropout": ("a number from 0 to below 1", lambda value: isinstance(value, int | float) and 0 <= value < 1),
    "init": ("default, gaussian", lambda value: value in ("default", "gaussian")),
    "frozen": ("a, b", lambda value: value in ("a", "b")),
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def to_task(described: Mapping[str, Any]) -> Task:
    """Return the task of one entry of ``MultiLoraConfig.tasks``.

    Raises:
        DataError: a name that cannot be part of a parameter's name, an unknown kind, or a classifier without labels.
    """
    name = str(described.get("name", ""))
    if not _NAME.fullmatch(name) or hasattr(nn.ModuleDict, name):
        raise DataError(f"task name {name!r}", remedy="use letters, digits, - and _, and no name of torch.nn.Module's")
    try:
        kind = TaskKind(described.get("kind", TaskKind.CLASSIFICATION))
    except ValueError:
        known = [kind.value for kind in TaskKind]
        raise DataError(f"task {name!r} has kind {described['kind']!r}", known=known) from None
    labels = described.get("label_names") or tuple(f"LABEL_{index}" for index in range(described.get("num_labels", 0)))
    if kind in (TaskKind.CLASSIFICATION, TaskKind.IMAGE_CLASSIFICATION) and len(labels) < 2:
        raise DataError(f"task {name!r} has {len(labels)} labels", remedy="give num_labels or label_names, two or more")
    return Task(name=name, kind=kind, label_names=tuple(labels), metrics=tuple(described.get("metrics", ())))


def describe(task: Task) -> dict[str, Any]:
    """Return a task as ``MultiLoraConfig.tasks`` holds it."""
    entry: dict[str, Any] = {"name": task.name, "kind": task.kind.value}
    if task.label_names:
        entry["label_names"] = list(task.label_names)
    if task.metrics:
        entry["metrics"] = list(task.metrics)
    return entry


@dataclass
class MultiLoraConfig(PeftConfig):
    """Configuration of Multi-LoRA for plain PEFT.

    Args:
        tasks: one mapping per task: ``name``; ``kind``: ``classification`` (default), ``regression``, ``causal_lm`` or
            ``image_classification``; ``num_labels`` or ``label_names`` for a classifier; ``frozen: true`` for one that
            does not train. Those of kind ``causal_lm`` need a model with a language-modelling head, which they share, and
            beside it others read a row's last token.
        r: rank.
        lora_alpha: the update is scaled by ``lora_alpha / r``.
        lora_dropout: probability of zeroing an element of x before A, in training.
        target_modules: names, or last parts of names, of the modules to adapt; ``all-linear``: all that can be, but for a
            language model's output layer. What is in a head is left alone.
        exclude_modules: the same, of modules to leave alone.
        heads: names of the fresh modules every task gets a copy of; default: what the model has outside its backbone, or
            on a language model the layer that its architecture's sequence classifier has there.
        init: ``default``: the shared factor is drawn as torch draws a Linear, ``gaussian``: from N(0, 1).
        frozen: the shared factor, ``a`` or ``b``.

    Raises:
        DataError: no task, two of one name, or one that cannot be read.
        CompatibilityError: an option of the wrong type or out of range.
    """

    tasks: list[dict[str, Any]] = field(default_factory=list)
    r: int = 8
    lora_alpha: float = 16
    lora_dropout: float = 0.0
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    heads: list[str] | None = None
    init: str = "default"
    frozen: str = "a"

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.peft_type = PEFT_TYPE
        names = [task.name for task in self.parsed()]
        if not names:
            raise DataError("multi_lora without a task", remedy="give one or more")
        for name in names:
            if names.count(name) > 1:
                raise DataError(f"two tasks are called {name!r}", known=names, remedy="give one of them another name")
        if self.task_type is not None:
            raise CompatibilityError("task_type with MultiLoraConfig", remedy="leave it out: every task has its kind")
        for name, (allowed, is_allowed) in _ALLOWED.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not is_allowed(value):
                raise CompatibilityError(f"{name}={value!r}", known=[allowed], owner="MultiLoraConfig")

    def parsed(self) -> list[Task]:
        """Return the tasks."""
        return [to_task(entry) for entry in self.tasks]


PEFT_TYPE_TO_CONFIG_MAPPING[PEFT_TYPE] = MultiLoraConfig  # type: ignore[index]
