"""One probe over several models: nothing measured twice, nothing lost by one that fails, one table and one picture."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tunery.core.curves import RESULTS
from tunery.core.data import load_task_data
from tunery.core.point_data import evaluation_arguments
from tunery.core.points import Point, find_points
from tunery.core.probe_points import Settings, evaluate_point, measure_points
from tunery.registry.catalog import Origin
from tunery.registry.context import Measurement, Subject
from tunery.registry.contracts import Probe
from tunery.registry.errors import DataError, TuneryError
from tunery.registry.loading import load_plugins

Cli = Callable[..., Any]


class Shaken(Probe):
    """The evaluation loss, and the same with a rise that grows with gamma, as a perturbation would measure it."""

    name = "shaken"
    summary = "a perturbation for tests"
    reference = "none"
    subjects: tuple[Subject, ...] = ()

    def measure(self, subject: Subject) -> Iterable[Measurement]:
        Shaken.subjects += (subject,)
        assert subject.evaluate is not None
        loss = subject.evaluate()["eval_loss"]
        yield Measurement(name="loss", value=loss, where={"gamma": 0.0, "draw": 0})
        for gamma in (0.1, 0.2):
            for draw in range(3):
                rise = gamma * (1 + 0.01 * torch.rand(()).item())
                yield Measurement(name="loss", value=loss + rise, where={"gamma": gamma, "draw": draw})


@pytest.fixture(autouse=True)
def shaken(monkeypatch: pytest.MonkeyPatch) -> type[Shaken]:
    """Offer the probe as an installed distribution would."""
    catalog = load_plugins().catalog
    monkeypatch.setattr(catalog, "entries", dict(catalog.entries))
    catalog.add(Shaken, Origin(distribution="shaken", version="1.0", module="shaken"))
    monkeypatch.setattr(Shaken, "subjects", ())
    return Shaken


@pytest.fixture
def checkpoints(finished: Callable[[str], Path], tmp_path: Path) -> str:
    """Two checkpoints of a run on the letters task, as a pattern."""
    shutil.copytree(finished("full"), tmp_path / "out" / "run")
    return str(tmp_path / "out/*/checkpoint-*")


def test_runs_are_measured_on_what_they_were_trained_for(checkpoints: str, tmp_path: Path, cli: Cli):
    """Data, steps and seed need not be named; table, sentence and picture come out."""
    code, out, err = cli("probe", "shaken", "--runs", checkpoints, "--output_dir", tmp_path / "kept")
    assert (code, err) == (0, "")
    assert "sensitivity at 0.2" in out
    assert "loss at gamma 0.1: none up to 10 steps (3 draws)" in out
    assert (tmp_path / "kept" / "shaken.png").stat().st_size > 10_000
    table = json.loads((tmp_path / "kept" / RESULTS).read_text())["table"]
    assert [row["steps"] for row in table] == ["5", "10"]
    assert all(row["at gamma 0.2"] == pytest.approx(row["loss"] + 0.201, abs=1e-3) for row in table)
    logged = json.loads((tmp_path / "out/run/checkpoint-10/trainer_state.json").read_text())["log_history"]
    result = json.loads((tmp_path / "out/run/result.json").read_text())
    assert logged is not None
    assert table[1]["loss"] == pytest.approx(result["metrics"]["loss"], rel=1e-5)  # the same rows, the same weights


def test_finished_points_stay_and_changed_ones_say_why(checkpoints: str, tmp_path: Path, cli: Cli, shaken: Any):
    """A second call measures nothing; other weights, options, data or seeds are measured anew."""
    call = ("probe", "shaken", "--runs", checkpoints, "--output_dir", tmp_path / "kept")
    cli(*call)
    first = {path.name: path.read_bytes() for path in (tmp_path / "kept").glob("*checkpoint*.json")}
    assert (len(first), len(shaken.subjects)) == (2, 2)
    out = cli(*call).out
    assert out.count("measured before") == 2
    assert len(shaken.subjects) == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "kept").glob("*checkpoint*.json")} == first
    assert cli(*call, "--max_eval_samples", "2").out.count("another data") == 2
    assert cli(*call, "--seed", "7").out.count("measured anew: another data and seed") == 2
    shutil.copy(tmp_path / "out/run/checkpoint-5/model.safetensors", tmp_path / "out/run/checkpoint-10")
    shutil.copy(tmp_path / "out/run/checkpoint-5/tunery.json", tmp_path / "out/run/checkpoint-10")
    assert "checkpoint-10: measured anew: another weights" in cli(*call, "--seed", "7").out
    kept = next((tmp_path / "kept").glob("*checkpoint-5-*.json"))
    kept.write_text(kept.read_text()[:100])  # cut short by a full disk
    assert "checkpoint-5" not in cli(*call, "--seed", "7").out.split("┏")[0]
    assert json.loads(kept.read_text())["measurements"]


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])


def write_wrong_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}))


def make_plain(folder: Path) -> None:
    (folder / "tunery.json").unlink()


def damage_pickle(folder: Path) -> None:
    make_plain(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"garbage" * 50)


def damage_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")  # its reader raises a bare Exception


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        ((cut,), "bytes instead of"),
        ((write_wrong_type,), "Validation error for field 'hidden_size': TypeError: Field"),
        ((make_plain, write_wrong_type), "cannot load model"),
        ((damage_pickle,), "cannot load model"),
        ((damage_tokenizer,), "cannot read"),
    ],
)
def test_one_that_fails_does_not_stop_the_others(
    breaks: Sequence[Callable[[Path], None]], says: str, checkpoints: str, tmp_path: Path, cli: Cli
):
    """Whatever is wrong with it, it is reported in one line, the others are in the table, and the exit code tells."""
    broken = tmp_path / "out/run/checkpoint-5"
    for harm in breaks:
        harm(broken)
    code, out, err = cli("probe", "shaken", "--runs", checkpoints, "--output_dir", tmp_path / "kept")
    assert code == 1
    assert len(err.splitlines()) == 1 and "checkpoint-5: " in err and says in err
    assert "checkpoint-10" in out
    results = json.loads((tmp_path / "kept" / RESULTS).read_text())
    assert list(results["failed"]) == [str(broken)]
    assert len(results["table"]) == 1


def test_plain_models_need_data_and_bring_their_class(tiny: Any, cli: Cli):
    """A transformers folder is evaluated on the data that are named; a validation file alone will do."""
    code, out, _ = cli(
        "probe", "shaken", "--models", tiny.base, "--validation_file", tiny.rows, "--json", "--max_length", "16"
    )
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [row["gamma"] for row in rows] == [0.0, 0.1, 0.1, 0.1, 0.2, 0.2, 0.2]
    code, out, _ = cli("probe", "weight_distance", "--model", tiny.base, "--json")
    assert json.loads(out.splitlines()[0])["value"] == 0.0  # nothing was trained


def test_plain_models_without_data_are_loaded_as_asked(tiny: Any, monkeypatch: pytest.MonkeyPatch, cli: Cli):
    """In the precision that is named, which has to be one."""
    loaded: list[torch.dtype] = []

    def measure(_: Probe, subject: Subject) -> Iterable[Measurement]:
        loaded.append(next(subject.model.parameters()).dtype)
        return [Measurement(name="loss", value=0.0)]

    monkeypatch.setattr(Shaken, "measure", measure)
    call = ("probe", "shaken", "--model", tiny.base, "--dtype")
    assert [cli(*call, "bfloat16").code, cli(*call, "float32").code] == [0, 0]
    assert loaded == [torch.bfloat16, torch.float32]
    code, _, err = cli(*call, "bfloat6")
    assert (code, len(err.splitlines())) == (2, 1) and "did you mean 'bfloat16'?" in err


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_probe_measures_the_split_that_is_named(split: str, tiny: Any, monkeypatch: pytest.MonkeyPatch):
    """What it finds layer by layer or draw by draw is left out."""

    def measure(_: Probe, subject: Subject) -> Iterable[Measurement]:
        assert subject.batches is not None
        yield Measurement(name="rows", value=float(sum(len(batch["labels"]) for batch in subject.batches())))
        yield Measurement(name="rows", value=0.0, where={"layer": 1})

    monkeypatch.setattr(Shaken, "measure", measure)
    keys = {"train_file": str(tiny.rows), "test_file": str(tiny.rows), "validation_fraction": 0.25, "max_length": 16}
    data = load_task_data(evaluation_arguments(keys), seed=0)
    found = evaluate_point(Point(reference=str(tiny.base)), data, Settings(probe="shaken"), split)
    assert found == {"rows": {"validation": 12.0, "test": 48.0}[split]}


def test_draws_are_the_same_at_every_point(checkpoints: str):
    """So that differences between points are of the weights, not of the noise."""
    done = list(measure_points(find_points(runs=[checkpoints]), Settings(probe="shaken", seed=3)))
    rises = [[row["value"] - one.rows[0]["value"] for row in one.rows[1:]] for one in done]
    assert rises[0] == pytest.approx(rises[1], abs=1e-6)
    assert [subject.run.seed for subject in Shaken.subjects] == [3, 3]


def test_gaussian_over_checkpoints(checkpoints: str, tmp_path: Path, cli: Cli):
    """Every metric of a task is there, its main one is tabled, and worse means lower where higher is better."""
    selection = "gaussian:gammas=[0.5,5.0],draws=2"
    code, out, err = cli("probe", selection, "--runs", checkpoints, "--output_dir", tmp_path / "kept")
    assert (code, err) == (0, "")
    assert "accuracy at gamma 5:" in out
    assert (tmp_path / "kept" / "gaussian.png").is_file()
    kept = json.loads(next((tmp_path / "kept").glob("*checkpoint-10-*.json")).read_text())["measurements"]
    assert {row["gamma"] for row in kept if row["name"] == "loss"} == {0.0, 0.5, 5.0}


def test_a_probe_without_its_data_asks_for_them(tiny: Any, cli: Cli):
    """In one line, with the flags that name some."""
    code, out, err = cli("probe", "gaussian", "--model", tiny.base)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "name what to evaluate on: --dataset_name" in err


def test_data_that_do_not_fit(checkpoints: str, tmp_path: Path):
    """Text alone is language modelling, and the run is a classifier."""
    (tmp_path / "text.jsonl").write_text('{"text": "a b c"}\n' * 4, encoding="utf-8")
    settings = Settings(probe="shaken", data={"train_file": str(tmp_path / "text.jsonl")})
    for one in measure_points(find_points(runs=[checkpoints]), settings):
        assert "data of causal_lm for a model of classification with 2 labels" in one.error
    with pytest.raises(DataError, match="data of causal_lm"):
        list(measure_points(find_points(runs=[checkpoints])[:1], settings))


def test_a_wrong_probe_or_wrong_data_stop_before_anything_is_loaded(checkpoints: str):
    """They concern every point."""
    for settings in (Settings(probe="shakn"), Settings(probe="shaken", data={"train_file": "gone.jsonl"})):
        with pytest.raises(TuneryError):
            list(measure_points(find_points(runs=[checkpoints]), settings))
    assert not Shaken.subjects
