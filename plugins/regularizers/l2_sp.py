"""L2-SP: (alpha/2) sum (w - w0)^2 over pre-trained weights + (beta/2) sum w^2 over new ones (Li et al. 2018, eq. 2).

Others write the same penalty without the half, or as a mean over the weights: ``form``. With w = (1, 2), w0 = 0 and one new
weight 3, alpha = 0.1 and beta = 0.01 give 0.295 in the authors' form; alpha = 1 and beta = 0 give 2.5 as a mean, 5 as a sum.

``form="decoupled"`` is no penalty but a pull beside the optimizer's step, w -= learning_rate alpha (w - w0), as AdamW's decay
is to zero (PriorWD, Zhang et al. 2021). Adam scales a penalty's gradient like any other, and a pull not: two methods.

The penalty's value is computed inside each module's forward, and its gradient, a multiple of w - w0, inside each module's
backward: there the weights are whole also under ZeRO-3, and nothing of their size is kept in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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

    # of each module: name of the weight, of its anchor, and strength
    _Pulls = dict[nn.Module, list[tuple[str, str | None, float]]]

_PIECE = 2**18  # elements: a megabyte stays in a core's cache


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
        self._pulled: _Pulls = {}
        self._companions: list[tuple[Sharding, nn.Module, str]] = []
        self._waiting: set[nn.Module] = set()
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
        pulls: _Pulls = {}
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
        self._hooks = [
            runs[owner].register_forward_hook(partial(self._after_forward, pulled, owner))
            for owner, pulled in pulls.items()
        ]

    def _counts(self, parameter: nn.Parameter) -> bool:
        return self.config.scope == "all" or len(getattr(parameter, "ds_shape", parameter.shape)) > 1

    def _normaliser(self, parameters: list[nn.Parameter]) -> float:
        """Return what a sum of squares over these parameters is multiplied by."""
        if self.config.form == "mean":
            return 1 / max(1, sum(int(getattr(p, "ds_numel", p.numel())) for p in parameters))
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
        self._values = []
        self._ticket = torch.zeros((), requires_grad=True)

    def _after_forward(
        self, pulls: list[tuple[str, str | None, float]], owner: nn.Module, module: nn.Module, args: Any, output: Any
    ) -> Any:
        import torch

        if owner not in self._waiting or not torch.is_grad_enabled():
            return None
        self._waiting.discard(owner)
        weights = [getattr(owner, name) for name, _, _ in pulls]
        anchors = [None if anchor is None else getattr(owner, anchor) for _, anchor, _ in pulls]
        strengths = [strength for _, _, strength in pulls]
        with torch.no_grad():
            for weight, anchor, strength in zip(weights, anchors, strengths, strict=True):
                self._values += [strength * part for part in _squares(weight, anchor)]
        return _through_first_tensor(output, lambda x: _pull().apply(x, self, anchors, strengths, *weights))

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


def _squares(weight: torch.Tensor, anchor: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """Yield sums of (w - w0)^2 over pieces of a weight.

    In pieces because memory of a big weight's size is mapped afresh on every step, which on the CPU costs ten times the
    arithmetic. Not by a norm or dot product: torch's sum long float32 vectors one after the other, and lose three digits.
    """
    from torch import split
    from torch.nn.functional import mse_loss

    pieces = split(weight.reshape(-1), _PIECE)
    if anchor is None:
        yield from (piece.float().square().sum() for piece in pieces)
    else:
        anchors = split(anchor.reshape(-1), _PIECE)
        yield from (mse_loss(w.float(), w0.float(), reduction="sum") for w, w0 in zip(pieces, anchors, strict=True))


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
        """The identity on a module's output; in backward adds factor * 2 strength (w - w0) to each weight's gradient."""

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
