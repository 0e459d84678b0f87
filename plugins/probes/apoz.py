"""APoZ: how often the neurons of a feed-forward block are silent (Hu et al. 2016; federated proxy fine-tuning, eq. 14).

    APoZ_k = 1 / (M S) sum_j sum_l 1[O_jkl = 0]

over M rows j and their S positions l that are no pads, for neuron k of a block: an activation that enters the module the
block is left by. Reported is the mean over a block's neurons.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from ...registry.context import Measurement, Subject, Support
from ...registry.contracts import Probe
from ...registry.hookspecs import hookimpl
from ..readings import batches_of, over_ranks, reading, valid_positions

if TYPE_CHECKING:
    import torch


class Apoz(Probe):
    """Count activations that are zero, layer by layer."""

    name = "apoz"
    summary = "share of feed-forward activations that are zero, per layer"
    reference = "Hu et al. 2016, Network Trimming; Peng et al. 2024, FedPFT (federated proxy fine-tuning), eq. 14"
    supports = Support(needs_anatomy=True, several_tasks=True)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of the count.

        Attributes:
            threshold: an activation of at most this size counts as zero; GELU and SiLU are hardly ever exactly 0.
        """

        threshold: Annotated[float, Ge(0)] = 0.0

    config: Config

    def measure(self, subject: Subject) -> Iterable[Measurement]:
        """Yield ``apoz`` of every layer, 1 for the first, and of all of them.

        Raises:
            CompatibilityError: there is no evaluation set.
        """
        import torch

        names = [layer.ffn_out for layer in subject.run.anatomy(subject.model).layers]
        device = next(subject.model.parameters()).device
        counts = torch.zeros(2, len(names), dtype=torch.float64, device=device)  # silent ones, all of them

        def read(place: int, value_BTF: torch.Tensor) -> None:
            valid_BT = valid_positions(batch, value_BTF)
            silent_BTF = value_BTF.abs() <= self.config.threshold
            counts[0, place] += (silent_BTF & valid_BT.unsqueeze(-1)).sum()
            counts[1, place] += valid_BT.sum() * value_BTF.shape[-1]

        with torch.no_grad(), reading(subject.model, names, read, inputs=True):
            for batch in batches_of(subject, self.name):
                subject.model(**batch)
        silent, total = over_ranks(subject, counts).tolist()
        for layer, (some, every) in enumerate(zip(silent, total, strict=True), start=1):
            yield Measurement(name="apoz", value=some / every, where={"layer": layer})
        yield Measurement(name="apoz", value=sum(silent) / sum(total))


@hookimpl
def tunery_probes() -> list[type[Probe]]:
    """Offer :class:`Apoz`."""
    return [Apoz]
