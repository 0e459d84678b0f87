"""The loss of the evaluation set as a function of some of the weights: its value, gradient and Hessian-vector products.

The loss is the model's own: its mean over rows, or over predicted tokens for language models, whatever the batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..registry.context import TaskKind
from ..registry.errors import CompatibilityError
from .perturbation import shifted
from .readings import labels_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..registry.context import Subject, Task

    Vector = dict[str, torch.Tensor]

Method = Literal["exact", "finite_difference"]

STEP = 2e-4  # of a finite difference, in norms of the weights


def method_for(subject: Subject) -> Method:
    """Return how products with the Hessian can be had: double backward fails under ZeRO-3 and in fused attention kernels."""
    fused = str(getattr(getattr(subject.model, "config", None), "_attn_implementation", ""))
    return "finite_difference" if subject.run.sharding.zero_stage == 3 or "flash" in fused else "exact"


def counted(batch: Mapping[str, Any], task: Task, probe: str) -> int:
    """Return how many items the loss of a batch is the mean of: rows, or tokens that are predicted.

    Raises:
        CompatibilityError: the batch has no labels.
    """
    labels = labels_of(batch, probe)
    if task.kind is TaskKind.CAUSAL_LM:
        return int((labels[..., 1:] != -100).sum())
    return int((labels != -100).sum()) if task.kind is TaskKind.MASKED_LM else len(labels)


@dataclass(frozen=True)
class Fixed:
    """A direction that is kept as it is; see ``perturbation.Direction``."""

    vector: Vector

    def names(self) -> frozenset[str]:
        """Return the parameters it moves."""
        return frozenset(self.vector)

    def of(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        """Return its part for one parameter."""
        return self.vector[name]


class Landscape:
    """The loss around the weights as they are, as a function of the parameters in ``names``.

    Vectors are dicts from parameter name to a tensor of its full shape, float32 or wider, the same on every rank; under
    ZeRO-3 too, where each then costs a copy of these parameters.

    Args:
        subject: what is measured.
        names: the parameters that count; those the loss does not depend on have zero derivatives.
        probe: who asks, for messages.

    Raises:
        CompatibilityError: there is no evaluation set.
    """

    def __init__(self, subject: Subject, names: frozenset[str], probe: str) -> None:
        if subject.batches is None:
            raise CompatibilityError(
                f"probe {probe!r} has no evaluation set", remedy="give the run validation rows (eval_dataset)"
            )
        self._subject, self._batches, self._probe = subject, subject.batches, probe
        self.parameters = {name: p for name, p in subject.model.named_parameters() if name in names}

    def value(self) -> float:
        """Return the loss."""
        import torch

        with torch.no_grad():
            total = sum((loss.detach().double() * count for loss, count in self._losses()), torch.zeros(()).double())
        return self._per_item({"": total})[""].item()

    def gradient(self) -> Vector:
        """Return its gradient."""
        return self._summed(lambda grads: grads, create_graph=False)

    def product(self, vector: Vector, method: Method, share: float = STEP) -> Vector:
        """Return the Hessian times ``vector``.

        Args:
            vector: for all of the parameters.
            method: ``exact`` differentiates twice; ``finite_difference`` is (g(w + h v) - g(w - h v)) / 2h.
            share: length of the step h v, in norms of the weights.

        Raises:
            CompatibilityError: an operation of the model cannot be differentiated twice.
        """
        if method == "exact":
            return self._exact(vector)
        if low := next((p.dtype for p in self.parameters.values() if p.dtype.itemsize < 4), None):
            raise CompatibilityError(
                f"probe {self._probe!r} would lose differences of gradients in {low} weights",
                remedy="use float32 weights, or method=exact without ZeRO-3",
            )
        step = self.step(math.sqrt(dot(vector, vector)), share)
        with shifted(self._subject, Fixed(vector), step):
            ahead = self.gradient()
        with shifted(self._subject, Fixed(vector), -step):
            behind = self.gradient()
        return {name: (ahead[name] - behind[name]) / (2 * step) for name in ahead}

    def step(self, norm: float, share: float) -> float:
        """Return how far to go along a vector of this norm to move the weights by a share of their own norm."""
        import torch

        sharding = self._subject.run.sharding
        squares = [sharding.local(p).double().square().sum() for p in self.parameters.values()]
        size = math.sqrt(sharding.sum_shards(torch.stack(squares).sum()).item())
        return share * (size or 1.0) / (norm or 1.0)

    def _exact(self, vector: Vector) -> Vector:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        parameters = list(self.parameters.values())

        def twice(grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
            along = [
                (grad * v).sum()
                for grad, v in zip(grads, vector.values(), strict=True)
                if grad is not None and grad.requires_grad
            ]
            if not along:
                return [None] * len(parameters)
            return list(torch.autograd.grad(torch.stack(along).sum(), parameters, allow_unused=True))

        vector = {name: vector[name] for name in self.parameters}
        try:
            with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
                return self._summed(twice, create_graph=True)
        except RuntimeError as error:
            if not any(words in str(error) for words in ("not implemented", "differentiate twice", "double backward")):
                raise
            raise CompatibilityError(
                f"probe {self._probe!r} cannot differentiate this model twice: {error}",
                remedy="add method=finite_difference",
            ) from None

    def _summed(self, derivatives: Any, create_graph: bool) -> Vector:
        """Return the mean over items of what ``derivatives`` makes of each batch's gradients."""
        import torch

        totals = {
            name: torch.zeros(tuple(getattr(p, "ds_shape", p.shape)), dtype=_wide(p), device=p.device)
            for name, p in self.parameters.items()
        }
        with torch.enable_grad(), self._differentiable():
            parameters = list(self.parameters.values())
            for loss, count in self._losses():
                grads = list(torch.autograd.grad(loss, parameters, create_graph=create_graph, allow_unused=True))
                for total, found in zip(totals.values(), derivatives(grads), strict=True):
                    if found is not None:
                        total.add_(found.detach(), alpha=count)
        return self._per_item(totals)

    def _losses(self) -> Iterator[tuple[torch.Tensor, int]]:
        self._items = 0
        for batch in self._batches():
            count = counted(batch, self._subject.run.task, self._probe)
            outputs = self._subject.model(**batch)
            self._items += count
            # A mean of no items is not a number; ZeRO-3 wants the same passes on every rank all the same.
            yield (outputs.loss if count else outputs.logits.sum() * 0), count

    def _per_item(self, totals: Vector) -> Vector:
        import torch
        from torch import distributed

        items = torch.tensor(float(self._items), dtype=torch.float64, device=next(iter(totals.values())).device)
        if self._subject.run.sharding.world_size > 1:
            for total in (items, *totals.values()):
                distributed.all_reduce(total)
        return {name: total / items.item() for name, total in totals.items()}

    @contextmanager
    def _differentiable(self) -> Iterator[None]:
        flags = {name: parameter.requires_grad for name, parameter in self.parameters.items()}
        try:
            for parameter in self.parameters.values():
                parameter.requires_grad_(True)
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.requires_grad_(flags[name])


def dot(a: Vector, b: Vector) -> float:
    """Return the inner product of two vectors."""
    return math.fsum((a[name].double() * b[name]).sum().item() for name in a)


def _wide(parameter: torch.Tensor) -> torch.dtype:
    import torch

    return torch.promote_types(parameter.dtype, torch.float32)
