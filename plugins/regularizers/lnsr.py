"""LNSR, layer-wise noise stability regularization: what noise in a hidden state does to the layers above (Hua et al. 2021).

For one position, with ``h_b`` the hidden state after layer b and ``f^{b,r}`` the layers b+1 ... r,

    penalty = sum over counted layers r > b of ||f^{b,r}(h_b + eps) - f^{b,r}(h_b)||^2,     eps ~ N(0, sigma^2 I)

averaged over a row's positions that are no pads, then over the rows of a batch. ``|| ||^2`` sums over hidden features, or
averages with ``reduction="mean"``. Every counted layer has lambda_r = 1, so that ``weight`` is the paper's lambda; its term
r = b is ||eps||^2, which moves nothing, and is left out. Gradients reach both branches, and through ``h_b`` the layers below.
``f^{b,L}`` ends with the last layer, before the norm that some backbones have after it.

The model's own forward pass is the clean branch: hooks keep how each upper layer was called and the random state it began
with. The noisy branch runs those layers alone a second time, from the same random states: both drop the same elements.

The noise of a position depends on the seed, the optimizer step, the content of its row and how many positions of the row
come before it, pads not counted: not on how rows are split over ranks and micro-batches, nor on how they are padded. Each
position takes the window that its hash names out of a sequence of normal numbers, drawn anew for every step.

Shapes: B rows, T positions, D hidden features, N numbers that a row of the input consists of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, MinLen

from ...registry.context import Support
from ...registry.contracts import Regularizer
from ...registry.errors import CompatibilityError
from ...registry.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from ...registry.context import Batch, RunContext

_PRIME = 2**31 - 1
_WINDOWS = 2**16


class Lnsr(Regularizer):
    """Keep the upper layers from amplifying noise in a hidden state."""

    name = "lnsr"
    summary = "how much noise in one hidden state moves the layers above it"
    reference = "Hua et al. 2021, Noise Stability Regularization for Improving BERT Fine-tuning"
    supports = Support(needs_anatomy=True, several_tasks=True)
    off: ClassVar[dict[str, Any]] = {"sigma": 0.0}

    @dataclass(frozen=True, kw_only=True)
    class Config(Regularizer.Config):
        """Options of LNSR; the defaults are tunery's own.

        Attributes:
            layer: b, whose output gets the noise, as ``hidden_states`` counts: 0 for the embeddings, 1 for the first
                layer; default: half of the layers.
            sigma: standard deviation of the noise in each hidden feature; 0 leaves the regularizer out.
            relative: take sigma as a share of the hidden state's root mean square at each position, seen as a constant.
            layers: which layers above ``layer`` count: ``all``, ``last`` (the one above all), or their numbers.
            reduction: ``sum`` (the squared norm) or ``mean`` over hidden features.
        """

        layer: Annotated[int, Ge(0)] | None = None
        sigma: Annotated[float, Ge(0)] = 0.01
        relative: bool = False
        layers: Literal["all", "last"] | Annotated[tuple[Annotated[int, Ge(1)], ...], MinLen(1)] = "all"
        reduction: Literal["sum", "mean"] = "sum"

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._hooks: list[RemovableHandle] = []
        self._upper: dict[int, nn.Module] = {}
        self._counted: frozenset[int] = frozenset()
        self._calls: dict[int, _Call] | None = None
        self._seed = 0
        self._content = ""

    def attach(self, model: nn.Module, run: RunContext) -> None:
        """Hook the layers from the one above ``layer`` to the last that counts.

        Raises:
            CompatibilityError: ``layer`` or ``layers`` do not fit the model's depth, or none of its layers trains.
        """
        layers = {number: model.get_submodule(at.name) for number, at in enumerate(run.anatomy(model).layers, start=1)}
        first, self._counted = self._numbers(len(layers))
        self._upper = {number: layers[number] for number in range(first, max(self._counted) + 1)}
        below = [layers[number] for number in range(1, max(self._counted) + 1)]
        if not any(parameter.requires_grad for module in below for parameter in module.parameters()):
            raise CompatibilityError(
                "regularizer 'lnsr' finds no layer that trains", remedy="leave it out, or train layers as 'full' does"
            )
        self._seed = run.seed
        self._content = getattr(model, "main_input_name", "input_ids")
        if self.config.sigma:
            for number, module in self._upper.items():
                before = partial(self._before_layer, number)
                self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
                if number in self._counted:
                    self._hooks.append(module.register_forward_hook(partial(self._after_layer, number)))

    def _numbers(self, depth: int) -> tuple[int, frozenset[int]]:
        """Return the first layer above the noise, and the layers that count."""
        layer, layers = self.config.layer, self.config.layers
        first = (depth // 2 if layer is None else layer) + 1
        if first > depth:
            raise CompatibilityError(
                f"regularizer 'lnsr' has no layer above layer={layer} in a model of {depth}",
                remedy=f"take a layer from 0 to {depth - 1}",
            )
        upper = range(first, depth + 1)
        if isinstance(layers, str):
            return first, frozenset(upper if layers == "all" else upper[-1:])
        if outside := sorted(set(layers) - set(upper)):
            raise CompatibilityError(
                f"regularizer 'lnsr' cannot count layers {', '.join(map(str, outside))}", known=map(str, upper)
            )
        return first, frozenset(layers)

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Keep the first call of every upper layer."""
        self._calls = {}

    def _before_layer(self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import torch

        if self._calls is None or number in self._calls or not torch.is_grad_enabled():
            return
        if any(hasattr(value, "get_seq_length") for value in (*args, *kwargs.values())):
            raise CompatibilityError(
                "regularizer 'lnsr' cannot run layers twice on one key-value cache", remedy="set use_cache=False"
            )
        self._calls[number] = _Call.now(args, kwargs)

    def _after_layer(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        call = None if self._calls is None else self._calls.get(number)
        if call is not None and call.output is None:
            call.output = _hidden(output)

    def penalty(self, batch: Batch) -> torch.Tensor | None:
        """Run the upper layers again on the noisy hidden state and return how far the counted ones moved.

        Raises:
            CompatibilityError: no hidden states with gradients were seen, or the batch does not say what its rows are.
        """
        import torch

        calls, self._calls = self._calls, None
        if calls is None or not self.config.sigma:
            return None
        if calls.keys() != self._upper.keys():
            raise CompatibilityError(
                "regularizer 'lnsr' saw no forward pass with gradients through every layer above the noise",
                remedy="with activation checkpointing, use_reentrant=False",
            )
        h_BTD = calls[min(calls)].hidden
        valid_BT = _valid(batch.inputs, h_BTD)
        noisy_BTD = h_BTD + self._noise(batch, h_BTD, valid_BT)
        moved: list[torch.Tensor] = []
        devices = {call.hidden.device for call in calls.values()} - {torch.device("cpu")}
        with torch.random.fork_rng(devices, device_type=h_BTD.device.type):
            for number, module in self._upper.items():
                call = calls[number]
                noisy_BTD = call.again(module, noisy_BTD)
                if number in self._counted:
                    moved.append(self._reduced(noisy_BTD - call.output, valid_BT))
        return torch.stack(moved).sum()

    def _reduced(self, difference_BTD: torch.Tensor, valid_BT: torch.Tensor) -> torch.Tensor:
        square_BTD = _precise(difference_BTD).square()
        square_BT = square_BTD.sum(-1) if self.config.reduction == "sum" else square_BTD.mean(-1)
        # Row by row: the objective weighs micro-batches by their rows.
        return (square_BT.masked_fill(~valid_BT, 0).sum(1) / valid_BT.sum(1).clamp(min=1)).mean()

    def _noise(self, batch: Batch, h_BTD: torch.Tensor, valid_BT: torch.Tensor) -> torch.Tensor:
        content = batch.inputs.get(self._content)
        if content is None or content.shape[0] != h_BTD.shape[0]:
            raise CompatibilityError(
                f"regularizer 'lnsr' finds no {self._content} with {h_BTD.shape[0]} rows in a batch of "
                f"{', '.join(batch.inputs)}"
            )
        window_BT = _windows(content.to(h_BTD.device), valid_BT)
        seed = (self._seed * 1_000_003 + batch.step) % 2**63
        eps_BTD = self.config.sigma * _normal(window_BT, h_BTD.shape[-1], seed)
        if self.config.relative:
            eps_BTD = eps_BTD * _precise(h_BTD.detach()).square().mean(-1, keepdim=True).sqrt()
        return eps_BTD.to(h_BTD.dtype)

    def detach(self, model: nn.Module) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._upper, self._calls = [], {}, None


@dataclass
class _Call:
    """One call of a layer in the clean branch, and all it takes to repeat it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    host_random: torch.Tensor
    device_random: tuple[list[int], list[torch.Tensor]]
    autocast: tuple[str, torch.dtype, bool]
    output: Any = None

    @classmethod
    def now(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        import torch
        from torch.utils.checkpoint import get_device_states

        hidden = args[0] if args else kwargs["hidden_states"]
        kind = hidden.device.type
        autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        return cls(args, kwargs, torch.get_rng_state(), get_device_states(hidden), autocast)

    @property
    def hidden(self) -> torch.Tensor:
        """The hidden state that went in."""
        return self.args[0] if self.args else self.kwargs["hidden_states"]  # type: ignore[no-any-return]

    def again(self, module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Repeat the call with another hidden state: same masks and positions, same dropout, same precision."""
        import torch
        from torch.utils.checkpoint import set_device_states

        torch.set_rng_state(self.host_random)
        set_device_states(*self.device_random, device_type=hidden.device.type)
        with torch.autocast(*self.autocast):
            if self.args:
                return _hidden(module(hidden, *self.args[1:], **self.kwargs))
            return _hidden(module(**{**self.kwargs, "hidden_states": hidden}))


def _precise(values: torch.Tensor) -> torch.Tensor:
    import torch

    return values.to(torch.promote_types(values.dtype, torch.float32))


def _hidden(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


def _valid(inputs: Mapping[str, Any], h_BTD: torch.Tensor) -> torch.Tensor:
    """Return (B, T), true where a position is no pad: everywhere in a batch without ``attention_mask``."""
    import torch

    mask = inputs.get("attention_mask")
    if mask is None:
        return torch.ones(h_BTD.shape[:2], dtype=torch.bool, device=h_BTD.device)
    if mask.shape != h_BTD.shape[:2]:
        raise CompatibilityError(
            f"regularizer 'lnsr' cannot tell pads: attention_mask {tuple(mask.shape)}, "
            f"hidden states {tuple(h_BTD.shape[:2])}"
        )
    return mask.to(h_BTD.device).bool()  # type: ignore[no-any-return]


def _windows(content: torch.Tensor, valid_BT: torch.Tensor) -> torch.Tensor:
    """Return (B, T), the window of the normal numbers that each position takes, from 0 to ``_WINDOWS`` - 1."""
    import torch

    content_BN = content.flatten(1)
    # Only what has the mask's shape can have its pads: token ids do, pixels do not.
    valid_BN = valid_BT if content.shape == valid_BT.shape else torch.ones_like(content_BN, dtype=torch.bool)
    if content.is_floating_point():
        content_BN = content_BN.float().contiguous().view(torch.int32)
    number_BN = (content_BN.long() % _PRIME + 1) * valid_BN
    row_B = (number_BN * _scrambled(_order(valid_BN)) % _PRIME).sum(1) % _PRIME
    return _scrambled((row_B[:, None] + _scrambled(_order(valid_BT))) % _PRIME) % _WINDOWS


def _order(valid: torch.Tensor) -> torch.Tensor:
    """Return how many valid positions of its row come before each."""
    return valid.cumsum(1) - valid.long()


def _scrambled(values: torch.Tensor) -> torch.Tensor:
    """Permute the integers modulo ``_PRIME``: x -> (a x + c)^5, one to one since 5 has no factor of ``_PRIME`` - 1."""
    x = (values * 48271 + 12345) % _PRIME
    square = x * x % _PRIME
    return square * square % _PRIME * x % _PRIME


def _normal(window_BT: torch.Tensor, width: int, seed: int) -> torch.Tensor:
    """Return (B, T, ``width``) of standard normal numbers; equal windows have equal ones, others are uncorrelated."""
    import torch

    # Drawn on the host, which has the same numbers for every device; apart from the generators that drop-out uses.
    numbers = torch.randn(_WINDOWS - 1 + width, generator=torch.Generator().manual_seed(seed))
    return numbers.to(window_BT.device).unfold(0, width, 1)[window_BT]


@hookimpl
def tunery_regularizers() -> list[type[Regularizer]]:
    """Offer :class:`Lnsr`."""
    return [Lnsr]
