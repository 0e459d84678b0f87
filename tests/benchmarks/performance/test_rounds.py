"""The script on what rounds cost beside the clients' training, with a model so small that only its workings show."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tunery.benchmarks.performance import rounds
from tunery.benchmarks.performance.claims import Run


@pytest.fixture(autouse=True)
def small(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model, and one row a client."""
    rows = place.folder / "rows.jsonl"
    lines = (place.data / "first" / "train.jsonl").read_text(encoding="utf-8")
    rows.write_text(lines * 3, encoding="utf-8")

    def keys(output_dir: Any, count: int) -> dict[str, Any]:
        data = {"train_file": str(rows), "validation_file": str(place.data / "first" / "validation.jsonl")}
        size = {
            "max_length": 16,
            "max_train_samples": 104,
            "strategy": "lora:r=2",
            "use_cpu": True,
            "report_to": "none",
        }
        return {"model_name_or_path": str(place.base), "output_dir": str(output_dir), **data, **size}

    monkeypatch.setattr(rounds, "_keys", keys)


def test_time_of_rounds_without_evaluation(place: Any) -> None:
    """Five of the hundred clients train in a round; the last one, which evaluates, does not count."""
    claim = rounds.hundred_clients_time(Run(quick=True), place.folder)
    lines = (place.folder / "time" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [len(row["clients"]) for row in rows] == [5, 5, 5]
    seconds, trained = (sum(row[key] for row in rows[:2]) for key in ("seconds", "client_seconds"))
    assert (claim.name, claim.goal) == ("100 clients, time", 1.05)
    assert claim.value == pytest.approx(seconds / trained) and claim.value > 1


def test_memory_beside_one_client_and_one_run(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The federation's peak over one client's and over the run's, for the model and for a sub-model that is aligned."""
    peaks = iter((300, 250, 240, 280, 250, 200))
    monkeypatch.setattr(rounds, "peak_memory", lambda work: (work(), SimpleNamespace(total=next(peaks)))[1])
    monkeypatch.setattr(rounds, "SUB_MODEL", "proxy_sub_fm:r=2,retained=[0],realign_every=1,realign_steps=1")
    monkeypatch.setattr(rounds, "hundred_clients_time", lambda *_: None)
    monkeypatch.setattr(rounds.tempfile, "TemporaryDirectory", lambda: nullcontext(place.folder))
    _, *found = rounds.claims(Run(quick=True))
    assert [claim.value for claim in found] == [1.2, 1.25, 1.12, 1.4]
    assert [claim.ok for claim in found] == [True, False, True, False]
    for kind in ("", ", sub-model"):
        for folder, clients, asked in ((f"many{kind}", 100, 2), (f"one{kind}", 1, 1)):
            result = json.loads((place.folder / folder / "result.json").read_text(encoding="utf-8"))
            lines = (place.folder / folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
            assert [len(json.loads(line)["clients"]) for line in lines] == [asked, asked]
            assert result["clients"] == clients and (result["bytes"].get("up_statistics", 0) > 0) == bool(kind)
        manifest = json.loads((place.folder / f"plain{kind}" / "tunery.json").read_text(encoding="utf-8"))
        state = json.loads((place.folder / f"plain{kind}" / "trainer_state.json").read_text(encoding="utf-8"))
        (strategy,) = [plugin for plugin in manifest["plugins"] if plugin["kind"] == "strategy"]
        assert (strategy["name"], strategy["config"].get("ratio", 0)) == ("proxy_sub_fm" if kind else "lora", 0)
        assert state["global_step"] == 8
