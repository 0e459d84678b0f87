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
