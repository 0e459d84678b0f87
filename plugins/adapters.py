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
    fresh = {name.split(".")[0] for name, _ in model.named_parameters() if not run.is_pretrained(name)}
    return {"task_type": _TASK_TYPES.get(run.task.kind), "modules_to_save": sorted(fresh) or None}


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
