"""The rounds of a federation: draw clients, have them train, average what comes back, align, evaluate, checkpoint."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from ...registry.errors import FederationError
from .aggregation import Mean
from .arguments import FederatedArguments
from .checkpoint import Checkpoints, Progress, RoundLog
from .engine import Engine
from .payload import Payload
from .server import Server
from .stand_in import INDICES, VALUES
from .worker import ADAPTER, DESCRIBE, STATISTICS, TRAIN

_LOGGER = logging.getLogger("tunery")
_SAMPLING, _TRAINING, _ALIGNING = 2, 3, 4  # streams of the seed; partition uses the first
_EMPTY = Payload()
_REST = 2  # rounds for which a client that failed is not asked again, where there are others


@dataclass
class Exchange:
    """What one try of a round came to.

    Attributes:
        asked: the clients asked.
        mean: of those whose answers count.
        left_out: the others, and why.
        traffic: bytes by direction and kind.
        seconds: of the clients' training, summed.
    """

    asked: list[str]
    mean: Mean
    left_out: dict[str, str] = field(default_factory=dict)
    traffic: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def count(self, kind: str, size: int) -> None:
        """Add to the traffic of one kind."""
        self.traffic[kind] = self.traffic.get(kind, 0) + size


class Rounds:
    """All rounds of a run.

    Args:
        server: what the server keeps.
        engine: what carries messages.
        options: how rounds go.
        learning_rate: of the first round.
        seed: what everything random depends on.
        checkpoints: where to write the state after each round.
        log: where to write a row for each round.
    """

    def __init__(
        self,
        server: Server,
        engine: Engine,
        options: FederatedArguments,
        *,
        learning_rate: float,
        seed: int,
        checkpoints: Checkpoints,
        log: RoundLog,
    ) -> None:
        self.server = server
        self.engine = engine
        self.options = options
        self._learning_rate = learning_rate
        self._seed = seed
        self._checkpoints = checkpoints
        self._log = log

    def run(self, progress: Progress) -> list[dict[str, Any]]:
        """Go on from ``progress`` to the last round; return the row of every round.

        Raises:
            FederationError: a node with another model, or a round that too few clients answer however often it is tried.
        """
        nodes = list(self.engine.nodes())
        self.server.meet(self.engine.exchange(DESCRIBE, dict.fromkeys(nodes, _EMPTY), self.options.round_timeout))
        rows = self._log.rewind(progress.done)
        for number in self._numbers(progress.done):
            rows.append(self._round(number, nodes, progress))
            self._log.add(rows[-1])
            progress.done = number + 1
            self._checkpoints.save(progress, self.server)
        return rows

    def _numbers(self, start: int) -> Iterator[int]:
        console = Console(stderr=True)
        total = self.options.num_rounds
        shown = track(range(start, total), "rounds", total=total, completed=start, console=console, transient=True)
        return iter(shown if sys.stderr.isatty() else range(start, total))

    def _round(self, number: int, nodes: Sequence[str], progress: Progress) -> dict[str, Any]:
        started = time.monotonic()
        options, every = self.options, self.server.realign_every
        last = number + 1 == options.num_rounds
        aligns = every > 0 and (number + 1) % every == 0 and not last
        rate = options.learning_rate(self._learning_rate, number)
        left_out: dict[str, str] = {}
        for attempt in range(options.max_attempts):
            resting = {node for node, until in progress.resting.items() if until > number}
            asked = self._draw(nodes, resting, left_out.keys(), number, attempt)
            tried = self._exchange(asked, nodes, number, rate, aligns)
            left_out |= tried.left_out
            progress.resting |= dict.fromkeys(tried.left_out, number + 1 + _REST)
            if tried.mean.count >= options.min_clients:
                break
        else:
            reasons = "; ".join(f"{node}: {reason}" for node, reason in list(tried.left_out.items())[:3])
            raise FederationError(
                f"round {number + 1}: {tried.mean.count} of {len(tried.asked)} clients answered as they should in the "
                f"last of {options.max_attempts} tries, and min_clients={options.min_clients} ({reasons})",
                remedy="see the clients' logs, then resume",
            )
        self.server.adapter = tried.mean.result()
        mean = tried.mean
        row: dict[str, Any] = {
            "round": number + 1,
            "learning_rate": rate,
            "clients": [node for node in tried.asked if node not in tried.left_out],
            "left_out": left_out,
            "attempts": attempt + 1,
            "rows": mean.rows,
            "loss": mean.loss / mean.rows,
            "bytes": tried.traffic,
            "client_seconds": tried.seconds,
        }
        if aligns:
            row["aligned"] = self.server.realign(mean.statistics, self._draw_seed(_ALIGNING, number))
        if last or (options.eval_every and (number + 1) % options.eval_every == 0):
            row["metrics"] = self.server.evaluate()
        return {**row, "seconds": time.monotonic() - started}

    def _draw(self, nodes: Sequence[str], resting: set[str], failed: Any, number: int, attempt: int) -> list[str]:
        """Draw a round's clients; those that failed a moment ago, and those that rest, only where others are too few."""
        random = np.random.default_rng([self._seed, _SAMPLING, number, attempt])
        count = max(1, round(self.options.client_fraction * len(nodes)))
        order = [nodes[index] for index in random.permutation(len(nodes))]
        order.sort(key=lambda node: (node in failed, node in resting))
        return sorted(order[:count])

    def _draw_seed(self, stream: int, *numbers: int) -> int:
        return int(np.random.SeedSequence([self._seed, stream, *numbers]).generate_state(1)[0])

    def _exchange(self, asked: list[str], nodes: Sequence[str], number: int, rate: float, aligns: bool) -> Exchange:
        """Ask ``asked`` to train, as many at once as the engine takes, and average what comes back."""
        options, server = self.options, self.server
        mean = Mean(server.adapter, server.version, aligns, options.aggregation == "uniform")
        tried = Exchange(asked, mean)
        step = self.engine.at_once or len(asked)
        for start in range(0, len(asked), step):
            requests = {}
            for node in asked[start : start + step]:
                seed = self._draw_seed(_TRAINING, number, nodes.index(node))
                scalars = {"round": number, "learning_rate": rate, "seed": seed, "statistics": aligns}
                requests[node] = request = server.request(node, scalars)
                tried.count("down_adapter", request.nbytes(ADAPTER))
                tried.count("down_stand_in", request.nbytes(VALUES) + request.nbytes(INDICES))
            replies = self.engine.exchange(TRAIN, requests, options.round_timeout)
            for node in requests:
                reply = replies.get(node)
                reason = mean.add(reply)
                server.heard(node, reason is None)
                if reason is not None or reply is None:
                    tried.left_out[node] = str(reason)
                    _LOGGER.warning("round %d: client %s is left out: %s", number + 1, node, reason)
                    continue
                tried.count("up_adapter", reply.nbytes(ADAPTER))
                tried.count("up_statistics", reply.nbytes(STATISTICS))
                tried.seconds += float(reply.scalars["seconds"])
        return tried
