"""A client, whole: it holds its rows and its config, gets payloads and answers with payloads, whatever engine carries them.

What leaves it is: what trains (the adapter), what a ``ProxyStrategy`` tells of its rows (statistics), and scalars: how many rows,
mean loss, seconds, version and setup. No row, label or text does, and of an error only its kind, since messages quote what they complain
about. Clipping and noise are applied here.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from ...registry.errors import FederationError, TuneryError
from .payload import Payload, grouped
from .protection import Protection
from .resident import Resident
from .stand_in import unpack

DESCRIBE, TRAIN = "describe", "train"
ADAPTER, STATISTICS, INITIAL = "adapter", "statistics", "initial"
_LOGGER = logging.getLogger("tunery")


class ClientWorker:
    """One client.

    Args:
        name: its name among the nodes.
        resident: the process's model; workers in one process share it, and each leaves nothing in it that counts.
        rows: the client's encoded rows, labels included; they stay here.
        protection: clipping and noise.
        noise_seed: of the noise; default: the machine's randomness, so that nobody else can take the noise off again. Only a
            simulation gives one.
        made_empty: whether the model's weights all come from the server, those that regularizers hold on to too.
    """

    def __init__(
        self,
        name: str,
        resident: Resident,
        rows: Any,
        protection: Protection,
        noise_seed: int | None = None,
        *,
        made_empty: bool = False,
    ) -> None:
        self.name = name
        self._resident = resident
        self._rows = rows
        self._protection = protection
        self._noise_seed = noise_seed
        self._made_empty = made_empty
        # A stand-in comes from the server; any other model is what the client has loaded itself.
        self.version = "" if resident.proxy is not None else resident.fingerprint

    def handle(self, op: str, request: Payload) -> Payload:
        """Do what is asked and return what to send; an error becomes its kind, and is told in full to this client's log."""
        try:
            if op == DESCRIBE:
                return Payload(
                    scalars={"rows": len(self._rows), "version": self.version, "setup": self._resident.setup}
                )
            if op == TRAIN:
                return self._train(request)
            raise FederationError(f"no operation {op!r}", known=(DESCRIBE, TRAIN))
        except Exception as error:  # noqa: BLE001  # whatever it is, the other clients go on
            reason = str(error) if isinstance(error, TuneryError) else repr(error)
            _LOGGER.warning("client %s could not %s: %s", self.name, op, reason)
            return Payload(scalars={"error": type(error).__name__, "version": self.version})

    def _train(self, request: Payload) -> Payload:
        resident, asked = self._resident, request.scalars
        labels = label_line(resident)
        if asked["labels"] != labels:
            raise FederationError(f"client {self.name} has labels {labels!r}, the server {asked['labels']!r}")
        if asked["setup"] != resident.setup:
            raise other_setup(self.name)
        if asked["statistics"] and not resident.aligns:
            raise FederationError(f"client {self.name} was asked for statistics, and its strategy tells none")
        if asked["from_version"] not in ("", self.version):
            raise FederationError(
                f"client {self.name} has version {self.version!r} and was sent what {asked['from_version']!r} lacks"
            )
        if resident.proxy is not None:
            unpack(resident.frozen(), request)
            if self._made_empty and (initial := request.group(INITIAL)):
                _check_fits(initial, resident.state())
                resident.attach_anew(initial)
            self.version = str(asked["version"])
        received = request.group(ADAPTER)
        _check_fits(received, resident.state())
        resident.load(received)
        seed, rate = int(asked["seed"]), float(asked["learning_rate"])
        told = resident.statistics(self._rows) if asked["statistics"] else {}
        loss, seconds = resident.fit(self._rows, rate, seed)
        noise = torch.Generator()
        noise.seed() if self._noise_seed is None else noise.manual_seed(self._noise_seed ^ seed)
        adapter = self._protection.adapter(received, resident.state(), noise)
        statistics = self._protection.statistics(told, noise)
        return Payload(
            {**grouped(ADAPTER, adapter), **grouped(STATISTICS, statistics)},
            {"rows": len(self._rows), "loss": loss, "seconds": seconds, "version": self.version},
        )


def other_setup(name: str) -> FederationError:
    """Return what to say of a client that does not train what the server has."""
    return FederationError(
        f"client {name} has another strategy than the server, other options or another version of it, another seed, or other "
        "regularizers",
        remedy="give server and clients the same of each",
    )


def label_line(resident: Resident) -> str:
    """Return the names of the labels in their order, which server and clients must agree on."""
    return ", ".join(resident.trainer.run.task.label_names)


def _check_fits(received: dict[str, torch.Tensor], mine: dict[str, torch.Tensor]) -> None:
    for name in sorted(received.keys() | mine.keys()):
        theirs, own = received.get(name), mine.get(name)
        if theirs is None or own is None or theirs.shape != own.shape or theirs.dtype != own.dtype:
            raise FederationError(
                f"{name!r} of the server's adapter does not fit this client's model",
                remedy="give server and clients the same model and strategy",
            )
