"""What strategies built on PEFT share: the task type, the head to train along, and the two ways to export."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..registry.context import TaskKind
from ..registry.errors import CompatibilityError

if TYPE_CHECKING:
    from torch import nn

    from ..registry.context import Layer, RunContext

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


def attention_projections(layers: Iterable[Layer]) -> list[str]:
    """Return the names of the attention projections of some layers, output included; one that is all three comes once."""
    return list(
        dict.fromkeys(
            name for layer in layers for name in (layer.query, layer.key, layer.value, layer.attention_output)
        )
    )


def add_lora(
    model: nn.Module,
    run: RunContext,
    targets: Iterable[str],
    *,
    r: int,
    alpha: float,
    dropout: float,
    modules_to_save: Iterable[str] = (),
) -> nn.Module:
    """Return a ``PeftModel`` with LoRA on the modules named, and the fresh head to train along.

    Args:
        model: the plain model, of a known architecture.
        run: the run it belongs to.
        targets: full names of the modules to adapt; may be none.
        r: rank.
        alpha: the update is scaled by alpha / r.
        dropout: probability of zeroing an element of an adapter's input, in training.
        modules_to_save: full names of further modules that train whole.
    """
    from peft import LoraConfig, get_peft_model
    from peft.utils.constants import DUMMY_TARGET_MODULES

    fields = task_fields(model, run)
    fields["modules_to_save"] = [*modules_to_save, *(fields["modules_to_save"] or ())] or None
    config: Any = LoraConfig(
        r=r,
        lora_alpha=alpha,  # type: ignore[arg-type]  # PEFT divides it; any number does
        lora_dropout=dropout,
        target_modules=list(targets) or DUMMY_TARGET_MODULES,  # PEFT's word for none
        fan_in_fan_out=run.anatomy(model).conv1d,
        **fields,
    )
    adapted: Any = model
    result: nn.Module = get_peft_model(adapted, config)
    return result


def plug_adapter(
    model: Any, proxy: Any, renamed: Callable[[str], str] = str, targets: Iterable[str] | None = None
) -> nn.Module:
    """Return ``model`` with the adapter and head of ``proxy``: as a ``PeftModel``, or the one it is, brought up to date.

    Args:
        model: a plain model with the modules that the adapter belongs to, or what this returned.
        proxy: the ``PeftModel`` to take the adapter from.
        renamed: from the name of a module or parameter in ``proxy`` to its name in ``model``.
        targets: full names of the modules to adapt; default: what the config of ``proxy`` says.
    """
    import torch
    from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    if not isinstance(model, PeftModel):
        config = copy.deepcopy(proxy.peft_config[proxy.active_adapter])
        rename_modules(config, renamed, targets)
        with torch.random.fork_rng():  # its first values are drawn, and none of them stays
            model = get_peft_model(model, config)
    state = get_peft_model_state_dict(proxy, save_embedding_layers=False)
    with torch.no_grad():
        set_peft_model_state_dict(model, {renamed(name): value for name, value in state.items()})
    plugged: nn.Module = model
    return plugged


def rename_modules(config: Any, renamed: Callable[[str], str], targets: Iterable[str] | None) -> None:
    """Have a PEFT config name the modules of another model; see :func:`plug_adapter`."""
    if targets is not None:
        config.target_modules = set(targets)
    if config.modules_to_save:
        config.modules_to_save = [renamed(name) for name in config.modules_to_save]


def export_adapter(model: Any, *, merge: bool) -> nn.Module:
    """Return the ``PeftModel`` itself, or the plain model with the adapter folded in.

    Raises:
        CompatibilityError: this PEFT method cannot be folded in.
    """
    if not merge:
        return model  # type: ignore[no-any-return]
    if hasattr(model.base_model, "merge_and_unload"):
        with suppress(NotImplementedError):  # some have the method and refuse inside
            return model.merge_and_unload()  # type: ignore[no-any-return]
    peft_type = model.peft_config[model.active_adapter].peft_type.value
    raise CompatibilityError(f"PEFT type {peft_type} cannot be merged", remedy="export it as an adapter")
