"""What plugins share that look into a model: batches, labels, which positions are no pads, hooks that read, sums over ranks.

Shapes: B rows, T positions, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..registry.errors import CompatibilityError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..registry.context import Subject


def batches_of(subject: Subject, probe: str) -> Iterable[Mapping[str, Any]]:
    """Return this rank's evaluation batches.

    Raises:
        CompatibilityError: there is no evaluation set.
    """
    if subject.batches is None:
        raise CompatibilityError(
            f"probe {probe!r} has no evaluation set", remedy="give the run validation rows (eval_dataset)"
        )
    return subject.batches()


def labels_of(batch: Mapping[str, Any], probe: str) -> torch.Tensor:
    """Return a batch's labels.

    Raises:
        CompatibilityError: it has none.
    """
    labels: torch.Tensor | None = batch.get("labels")
    if labels is None:
        raise CompatibilityError(
            f"probe {probe!r} finds no labels among {', '.join(batch)}", remedy="evaluate rows with labels"
        )
    return labels


def valid_positions(batch: Mapping[str, Any], hidden_BTD: torch.Tensor) -> torch.Tensor:
    """Return (B, T), true where a position is no pad: everywhere in a batch without an ``attention_mask`` of that shape."""
    import torch

    mask = batch.get("attention_mask")
    if mask is None or mask.shape != hidden_BTD.shape[:2]:
        return torch.ones(hidden_BTD.shape[:2], dtype=torch.bool, device=hidden_BTD.device)
    return mask.to(hidden_BTD.device).bool()  # type: ignore[no-any-return]


@contextmanager
def reading(
    model: nn.Module, names: Iterable[str], read: Callable[[int, torch.Tensor], None], *, inputs: bool = False
) -> Iterator[None]:
    """Inside, ``read`` gets the output of every named module, or its input, with the module's place in ``names``."""
    hooks = []

    def output(place: int) -> Callable[..., None]:
        return lambda module, args, answer: read(place, _first(answer))

    def entry(place: int) -> Callable[..., None]:
        return lambda module, args, kwargs: read(place, args[0] if args else next(iter(kwargs.values())))

    try:
        for place, name in enumerate(names):
            module = model.get_submodule(name)
            hook: Any = (
                module.register_forward_pre_hook(entry(place), with_kwargs=True)
                if inputs
                else module.register_forward_hook(output(place))
            )
            hooks.append(hook)
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _first(output: Any) -> torch.Tensor:
    """Return the hidden state among what a layer returns."""
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


def over_ranks(subject: Subject, values: torch.Tensor) -> torch.Tensor:
    """Return the sum of every rank's ``values``, in place."""
    from torch import distributed

    if subject.run.sharding.world_size > 1:
        distributed.all_reduce(values)
    return values
