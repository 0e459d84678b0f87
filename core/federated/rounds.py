"""The rounds of a federation: draw clients, have them train, average what comes back, align, evaluate, checkpoint."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
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
from .probes import BEFORE_ALIGNMENT, ROUND, ServerProbes
from .server import Server
from .stand_in import INDICES, VALUES
from .worker import ADAPTER, DESCRIBE, INITIAL, STATISTICS, TRAIN

_LOGGER = logging.getLogger("tunery")
_SAMPLING, _TRAINING, _ALIGNING = 2, 3, 4  # streams of the seed; partition uses the first
_EMPTY = Payload()
_REST = 2  # rounds for which a client that failed is not asked again, where there are enough others


@dataclass
class Exchange:
    """What one try of a round came to.

    Attributes:
        asked: the clients asked.
        mean: of those whose answers count.
        left_out: the others, and why.
    """

    asked: list[str]
    mean: Mean
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass
class Spent:
    """What a round took, over all its tries.

    Attributes:
        asked: how often a client was asked to train.
        answered: how many of the answers counted, in a try that was repeated too.
        traffic: bytes by direction and kind.
        seconds: of the training that led to these answers, summed.
    """

    asked: int = 0
    answered: int = 0
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
        probes: what measures the server's model.
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
        probes: ServerProbes,
    ) -> None:
        self.server = server
        self.engine = engine
        self.options = options
        self._learning_rate = learning_rate
        self._seed = seed
        self._checkpoints = checkpoints
        self._log = log
        self._probes = probes

    def run(self, progress: Progress) -> list[dict[str, Any]]:
        """Go on from ``progress`` to the last round; return the row of every round.

        Raises:
            FederationError: a node with another model, fewer nodes than a round needs, or a round that too few clients answer
                however often it is tried.
        """
        nodes, needed = list(self.engine.nodes()), self.options.min_clients
        if self._clients_of(nodes) < needed:
            raise FederationError(
                f"a round asks {self._clients_of(nodes)} of the {len(nodes)} clients there are, and min_clients={needed}",
                remedy="lower it, raise client_fraction, or wait for more clients",
            )
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
        said = {"round": number, "learning_rate": rate, "statistics": aligns}
        left_out: dict[str, str] = {}
        spent = Spent()
        for attempt in range(options.max_attempts):
            resting = {node for node, until in progress.resting.items() if until > number}
            asked = self._draw(nodes, resting, left_out.keys(), number, attempt)
            tried = self._exchange(asked, nodes, said, spent)
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
        probed: list[dict[str, Any]] = []
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
            "asked": spent.asked,
            "answered": spent.answered,
            "bytes": spent.traffic,
            "client_seconds": spent.seconds,
        }
        if aligns:
            probed = self._probes.measure(BEFORE_ALIGNMENT, number + 1)
            row["aligned"] = self.server.realign(mean.statistics, self._draw_seed(_ALIGNING, number))
        if last or (options.eval_every and (number + 1) % options.eval_every == 0):
            row["metrics"] = self.server.evaluate()
        if last or aligns or options.is_probed(number + 1):
            probed += self._probes.measure(ROUND, number + 1)
        if probed:
            row["probes"] = probed
        return {**row, "seconds": time.monotonic() - started}

    def _draw(self, nodes: Sequence[str], resting: set[str], failed: Any, number: int, attempt: int) -> list[str]:
        """Draw a round's clients: none that rests or failed a moment ago, but where without them too few are left."""
        random = np.random.default_rng([self._seed, _SAMPLING, number, attempt])
        count = self._clients_of(nodes)
        order = [nodes[index] for index in random.permutation(len(nodes))]
        order.sort(key=lambda node: (node in failed, node in resting))
        fresh = sum(node not in failed and node not in resting for node in order)
        return sorted(order[: min(count, fresh) if fresh >= self.options.min_clients else count])

    def _clients_of(self, nodes: Sequence[str]) -> int:
        return min(len(nodes), max(1, round(self.options.client_fraction * len(nodes))))

    def _draw_seed(self, stream: int, *numbers: int) -> int:
        return int(np.random.SeedSequence([self._seed, stream, *numbers]).generate_state(1)[0])

    def _exchange(self, asked: list[str], nodes: Sequence[str], said: Mapping[str, Any], spent: Spent) -> Exchange:
        """Ask ``asked`` to train, as many at once as the engine takes, and average what comes back."""
        options, server = self.options, self.server
        like = server.statistics_like if said["statistics"] else {}
        mean = Mean(server.adapter, server.version, like, options.aggregation == "uniform")
        tried = Exchange(asked, mean)
        step = self.engine.at_once or len(asked)
        for start in range(0, len(asked), step):
            requests = {}
            for node in asked[start : start + step]:
                seed = self._draw_seed(_TRAINING, said["round"], nodes.index(node))
                requests[node] = request = server.request(node, {**said, "seed": seed})
                spent.asked += 1
                spent.count("down_adapter", request.nbytes(ADAPTER))
                spent.count("down_stand_in", sum(map(request.nbytes, (VALUES, INDICES, INITIAL))))
            replies = self.engine.exchange(TRAIN, requests, options.round_timeout)
            for node in requests:
                reply = replies.get(node, _EMPTY)
                spent.count("up_adapter", reply.nbytes(ADAPTER))
                spent.count("up_statistics", reply.nbytes(STATISTICS))
                reason = mean.add(replies.get(node))
                server.heard(node, reason is None)
                if reason is not None:
                    tried.left_out[node] = reason
                    _LOGGER.warning("round %d: client %s is left out: %s", said["round"] + 1, node, reason)
                    continue
                spent.answered += 1
                spent.seconds += float(reply.scalars["seconds"])
        return tried
