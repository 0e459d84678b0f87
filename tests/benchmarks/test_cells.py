"""One cell: its result is true, sealed and the same every time; what was done, what is stale and why, what is damaged."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from safetensors.torch import load_file

from tunery.benchmarks.cells import result_path, state_of
from tunery.benchmarks.inputs import inputs_of
from tunery.benchmarks.measuring import measure
from tunery.benchmarks.results import read_cell, read_results
from tunery.registry.loading import load_plugins

Run = Callable[..., Any]
MEASURED = ("metrics", "curve", "majority", "inputs")


def test_result(place: Any, run: Run):
    """The documented keys, scored on the published validation split, and no leftovers in the folder."""
    cell = place.cells()[0]
    result = run(cell)
    folder = place.folder / "results"
    assert read_cell(result_path(folder, cell)).score == result["metrics"]["accuracy"]
    assert (result["status"], result["main_metric"], result["higher_is_better"]) == ("done", "accuracy", True)
    assert result["train_info"]["examples"] == {"train": 36, "validation": 4, "test": 20}
    assert result["train_info"]["steps"] == 4
    assert [step for step, _ in result["curve"]] == [2, 4]
    assert set(result["metrics"]) == {"accuracy", "f1", "loss"}
    rows = [json.loads(line) for line in (place.data / "first" / "validation.jsonl").read_text().splitlines()]
    yes = sum(row["label"] == "yes" for row in rows) / len(rows)
    assert result["majority"] in (pytest.approx(yes), pytest.approx(1 - yes))
    assert result["run_info"]["validation_metrics"]["accuracy"] == result["curve"][-1][1]
    assert [plugin["name"] for plugin in result["meta_info"]["plugins"]] == ["full"]
    assert str(place.base.parent) not in json.dumps(result["inputs"]["data"])
    assert [path.name for path in folder.rglob("*") if path.is_file() and path.name != ".guard"] == [
        "first--full--seed0.json"
    ]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_same_bits_every_time(method: str, place: Any, run: Run):
    """Alone, after another cell in between, in another folder: the same metrics, curve and training loss."""
    cell, other = place.cells(methods={method: {"strategy": method}, "head": {"strategy": "head"}})[:2]
    results = []
    for name in ("once", "again"):
        result = run(cell, place.folder / name)
        run(other, place.folder / name)
        results.append({key: result[key] for key in MEASURED} | {"loss": result["train_info"]["train_loss"]})
    assert results[0] == results[1]


def test_seeds_differ(place: Any, run: Run):
    first, second = (run(cell) for cell in place.cells() if cell.name.startswith("first--full"))
    assert first["metrics"]["loss"] != second["metrics"]["loss"]


def test_adapters_start_from_their_seed(place: Any):
    """Each seed draws an A of its own, and the same one every time."""
    still = {**place.content()["defaults"], "learning_rate": 0.0, "max_steps": 1}
    cells = place.cells(defaults=still, methods={"lora": {"strategy": "lora:r=2"}}, seeds=2)[:2]
    drawn = []
    for number, cell in enumerate([*cells, cells[0]]):
        folder = place.folder / str(number)
        folder.mkdir()
        measure(cell, folder)
        weights = load_file(folder / "run" / "adapter_model.safetensors")
        drawn.append({name: value for name, value in weights.items() if "lora_A" in name})
    assert [cell.seed for cell in cells] == [0, 1]
    for name, value in drawn[0].items():
        assert value.any()
        assert value.equal(drawn[2][name])
        assert not value.equal(drawn[1][name])
    assert len(drawn[0]) == 4  # query and value of two layers


def test_done_is_not_done_again(place: Any, run: Run):
    """Who expects no result, and finds one, leaves it alone."""
    from tunery.benchmarks.cells import run_cell

    cell = place.cells()[0]
    run(cell)
    folder, inputs = place.folder / "results", inputs_of(cell, load_plugins().catalog)
    before = result_path(folder, cell).read_bytes()
    assert state_of(folder, cell, inputs).status == "done"
    assert run_cell(cell, folder, inputs, replaces=None) is None
    assert result_path(folder, cell).read_bytes() == before


def test_cells_share_features(place: Any, run: Run, monkeypatch: pytest.MonkeyPatch):
    """What a frozen encoder says of a row is filed once for all seeds, scored rows included, and makes no cell stale."""
    from tunery.plugins.feature_cache import _Store

    methods = {"head": {"strategy": {"name": "head", "cache_dir": "{cache_dir}"}}}
    tasks = {"first": {"data_files": "{data_dir}/first", "max_steps": 9}}  # an epoch
    filed = []
    for cell in place.cells(methods=methods, tasks=tasks):
        monkeypatch.setattr(_Store, "recent", None)  # a cell is a process
        result = run(cell)
        gc.collect()
        filed.append(sorted((place.folder / "results" / ".work" / "cache").rglob("*.safetensors")))
        assert (result["status"], result["run_info"]["strategy"]) == ("done", "head")
    assert filed[0] and filed[0] == filed[1]
    assert sum(len(load_file(path)["keys"]) for path in filed[0]) == 60  # 36 to train on, 4 to choose by, 20 to score
    plain = place.cells(methods={"head": {"strategy": "head"}}, tasks=tasks)[1]
    assert state_of(place.folder / "results", plain, inputs_of(plain, load_plugins().catalog)).status == "done"


def test_damaged_result_is_moved_aside(place: Any, run: Run):
    """A file with one flipped digit is named, kept apart, and its cell is to be run."""
    cell = place.cells()[0]
    run(cell)
    folder = place.folder / "results"
    path = result_path(folder, cell)
    path.write_text(path.read_text().replace('"accuracy": 0', '"accuracy": 1', 1))
    state = state_of(folder, cell, inputs_of(cell, load_plugins().catalog))
    assert state.status == "missing"
    assert state.why == f"{path.name} does not match its hash; moved to damaged/{path.name}"
    assert not path.exists()
    assert (folder / "damaged" / path.name).is_file()


def test_failure_is_recorded(place: Any, run: Run):
    """The error stands in the result, and the cell counts as failed, to be tried again by the next call."""
    cell = place.cells(defaults={**place.content()["defaults"], "text_columns": ["txet"]})[0]
    result = run(cell)
    assert result["status"] == "failed"
    assert "txet" in result["error"]
    folder = place.folder / "results"
    state = state_of(folder, cell, inputs_of(cell, load_plugins().catalog))
    assert (state.status, state.why) == ("failed", result["error"])
    assert run(cell) is not None


@pytest.fixture
def counting(place: Any) -> Callable[..., Any]:
    """Make a cell that learns to count letters and searches for its learning rate."""
    for split in ("train", "validation"):
        rows = [json.loads(line) for line in (place.data / "first" / f"{split}.jsonl").read_text().splitlines()]
        numbers = [{"text": row["text"], "label": float(row["text"].count("a"))} for row in rows]
        lines = "".join(f"{json.dumps(row)}\n" for row in numbers)
        (place.folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return lambda metric, rates: place.cells(
        tasks={"count": {"data_files": str(place.folder), "metrics": [metric]}},
        protocol=["dev_as_test", f"learning_rate_search({rates})"],
        methods={"full": {"strategy": "full"}},
    )[0]


@pytest.mark.parametrize(("metric", "better"), [("mse", min), ("spearman", max)])
def test_learning_rate_search(metric: str, better: Callable[..., Any], place: Any, counting: Any, run: Run):
    """The rate with the best validation score is chosen, and the result is that of a run with it alone."""
    cell = counting(metric, "1e-6, 3e-2")
    found = run(cell)
    assert found["higher_is_better"] == (better is max)
    searched = found["run_info"]["learning_rate_search"]
    assert list(searched) == ["1e-06", "0.03"]
    assert searched["1e-06"] != searched["0.03"]
    best = better(searched, key=lambda rate: searched[rate])
    assert found["run_info"]["learning_rate"] == float(best)
    alone = dataclasses.replace(cell, pieces=("dev_as_test",), recipe={**cell.recipe, "learning_rate": float(best)})
    assert run(alone, place.folder / "alone")["metrics"] == found["metrics"]


def test_a_rate_that_diverges_is_not_chosen(place: Any, counting: Any, run: Run):
    """Though it stands first in the grid; the file says ``null`` of it, as strict readers of JSON want it."""
    cell = counting("mse", "1e30, 1e-3")
    found = run(cell)
    assert found["run_info"]["learning_rate_search"]["1e+30"] is None
    assert found["run_info"]["learning_rate"] == 1e-3
    assert found["metrics"]["mse"] is not None

    def refuse(word: str) -> None:
        raise ValueError(word)

    text = result_path(place.folder / "results", cell).read_text()
    assert json.loads(text, parse_constant=refuse)["run_info"] == found["run_info"]


def test_a_model_that_diverges(place: Any, counting: Any, run: Run):
    """With every rate of a search there is nothing to choose; with the only rate the result is read back as no number."""
    cell = counting("mse", "1e30, 1e31")
    assert run(cell)["error"] == "learning_rate_search: the model diverged with every rate; add smaller ones"
    alone = dataclasses.replace(cell, pieces=("dev_as_test",), recipe={**cell.recipe, "learning_rate": 1e30})
    run(alone, place.folder / "alone")
    read = read_cell(result_path(place.folder / "alone", alone))
    assert math.isnan(read.metrics["mse"])
    assert math.isnan(read.curve[-1][1])
    assert (read.status, read.score, read.failed) == ("done", None, True)


def test_several_tasks_in_one_run(place: Any, run: Run):
    """Each task's metrics and their mean, all of the test split."""
    joint = [{"name": name, "data_files": f"{{data_dir}}/{name}"} for name in ("first", "second")]
    cells = place.cells(
        tasks={"both": {"tasks": joint}},
        methods={"multi_lora": {"strategy": "multi_lora:r=2"}},
        defaults={**place.content()["defaults"], "mixing": "round_robin"},
    )
    result = run(cells[0])
    assert result["error"] is None
    assert result["main_metric"] == "mean"
    assert {"first_accuracy", "second_accuracy"} <= result["metrics"].keys()
    both = (result["metrics"]["first_accuracy"] + result["metrics"]["second_accuracy"]) / 2
    assert result["metrics"]["mean"] == pytest.approx(both)
    assert result["train_info"]["examples"] == {"train": 72, "validation": 8, "test": 40}
    alone = {cell.task: cell for cell in read_results(place.folder / "results").cells}
    assert {cell.run for cell in alone.values()} == {("both", "multi_lora", 0)}
    for name in ("first", "second"):
        rows = [json.loads(line)["label"] for line in (place.data / name / "validation.jsonl").read_text().splitlines()]
        assert alone[name].score == result["metrics"][f"{name}_accuracy"]
        assert alone[name].majority in [pytest.approx(rows.count(label) / len(rows)) for label in ("yes", "no")]
        assert [step for step, _ in alone[name].curve] == [2, 4]
    curves = [[value for _, value in part.curve] for part in alone.values()]
    assert [sum(pair) / 2 for pair in zip(*curves, strict=True)] == pytest.approx([v for _, v in result["curve"]])
    assert set(result["inputs"]["data"]) == {
        f"{name}/{split}.jsonl" for name in ("first", "second") for split in ("train", "validation")
    }


def test_federated_cell(place: Any, run: Run):
    """Rounds are its steps, the server's evaluations its curve, and the majority class stands beside."""
    defaults = {key: place.content()["defaults"][key] for key in ("model_name_or_path", "max_length", "use_cpu")}
    defaults |= {"num_clients": 4, "client_fraction": 0.5, "num_rounds": 3, "eval_every": 1, "learning_rate": 1e-2}
    cell = place.cells(
        command="federate", defaults=defaults, methods={"lora": {"strategy": "lora:r=2"}}, protocol=["official_split"]
    )[0]
    first, again = run(cell), run(cell, place.folder / "again")
    assert first["error"] is None
    assert [round_ for round_, _ in first["curve"]] == [1, 2, 3]
    assert first["metrics"]["accuracy"] == first["curve"][-1][1]
    assert 0 < first["majority"] < 1
    assert first["train_info"]["clients"] == 4
    assert (again["metrics"], again["curve"]) == (first["metrics"], first["curve"])
