"""Finished runs and what is exported of them, loaded back: tokens, precision, weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertModel, GPT2Config, GPT2Model, set_seed

from tunery.core.artifacts import write_json
from tunery.core.finished import export_run, load_run
from tunery.core.options import build_options
from tunery.core.points import Point
from tunery.core.probe_points import Settings, measure_points, probe_run
from tunery.core.run import train
from tunery.registry.errors import ArtifactError

Finished = Callable[[str], Path]
GAUSSIAN = "gaussian:gammas=[0.1],draws=1"

# ---- decoders whose config names no pad token


@pytest.fixture(scope="module")
def decoder(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 without a pad token, and the tokenizer that has one."""
    folder = tmp_path_factory.mktemp("decoder")
    set_seed(0)
    sizes = {"vocab_size": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    GPT2Model(GPT2Config(**sizes, bos_token_id=2, eos_token_id=3)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.base).save_pretrained(folder)
    return folder


def test_an_adapter_of_a_decoder_pads_as_it_was_trained(decoder: Path, tiny: Any, tmp_path: Path):
    """It is evaluated to the metrics of its run, and folded in it says its pad token to whoever loads it."""
    run, keys = tmp_path / "run", {"strategy": "lora:r=2", "max_steps": 2, "model_name_or_path": str(decoder)}
    result = train(build_options(tiny.given(**keys, output_dir=str(run))))
    assert load_run(run).model.config.pad_token_id == 0
    found = next(row for row in probe_run(GAUSSIAN, run) if row["name"] == "loss" and row["gamma"] == 0)
    assert found["value"] == pytest.approx(result["metrics"]["loss"], rel=1e-5)
    merged = AutoModelForSequenceClassification.from_pretrained(export_run(run, tmp_path / "merged", merge=True))
    assert merged.config.pad_token_id == 0


def test_a_plain_decoder_is_probed_in_batches(decoder: Path, tiny: Any):
    """With the pad token of its tokenizer."""
    data = {"train_file": str(tiny.rows), "max_length": 16}
    (measured,) = measure_points([Point(reference=str(decoder))], Settings(probe=GAUSSIAN, data=data, batch_size=4))
    assert {row["gamma"] for row in measured.rows if row["name"] == "loss"} == {0.0, 0.1}


# ---- precision


@pytest.mark.parametrize(
    ("stored", "asked"),
    [(torch.bfloat16, "float32"), (torch.float32, "float16")],
    ids=["more", "less"],
)
def test_an_adapter_stands_on_the_precision_it_was_trained_on(
    stored: torch.dtype, asked: str, tiny: Any, tmp_path: Path
):
    """Whatever the files of its base model hold: the weights are those of the run, and so are the answers."""
    base = tmp_path / "base"
    BertModel.from_pretrained(tiny.base, dtype=stored).save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny.base).save_pretrained(base)
    keys = {"strategy": "lora:r=2", "max_steps": 2, "model_name_or_path": str(base), "dtype": asked}
    result = train(build_options(tiny.given(**keys, output_dir=str(tmp_path / "run"))))
    loaded = load_run(tmp_path / "run")
    assert loaded.manifest["base_model"]["dtype"] == asked
    name = "bert.encoder.layer.0.output.dense.weight"
    assert str(loaded.model.get_base_model().get_parameter(name).dtype) == f"torch.{asked}"
    found = next(row for row in probe_run(GAUSSIAN, tmp_path / "run") if row["name"] == "loss" and row["gamma"] == 0)
    assert found["value"] == pytest.approx(result["metrics"]["loss"], rel=1e-6)


def test_a_manifest_without_a_precision_loads_the_files_own(finished: Finished, tmp_path: Path):
    """As those have that an earlier version wrote."""
    run = Path(shutil.copytree(finished("lora:r=2"), tmp_path / "run"))
    content = json.loads((run / "tunery.json").read_text(encoding="utf-8"))
    assert content["base_model"].pop("dtype") == "float32"
    write_json(run / "tunery.json", content)
    assert load_run(run).model.dtype == torch.float32


# ---- exports


def distance(folder: Path) -> float:
    """Return how far the weights are from the pre-trained ones."""
    return next(float(row["value"]) for row in probe_run("weight_distance", folder) if row["name"] == "distance")


@pytest.mark.parametrize("strategy", ["full", "lora:r=2"])
@pytest.mark.parametrize(
    ("options", "share"),
    [({}, 1.0), ({"merge": True}, 1.0), ({"wise_ft": 0.5}, 0.5), ({"wise_ft": 0.5, "merge": True}, 0.5)],
    ids=["as trained", "merged", "half way", "half way, merged"],
)
def test_an_export_is_measured_like_its_run(
    strategy: str, options: dict[str, Any], share: float, finished: Finished, tmp_path: Path
):
    """It stands where the run stands, or half as far."""
    run = finished(strategy)
    assert distance(export_run(run, tmp_path / "out", **options)) == pytest.approx(share * distance(run), rel=1e-4)
    assert distance(run) > 0.01


@pytest.fixture(scope="module")
def several(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two tasks of the same rows; only to read."""
    folder = tmp_path_factory.mktemp("several") / "run"
    keys = {"strategy": "multi_lora:r=2", "tasks": [{"name": "one"}, {"name": "two"}], "output_dir": str(folder)}
    train(build_options(tiny.given(**keys)))
    return folder


@pytest.mark.parametrize("merge", [False, True], ids=["adapter", "merged"])
def test_a_task_of_several_is_loaded_back(merge: bool, several: Path, tmp_path: Path):
    """Kept apart or folded in, the export of a task gives the answers of the run's task; what others load of it too."""
    out = export_run(several, tmp_path / "out", task="two", merge=merge)
    given = AutoTokenizer.from_pretrained(out)(["a b c d", "e f"], padding=True, return_tensors="pt")
    both = load_run(several).model
    with torch.no_grad():
        expected = both(**given, task_ids=torch.tensor([1, 1])).logits
        loaded = load_run(out, with_reference=True)
        torch.testing.assert_close(loaded.model(**given).logits, expected, rtol=0, atol=1e-5)
    assert (loaded.recipe.strategy, [task.name for task in loaded.run.tasks]) == (None, ["two"])
    assert distance(out) > 0.01


def test_an_export_of_an_export_is_one_line(finished: Finished, tmp_path: Path, cli: Any):
    """It says what to export instead."""
    out = export_run(finished("lora:r=2"), tmp_path / "out")
    code, _, err = cli("export", out, "--output_dir", tmp_path / "again", "--merge")
    assert code == 2
    assert "out is an export already; export the run it was made from" in err and err.count("\n") == 1
    assert not (tmp_path / "again").exists()


def test_a_damaged_adapter_config_is_one_line(finished: Finished, tmp_path: Path):
    """It names the file."""
    out = export_run(finished("lora:r=2"), tmp_path / "out")
    (out / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"cannot use .*adapter_config\.json") as error:
        load_run(out)
    assert "\n" not in str(error.value)
