"""What strategies built on PEFT share: the task type, the head to train along, and the two ways to export."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..registry.context import TaskKind
from ..registry.errors import CompatibilityError

if TYPE_CHECKING:
    from torch import nn

    from ..registry.context import RunContext

_TASK_TYPES = {
    TaskKind.CLASSIFICATION: "SEQ_CLS",
    TaskKind.REGRESSION: "SEQ_CLS",
    TaskKind.CAUSAL_LM: "CAUSAL_LM",
}


def task_fields(model: nn.Module, run: RunContext) -> dict[str, Any]:
    """Return the fields of a ``PeftConfig`` that follow from the task: its type, and the fresh head as a saved module."""
    fresh = sorted(fresh_modules(model, run))
    return {"task_type": task_type(run), "modules_to_save": fresh or None}


def task_type(run: RunContext) -> str | None:
    """Return what PEFT calls the run's task, ``None`` for what it has no name for."""
    return _TASK_TYPES.get(run.task.kind)


def fresh_modules(model: nn.Module, run: RunContext) -> list[str]:
    """Return the model's own children that hold what is not pre-trained, in the order it runs them."""
    return list(
        dict.fromkeys(name.split(".")[0] for name, _ in model.named_parameters() if not run.is_pretrained(name))
    )


def query_and_value(model: nn.Module, run: RunContext) -> list[str]:
    """Return the last parts of the names of the attention's query and value projections.

    Raises:
        AnatomyError: the architecture is unknown.
    """
    layers = run.anatomy(model).layers
    return sorted({name.rsplit(".", 1)[-1] for layer in layers for name in (layer.query, layer.value)})


def export_adapter(model: Any, *, merge: bool) -> nn.Module:
    """Return the ``PeftModel`` itself, or the plain model with the adapter folded in.

    Raises:
        CompatibilityError: this PEFT method cannot be folded in.
    """
    if not merge:
        return model  # type: ignore[no-any-return]
    if not hasattr(model.base_model, "merge_and_unload"):
        peft_type = model.peft_config[model.active_adapter].peft_type.value
        raise CompatibilityError(f"PEFT type {peft_type} cannot be merged", remedy="export it as an adapter")
    return model.merge_and_unload()  # type: ignore[no-any-return]
