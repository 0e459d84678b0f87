"""An adapted module: h = W0 x + (alpha / r) B_i A x, one frozen A for all tasks and one B_i per task (paper, section 5).

Shape suffixes: B rows, T positions, I inputs, O outputs, R rank, K tasks that take part.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from .routing import Router

ADAPTABLE = (nn.Linear, Conv1D)


class TaskMatrices(nn.Module):
    """One matrix of shape (outputs, inputs) per task, named by it: a parameter while it trains, a buffer while it does not.

    DeepSpeed's ZeRO-3 leaves frozen parameters out of what it saves; buffers are always there.
    """

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.router = router

    def put(self, task: str, value: torch.Tensor, trains: bool) -> None:
        """Give a task its matrix; one it had before goes."""
        self.drop(task)
        if trains:
            self.register_parameter(task, nn.Parameter(value))
        else:
            self.register_buffer(task, value)

    def drop(self, task: str) -> None:
        """Take a task's matrix away, if there is one."""
        self._parameters.pop(task, None)
        self._buffers.pop(task, None)

    def of(self, task: str) -> torch.Tensor:
        """Return a task's matrix, shape (outputs, inputs)."""
        value = getattr(self, task)
        assert isinstance(value, torch.Tensor)
        return value

    def forward(self, x: torch.Tensor, module: str) -> torch.Tensor:
        """Multiply each row with its own task's matrix.

        Args:
            x: shape (B, T, inputs) or (B, inputs).
            module: whose matrices these are, for errors.

        Returns:
            Shape (B, T, outputs) or (B, outputs).
        """
        groups = self.router.groups_of(x, module)
        weights = [self.of(self.router.tasks[number]).to(x.dtype) for number in groups.tasks]
        if groups.place is None:
            return groups.joined([functional.linear(*pair) for pair in zip(groups.split(x), weights, strict=True)])
        w_BOI = torch.stack(weights).index_select(0, groups.place)
        x_BTI = x if x.dim() == 3 else x.reshape(len(x), -1, x.shape[-1])
        return torch.bmm(x_BTI, w_BOI.transpose(1, 2)).reshape(*x.shape[:-1], -1)


class MultiLoraLayer(nn.Module, BaseTunerLayer):
    """A Linear or Conv1D with one frozen factor for all tasks and one trained factor per task.

    Args:
        base_layer: the module to adapt.
        name: its name in the model, for errors.
        router: says which row belongs to which task.
        r: rank.
        alpha: the update is scaled by alpha / r.
        dropout: probability of zeroing an element of x before A, in training.
        gaussian: draw the frozen factor from N(0, 1) (paper, Algorithm 1) instead of U(+-1 / sqrt(inputs)).
        frozen: ``"a"``: A (r, inputs) is shared and B_i (outputs, r) start at 0; ``"b"``: B (outputs, r) is shared and
            A_i (r, inputs) start at 0 (paper, Algorithm 1).
        trains: task -> whether it trains.
    """

    adapter_layer_names = ("lora_A", "lora_B")
    other_param_names = ()

    def __init__(
        self,
        base_layer: nn.Module,
        name: str,
        router: Router,
        *,
        r: int,
        alpha: float,
        dropout: float,
        gaussian: bool,
        frozen: str,
        trains: Mapping[str, bool],
    ) -> None:
        super().__init__()
        weight = base_layer.weight
        assert isinstance(weight, torch.Tensor)
        self.base_layer = base_layer
        self.name = name
        self.frozen = frozen
        self.scaling = alpha / r
        self.fan_in_fan_out = isinstance(base_layer, Conv1D)
        outputs, inputs = features(base_layer)
        self.merged_adapters: list[str] = []
        self.lora_dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        per_task = TaskMatrices(router)
        shape = (r, inputs) if frozen == "a" else (outputs, r)
        shared = torch.empty(shape, device=weight.device, dtype=weight.dtype)
        if gaussian:
            nn.init.normal_(shared)
        else:
            nn.init.kaiming_uniform_(shared, a=math.sqrt(5))
        zeros = (outputs, r) if frozen == "a" else (r, inputs)
        for task, does in trains.items():
            per_task.put(task, torch.zeros(zeros, device=weight.device, dtype=weight.dtype), does)
        if frozen == "a":
            self.register_buffer("lora_A", shared)
            self.lora_B = per_task
        else:
            self.lora_A = per_task
            self.register_buffer("lora_B", shared)

    @property
    def per_task(self) -> TaskMatrices:
        """The factors the tasks have of their own."""
        factor = self.lora_B if self.frozen == "a" else self.lora_A
        assert isinstance(factor, TaskMatrices)
        return factor

    @property
    def shared(self) -> torch.Tensor:
        """The frozen factor."""
        factor = self.lora_A if self.frozen == "a" else self.lora_B
        assert isinstance(factor, torch.Tensor)
        return factor

    def factors(self, task: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A, shape (r, inputs), and B, shape (outputs, r), of one task."""
        own, shared = self.per_task.of(task), self.shared
        return (shared, own) if self.frozen == "a" else (own, shared)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return W0 x + b + (alpha / r) B_i A x, shape (B, T, O), for x of shape (B, T, I)."""
        result: torch.Tensor = self.base_layer(x, *args, **kwargs)
        update_BTO: torch.Tensor
        if self.disable_adapters:
            return result
        x_BTI = self.lora_dropout(x.to(self.shared.dtype))
        # The scale goes where it is cheapest: r numbers a position.
        if self.frozen == "a":
            z_BTR = functional.linear(x_BTI, self.shared) * self.scaling
            update_BTO = self.lora_B(z_BTR, self.name)
        else:
            z_BTR = self.lora_A(x_BTI, self.name) * self.scaling
            update_BTO = functional.linear(z_BTR, self.shared)
        return result + update_BTO.to(result.dtype)

    def plain(self, task: str, merge: bool) -> nn.Module:
        """Return the base module, with ``merge`` as W0 + (alpha / r) B_i A of one task."""
        if merge:
            a_RI, b_OR = self.factors(task)
            update_OI = self.scaling * (b_OR @ a_RI)
            weight = self.base_layer.weight
            assert isinstance(weight, torch.Tensor)
            weight.data += (update_OI.T if self.fan_in_fan_out else update_OI).to(weight.dtype)
        return self.base_layer

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Let what trains require a gradient, or with ``inference_mode`` nothing."""
        for parameter in self.per_task.parameters():
            parameter.requires_grad_(not inference_mode)
        self._active_adapter = adapter_names

    def enable_adapters(self, enabled: bool) -> None:
        """Switch the updates on or off."""
        self._disable_adapters = not enabled
        for parameter in self.per_task.parameters():
            parameter.requires_grad_(enabled)


def features(module: nn.Module) -> tuple[int, int]:
    """Return outputs and inputs of a Linear or Conv1D."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    # Under ZeRO-3 the weight itself is a shard.
    first, second = getattr(weight, "ds_shape", weight.shape)
    return (second, first) if isinstance(module, Conv1D) else (first, second)


def adaptable(model: nn.Module, heads: Sequence[str]) -> list[str]:
    """Return the names of the modules that can be adapted: those in no head, with a weight that no other module has too."""
    owners = Counter(id(value) for part in model.modules() for value in part.parameters(recurse=False))
    return [
        name
        for name, part in model.named_modules()
        if isinstance(part, ADAPTABLE) and owners[id(part.weight)] == 1 and not is_within(name, heads)
    ]


def is_within(name: str, modules: Sequence[str]) -> bool:
    """Whether a module is one of some others, or inside one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def values_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield every parameter and buffer of a module."""
    yield from module.parameters()
    yield from module.buffers()


def numel(value: torch.Tensor) -> int:
    """Return how many numbers a tensor has, as a whole where DeepSpeed's ZeRO-3 has cut it into shards."""
    return int(getattr(value, "ds_numel", value.numel()))
