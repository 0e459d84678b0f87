"""The script on what rounds cost beside the clients' training, with a model so small that only its workings show."""

from __future__ import annotations

import json
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
            "max_train_samples": 100,
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


def test_memory_beside_one_run(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The federation's peak over the run's."""
    peaks = iter((300, 250))
    monkeypatch.setattr(rounds, "peak_memory", lambda work: (work(), SimpleNamespace(total=next(peaks)))[1])
    claim = rounds.hundred_clients_memory(place.folder)
    assert (claim.value, claim.goal) == (1.2, 1.2)
    assert json.loads((place.folder / "many" / "result.json").read_text(encoding="utf-8"))["clients"] == 100
    state = json.loads((place.folder / "one" / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["global_step"] == 20
