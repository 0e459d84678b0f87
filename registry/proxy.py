"""Strategies that train a stand-in for the model, whose adapter is then plugged into the model itself.

One owner may use them to tune a small stand-in; in a federation the server keeps the model and the clients get the stand-in.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from .contracts import Strategy
from .errors import CompatibilityError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .context import RunContext


class ProxyStrategy(Strategy):
    """A strategy whose :meth:`prepare` returns a stand-in: smaller than the model, and with an adapter the model takes too.

    Everything below runs where the full model is: with one owner, or on a federation's server. Only :meth:`statistics` runs
    on a client. Batches are what the model is called with, on its device; labels, where there are any, are not looked at.

    :meth:`prepare` takes modules of the model apart and changes none of its tensors: a twin that shares them stays the model.

    Laws: those of a strategy, but for one. What :meth:`export` returns answers as what :meth:`plug_in` returns, within 1e-5,
    and not as the stand-in.
    """

    #: Rounds of a federation between two calls of :meth:`realign`; 0 for never.
    realign_every: int = 0

    @abstractmethod
    def plug_in(self, model: nn.Module, proxy: nn.Module, run: RunContext) -> nn.Module:
        """Return the full model with the stand-in's adapter and head in it.

        Args:
            model: the full model, as :meth:`prepare` was given it, or what an earlier call returned, which is then brought up
                to date.
            proxy: what :meth:`prepare` returned, trained or not.
            run: the run it belongs to.
        """

    def whole(self, proxy: nn.Module, run: RunContext) -> AbstractContextManager[nn.Module]:
        """Return a context in which the stand-in is the full model, with the very parameters of its adapter and head.

        For one owner, from what :meth:`prepare` kept. Not under ZeRO-3, whose modules keep the parameters they began with.

        Args:
            proxy: what :meth:`prepare` of this instance returned.
            run: the run it belongs to.

        Raises:
            CompatibilityError: the strategy keeps nothing to make the model of.
        """
        raise CompatibilityError(f"strategy {self.name!r} keeps nothing of the model beside its stand-in")

    def distill(
        self, model: nn.Module | None, proxy: nn.Module, batches: Iterable[Mapping[str, Any]], run: RunContext
    ) -> Mapping[str, float]:
        """Bring the untrained stand-in closer to the model on unlabelled rows; return what was measured, by name.

        With one owner the Trainer calls it when training begins, not when it resumes; :meth:`stored` then says what changed.

        Args:
            model: the full model; ``None`` with one owner, where :meth:`whole` has it.
            proxy: what :meth:`prepare` returned, untrained; changed in place, its adapter and head excepted.
            batches: the same on every rank; can be gone through more than once. Left alone by a strategy that has unlabelled
                rows of its own.
            run: the run it belongs to.
        """
        return {}

    def statistics(
        self, proxy: nn.Module, batches: Iterable[Mapping[str, Any]], run: RunContext
    ) -> Mapping[str, torch.Tensor]:
        """Return what a client tells of its own rows for :meth:`realign`: additive (summed over clients) float64 tensors."""
        return {}

    def realign(
        self,
        model: nn.Module,
        proxy: nn.Module,
        statistics: Mapping[str, torch.Tensor],
        batches: Iterable[Mapping[str, Any]],
        run: RunContext,
    ) -> Mapping[str, float]:
        """Bring the stand-in closer again during tuning, the aggregated adapter in both; return what was measured.

        Args:
            model: the full model with the adapter, see :meth:`plug_in`.
            proxy: the stand-in with the same adapter; changed in place, its adapter and head excepted.
            statistics: the sum of what the clients told; empty if they told nothing.
            batches: unlabelled rows of the server.
            run: the run it belongs to.
        """
        return {}

    def realigned(self, proxy: nn.Module, run: RunContext) -> int:
        """Return how many numbers of the stand-in one :meth:`realign` changes, for the cost model; 0 where that is not known."""
        return 0
