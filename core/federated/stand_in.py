"""What changed of the part of a model that does not train, and how it gets to a node that lacks it.

A change is generic: of each parameter, the slices that differ along the dimension where sending them takes the fewest numbers.
The server keeps which slices changed at each version, not their values: it sends those of now, which is what counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ...registry.errors import FederationError
from .payload import Payload, grouped

VALUES, INDICES = "frozen", "indices"
Changes = Mapping[str, "Change"]


@dataclass(frozen=True)
class Change:
    """Where one tensor changed.

    Attributes:
        dim: the dimension that ``indices`` count along; -1 for all of the tensor.
        indices: the slices that changed, ascending, int32.
    """

    dim: int
    indices: torch.Tensor


def find_changes(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> dict[str, Change]:
    """Return where ``after`` differs from ``before``; tensors that do not are left out."""
    found = {}
    for name, new in after.items():
        differs = before[name].cpu() != new.detach().cpu()
        if not differs.any():
            continue
        best, least = Change(-1, torch.empty(0, dtype=torch.int32)), new.numel()
        for dim in range(new.dim()):
            others = [other for other in range(new.dim()) if other != dim]
            hit = differs.any(dim=others) if others else differs
            numbers = int(hit.sum()) * (new.numel() // new.shape[dim])
            if numbers < least:
                best, least = Change(dim, hit.nonzero().flatten().to(torch.int32)), numbers
        found[name] = best
    return found


def merge(several: Iterable[Changes]) -> dict[str, Change]:
    """Return changes that cover several versions at once."""
    merged: dict[str, Change] = {}
    for changes in several:
        for name, change in changes.items():
            known = merged.get(name, change)
            dim = change.dim if known.dim == change.dim else -1
            indices = torch.unique(torch.cat([known.indices, change.indices])) if dim >= 0 else change.indices[:0]
            merged[name] = Change(dim, indices)
    return merged


def pack(state: Mapping[str, torch.Tensor], changes: Changes) -> dict[str, torch.Tensor]:
    """Return the tensors that bring a node up to ``state``."""
    values, indices = {}, {}
    for name, change in changes.items():
        value = state[name].detach().cpu()
        if change.dim >= 0:
            key = f"{change.dim}/{name}"
            values[key], indices[key] = value.index_select(change.dim, change.indices), change.indices
        else:
            values[f"all/{name}"] = value
    return {**grouped(VALUES, values), **grouped(INDICES, indices)}


def everything(state: Mapping[str, torch.Tensor]) -> dict[str, Change]:
    """Return changes that stand for all of ``state``."""
    return {name: Change(-1, torch.empty(0, dtype=torch.int32)) for name in state}


def unpack(state: Mapping[str, torch.Tensor], message: Payload) -> None:
    """Write what :func:`pack` packed into the live ``state``.

    Raises:
        FederationError: it belongs to another model.
    """
    values, indices = message.group(VALUES), message.group(INDICES)
    for key, value in values.items():
        dim, _, name = key.partition("/")
        live = state.get(name)
        where = indices.get(key)
        shape = None if live is None else list(live.shape)
        if shape is not None and where is not None:
            shape[int(dim)] = len(where)
        if live is None or shape != list(value.shape) or live.dtype != value.dtype:
            raise FederationError(f"{name!r} of the stand-in does not fit this client's model")
        with torch.no_grad():
            if where is None:
                live.copy_(value)
            else:
                live.index_copy_(int(dim), where.long().to(live.device), value.to(live.device))
