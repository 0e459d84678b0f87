"""The seam between rounds and what carries their messages, and the engine that needs no other process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from .payload import Payload
from .worker import ClientWorker


class Engine(Protocol):
    """What carries payloads to nodes and back.

    Attributes:
        at_once: how many nodes to ask in one exchange, where more would only fill the memory; ``None`` for all.
    """

    at_once: int | None

    def nodes(self) -> Sequence[str]:
        """Return the names of the nodes there are, ascending."""
        ...

    def exchange(self, op: str, requests: Mapping[str, Payload], timeout: float | None) -> dict[str, Payload]:
        """Send each node its request and return the answers; a missing key is a node that failed.

        Args:
            op: what is asked.
            requests: one for each node that is asked.
            timeout: seconds after which an answer is too late; ``None`` leaves that to the engine.
        """
        ...

    def close(self) -> None:
        """Let the nodes go."""
        ...


class InProcess:
    """Clients one after another in this process, on its one model. Messages still travel as bytes.

    Args:
        workers: the clients, by name.
    """

    at_once: int | None = 1

    def __init__(self, workers: Mapping[str, ClientWorker]) -> None:
        self.workers = workers

    def nodes(self) -> Sequence[str]:
        """Return the clients' names."""
        return sorted(self.workers)

    def exchange(self, op: str, requests: Mapping[str, Payload], timeout: float | None) -> dict[str, Payload]:
        """Ask one client after the other; one that took longer than ``timeout`` is as if it had not answered, ``None`` waits."""
        replies = {}
        for node in sorted(requests):
            started = time.monotonic()
            reply = self.workers[node].handle(op, Payload.from_bytes(requests[node].to_bytes())).to_bytes()
            if timeout is None or time.monotonic() - started <= timeout:
                replies[node] = Payload.from_bytes(reply)
        return replies

    def close(self) -> None:
        """Do nothing: there is nobody else."""
