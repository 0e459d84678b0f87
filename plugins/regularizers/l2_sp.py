"""L2-SP: (alpha/2) sum (w - w0)^2 over pre-trained weights + (beta/2) sum w^2 over new ones (Li et al. 2018, eq. 2).

Others write the same penalty without the half, or as a mean over the weights: ``form``. With w = (1, 2), w0 = 0 and one new
weight 3, alpha = 0.1 and beta = 0.01 give 0.295 in the authors' form; alpha = 1 and beta = 0 give 2.5 as a mean, 5 as a sum.

``form="decoupled"`` is no penalty but a pull beside the optimizer's step, w -= learning_rate alpha (w - w0), as AdamW's decay
is to zero (PriorWD, Zhang et al. 2021). Adam scales a penalty's gradient like any other, and a pull not: two methods.

The penalty's value is computed inside each module's forward, and its gradient, a multiple of w - w0, inside each module's
backward: there the weights are whole also under ZeRO-3, and nothing of their size is kept in between. Nor is it made on the
way: memory of a big weight's size is mapped afresh on every step, which on the CPU costs ten times the arithmetic. So w - w0
comes in pieces, and is added in place to the gradient of the loss as soon as that is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge

from ...registry.context import Support
from ...registry.contracts import Regularizer
from ...registry.errors import CompatibilityError
from ...registry.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from ...registry.context import Batch, RunContext
    from ...registry.sharding import Sharding

    # name of a weight, of its anchor, and strength
    _Pull = tuple[str, str | None, float]

_PIECE = 2**20  # elements: memory of this size is used again, and not mapped afresh


class L2SP(Regularizer):
    """Pull pre-trained weights to where they started and new weights to zero.

    Where they started is what the run's last stage begins with: after ``surt``, the re-trained weights.
    """

    name = "l2_sp"
    summary = "L2 distance to the pre-trained weights, L2 norm of new ones"
    reference = "Li, Grandvalet and Davoine 2018, L2-SP, eq. 2"
    supports = Support(several_tasks=True)

    @dataclass(frozen=True, kw_only=True)
    class Config(Regularizer.Config):
        """Options of L2-SP.

        Attributes:
            alpha: strength on pre-trained weights, per squared weight (authors' default 0.1).
            beta: strength on new weights (authors' default 0.01).
            form: ``sum_half`` as the authors write it; ``sum`` leaves out both halves; ``mean`` divides, instead of by two, by
                the number of pre-trained weights that train, and by that of new ones: a strength does not depend on the
                model's size then, and is that many times smaller. ``decoupled`` pulls each weight by
                learning_rate * strength of its distance, right before the optimizer's step and apart from the loss.
            scope: ``all`` parameters, or ``weights`` of two or more dimensions, without biases and norms, which is what the
                authors' code has by default.
        """

        alpha: Annotated[float, Ge(0)] = 0.1
        beta: Annotated[float, Ge(0)] = 0.01
        form: Literal["sum_half", "sum", "mean", "decoupled"] = "sum_half"
        scope: Literal["all", "weights"] = "all"

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._clear()

    def _clear(self) -> None:
        self._hooks: list[RemovableHandle] = []
        self._pulled: dict[nn.Module, list[_Pull]] = {}
        self._companions: list[tuple[Sharding, nn.Module, str]] = []
        self._waiting: set[nn.Module] = set()
        self._arriving: set[nn.Parameter] = set()
        self._values: list[torch.Tensor] = []
        self._owners: set[nn.Module] = set()
        self._ticket: torch.Tensor | None = None

    def attach(self, model: nn.Module, run: RunContext) -> None:
        """Keep a frozen copy of every trainable pre-trained parameter beside it, sharded as it is.

        Raises:
            CompatibilityError: nothing trains that has a strength.
        """
        trained = [item for item in _trained(model, run) if self._counts(item[2])]
        factors = {
            anchored: strength * self._normaliser([own for *_, own, kind in trained if kind is anchored])
            for anchored, strength in ((True, self.config.alpha), (False, self.config.beta))
        }
        pulls: dict[nn.Module, list[_Pull]] = {}
        for module, name, _, anchored in trained:
            if factors[anchored]:
                anchor = self._anchor(module, name, run.sharding) if anchored else None
                pulls.setdefault(module, []).append((name, anchor, factors[anchored]))
        if not pulls:
            raise CompatibilityError(
                f"regularizer 'l2_sp' would do nothing: {len(trained)} parameters train, "
                f"{sum(anchored for *_, anchored in trained)} of them pre-trained, "
                f"with alpha={self.config.alpha:g} on these and beta={self.config.beta:g} on the others",
                remedy="leave it out, or give a strength to what trains",
            )
        self._sharding = run.sharding
        if self.config.form == "decoupled":
            self._pulled = pulls
            return
        self._owners = set(pulls)
        runs = _runs(model)
        for owner, pulled in pulls.items():
            contained = runs[owner] is not owner
            after_forward = partial(self._after_forward, pulled, owner, contained)
            self._hooks.append(runs[owner].register_forward_hook(after_forward))
            for name, anchor, strength in () if contained else pulled:
                after_gradient = partial(self._after_gradient, owner, anchor, strength)
                self._hooks.append(getattr(owner, name).register_post_accumulate_grad_hook(after_gradient))

    def _counts(self, parameter: nn.Parameter) -> bool:
        return self.config.scope == "all" or len(getattr(parameter, "ds_shape", parameter.shape)) > 1

    def _normaliser(self, parameters: list[nn.Parameter]) -> float:
        """Return what a sum of squares over these parameters is multiplied by."""
        if self.config.form == "mean":
            return 1 / max(1, sum(map(_numel, parameters)))
        return 0.5 if self.config.form == "sum_half" else 1.0  # a sum, and the pull

    def _anchor(self, module: nn.Module, name: str, sharding: Sharding) -> str:
        anchor = f"l2_sp_{name}"
        sharding.companion(module, anchor, like=name)
        self._companions.append((sharding, module, anchor))
        return anchor

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Expect one contribution of every module that runs."""
        import torch

        self._waiting = set(self._owners)
        self._arriving = set()
        self._values = []
        self._ticket = torch.zeros((), requires_grad=True)

    def _after_forward(
        self, pulls: list[_Pull], owner: nn.Module, contained: bool, module: nn.Module, args: Any, output: Any
    ) -> Any:
        import torch

        if owner not in self._waiting or not torch.is_grad_enabled():
            return None
        self._waiting.discard(owner)
        weights = [getattr(owner, name) for name, _, _ in pulls]
        anchors = [None if anchor is None else getattr(owner, anchor) for _, anchor, _ in pulls]
        strengths = [strength for _, _, strength in pulls]
        for weight, anchor, strength in zip(weights, anchors, strengths, strict=True):
            self._values += [strength * offset.square_().sum() for offset in _offsets(weight, anchor)]
        if contained:  # not all of these weights need have a gradient of the loss to add to: an absent task's has none
            return _through_first_tensor(output, lambda x: _pull().apply(x, self, anchors, strengths, *weights))
        self._arriving.update(weights)
        return None

    def _after_gradient(self, owner: nn.Module, anchor: str | None, strength: float, weight: nn.Parameter) -> None:
        """Add the penalty's gradient to the one that has just been accumulated."""
        factor = None if self._ticket is None else self._ticket.grad
        if factor is None or weight.grad is None or weight not in self._arriving:
            return
        self._arriving.discard(weight)
        offsets = _offsets(weight, None if anchor is None else getattr(owner, anchor))
        factor = 2 * strength * factor
        for piece, offset in zip(_pieces(weight.grad), offsets, strict=True):
            piece.add_(offset.mul_(factor))

    def penalty(self, batch: Batch) -> torch.Tensor | None:
        """Return the sum over the modules that ran; its gradient reaches the weights in the modules' own backward."""
        import torch

        if not self._values:
            return None
        value = torch.stack(self._values).sum()
        self._waiting = set()
        # A leaf: autograd fills its .grad, the factor the objective gave this penalty, before any module's backward.
        self._ticket = value.detach().requires_grad_()
        return self._ticket

    def before_update(self, learning_rate: Callable[[nn.Parameter], float]) -> None:
        """Pull the weights of ``form="decoupled"``."""
        for module, pulls in self._pulled.items():
            for name, anchor, strength in pulls:
                weight = getattr(module, name)
                own = self._sharding.updated(weight)
                if own is None:
                    continue
                values, start = own
                rate = learning_rate(weight) * strength * self.config.weight
                if anchor is None:
                    values.mul_(1 - rate)
                else:
                    first = self._sharding.local(getattr(module, anchor))
                    first = first if first.numel() == values.numel() else first[start : start + values.numel()]
                    values.lerp_(first.to(values.dtype), rate)

    def detach(self, model: nn.Module) -> None:
        """Remove hooks and anchors."""
        for hook in self._hooks:
            hook.remove()
        for sharding, module, anchor in self._companions:
            sharding.remove_companion(module, anchor)
        self._clear()


def _runs(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return for each module the one that runs for it: itself, or for a mere container, as PEFT's are, the one around it."""
    from torch import nn

    found: dict[nn.Module, nn.Module] = {}
    for name, module in model.named_modules():
        contained = type(module).forward is nn.Module.forward
        around = model.get_submodule(name.rpartition(".")[0]) if name else module
        found[module] = found[around] if contained and name else module
    return found


def _trained(model: nn.Module, run: RunContext) -> Iterator[tuple[nn.Module, str, nn.Parameter, bool]]:
    """Yield every parameter that trains with its module, its name there, and whether it is pre-trained; tied ones once."""
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield module, name, parameter, run.is_pretrained(f"{module_name}.{name}" if module_name else name)


def _numel(parameter: nn.Parameter) -> int:
    """Return the number of elements, of all ranks together under ZeRO-3."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return views of a few rows each; elsewhere than on the CPU, of all."""
    from torch import split

    if tensor.device.type != "cpu" or tensor.numel() <= _PIECE:
        return (tensor,)
    return split(tensor, max(1, _PIECE * len(tensor) // tensor.numel()))


def _offsets(weight: torch.Tensor, anchor: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """Yield w - w0 of one piece of a weight after the other, all in the same memory, in float32 at least.

    Sums over a piece keep six digits; torch's norms and dot products of a whole weight lose three.
    """
    import torch

    pieces = _pieces(weight.detach())
    precision = torch.promote_types(weight.dtype, torch.float32)
    room = torch.empty_like(pieces[0], dtype=precision)
    firsts = itertools.repeat(None, len(pieces)) if anchor is None else _pieces(anchor)
    for piece, first in zip(pieces, firsts, strict=True):
        offset = room if piece.shape == room.shape else room[: len(piece)]
        if first is None:
            offset.copy_(piece)
        else:
            torch.sub(piece.to(precision), first.to(precision), out=offset)
        yield offset


def _through_first_tensor(output: Any, function: Any) -> Any:
    """Apply ``function`` to the tensor, or the first tensor inside a tuple or mapping, that a module returned."""
    import torch

    if isinstance(output, torch.Tensor):
        return function(output)
    if isinstance(output, tuple | list):
        index = next(i for i, item in enumerate(output) if isinstance(item, torch.Tensor))
        items = [*output[:index], function(output[index]), *output[index + 1 :]]
        return type(output)(items)
    key = next(key for key, item in output.items() if isinstance(item, torch.Tensor))
    output[key] = function(output[key])
    return output


@cache
def _pull() -> Any:
    import torch

    class Pull(torch.autograd.Function):
        """The identity on the output of a module around containers; in backward gives each weight factor * 2 strength (w - w0)."""

        @staticmethod
        def forward(
            ctx: Any, output: torch.Tensor, owner: L2SP, anchors: list[Any], strengths: list[float], *weights: Any
        ) -> torch.Tensor:
            ctx.owner, ctx.anchors, ctx.strengths, ctx.weights = owner, anchors, strengths, weights
            return output.view_as(output)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            factor = ctx.owner._ticket.grad
            if factor is None:
                return (grads[0], None, None, None, *(None for _ in ctx.weights))
            pulls: list[torch.Tensor] = []
            for weight, anchor, strength in zip(ctx.weights, ctx.anchors, ctx.strengths, strict=True):
                offset = weight.clone() if anchor is None else weight - anchor
                pulls.append(offset.mul_((2 * strength * factor).to(offset.dtype)))
            return (grads[0], None, None, None, *pulls)

    return Pull


@hookimpl
def tunery_regularizers() -> list[type[Regularizer]]:
    """Offer :class:`L2SP`."""
    return [L2SP]
