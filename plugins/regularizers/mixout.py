"""MixOut: train with W~ = [(1-m) T + m W - p T] / (1-p), m ~ Bernoulli(1-p), T pre-trained (Lee, Cho and Kang 2020).

That is W~ = T + (W-T) m/(1-p), whose mean is W and whose gradient is m/(1-p). By default one bit of m serves a column, all
weights of one input feature, as dropout of that feature would: backward multiplies out only the columns that are kept.
Neither W~ nor m outlives the pass that needs it: backward draws m again from its seed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Lt

from ...registry.context import Support
from ...registry.contracts import Regularizer
from ...registry.errors import CompatibilityError
from ...registry.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ...registry.context import RunContext

_TARGET = "mixout_target"
_GATHERS_BELOW = 0.75  # share of kept columns above which gathering them takes longer than multiplying the others too


class MixOut(Regularizer):
    """Replace random weights by their pre-trained values in each training step; evaluation and files have W.

    Mixed is every ``nn.Linear`` and transformers ``Conv1D`` whose weight is pre-trained and trains; biases, norms,
    embeddings and fresh heads are not. An output layer tied to the input embeddings is mixed where it multiplies, not where
    tokens are looked up, and stays tied. Weight decay pulls towards zero, not towards T: set ``weight_decay`` to 0, or add
    ``l2_sp``. The authors' code replaces dropout by it: the run's ``dropout: 0``. T is what the run's last stage begins with:
    after ``surt``, the re-trained weights.
    """

    name = "mixout"
    summary = "mix pre-trained values into random weights while training"
    reference = (
        "Lee, Cho and Kang 2020, Mixout, section 3; with the derivative's factor 1/(1-p), which the authors' code lacks"
    )
    supports = Support(several_tasks=True)
    off = {"p": 0.0}  # noqa: RUF012  # a ClassVar in the contract

    @dataclass(frozen=True, kw_only=True)
    class Config(Regularizer.Config):
        """Options of MixOut.

        Attributes:
            weight: 0 leaves MixOut out; else 1: there is no penalty to weigh, ``p`` is the strength.
            p: probability that a weight takes its pre-trained value (authors' example 0.9; their paper has 0.7 to 0.9).
            mask: ``column`` draws one bit per input feature, as the authors do; ``element`` one per weight.
            every: ``step`` draws once an optimizer step, the same for its micro-batches and ranks, so that it matters not
                how a batch is split; ``forward`` draws for each micro-batch of each rank, so that it does.
            target_modules: modules to mix: last parts of their names, or regular expressions for all of it; default: all.
        """

        p: Annotated[float, Ge(0), Lt(1)] = 0.9
        mask: Literal["column", "element"] = "column"
        every: Literal["step", "forward"] = "step"
        target_modules: tuple[str, ...] | None = None

        def __post_init__(self) -> None:
            if self.weight not in (0, 1):
                raise ValueError(f"option weight = {self.weight}: there is no penalty to weigh, use p; allowed: 0, 1")
            for pattern in self.target_modules or ():
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(f"option target_modules: {pattern!r} is no regular expression: {error}") from None

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._mixed: list[nn.Module] = []
        self._step = 0
        self._pass = 0

    def attach(self, model: nn.Module, run: RunContext) -> None:
        """Put the pre-trained weight beside each module's own, sharded as it is, and mix both in its forward.

        Raises:
            CompatibilityError: nothing to mix, or an entry of ``target_modules`` that is nowhere.
        """
        if not self.config.p:
            return
        self._run = run
        for name, module in self._chosen(dict(_mixable(model, run))):
            run.sharding.companion(module, _TARGET, like="weight")
            vars(module)["forward"] = partial(self._forward, module, name)
            self._mixed.append(module)

    def _chosen(self, mixable: dict[str, nn.Module]) -> list[tuple[str, nn.Module]]:
        if not mixable:
            raise CompatibilityError(
                "regularizer 'mixout' finds no linear layer with a pre-trained weight that trains",
                remedy="use strategy 'full'",
            )
        patterns = self.config.target_modules
        if patterns is None:
            return list(mixable.items())
        for pattern in patterns:
            if not any(_matches(name, pattern) for name in mixable):
                raise CompatibilityError(
                    f"regularizer 'mixout' finds no target module {pattern!r} to mix",
                    known=sorted({name.rsplit(".", 1)[-1] for name in mixable}),
                )
        return [item for item in mixable.items() if any(_matches(item[0], pattern) for pattern in patterns)]

    def begin_step(self, step: int) -> None:
        """Draw new masks from here on."""
        self._step, self._pass = step, 0

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Draw new masks, if every micro-batch has its own."""
        self._pass += 1

    def _forward(self, module: Any, name: str, input: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return type(module).forward(module, input)  # type: ignore[no-any-return]
        mask = _Mask(
            seed=self._seed(name),
            p=self.config.p,
            by_column=self.config.mask == "column",
            input_dim=0 if _is_conv1d(module) else 1,
        )
        return _mixed_linear().apply(input, module.weight, getattr(module, _TARGET), module.bias, mask)  # type: ignore[no-any-return]

    def _seed(self, name: str) -> int:
        """Hash what a mask depends on, no generator's state: a resumed run and every rank find the same masks."""
        key: tuple[object, ...] = (self._run.seed, self._step, name)
        if self.config.every == "forward":
            key += (self._pass, self._run.sharding.rank)
        return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")

    def detach(self, model: nn.Module) -> None:
        """Give the modules their own forward back and drop the pre-trained weights."""
        for module in self._mixed:
            del vars(module)["forward"]
            self._run.sharding.remove_companion(module, _TARGET)
        self._mixed = []


def _mixable(model: nn.Module, run: RunContext) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of every linear layer whose weight is pre-trained and trains."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    names = {id(parameter): name for name, parameter in model.named_parameters()}  # tied ones under their first name
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D) or not module.weight.requires_grad:
            continue
        if not run.is_pretrained(names[id(module.weight)]):
            continue
        if type(module) in (nn.Linear, Conv1D) and "forward" not in vars(module):
            yield name, module
        else:
            run.logger.warning("mixout leaves %s alone: a %s with a forward of its own", name, type(module).__name__)


def _matches(name: str, pattern: str) -> bool:
    return f".{name}".endswith(f".{pattern}") or re.fullmatch(pattern, name) is not None


def _is_conv1d(module: nn.Module) -> bool:
    from torch import nn

    return not isinstance(module, nn.Linear)


@dataclass(frozen=True)
class _Mask:
    """Which weights of one module keep their trained value in one pass.

    Attributes:
        seed: what the bits are drawn from.
        p: probability of a zero.
        by_column: whether all weights of an input feature share a bit.
        input_dim: dimension of the weight that counts input features: 1 for ``nn.Linear``, 0 for ``Conv1D``.
    """

    seed: int
    p: float
    by_column: bool
    input_dim: int

    def bits(self, weight: torch.Tensor) -> torch.Tensor:
        """Return m: (in,) on the CPU, where a few bits are drawn and counted without waiting for a device; or as weight."""
        import torch

        device = torch.device("cpu") if self.by_column else weight.device
        shape = weight.shape[self.input_dim : self.input_dim + 1] if self.by_column else weight.shape
        generator = torch.Generator(device).manual_seed(self.seed)
        return torch.rand(shape, generator=generator, device=device) >= self.p

    def factor(self, weight: torch.Tensor) -> torch.Tensor:
        """Return m / (1-p), which spreads to the shape of ``weight``."""
        factor = self.bits(weight).to(weight, non_blocking=True) / (1 - self.p)
        return factor.unsqueeze(1 - self.input_dim) if self.by_column else factor

    def mixed(self, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return W~, (out, in)."""
        import torch

        mixed = torch.lerp(target, weight, self.factor(weight))
        return mixed if self.input_dim else mixed.t()

    def weight_gradient(self, x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the gradient of ``weight`` from the rows ``x`` (rows, in) and ``grad`` (rows, out)."""
        import torch

        kept = self.bits(weight).nonzero().squeeze(1) if self.by_column else None
        if kept is None or len(kept) > _GATHERS_BELOW * x.shape[1]:
            full = grad.t() @ x if self.input_dim else x.t() @ grad
            return full.to(weight.dtype).mul_(self.factor(weight))
        kept = kept.to(x.device, non_blocking=True)
        columns = (x.index_select(1, kept).t() @ grad).to(weight.dtype).div_(1 - self.p)
        gradient = torch.zeros_like(weight)
        (gradient.t() if self.input_dim else gradient).index_copy_(0, kept, columns)
        return gradient


@cache
def _mixed_linear() -> Any:
    import torch
    from torch.autograd.function import once_differentiable
    from torch.nn import functional

    class MixedLinear(torch.autograd.Function):
        """x W~^T + b, which keeps its inputs alone."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: Any, target: Any, bias: Any, mask: _Mask) -> torch.Tensor:
            ctx.save_for_backward(x, weight, target)
            ctx.mask = mask
            return functional.linear(x, mask.mixed(weight, target), bias)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, weight, target = ctx.saved_tensors
            mask, (needs_x, needs_weight, _, needs_bias, _) = ctx.mask, ctx.needs_input_grad
            # Under autocast x and W are wider than grad.
            x_rows, grad_rows = x.reshape(-1, x.shape[-1]).to(grad.dtype), grad.reshape(-1, grad.shape[-1])
            grad_x = grad @ mask.mixed(weight, target).to(grad.dtype) if needs_x else None
            grad_weight = mask.weight_gradient(x_rows, grad_rows, weight) if needs_weight else None
            return grad_x, grad_weight, None, grad_rows.sum(0) if needs_bias else None, None

    return MixedLinear


@hookimpl
def tunery_regularizers() -> list[type[Regularizer]]:
    """Offer :class:`MixOut`."""
    return [MixOut]
