"""A client does what its own config allows, and its version is that of what it has."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tunery.core.federated.arguments import build_federated_options
from tunery.core.federated.payload import Payload, grouped
from tunery.core.federated.protection import Protection
from tunery.core.federated.run import assemble
from tunery.core.federated.server import Server
from tunery.core.federated.worker import ClientWorker, label_line
from tunery.registry.errors import FederationError


@pytest.fixture
def worker(given: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., ClientWorker]:
    def made(
        strategy: str, protection: Protection | None = None, noise_seed: int | None = 0, **keys: Any
    ) -> ClientWorker:
        keys = {"strategy": strategy, "num_clients": 1, "server_fraction": 0.2, **keys}
        federation = assemble(build_federated_options(given(tmp_path, **keys)))
        return ClientWorker(
            "north", federation.resident, federation.client_rows[0], protection or Protection(), noise_seed
        )

    return made


def asked(worker: ClientWorker, **changes: Any) -> Payload:
    resident = worker._resident
    scalars = {"labels": label_line(resident), "from_version": "", "version": "server's", "seed": 1}
    scalars |= {"setup": resident.setup, "learning_rate": 0.01, "statistics": False, **changes}
    return Payload(grouped("adapter", resident.state()), scalars)


def test_only_a_stand_in_has_the_servers_version(worker: Callable[..., ClientWorker], half_width: Any):
    """Who loaded the model itself says which one that is, whatever the server calls its own."""
    own = worker("lora:r=2")
    mine = own.version
    assert own.handle("train", asked(own)).scalars["version"] == own.version == mine != "server's"
    proxy = worker("half_width")
    assert proxy.version == ""
    assert proxy.handle("train", asked(proxy)).scalars["version"] == proxy.version == "server's"


@pytest.mark.parametrize("strategy", ["lora:r=2", "half_width:every=0"])
def test_statistics_that_the_config_does_not_tell(
    strategy: str, worker: Callable[..., ClientWorker], half_width: Any, caplog: pytest.LogCaptureFixture
):
    """A server that asks for them gets an error's kind and no number; the client's log says why."""
    client = worker(strategy)
    reply = client.handle("train", asked(client, statistics=True))
    assert reply.scalars["error"] == "FederationError" and not reply.arrays
    assert "was asked for statistics, and its strategy tells none" in caplog.text
    assert "error" not in client.handle("train", asked(client)).scalars


def test_statistics_are_clipped_before_they_leave(worker: Callable[..., ClientWorker], half_width: Any):
    """What a client tells has at most the norm of its own config, whatever the server asks."""
    plain = worker("half_width")
    request = asked(plain, statistics=True)
    told = plain.handle("train", request).group("statistics")["tokens"]
    clipped = worker("half_width", Protection(statistics_clip_norm=3.0)).handle("train", request)
    assert told.item() > 3.0 and clipped.group("statistics")["tokens"].item() == pytest.approx(3.0)


def test_noise_is_the_clients_own(worker: Callable[..., ClientWorker]):
    """Only a simulation's can be drawn again; a real client's takes no seed that a server could know."""
    noisy = Protection(clip_norm=1.0, noise_multiplier=1.0)
    clients = [worker("lora:r=2", noisy, seed) for seed in (1, 1, None, None)]
    request = asked(clients[0])
    sent = [client.handle("train", request).group("adapter") for client in clients]
    same = [all(torch.equal(one[name], other[name]) for name in one) for one, other in itertools.pairwise(sent)]
    assert same == [True, False, False]


@pytest.mark.parametrize(
    ("strategy", "keys"),
    [
        ("lora:r=2,alpha=4", {}),
        ("half_width:every=1", {}),
        ("multi_lora:r=2", {"seed": 2}),
        ("lora:r=2", {"regularizers": ["lnsr"]}),
    ],
)
def test_a_setup_that_is_not_the_servers(
    strategy: str,
    keys: dict[str, Any],
    worker: Callable[..., ClientWorker],
    half_width: Any,
    caplog: pytest.LogCaptureFixture,
):
    """Another option, other frozen numbers or another regularizer, where names and shapes are the same: a client does not
    train on it, and a server that hears of it does not begin.
    """
    plain = strategy.partition(":")[0] + (":r=2" if "r=2" in strategy else "")
    other, client = worker(plain), worker(strategy, **keys)
    assert client.handle("train", asked(other)).scalars["error"] == "FederationError"
    assert "client north has another strategy than the server" in caplog.text
    server = Server(other._resident, None, None, None, "run")
    server.meet({"north": other.handle("describe", Payload())})
    with pytest.raises(FederationError, match="client north has another strategy than the server") as caught:
        server.meet({"north": client.handle("describe", Payload())})
    assert "\n" not in str(caught.value)
