"""How much one row, or a tenth of them, changes the head that is learnt (Fu et al. 2023, definitions 2.1 and 2.3, table 4).

    ||A(S^i) - A(S)||     and normalised     || A(S^i) / ||A(S^i)||  -  A(S) / ||A(S)|| ||

A(S) are weight and bias of the head's final linear layer, learnt from the rows S, and S^i lacks row i. For head tuning the
features that enter this layer never change: they are read once, and every A(S) is the minimum of a convex problem, mean
cross-entropy + l2 / 2 ||weight||^2, found to convergence, so that no optimizer's randomness is in the difference.

The rows are those of the evaluation set, which is what a probe is given. Shapes: N rows, D features. Whole fine-tuning is
run again without a tenth of its training rows by ``tunery bench`` with the protocol ``leave_out(0.1)``.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt, Lt

from ...registry.context import Measurement, Subject, Support, TaskKind
from ...registry.contracts import Probe
from ...registry.errors import CompatibilityError
from ...registry.hookspecs import hookimpl
from ..features import pooled
from ..readings import batches_of, labels_of, reading

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_NEWTON_SIZE = 3000  # unknowns up to which a Newton step's matrix is small


class DataPerturbation(Probe):
    """Learn the head again and again, with rows left out."""

    name = "data_perturbation"
    summary = "how far the head moves when one row, or a share of them, is left out of what it learns from"
    reference = "Fu et al. 2023, stability analysis of fine-tuning, definitions 2.1 and 2.3, section 4.2.7"
    supports = Support(tasks=frozenset({TaskKind.CLASSIFICATION, TaskKind.IMAGE_CLASSIFICATION}), needs_anatomy=True)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of what is left out; the paper removes 10 %.

        Attributes:
            leave_one_out: at most so many rows are left out one at a time, drawn at random.
            share: of the rows, left out together.
            reruns: how often a share is left out.
            l2: strength of the penalty on the weight, which makes the head unique on separable rows.
            seed: of what is left out; default: the run's.
        """

        leave_one_out: Annotated[int, Ge(0)] = 100
        share: Annotated[float, Gt(0), Lt(1)] = 0.1
        reruns: Annotated[int, Ge(0)] = 10
        l2: Annotated[float, Gt(0)] = 1e-3
        seed: Annotated[int, Ge(0)] | None = None

    config: Config

    def measure(self, subject: Subject) -> Iterable[Measurement]:
        """Yield ``leave_one_out`` and ``normalized_leave_one_out``, mean over rows, and each rerun's ``distance``,
        ``normalized_distance`` and ``held_out_accuracy`` with their means and the accuracy's standard deviation.

        Rows whose absence leaves a class without any are not left out.

        Raises:
            CompatibilityError: no evaluation set, no head, or fewer than two classes in it.
        """
        import numpy as np

        x_ND, labels_N = _features(subject, self.name)
        if len(set(labels_N)) < 2:
            raise CompatibilityError(
                f"probe {self.name!r} finds rows of {len(set(labels_N))} class", remedy="evaluate rows of two or more"
            )
        random = np.random.default_rng(subject.run.seed if self.config.seed is None else self.config.seed)
        whole = self._learnt(x_ND, labels_N)
        singles = [one for one in random.permutation(len(x_ND)) if _keeps_classes(labels_N, [one])]
        moves = [self._without(x_ND, labels_N, [one], whole)[:2] for one in singles[: self.config.leave_one_out]]
        if moves:
            plain, normalized = zip(*moves, strict=True)
            yield Measurement(name="leave_one_out", value=statistics.fmean(plain))
            yield Measurement(name="normalized_leave_one_out", value=statistics.fmean(normalized))
        size = max(1, round(self.config.share * len(x_ND)))
        drawn = [random.choice(len(x_ND), size, replace=False) for _ in range(self.config.reruns)]
        runs = [self._without(x_ND, labels_N, rows, whole) for rows in drawn if _keeps_classes(labels_N, rows)]
        names = ("distance", "normalized_distance", "held_out_accuracy")
        for rerun, values in enumerate(runs):
            for name, value in zip(names, values, strict=True):
                yield Measurement(name=name, value=value, where={"rerun": rerun})
        for name, values in zip(names, zip(*runs, strict=True), strict=bool(runs)):
            yield Measurement(name=name, value=statistics.fmean(values))
        if len(runs) > 1:
            yield Measurement(name="held_out_accuracy_std", value=statistics.stdev(run[2] for run in runs))

    def _without(self, x_ND: Array, labels_N: Array, rows: Any, whole: Any) -> tuple[float, float, float]:
        """Return distance, normalised distance, and accuracy on the rows that were left out."""
        import numpy as np

        kept = np.delete(np.arange(len(x_ND)), rows)
        head = self._learnt(x_ND[kept], labels_N[kept])
        now, before = _parameters(head), _parameters(whole)
        distance = np.linalg.norm(now - before)
        normalized = np.linalg.norm(now / np.linalg.norm(now) - before / np.linalg.norm(before))
        return float(distance), float(normalized), float((head.predict(x_ND[rows]) == labels_N[rows]).mean())

    def _learnt(self, x_ND: Array, labels_N: Array) -> Any:
        from sklearn.linear_model import LogisticRegression

        unknowns = x_ND.shape[1] * len(set(labels_N))
        return LogisticRegression(
            C=1 / (self.config.l2 * len(x_ND)),  # scikit-learn sums over rows and weighs the sum
            solver="newton-cholesky" if unknowns <= _NEWTON_SIZE else "lbfgs",
            tol=1e-10,
            max_iter=10_000,
        ).fit(x_ND, labels_N)


def _parameters(head: Any) -> Array:
    import numpy as np

    # A constant added to every class's bias changes nothing.
    bias = head.intercept_ - head.intercept_.mean() if len(head.intercept_) > 1 else head.intercept_
    return np.append(head.coef_, bias)


def _keeps_classes(labels_N: Array, rows: Any) -> bool:
    counts, gone = Counter(labels_N.tolist()), Counter(labels_N[rows].tolist())
    return all(counts[label] > number for label, number in gone.items())


def _features(subject: Subject, probe: str) -> tuple[Array, Array]:
    """Return what enters the head's final linear layer, (N, D), and the labels, of all ranks' rows in their order."""
    import numpy as np
    import torch
    from torch import distributed

    head = subject.run.anatomy(subject.model).head
    if head is None:
        raise CompatibilityError(f"probe {probe!r} finds no head", remedy="probe a model that classifies")
    pad_token_id = getattr(subject.model.config, "pad_token_id", None)
    own: list[tuple[Array, Array]] = []

    def read(_: int, values: torch.Tensor) -> None:
        labels = labels_of(batch, probe).cpu().numpy()
        own.append((pooled(values, batch, pad_token_id).double().cpu().numpy(), labels))

    batch: Mapping[str, Any]
    with torch.no_grad(), reading(subject.model, [head], read, inputs=True):
        for batch in batches_of(subject, probe):
            subject.model(**batch)
    ranks: list[Any] = [own]
    if subject.run.sharding.world_size > 1:
        ranks = [None] * subject.run.sharding.world_size
        distributed.all_gather_object(ranks, own)
    parts = [part for batches in zip(*ranks, strict=True) for part in batches]
    return np.concatenate([x for x, _ in parts]), np.concatenate([labels for _, labels in parts])


@hookimpl
def tunery_probes() -> list[type[Probe]]:
    """Offer :class:`DataPerturbation`."""
    return [DataPerturbation]
