"""Rounds go on without clients that fail, name them, and stop where too few are left."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tunery.core.federated.engine
from tunery.core.federated.arguments import FederatedArguments
from tunery.core.federated.payload import Payload
from tunery.core.federated.run import in_process
from tunery.registry.errors import FederationError


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]


class Saboteur:
    """A client that does something else from its ``first`` training on."""

    def __init__(self, worker: Any, act: Callable[[Any, Payload], Payload]) -> None:
        self.worker, self.act = worker, act

    def handle(self, op: str, request: Payload) -> Payload:
        reply = self.worker.handle(op, request)
        return self.act(self.worker, reply) if op == "train" else reply


def poisoned(worker: Any, reply: Payload) -> Payload:
    return Payload({name: torch.full_like(value, math.nan) for name, value in reply.arrays.items()}, reply.scalars)


def misshapen(worker: Any, reply: Payload) -> Payload:
    return Payload({name: value[..., None] for name, value in reply.arrays.items()}, reply.scalars)


def outdated(worker: Any, reply: Payload) -> Payload:
    return Payload(reply.arrays, {**reply.scalars, "version": "long ago"})


class Clock:
    """A clock that can be put forward."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


def crashed(worker: Any, reply: Payload) -> Payload:
    return Payload(scalars={"error": "MemoryError", "version": worker.version})


def sabotage(acts: dict[str, Callable[[Any, Payload], Payload]]) -> Callable[[Any, Any], Any]:
    def connect(federation: Any, options: Any) -> Any:
        engine = in_process(federation, options)
        for name, act in acts.items():
            engine.workers[name] = Saboteur(engine.workers[name], act)
        return engine

    return connect


def test_clients_that_fail_are_left_out_named_and_counted(
    run_federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """NaN, a wrong shape, a wrong version, an error and a late reply: the others' mean is the round's."""
    clock = Clock()
    monkeypatch.setattr(tunery.core.federated.engine, "time", clock)

    def late(worker: Any, reply: Payload) -> Payload:
        clock.ahead += 1000
        return reply

    acts = {"client-0": poisoned, "client-1": misshapen, "client-2": outdated, "client-3": crashed, "client-4": late}
    keys = {"client_fraction": 1.0, "num_rounds": 2, "round_timeout": 500.0}
    result = run_federation(tmp_path / "run", sabotage(acts), **keys)
    first, second = rows_of(tmp_path / "run")
    assert first["clients"] == second["clients"] == ["client-5"]
    assert second["left_out"] == {}  # they rest
    told = (
        "not finite",
        "instead of float32",
        "trained version 'long ago'",
        "failed with MemoryError",
        "no reply in time",
    )
    assert all(words in first["left_out"][name] for name, words in zip(acts, told, strict=True))
    assert result["left_out"] == dict.fromkeys(acts, 1)

    alone = {**keys, "client_fraction": 1.0}
    run_federation(tmp_path / "only", sabotage(dict.fromkeys(acts, crashed)), **alone)
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("run", "only"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def cut(worker: Any, reply: Payload) -> Payload:
    return changed(reply, lambda name, value: {name: value[1:] if value.dim() else value})


def silent(worker: Any, reply: Payload) -> Payload:
    return changed(reply, lambda name, value: {})


def renamed(worker: Any, reply: Payload) -> Payload:
    return changed(reply, lambda name, value: {f"{name}.1": value})


def changed(reply: Payload, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]) -> Payload:
    arrays: dict[str, torch.Tensor] = {}
    for name, value in reply.arrays.items():
        arrays |= change(name, value) if name.startswith("statistics/") else {name: value}
    return Payload(arrays, reply.scalars)


@pytest.mark.parametrize(("act", "words"), [(cut, "instead of float64"), (silent, "without"), (renamed, "without")])
def test_the_first_clients_statistics_are_no_norm(act: Any, words: str, run_federation, tmp_path: Path):
    """Bad ones of whoever comes first leave out that client alone, and the others' align the stand-in."""
    strategy = "proxy_sub_fm:r=2,ratio=0.5,retained=[0],realign_every=1,realign_steps=1"
    keys = {"client_fraction": 1.0, "num_clients": 3, "num_rounds": 2, "strategy": strategy, "server_fraction": 0.2}
    run_federation(tmp_path / "run", sabotage({"client-0": act}), **keys)
    first = rows_of(tmp_path / "run")[0]
    assert first["clients"] == ["client-1", "client-2"] and words in first["left_out"]["client-0"]
    assert first["aligned"]["alignment_steps"] == 1


def test_a_client_that_failed_rests(run_federation, tmp_path: Path):
    """It is not asked for two rounds, since there are others; then it is again."""
    keys = {"client_fraction": 0.67, "num_rounds": 8, "num_clients": 6}
    run_federation(tmp_path / "run", sabotage({"client-1": crashed}), **keys)
    failed = [row["round"] for row in rows_of(tmp_path / "run") if "client-1" in row["left_out"]]
    assert len(failed) >= 2
    assert all(later - earlier > 2 for earlier, later in itertools.pairwise(failed))


def test_a_round_with_too_few_is_repeated_with_others(run_federation, tmp_path: Path):
    """The repetition asks clients that have not failed; the row says how often and who."""
    acts = dict.fromkeys(["client-0", "client-1", "client-2"], crashed)
    run_federation(tmp_path / "run", sabotage(acts), min_clients=3, num_rounds=2, max_attempts=4)
    rows = rows_of(tmp_path / "run")
    assert all(row["clients"] == ["client-3", "client-4", "client-5"] for row in rows)
    assert rows[0]["attempts"] > 1 and set(rows[0]["left_out"]) <= set(acts)


def test_repeated_tries_are_paid_for(run_federation, tmp_path: Path):
    """Bytes and seconds of a round are those of all its tries, and what a client's round costs is by who was asked."""
    acts = dict.fromkeys(["client-0", "client-1", "client-2"], poisoned)
    asked: dict[str, list[Payload]] = {"sent": [], "replied": []}

    def connect(federation: Any, options: Any) -> Any:
        engine = sabotage(acts)(federation, options)
        exchange = engine.exchange

        def watched(op: str, requests: Any, timeout: Any) -> Any:
            replies = exchange(op, requests, timeout)
            if op == "train":
                asked["sent"] += requests.values()
                asked["replied"] += replies.values()
            return replies

        engine.exchange = watched
        return engine

    result = run_federation(tmp_path / "run", connect, min_clients=3, num_rounds=1, max_attempts=4)
    (row,) = rows_of(tmp_path / "run")
    assert row["attempts"] > 1 and row["asked"] == len(asked["sent"]) > 3
    good = [reply for reply in asked["replied"] if all(value.isfinite().all() for value in reply.arrays.values())]
    assert row["answered"] == len(good) > 3
    for key, sent in (("down_adapter", asked["sent"]), ("up_adapter", asked["replied"])):
        assert row["bytes"][key] == sum(message.nbytes("adapter") for message in sent)
    assert row["client_seconds"] == pytest.approx(sum(float(reply.scalars["seconds"]) for reply in good))
    measured = result["cost"]["measured"]
    assert measured["adapter_bytes"] == result["cost"]["predicted"]["adapter_bytes"]
    assert measured["seconds"] == pytest.approx(row["client_seconds"] / len(good))


def test_nobody_left_is_an_error(run_federation, tmp_path: Path):
    """When every client fails, the federation stops in one line, and goes on from there when they are back."""
    acts = dict.fromkeys([f"client-{n}" for n in range(6)], crashed)
    with pytest.raises(FederationError, match=r"round 1: 0 of 3 clients .* failed with MemoryError") as caught:
        run_federation(tmp_path / "run", sabotage(acts))
    assert "\n" not in str(caught.value)
    result = run_federation(tmp_path / "run", resume_from_checkpoint="last")
    assert result["rounds"] == 3


def test_fewer_clients_than_a_round_needs(run_federation, tmp_path: Path):
    """Where not as many clients came as the recipe counts on, nobody is asked to train."""

    def connect(federation: Any, options: Any) -> Any:
        engine = in_process(federation, options)
        for name in ("client-0", "client-1", "client-2"):
            del engine.workers[name]
        return engine

    with pytest.raises(FederationError, match="a round asks 2 of the 3 clients there are, and min_clients=3") as caught:
        run_federation(tmp_path / "run", connect, min_clients=3)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "rounds").exists()


def test_another_base_model_is_refused(run_federation, tmp_path: Path):
    """A client whose base model is another one than the server's stops the federation before the first round."""

    def connect(federation: Any, options: Any) -> Any:
        engine = in_process(federation, options)
        engine.workers["client-2"].version = "f" * 64
        return engine

    with pytest.raises(FederationError, match="client client-2 has another base model than the server: ffff"):
        run_federation(tmp_path / "run", connect)


def test_noise_is_bounded_by_the_clip_norm(run_federation, tmp_path: Path):
    """With clipping, no client's change is longer than the norm; the mean of what they send is what the server has."""
    moved: list[float] = []

    def connect(federation: Any, options: Any) -> Any:
        engine = in_process(federation, options)
        for name, worker in engine.workers.items():

            def measured(worker: Any, reply: Payload) -> Payload:
                before = sent[0].group("adapter")
                change = [value - before[key] for key, value in reply.group("adapter").items()]
                moved.append(torch.cat([value.flatten() for value in change]).norm().item())
                return reply

            engine.workers[name] = Saboteur(worker, measured)
        asked = engine.exchange

        def exchange(op: str, requests: Any, timeout: Any) -> Any:
            sent[:] = list(requests.values())
            return asked(op, requests, timeout)

        engine.exchange = exchange
        return engine

    sent: list[Payload] = []
    run_federation(tmp_path / "run", connect, clip_norm=0.01, num_rounds=1)
    assert len(moved) == 3 and all(length == pytest.approx(0.01, rel=1e-3) for length in moved)


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("linear", [1, 0.8, 0.6, 0.4, 0.2]),
        ("released", [1, 0.6, 0.4, 0.2, 0.2]),  # the public code's, where the last round uses the rate before it
        ("constant", [1, 1, 1, 1, 1]),
    ],
)
def test_learning_rates(decay: Any, expected: list[float]):
    """The sequences over five rounds."""
    options = FederatedArguments(num_rounds=5, learning_rate_decay=decay)
    assert [options.learning_rate(1.0, done) for done in range(5)] == pytest.approx(expected)
