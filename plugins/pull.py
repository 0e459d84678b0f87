"""One weight's distance from where it started, squared, and the gradient of that; for a big one without memory of its size."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

_PIECE = 2**20  # elements: memory of this size is used again, and not mapped afresh
_SMALL = 2**16  # elements up to which w - w0 is kept from the value to the gradient
_MANY_ROWS = 2**12  # from which on it pays to look which ones moved


@dataclass(eq=False)
class Pull:
    """One weight's part of an L2-SP penalty: strength * ||w - w0||^2.

    On the CPU the rows of an embedding that have not moved, as of tokens not met so far, are left out of the gradient.

    Attributes:
        owner: the module it is a parameter of.
        name: its name there.
        anchor: the name of w0 there; ``None`` where w0 is zero.
        strength: what the square is multiplied by.
    """

    owner: nn.Module
    name: str
    anchor: str | None
    strength: float
    _offset: torch.Tensor | None = None  # w - w0, if it is small
    _moved: torch.Tensor | None = None  # rows, where those are few

    @property
    def weight(self) -> nn.Parameter:
        """The parameter w."""
        return getattr(self.owner, self.name)  # type: ignore[no-any-return]

    @property
    def first(self) -> nn.Parameter | None:
        """The parameter w0."""
        return None if self.anchor is None else getattr(self.owner, self.anchor)

    def value(self) -> torch.Tensor:
        """Return this part, and keep for its gradient what is small: a short w - w0, or which rows moved."""
        import torch

        weight, first = self.weight, self.first
        offsets = _offsets(weight, first)
        if weight.numel() <= _SMALL:
            self._offset = next(offsets)
            return self._offset.square().sum().mul_(self.strength)
        if first is None or weight.dim() < 2 or len(weight) < _MANY_ROWS or weight.device.type != "cpu":
            return reduce(torch.add, (offset.square_().sum() for offset in offsets)).mul_(self.strength)
        rows = torch.cat([offset.square_().flatten(1).sum(1) for offset in offsets])
        moved = rows.nonzero().squeeze(1)
        self._moved = moved if len(moved) < len(rows) / 5 else None  # row by row takes five times as long
        return rows.sum().mul_(self.strength)

    def add_gradient(self, factor: torch.Tensor | None) -> None:
        """Add 2 strength factor (w - w0) to the weight's gradient, if it has one."""
        weight, first, grad, moved = self.weight.detach(), self.first, self.weight.grad, self._moved
        if grad is None or factor is None:
            return
        scale = 2 * self.strength * (factor.item() if factor.device.type == "cpu" else factor)
        if self._offset is not None:
            _add(grad, [self._offset], scale)
        elif first is None or moved is None:
            _add(grad, _offsets(weight, first), scale)
        else:
            rows = grad.index_select(0, moved)
            _add(rows, _offsets(weight.index_select(0, moved), first.detach().index_select(0, moved)), scale)
            grad.index_copy_(0, moved, rows)

    def gradient(self, factor: torch.Tensor) -> torch.Tensor:
        """Return 2 strength factor (w - w0)."""
        weight = self.weight.detach()
        offset = weight.clone() if self.first is None else weight - self.first
        return offset.mul_((2 * self.strength * factor).to(offset.dtype))


def _add(grad: torch.Tensor, offsets: Iterable[torch.Tensor], scale: float | torch.Tensor) -> None:
    for piece, offset in zip(_pieces(grad), offsets, strict=True):
        if isinstance(scale, float):
            piece.add_(offset, alpha=scale)
        else:  # a number would have to come from the device first
            piece.add_(offset.mul_(scale))


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return views of a few rows each; elsewhere than on the CPU, of all."""
    from torch import split

    if tensor.device.type != "cpu" or tensor.numel() <= _PIECE:
        return (tensor,)
    return split(tensor, max(1, _PIECE * len(tensor) // tensor.numel()))


def _offsets(weight: torch.Tensor, anchor: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """Yield w - w0 of one piece of a weight after the other, all in the same memory, in float32 at least.

    Sums over a piece keep six digits; torch's norms and dot products of a whole weight lose three.
    """
    import torch

    pieces = _pieces(weight.detach())
    precision = torch.promote_types(weight.dtype, torch.float32)
    room = torch.empty_like(pieces[0], dtype=precision)
    firsts = itertools.repeat(None, len(pieces)) if anchor is None else _pieces(anchor)
    for piece, first in zip(pieces, firsts, strict=True):
        offset = room if piece.shape == room.shape else room[: len(piece)]
        if first is None:
            offset.copy_(piece)
        else:
            torch.sub(piece.to(precision), first.to(precision), out=offset)
        yield offset
