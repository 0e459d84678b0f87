"""A task's own head: one copy per task of a module the base model has fresh, the last one with a width per task."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import gather_params_ctx
from torch import nn
from torch.nn import functional

from ....registry.errors import CompatibilityError
from .routing import Router


class TaskHeads(nn.Module, BaseTunerLayer):
    """Each row goes through its own task's copy; narrower logits are filled up with -inf, which no softmax counts.

    Args:
        base_layer: the fresh module of the base model; kept, not used, so that it can be put back.
        name: its name in the model, for errors.
        router: says which row belongs to which task.
    """

    adapter_layer_names = ("heads",)
    other_param_names = ()

    def __init__(self, base_layer: nn.Module, name: str, router: Router) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.name = name
        self.router = router
        self.heads = nn.ModuleDict()
        self.merged_adapters: list[str] = []

    def put(self, task: str, head: nn.Module, trains: bool) -> None:
        """Give a task its head; what does not train keeps its values in buffers, as :class:`TaskMatrices` does."""
        self.heads[task] = head.requires_grad_(True) if trains else as_buffers(head)

    def of(self, task: str) -> nn.Module:
        """Return the head that rows of a task go through: its own, or the base model's while adapters are off."""
        return self.base_layer if self.disable_adapters else self.heads[task]

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the logits, shape (B, ..., widest label space), of x, shape (B, ...)."""
        if self.disable_adapters:
            return self.base_layer(x, *args, **kwargs)  # type: ignore[no-any-return]
        groups = self.router.groups_of(x, self.name)
        heads = [self.heads[self.router.tasks[number]] for number in groups.tasks]
        if groups.place is None:
            return heads[0](x, *args, **kwargs)  # type: ignore[no-any-return]
        pieces = [head(rows, *args, **kwargs) for head, rows in zip(heads, groups.split(x), strict=True)]
        width = max(piece.shape[-1] for piece in pieces)
        filled = [functional.pad(piece, (0, width - piece.shape[-1]), value=-torch.inf) for piece in pieces]
        return groups.joined(filled)

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Let what trains require a gradient, or with ``inference_mode`` nothing."""
        for parameter in self.heads.parameters():
            parameter.requires_grad_(not inference_mode)
        self._active_adapter = adapter_names

    def enable_adapters(self, enabled: bool) -> None:
        """Use the tasks' heads, or the base model's own."""
        self._disable_adapters = not enabled
        for parameter in self.heads.parameters():
            parameter.requires_grad_(enabled)

    def plain(self, task: str, merge: bool) -> nn.Module:
        """Return one task's head as an ordinary module."""
        return as_parameters(self.heads[task])


def as_buffers(module: nn.Module) -> nn.Module:
    """Turn every parameter of a module into a buffer of the same name."""
    for part in module.modules():
        for name, value in list(part.named_parameters(recurse=False)):
            del part._parameters[name]
            part.register_buffer(name, value.detach())
    return module


def as_parameters(module: nn.Module) -> nn.Module:
    """Turn floating-point buffers that :func:`as_buffers` made back into parameters."""
    for part in module.modules():
        for name, value in list(part.named_buffers(recurse=False)):
            if name in ("weight", "bias"):
                del part._buffers[name]
                part.register_parameter(name, nn.Parameter(value))
    return module


def fresh_heads(model: Any, names: Sequence[str], width: int, like_base: bool) -> dict[str, nn.Module]:
    """Draw one task's copy of every fresh module.

    Args:
        model: the base model.
        names: its fresh modules, in the order the model runs them.
        width: labels of the task.
        like_base: keep the values the base model drew, where the width is the same.

    Returns:
        Module name -> the task's copy.
    """
    copies = {name: _copy(model.get_submodule(name)) for name in names}
    final_name, final = last_linear(copies)
    if like_base and final.out_features == width:
        return copies
    drawn = nn.Linear(
        final.in_features, width, bias=final.bias is not None, device=final.weight.device, dtype=final.weight.dtype
    )
    if final is copies[final_name]:
        copies[final_name] = drawn
    else:
        path = next(path for path, module in copies[final_name].named_modules() if module is final)
        copies[final_name].set_submodule(path, drawn)
    for head in copies.values():
        head.apply(model._init_weights)
    return copies


def last_linear(heads: Mapping[str, nn.Module]) -> tuple[str, nn.Linear]:
    """Return the final linear layer of a head, and in which of its modules it is."""
    linears = [(name, part) for name, head in heads.items() for part in head.modules() if isinstance(part, nn.Linear)]
    return linears[-1]


def _copy(module: nn.Module) -> nn.Module:
    """Copy a module with its full values, also where DeepSpeed's ZeRO-3 has cut them into shards."""
    source = module.base_layer if isinstance(module, TaskHeads) else module
    with gather_params_ctx(source.parameters()):
        copied = copy.deepcopy(source)
        values = {name: value.detach().clone() for name, value in source.named_parameters()}
    for name, value in values.items():
        path, _, own = name.rpartition(".")
        setattr(copied.get_submodule(path), own, nn.Parameter(value))
    return copied


def find_heads(model: nn.Module, names: Sequence[str] | None) -> list[str]:
    """Return the names of the modules that every task gets a copy of: ``names``, or what is outside the backbone.

    Raises:
        CompatibilityError: there is none, the model lacks one of them, or none of them has a linear layer.
    """
    outside, there = outside_backbone(model), dict(model.named_modules())
    heads = list(outside if names is None else names)
    if not heads:
        raise CompatibilityError(
            f"{type(model).__name__} has no head to give the tasks", remedy="load it with a classification head"
        )
    for name in heads:
        if not name or name not in there:
            raise CompatibilityError(f"heads: {type(model).__name__} has no module {name!r}", known=outside)
    if not any(isinstance(part, nn.Linear) for name in heads for part in there[name].modules()):
        raise CompatibilityError(f"heads: no linear layer in {', '.join(heads)}", known=outside)
    return heads


def outside_backbone(model: Any) -> list[str]:
    """Return the children of a transformers model, other than its backbone, that have parameters."""
    backbone = getattr(model, "base_model_prefix", "")
    if not isinstance(getattr(model, backbone, None), nn.Module):
        return []  # the model is the backbone
    return [
        name for name, child in model.named_children() if name != backbone and any(True for _ in child.parameters())
    ]
