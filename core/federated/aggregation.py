"""From clients' replies to the server's next adapter: which replies count, and their mean.

McMahan et al. 2017, Communication-Efficient Learning, algorithm 1: theta = sum_k (n_k / n) theta_k. Sums run over the clients in
the order of their names, in float64, so that the result does not depend on who answers first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from .payload import Payload
from .worker import ADAPTER, STATISTICS

Tensors = Mapping[str, torch.Tensor]
_MOST_ROWS = 2**53  # a float counts no further


class Mean:
    """A weighted mean of adapters, and the sum of the statistics that came with them.

    Args:
        like: the adapter that was sent out; replies must be like it.
        version: the version of everything else that they must have trained on.
        statistics_like: what statistics look like, of which names and shapes; none where none were asked for.
        uniform: give every client the same weight, not its rows.
    """

    def __init__(self, like: Tensors, version: str, statistics_like: Tensors, uniform: bool) -> None:
        self._like = like
        self._version = version
        self._statistics_like = statistics_like
        self._uniform = uniform
        self._sums: dict[str, torch.Tensor] = {}
        self._weight = 0
        self.statistics: dict[str, torch.Tensor] = {}
        self.count = 0
        self.rows = 0
        self.loss = 0.0

    def add(self, reply: Payload | None) -> str | None:
        """Count a reply in, or return why it does not count."""
        reason = self._refusal(reply)
        if reason is not None or reply is None:
            return reason
        rows = int(reply.scalars["rows"])
        weight = 1 if self._uniform else rows
        for name, value in reply.group(ADAPTER).items():
            term = value.double() * weight
            self._sums[name] = self._sums[name].add_(term) if name in self._sums else term
        for name, value in reply.group(STATISTICS).items():
            self.statistics[name] = self.statistics[name] + value if name in self.statistics else value.clone()
        self._weight += weight
        self.count += 1
        self.rows += rows
        self.loss += float(reply.scalars["loss"]) * rows
        return None

    def result(self) -> dict[str, torch.Tensor]:
        """Return the mean, each tensor of the type it was sent out in."""
        return {name: (total / self._weight).to(self._like[name].dtype) for name, total in self._sums.items()}

    def _refusal(self, reply: Payload | None) -> str | None:
        """Return one line on what is wrong with a reply, ``None`` where nothing is."""
        if reply is None:
            return "no reply in time"
        scalars, adapter, statistics = reply.scalars, reply.group(ADAPTER), reply.group(STATISTICS)
        if "error" in scalars:
            return f"failed with {str(scalars['error'])[:80]}"
        if scalars.get("version") != self._version:
            return f"trained version {str(scalars.get('version'))[:80]!r} instead of {self._version!r}"
        rows = scalars.get("rows")
        if not isinstance(rows, int) or not 0 < rows < _MOST_ROWS:
            return f"says rows={rows!r:.80}"
        for name in ("loss", "seconds"):
            said = scalars.get(name)
            if not isinstance(said, float) or not math.isfinite(said):
                return f"says {name}={said!r:.80}"
        for what, told, like in (
            ("an adapter", adapter, self._like),
            ("statistics", statistics, self._statistics_like),
        ):
            if told.keys() != like.keys():
                odd = min(told.keys() ^ like.keys())
                return f"{what} with {odd!r} that nobody asked for" if odd in told else f"{what} without {odd!r}"
            for name, value in told.items():
                if value.shape != like[name].shape or value.dtype != like[name].dtype:
                    return f"{name!r} is {_kind(value)} instead of {_kind(like[name])}"
        for name, value in (*adapter.items(), *statistics.items()):
            if not value.isfinite().all():
                return f"{name!r} holds numbers that are not finite"
        return None


def _kind(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
