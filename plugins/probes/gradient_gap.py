"""How far a stand-in's gradient is from the model's: the conditions of theorem 1 of Federated Proxy Fine-Tuning, measured.

f is the model's loss with the stand-in's adapter and head in it, f' the stand-in's, both over the evaluation set, in eval
mode, as functions of what trains; delta = grad f' - grad f. Gradient descent on f' takes f along if

    ||delta||^2 < 1/2 ||grad f||^2                                       (9)
    eta sum_i ||delta_i||^2 <= sum_i <delta_i, x_i - x*>                 (10)

and theorem 2 bounds ||delta||^2 by what alignment lowers. A ratio that grows says when to align again. Two things to know of
the paper: (9) has grad f where its proof (18) ends with grad f', so both ratios are given; and (16) drops 2 <grad f, delta>,
which the cosine shows. (10) asks for the optimum x*, which only a finished run knows: ``optimum``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from ...registry.context import Measurement, Support
from ...registry.contracts import Probe
from ...registry.errors import CompatibilityError, ConfigError
from ...registry.hookspecs import hookimpl
from ..landscape import counted

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ...registry.context import Subject

_LAYER = re.compile(r"\.(\d+)\.")


class GradientGap(Probe):
    """Measure ||grad f' - grad f||^2 against ||grad f||^2, f' the loss of a stand-in and f that of the model it stands for."""

    name = "gradient_gap"
    summary = "distance between the gradients of a stand-in and of the model it stands for"
    reference = "Peng et al. 2024, FedPFT: Federated Proxy Fine-Tuning of Foundation Models, theorems 1 and 2"
    # ZeRO-3's modules cannot be given other parameters meanwhile.
    supports = Support(zero_stages=frozenset({0, 1, 2}), needs_stand_in=True)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of the gradient gap.

        Attributes:
            batches: at most how many of the evaluation set's batches each rank takes; default: all.
            optimum: folder of a finished run or adapter of the same stand-in, whose weights are taken for x* in (10).
        """

        batches: Annotated[int, Ge(1)] | None = None
        optimum: str | None = None

    config: Config

    def measure(self, subject: Subject) -> Iterable[Measurement]:
        """Return ``gap`` ||delta||^2, ``gradient`` ||grad f||^2, ``proxy_gradient`` ||grad f'||^2, ratios and ``cosine``.

        ``ratio`` is gap / gradient, in total and per layer of the stand-in, and ``proxy_ratio`` gap / proxy_gradient: (9)
        holds below 1/2. With ``optimum`` also ``descent``, <delta, x - x*>, and ``learning_rate_bound``, up to which this
        moment's terms meet (10).

        Raises:
            CompatibilityError: no stand-in is trained, or there is nothing to evaluate it on.
            ConfigError: ``optimum`` is no adapter of this stand-in.
        """
        import torch

        model = subject.model
        if subject.whole is None:
            raise CompatibilityError(
                f"probe {self.name!r} compares a stand-in with its model, and this strategy trains the model itself",
                remedy="use a strategy that trains a stand-in",
            )
        if subject.batches is None:
            raise CompatibilityError(f"probe {self.name!r} needs an evaluation set", remedy="give one, with labels")
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        parameters = [parameter for _, parameter in trained]
        ours = self._gradient(model, parameters, subject)
        with subject.whole() as full:
            theirs = self._gradient(full, parameters, subject)
        gaps = [mine - aim for mine, aim in zip(ours, theirs, strict=True)]

        gap, gradient, proxy_gradient = (_squared(values) for values in (gaps, theirs, ours))
        product = sum(float((mine * aim).sum()) for mine, aim in zip(ours, theirs, strict=True))
        yield Measurement(name="gap", value=gap)
        yield Measurement(name="gradient", value=gradient)
        yield Measurement(name="proxy_gradient", value=proxy_gradient)
        yield Measurement(name="ratio", value=_over(gap, gradient))
        yield Measurement(name="proxy_ratio", value=_over(gap, proxy_gradient))
        yield Measurement(name="cosine", value=_over(product, (gradient * proxy_gradient) ** 0.5))
        layers = [int(match.group(1)) if (match := _LAYER.search(name)) else -1 for name, _ in trained]
        for layer in sorted(set(layers) - {-1}):
            at = [place for place, number in enumerate(layers) if number == layer]
            value = _over(_squared([gaps[place] for place in at]), _squared([theirs[place] for place in at]))
            yield Measurement(name="ratio", value=value, where={"layer": layer})
        if self.config.optimum is not None:
            best = _optimum(model, trained, Path(self.config.optimum))
            with torch.no_grad():
                ways = [parameter.double().cpu() - value for parameter, value in zip(parameters, best, strict=True)]
            descent = sum(float((delta * way).sum()) for delta, way in zip(gaps, ways, strict=True))
            yield Measurement(name="descent", value=descent)
            yield Measurement(name="learning_rate_bound", value=_over(descent, gap))

    def _gradient(self, model: nn.Module, parameters: Sequence[nn.Parameter], subject: Subject) -> list[torch.Tensor]:
        """Return the gradient of the mean loss over the evaluation set, all ranks' together; float64, on the CPU."""
        import torch

        assert subject.batches is not None
        sums = [torch.zeros(parameter.shape, dtype=torch.float64, device=parameter.device) for parameter in parameters]
        total = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
        for batch in islice(subject.batches(), self.config.batches):
            weight = counted(batch, subject.run.task, self.name)
            with torch.enable_grad():
                loss = model(**batch).loss
                # Not backward(): what shards or reduces gradients hooks on to that.
                gradients = torch.autograd.grad(loss, list(parameters), allow_unused=True)
            total += weight
            for value, gradient in zip(sums, gradients, strict=True):
                if gradient is not None:
                    value += weight * gradient.double()
        if subject.run.sharding.world_size > 1:
            for value in (*sums, total):
                torch.distributed.all_reduce(value)
        return [(value / total).cpu() for value in sums]


def _squared(values: Iterable[torch.Tensor]) -> float:
    return sum(float(value.square().sum()) for value in values)


def _over(value: float, other: float) -> float:
    return value / other if other else 0.0 if not value else float("inf")


def _optimum(model: Any, trained: Sequence[tuple[str, nn.Parameter]], folder: Path) -> Iterator[torch.Tensor]:
    """Yield for each parameter that trains its value in a saved adapter, float64."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file

    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise ConfigError(f"probe 'gradient_gap': optimum={str(folder)!r} holds no {file.name}")
    saved = load_file(file)
    named = {
        value.data_ptr(): key for key, value in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    for name, parameter in trained:
        value = saved.get(named.get(parameter.data_ptr(), ""))
        if value is None or value.shape != parameter.shape:
            raise ConfigError(
                f"probe 'gradient_gap': optimum={str(folder)!r} has no {name!r} of shape {tuple(parameter.shape)}"
            )
        yield value.double()


@hookimpl
def tunery_probes() -> list[type[Probe]]:
    """Offer :class:`GradientGap`."""
    return [GradientGap]
