"""How a plugin reaches parameters: a protocol that the core meets on one process, under DDP and under ZeRO-1, 2 and 3."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn


class Sharding(Protocol):
    """Reading and writing parameters the same way on one process, under DDP and under ZeRO-1, 2 and 3."""

    @property
    def zero_stage(self) -> int:
        """0 without DeepSpeed, else the ZeRO stage."""
        ...

    @property
    def rank(self) -> int:
        """Rank of this process, 0 alone."""
        ...

    @property
    def world_size(self) -> int:
        """Number of processes, 1 alone."""
        ...

    def gathered(self, params: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """Inside, every parameter has its full shape on every rank; for reading only."""
        ...

    def written(self, params: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """Like :meth:`gathered`, and what is written inside reaches every rank (rank 0's values count)."""
        ...

    def local(self, param: nn.Parameter) -> torch.Tensor:
        """Return this rank's own piece of ``param``, flat, no copy: everything without ZeRO-3, a shard with it."""
        ...

    def local_of(self, param: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        """Cut the piece of ``full`` that corresponds to ``local(param)``, flat."""
        ...

    def updated(self, param: nn.Parameter) -> tuple[torch.Tensor, int] | None:
        """Return this rank's own part of the value that the optimizer updates, flat, no copy, and where in the whole it begins.

        All of the parameter on one process and under DDP; a part of the master weights under ZeRO, ``None`` on a rank that
        has none of it. To be changed in ``Regularizer.before_update`` only.
        """
        ...

    def sum_shards(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks what was computed on :meth:`local` pieces; the identity without ZeRO-3."""
        ...

    def perturbed(self, params: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """Inside, parameters may be changed with :meth:`written`; afterwards every bit is back."""
        ...

    @property
    def is_perturbed(self) -> bool:
        """Whether the run is inside :meth:`perturbed`: what was computed from the parameters before does not hold."""
        ...

    def companion(self, module: nn.Module, name: str, like: str, value: torch.Tensor | None = None) -> nn.Parameter:
        """Register a frozen parameter ``name`` beside ``module.<like>``, sharded as it is, absent from every state_dict.

        Its value is a copy of ``module.<like>`` unless ``value`` is given.
        """
        ...

    def remove_companion(self, module: nn.Module, name: str) -> None:
        """Take a companion away again."""
        ...

    def adopt(self, module: nn.Module, name: str, child: nn.Module) -> None:
        """Make ``child`` a submodule ``module.<name>`` that trains with the model and is in none of its state_dicts.

        Its parameters go to the optimizer, are sharded, and are saved and restored with every checkpoint. Call it in
        ``attach``, and ``delattr(module, name)`` in ``detach``.
        """
        ...
