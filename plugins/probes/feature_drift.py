"""How far a layer's features have moved from the pre-trained ones: linear CKA and cosine (Kornblith et al. 2019).

With X and Y the features of all rows now and before, centred, a row's feature being the mean over its positions that are no
pads,

    CKA = ||Y'X||_F^2 / (||X'X||_F ||Y'Y||_F)

which is 1 for features that differ by a rotation and a scale. The cosine is that of each row's two features, mean over rows;
1 only where they point the same way. Shapes: N rows, D features.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...registry.context import Measurement, Subject, Support
from ...registry.contracts import Probe
from ...registry.hookspecs import hookimpl
from ..perturbation import pretrained
from ..readings import batches_of, over_ranks, reading, valid_positions

if TYPE_CHECKING:
    import torch


class FeatureDrift(Probe):
    """Compare the features of every layer with those the pre-trained weights give."""

    name = "feature_drift"
    summary = "linear CKA and cosine of every layer's features to the pre-trained ones"
    reference = "Kornblith et al. 2019, Similarity of Neural Network Representations Revisited, eq. 3-5"
    supports = Support(needs_anatomy=True, several_tasks=True)

    def measure(self, subject: Subject) -> Iterable[Measurement]:
        """Yield ``cka`` and ``cosine`` of every layer, 1 for the first, and their means over layers.

        The features of all evaluation rows are kept on the host meanwhile. CKA is not a number where features do not vary.

        Raises:
            CompatibilityError: there is no evaluation set.
        """
        now = _features(subject, self.name)
        with pretrained(subject):
            before = _features(subject, self.name)
        ckas, cosines = [], []
        for layer, (x_ND, y_ND) in enumerate(zip(now, before, strict=True), start=1):
            cka, cosine = _compared(subject, x_ND, y_ND)
            ckas.append(cka)
            cosines.append(cosine)
            yield Measurement(name="cka", value=cka, where={"layer": layer})
            yield Measurement(name="cosine", value=cosine, where={"layer": layer})
        yield Measurement(name="cka", value=sum(ckas) / len(ckas))
        yield Measurement(name="cosine", value=sum(cosines) / len(cosines))


def _features(subject: Subject, probe: str) -> list[torch.Tensor]:
    """Return the features of this rank's rows, (N, D) on the host, layer by layer."""
    import torch

    names = [layer.name for layer in subject.run.anatomy(subject.model).layers]
    found: list[list[torch.Tensor]] = [[] for _ in names]

    def read(place: int, hidden_BTD: torch.Tensor) -> None:
        valid_BT1 = valid_positions(batch, hidden_BTD).unsqueeze(-1)
        mean_BD = (hidden_BTD.double() * valid_BT1).sum(1) / valid_BT1.sum(1).clamp(min=1)
        found[place].append(mean_BD.float().cpu())

    with torch.no_grad(), reading(subject.model, names, read):
        for batch in batches_of(subject, probe):
            subject.model(**batch)
    return [torch.cat(parts) for parts in found]


def _compared(subject: Subject, x_ND: torch.Tensor, y_ND: torch.Tensor) -> tuple[float, float]:
    import torch

    device = next(subject.model.parameters()).device
    x_ND, y_ND = x_ND.to(device).double(), y_ND.to(device).double()
    cosine = torch.nn.functional.cosine_similarity(x_ND, y_ND).sum()
    count = torch.tensor(float(len(x_ND)), dtype=torch.float64, device=device)
    cosine, count = over_ranks(subject, torch.stack([cosine, count])).unbind()
    x_ND, y_ND = (values - over_ranks(subject, values.sum(0)) / count for values in (x_ND, y_ND))
    xy, xx, yy = (over_ranks(subject, a.T @ b).square().sum() for a, b in ((y_ND, x_ND), (x_ND, x_ND), (y_ND, y_ND)))
    return (xy / (xx * yy).sqrt()).item(), (cosine / count).item()


@hookimpl
def tunery_probes() -> list[type[Probe]]:
    """Offer :class:`FeatureDrift`."""
    return [FeatureDrift]
