"""A client does what its own config allows, and its version is that of what it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunery.core.federated.arguments import build_federated_options
from tunery.core.federated.payload import Payload, grouped
from tunery.core.federated.protection import Protection
from tunery.core.federated.run import assemble
from tunery.core.federated.worker import ClientWorker, label_line


@pytest.fixture
def worker(given: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[[str], ClientWorker]:
    def made(strategy: str) -> ClientWorker:
        federation = assemble(
            build_federated_options(given(tmp_path, strategy=strategy, num_clients=1, server_fraction=0.2))
        )
        return ClientWorker("north", federation.resident, federation.client_rows[0], Protection(), noise_seed=0)

    return made


def asked(worker: ClientWorker, **changes: Any) -> Payload:
    resident = worker._resident
    scalars = {"labels": label_line(resident), "from_version": "", "version": "server's", "seed": 1}
    scalars |= {"learning_rate": 0.01, "statistics": False, **changes}
    return Payload(grouped("adapter", resident.state()), scalars)


def test_only_a_stand_in_has_the_servers_version(worker: Callable[[str], ClientWorker], half_width: Any):
    """Who loaded the model itself says which one that is, whatever the server calls its own."""
    own = worker("lora:r=2")
    mine = own.version
    assert own.handle("train", asked(own)).scalars["version"] == own.version == mine != "server's"
    proxy = worker("half_width")
    assert proxy.version == ""
    assert proxy.handle("train", asked(proxy)).scalars["version"] == proxy.version == "server's"


@pytest.mark.parametrize("strategy", ["lora:r=2", "half_width:every=0"])
def test_statistics_that_the_config_does_not_tell(
    strategy: str, worker: Callable[[str], ClientWorker], half_width: Any, caplog: pytest.LogCaptureFixture
):
    """A server that asks for them gets an error's kind and no number; the client's log says why."""
    client = worker(strategy)
    reply = client.handle("train", asked(client, statistics=True))
    assert reply.scalars["error"] == "FederationError" and not reply.arrays
    assert "was asked for statistics, and its strategy tells none" in caplog.text
    assert "error" not in client.handle("train", asked(client)).scalars
