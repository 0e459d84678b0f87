"""L2-SP: (alpha/2) sum (w - w0)^2 over pre-trained weights + (beta/2) sum w^2 over new ones (Li et al. 2018, eq. 2).

Others write the same penalty without the half, or as a mean over the weights: ``form``. With w = (1, 2), w0 = 0 and one new
weight 3, alpha = 0.1 and beta = 0.01 give 0.295 in the authors' form; alpha = 1 and beta = 0 give 2.5 as a mean, 5 as a sum.

``form="decoupled"`` is no penalty but a pull beside the optimizer's step, w -= learning_rate alpha (w - w0), as AdamW's decay
is to zero (PriorWD, Zhang et al. 2021). Adam scales a penalty's gradient like any other, and a pull not: two methods.

The penalty's value is computed inside each module's forward, and its gradient, a multiple of w - w0, inside each module's
backward: there the weights are whole also under ZeRO-3, and nothing of a big one's size is kept in between. Nor is it made on
the way: memory of a big weight's size is mapped afresh on every step, which on the CPU costs ten times the arithmetic. So w - w0
comes in pieces, and is added in place to the gradient of the loss as soon as that is there. A process alone, which has all
weights and gradients at hand, goes through them once after forward and once after backward: between the modules' own work
every look at one finds the caches cold. Not so where a layer-wise optimizer takes each gradient as soon as it is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge

from ...registry.context import Support
from ...registry.contracts import Regularizer
from ...registry.errors import CompatibilityError
from ...registry.hookspecs import hookimpl
from ..pull import Pull

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from ...registry.context import Batch, RunContext


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
        self._pulls: dict[nn.Module, list[Pull]] = {}
        self._waiting: set[nn.Module] = set()
        self._ran: dict[Pull, None] = {}
        self._values: list[torch.Tensor] = []
        self._ticket: torch.Tensor | None = None
        self._at_once = False

    def attach(self, model: nn.Module, run: RunContext) -> None:
        """Keep a frozen copy of every trainable pre-trained parameter beside it, sharded as it is.

        Raises:
            CompatibilityError: nothing trains that has a strength; or the optimizer steps inside backward, where a decoupled
                pull has no moment of its own.
        """
        import torch

        layer_wise = run.optimizer.endswith("layerwise")
        if layer_wise and self.config.form == "decoupled":
            raise CompatibilityError(
                f"regularizer 'l2_sp' with form=decoupled acts right before a step, and {run.optimizer!r} has one a parameter",
                remedy="choose another form or an optimizer that is not layer-wise",
            )
        trained = [item for item in _trained(model, run) if self._counts(item[2])]
        factors = {
            anchored: strength * self._normaliser([own for *_, own, kind in trained if kind is anchored])
            for anchored, strength in ((True, self.config.alpha), (False, self.config.beta))
        }
        self._sharding = run.sharding
        for module, name, _, anchored in trained:
            if factors[anchored]:
                anchor = self._anchor(module, name) if anchored else None
                self._pulls.setdefault(module, []).append(Pull(module, name, anchor, factors[anchored]))
        if not self._pulls:
            raise CompatibilityError(
                f"regularizer 'l2_sp' would do nothing: {len(trained)} parameters train, "
                f"{sum(anchored for *_, anchored in trained)} of them pre-trained, "
                f"with alpha={self.config.alpha:g} on these and beta={self.config.beta:g} on the others",
                remedy="leave it out, or give a strength to what trains",
            )
        if self.config.form == "decoupled":
            return
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._at_once = not distributed and not layer_wise
        runs = _runs(model)
        for owner, pulls in self._pulls.items():
            contained = runs[owner] is not owner
            after_forward = partial(self._after_forward, owner, contained)
            self._hooks.append(runs[owner].register_forward_hook(after_forward))
            for pull in () if contained or self._at_once else pulls:
                after_gradient = partial(self._after_gradient, pull)
                self._hooks.append(pull.weight.register_post_accumulate_grad_hook(after_gradient))  # type: ignore[no-untyped-call]

    def _counts(self, parameter: nn.Parameter) -> bool:
        return self.config.scope == "all" or len(getattr(parameter, "ds_shape", parameter.shape)) > 1

    def _normaliser(self, parameters: list[nn.Parameter]) -> float:
        """Return what a sum of squares over these parameters is multiplied by."""
        if self.config.form == "mean":
            return 1 / max(1, sum(map(_numel, parameters)))
        return 0.5 if self.config.form == "sum_half" else 1.0  # a sum, and the pull

    def _anchor(self, module: nn.Module, name: str) -> str:
        anchor = f"l2_sp_{name}"
        self._sharding.companion(module, anchor, like=name)
        return anchor

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Expect one contribution of every module that runs."""
        import torch

        self._waiting = set(self._pulls)
        self._ran = {}
        self._values = []
        self._ticket = torch.zeros((), requires_grad=True)

    def _after_forward(self, owner: nn.Module, contained: bool, module: nn.Module, args: Any, output: Any) -> Any:
        import torch

        if owner not in self._waiting or not torch.is_grad_enabled():
            return None
        self._waiting.discard(owner)
        pulls = self._pulls[owner]
        if not contained:
            self._ran |= dict.fromkeys(pulls)
        if contained or not self._at_once:
            self._values += [pull.value() for pull in pulls]
        if contained:  # not all of these weights need have a gradient of the loss to add to: an absent task's has none
            weights = [pull.weight for pull in pulls]
            return _through_first_tensor(output, lambda x: _pulled().apply(x, self, pulls, *weights))
        return None

    def _after_gradient(self, pull: Pull, weight: nn.Parameter) -> None:
        """Add the penalty's gradient to the one that has just been accumulated, the first time that it is."""
        if self._factor is not None and pull in self._ran:
            del self._ran[pull]
            pull.add_gradient(self._factor)

    @property
    def _factor(self) -> torch.Tensor | None:
        """What the objective multiplied the penalty by, once a backward pass has begun."""
        return None if self._ticket is None else self._ticket.grad

    def penalty(self, batch: Batch) -> torch.Tensor | None:
        """Return the sum over the modules that ran; its gradient reaches the weights in the modules' own backward."""
        import torch

        self._waiting = set()
        if self._at_once:
            self._values += [pull.value() for pull in self._ran]
        if not self._values:
            return None
        # A leaf: autograd fills its .grad, the factor the objective gave this penalty, before any module's backward.
        self._ticket = torch.stack(self._values).sum().detach().requires_grad_()
        if self._at_once:
            self._ticket.register_post_accumulate_grad_hook(self._after_backward)  # type: ignore[no-untyped-call]
        return self._ticket

    def _after_backward(self, ticket: torch.Tensor) -> None:
        """Have the penalty's gradient added to all others once these are there."""
        import torch

        pulls = self._ran

        def add_all() -> None:
            for pull in pulls:
                pull.add_gradient(ticket.grad)

        torch.autograd.Variable._execution_engine.queue_callback(add_all)

    def before_update(self, learning_rate: Callable[[nn.Parameter], float]) -> None:
        """Pull the weights of ``form="decoupled"``."""
        if self.config.form != "decoupled":
            return
        for pull in itertools.chain.from_iterable(self._pulls.values()):
            own = self._sharding.updated(pull.weight)
            if own is None:
                continue
            values, start = own
            rate = learning_rate(pull.weight) * pull.strength * self.config.weight
            if pull.first is None:
                values.mul_(1 - rate)
            else:
                first = self._sharding.local(pull.first)
                first = first if first.numel() == values.numel() else first[start : start + values.numel()]
                values.lerp_(first.to(values.dtype), rate)

    def detach(self, model: nn.Module) -> None:
        """Remove hooks and anchors."""
        for hook in self._hooks:
            hook.remove()
        for pull in itertools.chain.from_iterable(self._pulls.values()):
            if pull.anchor is not None:
                self._sharding.remove_companion(pull.owner, pull.anchor)
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
def _pulled() -> Any:
    import torch

    class Pulled(torch.autograd.Function):
        """The identity on the output of a module around containers, whose backward gives their weights the gradient."""

        @staticmethod
        def forward(ctx: Any, output: torch.Tensor, owner: L2SP, pulls: list[Pull], *weights: Any) -> torch.Tensor:
            ctx.owner, ctx.pulls = owner, pulls
            return output.view_as(output)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            factor = ctx.owner._factor
            return grads[0], None, None, *(None if factor is None else pull.gradient(factor) for pull in ctx.pulls)

    return Pulled


@hookimpl
def tunery_regularizers() -> list[type[Regularizer]]:
    """Offer :class:`L2SP`."""
    return [L2SP]
