"""L2 distance of the weights to their pre-trained values, in total and per layer (overtraining paper, figure 8)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ...registry.context import Measurement, Support
from ...registry.contracts import Probe
from ...registry.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch

    from ...registry.context import Subject

_LAYER = re.compile(r"\.(\d+)\.")


class WeightDistance(Probe):
    """Measure ||w - w0||_2 over pre-trained weights; an adapter counts with the update it makes, not its factors."""

    name = "weight_distance"
    summary = "L2 distance to the pre-trained weights, total and per layer"
    reference = "Springer et al., overtrained language models are harder to fine-tune, figure 8"
    supports = Support(several_tasks=True)

    def measure(self, subject: Subject) -> Iterable[Measurement]:
        """Return ``distance`` (total), ``distance`` per layer, and ``relative_distance``, ||w - w0|| / ||w0||.

        Weights outside numbered layers (embeddings, pooler) count in the total only; a fresh head has no pre-trained
        value and does not count.
        """
        import torch

        squares: dict[int, float] = {}
        total = origin = 0.0
        with torch.no_grad():
            for name, moved, start in _squares(subject):
                total += moved
                origin += start
                match = _LAYER.search(name)
                if match:
                    layer = int(match.group(1))
                    squares[layer] = squares.get(layer, 0.0) + moved
        yield Measurement(name="distance", value=math.sqrt(total))
        if origin:
            yield Measurement(name="relative_distance", value=math.sqrt(total / origin))
        for layer in sorted(squares):
            yield Measurement(name="distance", value=math.sqrt(squares[layer]), where={"layer": layer})


def _squares(subject: Subject) -> Iterator[tuple[str, float, float]]:
    """Yield name, ||w - w0||^2 and ||w0||^2 of every pre-trained weight that moves."""
    import torch

    sharding = subject.run.sharding
    for name, parameter, start in subject.reference.pieces():
        if parameter.requires_grad and subject.run.is_pretrained(name):
            live = sharding.local(parameter).double().cpu()
            origin = start.double()
            both = torch.stack([(live - origin).square().sum(), origin.square().sum()])
            moved, norm = sharding.sum_shards(both).tolist()
            yield name, moved, norm
    for name, module in subject.model.named_modules():
        for adapter in getattr(module, "active_adapters", ()) if hasattr(module, "get_delta_weight") else ():
            with sharding.gathered(module.parameters()):
                delta: torch.Tensor = module.get_delta_weight(adapter)
                base: torch.Tensor = module.get_base_layer().weight
                yield name + ".", delta.double().square().sum().item(), base.double().square().sum().item()


@hookimpl
def tunery_probes() -> list[type[Probe]]:
    """Offer :class:`WeightDistance`."""
    return [WeightDistance]
