"""The moment right before an optimizer step: regularizers may change weights themselves, and tasks without rows rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..registry.contracts import Regularizer
from ..registry.errors import CompatibilityError


class Updates:
    """Calls ``Regularizer.before_update`` once before each step of an optimizer.

    The hook sits on torch's own optimizer: DeepSpeed steps that one inside ``backward``, group by group, where no callback of
    transformers comes in time.
    """

    def __init__(self) -> None:
        self._groups: Sequence[Sequence[torch.nn.Parameter]] = ()
        self._regularizers: list[Regularizer] = []
        self._hooked: Any = None
        self._group_of: dict[int, int] = {}
        self._rates: list[float] = []
        self._due = False

    def hook(
        self,
        optimizer: Any,
        regularizers: Sequence[Regularizer],
        groups: Sequence[Sequence[torch.nn.Parameter]] = (),
    ) -> None:
        """Have the regularizers that ask for it called before each step of ``optimizer``; nothing is done for others.

        Args:
            optimizer: torch's.
            regularizers: all of the run.
            groups: the parameters of each of several tasks. Those of a task without a gradient rest: no momentum, no weight
                decay, as where it trains alone. Ranks that work together have gradients of zero there, and no ``None``.

        Raises:
            CompatibilityError: DeepSpeed is to make the optimizer itself.
        """
        asking = [r for r in regularizers if type(r).before_update is not Regularizer.before_update]
        if not (asking or groups) or optimizer is self._hooked:
            return
        if asking and not isinstance(optimizer, torch.optim.Optimizer):
            raise CompatibilityError(
                f"regularizer {asking[0].name!r} needs torch's optimizer, not DeepSpeed's",
                remedy="take 'optimizer' out of the DeepSpeed config",
            )
        self._regularizers, self._groups, self._hooked = asking, groups, optimizer
        self._group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        optimizer.register_step_pre_hook(self._before_step)

    def expect(self, optimizer: Any) -> None:
        """Take note of the learning rates of the coming step: DeepSpeed shows the hook one group at a time."""
        if self._regularizers:
            self._rates, self._due = [group["lr"] for group in optimizer.param_groups], True

    def _before_step(self, *_: Any) -> None:
        self._rest()
        if self._due:
            self._due = False
            with torch.no_grad():
                for regularizer in self._regularizers:
                    regularizer.before_update(lambda parameter: float(self._rates[self._group_of[id(parameter)]]))

    def _rest(self) -> None:
        zero = torch.zeros((), dtype=torch.bool)
        moves = [[p.grad.any() for p in group if p.grad is not None] for group in self._groups]
        for group, moved in zip(self._groups, [torch.stack(found or [zero]).any() for found in moves], strict=True):
            if not moved:
                for parameter in group:
                    parameter.grad = None
