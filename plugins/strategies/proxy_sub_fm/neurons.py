"""The neurons of feed-forward blocks: how much each weighs, and blocks that keep some of them (Federated Proxy Fine-Tuning, 3.4).

A neuron is a row of the weight that a hidden state enters by, with its bias, and a column of the one it leaves by. Under
``Conv1D`` (GPT-2), whose weights are (in, out), it is a column and a row. In a gated block (Llama, Qwen, OLMo-2) it is a
row of gate, a row of up and a column of down. Shapes: D hidden size, N neurons.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ....registry.context import RunContext


@dataclass(frozen=True, kw_only=True)
class Block:
    """The feed-forward block of one layer.

    Attributes:
        layer: number of the layer.
        enter: the modules a hidden state enters by: one, or gate and up.
        leave: the module it leaves by.
        conv1d: whether weights are (in, out).
    """

    layer: int
    enter: tuple[Any, ...]
    leave: Any
    conv1d: bool

    def parts(self) -> Iterator[tuple[Any, str, int | None]]:
        """Yield every parameter as its module, its name there, and which of its dimensions counts neurons, if any does."""
        for module in self.enter:
            yield module, "weight", 1 if self.conv1d else 0
            if module.bias is not None:
                yield module, "bias", 0
        yield self.leave, "weight", 0 if self.conv1d else 1
        if self.leave.bias is not None:
            yield self.leave, "bias", None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in the order of :meth:`parts`."""
        return [getattr(module, name) for module, name, _ in self.parts()]

    @property
    def width(self) -> int:
        """Number of neurons; told from the module, since a sharded weight has no shape."""
        return int(self.enter[0].nf if self.conv1d else self.enter[0].out_features)

    def put(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Give the block other parameters, of any number of neurons; return those it had."""
        had = self.parameters
        for (module, name, dim), parameter in zip(self.parts(), parameters, strict=True):
            setattr(module, name, parameter)
            if name == "weight" and dim is not None:
                setattr(module, self._width_of(module), parameter.shape[dim])
        return had

    def _width_of(self, module: Any) -> str:
        if module is self.leave:
            return "nx" if self.conv1d else "in_features"
        return "nf" if self.conv1d else "out_features"


def find_blocks(model: nn.Module, run: RunContext) -> list[Block]:
    """Return the feed-forward block of every layer, from the input to the output.

    Raises:
        AnatomyError: the architecture is unknown.
    """
    anatomy = run.anatomy(model)
    return [
        Block(
            layer=number,
            enter=tuple(model.get_submodule(name) for name in layer.ffn_in),
            leave=model.get_submodule(layer.ffn_out),
            conv1d=anatomy.conv1d,
        )
        for number, layer in enumerate(anatomy.layers)
    ]


def saliency(block: Block) -> torch.Tensor:
    """Return the L2 norm of all weights of each neuron, biases left out (eq. 8); float64, shape (N,)."""
    squares: Any = 0.0
    for module, name, dim in block.parts():
        if name == "weight" and dim is not None:
            squares = squares + getattr(module, name).detach().double().square().sum(1 - dim)
    result: torch.Tensor = squares.sqrt()
    return result


def most(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the positions of the ``count`` largest values, in ascending order; of equal ones the first count as larger."""
    positions: torch.Tensor = values.argsort(descending=True, stable=True)[:count].sort().values
    return positions


def selected(block: Block, kept: torch.Tensor) -> list[nn.Parameter]:
    """Return copies of the block's parameters that have the neurons ``kept`` alone, in that order; nothing trains."""
    from torch import nn

    copies = []
    for module, name, dim in block.parts():
        value = getattr(module, name).detach()
        chosen = value.clone() if dim is None else value.index_select(dim, kept.to(value.device))
        copies.append(nn.Parameter(chosen, requires_grad=False))
    return copies


def on_host(parameter: nn.Parameter) -> nn.Parameter:
    """Return a full parameter in host memory: itself where it lies there already, unless it is part of something sharded.

    One without values (meta) stays where it is.
    """
    from torch import nn

    value = parameter.detach()
    if value.is_meta:
        return nn.Parameter(value, requires_grad=False)
    return nn.Parameter(value.to("cpu", copy=hasattr(parameter, "ds_tensor")), requires_grad=False)


def like(whole: nn.Parameter, now: nn.Parameter) -> nn.Parameter:
    """Return ``whole`` where ``now`` lies."""
    from torch import nn

    return nn.Parameter(whole.detach().to(now.device, now.dtype), requires_grad=False)


@contextmanager
def with_parameters(blocks: Sequence[tuple[Block, Sequence[nn.Parameter]]]) -> Iterator[None]:
    """Inside, blocks have other parameters."""
    had = [(block, block.put(parameters)) for block, parameters in blocks]
    try:
        yield
    finally:
        for block, parameters in had:
            block.put(parameters)
