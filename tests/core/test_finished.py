"""Finished runs and what is exported of them, loaded back: tokens, precision, weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GPT2Config, GPT2Model, set_seed

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
