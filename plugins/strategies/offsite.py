"""Offsite-Tuning: adapter layers at both ends of the model, and between them an emulator of few layers (Xiao et al. 2023).

The emulator keeps uniformly chosen layers of those in between, frozen, and may learn to give what they all give (section 3.2).
Only the adapter layers train, by LoRA or whole, with the fresh head; plugged into the model they stand around all of its
layers again. In a federation this is FedOT, the baseline of Federated Proxy Fine-Tuning.

The stand-in's layers are numbered through; what is exported has the numbers of the model. While a model is a stand-in its
config says how many layers it has. The layers taken out stay in host memory until the full model
is first needed (:meth:`Offsite.whole`, :meth:`Offsite.export`), then where the stand-in is.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len, Lt

from ...registry.context import Support
from ...registry.contracts import Strategy
from ...registry.errors import CompatibilityError
from ...registry.hookspecs import hookimpl
from ...registry.proxy import ProxyStrategy
from ..adapters import add_lora, attention_projections, export_adapter, plug_adapter, rename_modules
from ..distillation import Schedule, follow, hidden_states, modes_kept, state_distance
from ..readings import valid_positions
from ..texts import DistillationText, TextBatches

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ...registry.context import RunContext

_WRAPPED = "base_model.model."


class Offsite(ProxyStrategy):
    """Train the layers at both ends of a model that has an emulator for a middle; the artefact is an adapter for the model."""

    name = "offsite"
    summary = "train the layers at both ends around a shortened middle, plug them into the model itself"
    reference = "Xiao et al. 2023, Offsite-Tuning: Transfer Learning without Full Model, section 3"
    supports = Support(needs_anatomy=True)
    identity_start = False

    @dataclass(frozen=True, kw_only=True)
    class Config(DistillationText):
        """Options of Offsite-Tuning.

        Attributes:
            adapter_layers: how many layers train at the input's and at the output's end (the paper's 2 and 2).
            emulator_layers: how many of the layers in between the emulator keeps; the federated paper keeps 3 of 8.
            tune: lora: LoRA on the attention of the adapter layers; layers: all of their parameters.
            r: rank of the LoRA updates on query, key, value and attention output; 24 on four layers has as many parameters
                as 8 on twelve.
            alpha: the update is scaled by alpha / r (our choice: the scale of ``proxy_sub_fm``).
            dropout: probability of zeroing an element of an adapter's input, in training.
            distill_steps: steps in which the emulator learns to give what all layers give, on ``data``, or on the server's
                rows, or with one owner on the run's own training inputs, a global batch a step; 0 leaves it out.
            learning_rate: peak learning rate of those steps (the paper's code).
            weight_decay: AdamW's, there (the paper's code).
            warmup_ratio: share of those steps with rising learning rate (our choice; the code warms up for 2000 steps).
            max_grad_norm: those steps clip the gradient to it (our choice).
        """

        adapter_layers: Annotated[tuple[Annotated[int, Ge(0)], ...], Len(2, 2)] = (2, 2)
        emulator_layers: Annotated[int, Ge(0)] = 3
        tune: Literal["lora", "layers"] = "lora"
        r: Annotated[int, Ge(1)] = 24
        alpha: Annotated[float, Gt(0)] = 144
        dropout: Annotated[float, Ge(0), Lt(1)] = 0.1
        learning_rate: Annotated[float, Gt(0)] = 1e-4
        weight_decay: Annotated[float, Ge(0)] = 0.1
        warmup_ratio: Annotated[float, Ge(0), Le(1)] = 0.06
        max_grad_norm: Annotated[float, Gt(0)] = 1.0

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.distill_steps and not self.emulator_layers:
                raise ValueError("option distill_steps: an emulator of no layers has nothing to learn; set it to 0")

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._stack = ""  # the name of the list of layers in the plain model
        self._between: list[nn.Module] = []  # the layers that the emulator stands for
        self._kinds: list[str] | None = None  # of all layers, where the config says them

    def prepare(self, model: nn.Module, run: RunContext) -> nn.Module:
        """Put the emulator in the place of the layers in between, and return a ``PeftModel`` whose ends train.

        Raises:
            AnatomyError: the architecture is unknown.
            CompatibilityError: fewer layers than asked for, or none that train.
        """
        self._stack = run.anatomy(model).layers[0].name.rpartition(".")[0]
        stack: Any = model.get_submodule(self._stack)
        layers = list(stack)
        start, stop = self._ends(len(layers))
        kept = [start + position for position in choose_uniformly(stop - start, self.config.emulator_layers)]
        self._between = layers[start:stop]
        self._kinds = getattr(_config(model), "layer_types", None)
        emulator = []
        for number in kept:
            with run.sharding.gathered(layers[number].parameters()):
                emulator.append(copy.deepcopy(layers[number]).requires_grad_(False))
        self._put(model, [*range(start), *kept, *range(stop, len(layers))], emulator)

        ends = self._adapted(run.anatomy(model).layers)
        config = self.config
        return add_lora(
            model,
            run,
            attention_projections(ends) if config.tune == "lora" else (),
            r=config.r,
            alpha=config.alpha,
            dropout=config.dropout,
            modules_to_save=[layer.name for layer in ends] if config.tune == "layers" else (),
        )

    def _ends(self, count: int) -> tuple[int, int]:
        """Return where the layers in between begin and end."""
        (first, last), asked = self.config.adapter_layers, f"strategy {self.name!r}"
        if not first + last:
            raise CompatibilityError(f"{asked} has no adapter layers to train", remedy="adapter_layers=[2,2]")
        if first + last + self.config.emulator_layers > count:
            raise CompatibilityError(
                f"{asked} asks for {first} + {self.config.emulator_layers} + {last} layers of {count}",
                remedy="lower adapter_layers or emulator_layers",
            )
        return first, count - last

    def _adapted(self, layers: Sequence[Any]) -> list[Any]:
        first, last = self.config.adapter_layers
        return [*layers[:first], *layers[len(layers) - last :]]

    def _put(self, model: nn.Module, numbers: Sequence[int], between: Sequence[nn.Module]) -> list[nn.Module]:
        """Put ``between`` between the ends; ``numbers`` are those of all layers in the full model. Return what was there."""
        first, last = self.config.adapter_layers
        stack: Any = model.get_submodule(self._prefix(model) + self._stack)
        layers = list(stack)
        had = layers[first : len(layers) - last]
        there = [*layers[:first], *between, *layers[len(layers) - last :]]
        del stack[:]
        stack.extend(there)
        for number, layer in enumerate(there):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):  # where the cache of a decoder keeps the layer's keys and values
                    module.layer_idx = number
        config = _config(model)
        config.num_hidden_layers = len(there)
        if self._kinds is not None:
            config.layer_types = [self._kinds[number] for number in numbers]
        return had

    @staticmethod
    def _prefix(model: nn.Module) -> str:
        return _WRAPPED if hasattr(model, "peft_config") else ""

    # ---- the full model

    def _renamed(self, name: str) -> str:
        """Return what a module or parameter of the stand-in is called in the full model."""
        first, emulated = self.config.adapter_layers[0], self.config.emulator_layers

        def number(match: re.Match[str]) -> str:
            layer = int(match.group(2))
            return match.group(1) + str(layer if layer < first else layer - emulated + len(self._between))

        return re.sub(rf"(\b{re.escape(self._stack)}\.)(\d+)\b", number, name)

    def _targets(self, layers: Sequence[Any]) -> list[str] | None:
        """Return what LoRA adapts, by its name in the plain model; ``None`` where it adapts nothing."""
        if self.config.tune == "layers":
            return None
        return [name.removeprefix(_WRAPPED) for name in attention_projections(self._adapted(layers))]

    def plug_in(self, model: nn.Module, proxy: nn.Module, run: RunContext) -> nn.Module:
        """Return the full model as a ``PeftModel`` with the stand-in's adapter layers and head."""
        return plug_adapter(model, proxy, self._renamed, self._targets(run.anatomy(model).layers))

    @contextmanager
    def whole(self, proxy: nn.Module, run: RunContext) -> Iterator[nn.Module]:
        """Inside, all layers are between the ends, as the base model has them."""
        first, last = self.config.adapter_layers
        emulator = self._fill(proxy)
        try:
            yield proxy
        finally:
            count = first + len(self._between) + last
            kept = [first + n for n in choose_uniformly(len(self._between), self.config.emulator_layers)]
            self._put(proxy, [*range(first), *kept, *range(count - last, count)], emulator)

    def _fill(self, proxy: nn.Module) -> list[nn.Module]:
        like = next(proxy.get_submodule(self._prefix(proxy) + self._stack).parameters())
        between = [layer.to(like.device, like.dtype).train(proxy.training) for layer in self._between]
        for layer in between:
            layer.requires_grad_(False)
        return self._put(proxy, range(sum(self.config.adapter_layers) + len(between)), between)

    def export(self, model: nn.Module, run: RunContext, *, merge: bool = False) -> nn.Module:
        """Return the full model: a ``PeftModel`` with the adapter layers, or with ``merge`` the plain model."""
        self._fill(model)
        adapted: Any = model
        config = adapted.peft_config[adapted.active_adapter]
        rename_modules(config, self._renamed, self._targets(run.anatomy(model).layers))
        return export_adapter(model, merge=merge)

    # ---- the emulator

    def stored(self, model: nn.Module, run: RunContext) -> Sequence[str]:
        """Return the names of the emulator's parameters, where it learns."""
        if not self.config.distill_steps:
            return ()
        prefix = self._prefix(model) + self._stack
        return [f"{prefix}.{n}.{name}" for n, layer in self._emulator(model) for name, _ in layer.named_parameters()]

    def _emulator(self, proxy: nn.Module) -> list[tuple[int, nn.Module]]:
        stack: Any = proxy.get_submodule(self._prefix(proxy) + self._stack)
        first = self.config.adapter_layers[0]
        return [(number, stack[number]) for number in range(first, first + self.config.emulator_layers)]

    def distill(
        self, model: nn.Module | None, proxy: nn.Module, batches: Iterable[Mapping[str, Any]], run: RunContext
    ) -> Mapping[str, float]:
        """Minimise mean(((T - S) / RMS(T))^2), S what the emulator gives and T what all layers give; return steps and loss.

        On ``data``, where it is named.
        """
        import torch

        config, first = self.config, self.config.adapter_layers[0]
        if not config.distill_steps:
            return {}
        if config.data is not None:
            batches = TextBatches(config, proxy, run.seed, f"strategy {self.name!r}")
        full = proxy if model is None else model
        mine = f"{self._prefix(proxy)}{self._stack}.{first + config.emulator_layers - 1}"
        theirs = f"{self._prefix(full)}{self._stack}.{first + len(self._between) - 1}"

        def taught(batch: Mapping[str, Any]) -> torch.Tensor:
            with torch.no_grad(), modes_kept(full):
                if model is not None:
                    return hidden_states(full.eval(), [theirs], batch)[0]
                with self.whole(proxy, run):
                    return hidden_states(full.eval(), [theirs], batch)[0]

        def loss_of(batch: Mapping[str, Any]) -> torch.Tensor:
            aim = taught(batch)
            state = hidden_states(proxy.train(), [mine], batch)[0]
            return state_distance(state, aim, valid_positions(batch, state), "normalised")

        parameters = [parameter for _, layer in self._emulator(proxy) for parameter in layer.parameters()]
        schedule = Schedule(
            steps=config.distill_steps,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            warmup_ratio=config.warmup_ratio,
            max_grad_norm=config.max_grad_norm,
            seed=run.seed,
        )
        with modes_kept(proxy), run.sharding.gathered([*proxy.parameters(), *self._all_between()]):
            proxy.requires_grad_(False)
            for parameter in parameters:
                parameter.requires_grad_(True)
            return follow(parameters, loss_of, batches, schedule)

    def _all_between(self) -> list[nn.Parameter]:
        return [parameter for layer in self._between for parameter in layer.parameters()]


def choose_uniformly(count: int, keep: int) -> list[int]:
    """Return ``keep`` of ``count`` positions, evenly spread with both ends: round(i (count - 1) / (keep - 1)).

    Halves are rounded to the even number, as the paper's code does. One position is the middle one, where that code divides
    by zero.
    """
    if keep == 1:
        return [(count - 1) // 2]
    return [round(number * (count - 1) / (keep - 1)) for number in range(keep)]


def _config(model: Any) -> Any:
    return model.get_base_model().config if hasattr(model, "peft_config") else model.config


@hookimpl
def tunery_strategies() -> list[type[Strategy]]:
    """Offer :class:`Offsite`."""
    return [Offsite]
