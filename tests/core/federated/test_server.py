"""What a node says it has decides what it is sent, and is not trusted further than that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tunery.core.federated.server
from tunery.core.federated.arguments import build_federated_options
from tunery.core.federated.payload import Payload
from tunery.core.federated.run import assemble
from tunery.core.federated.server import Server


@pytest.fixture(scope="module")
def server(half_width: Any, given: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Server:
    options = build_federated_options(
        given(tmp_path_factory.mktemp("server"), strategy="half_width", server_fraction=0.2)
    )
    made = assemble(options)
    found = Server(made.resident, made.full, made.validation, made.server_rows, "run")
    found.changes.append({})
    return found


@pytest.mark.parametrize("says", ["", "run:", "run:x", "run:-1", "run:2", "run:1:0", "other:1", "run:" + "9" * 5000])
def test_a_version_that_never_was_gets_everything(says: str, server: Server):
    """Whatever a node claims to have, it is sent the whole stand-in unless that is a version of this run."""
    server.meet({"north": Payload(scalars={"version": says, "setup": server.resident.setup})})
    request = server.request("north", {})
    assert request.nbytes("frozen") == sum(value.nbytes for value in server.resident.frozen().values())
    assert (request.scalars["from_version"], request.scalars["version"]) == ("", "run:1")


def test_alignments_give_their_memory_back(server: Server, monkeypatch: pytest.MonkeyPatch):
    """What an alignment took is not kept through the rounds that follow."""
    given_back: list[int] = []
    monkeypatch.setattr(tunery.core.federated.server, "give_back", lambda: given_back.append(len(server.changes)))
    before = len(server.changes)
    server.distill(0)
    server.realign(server.statistics_like, 0)
    assert given_back == [before, before + 1]
    del server.changes[before:]


def test_a_version_of_this_run_gets_what_it_lacks(server: Server):
    """Nothing, where nothing changed since."""
    for says in ("run:0", "run:1"):
        server.meet({"north": Payload(scalars={"version": says, "setup": server.resident.setup})})
        request = server.request("north", {})
        assert request.nbytes("frozen") == 0 and request.scalars["from_version"] == says
