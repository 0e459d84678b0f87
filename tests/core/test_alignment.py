"""A run that trains a stand-in also says what the full model makes of its adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from tunery.core.finished import export_run


@pytest.mark.parametrize(
    "strategy", ["proxy_sub_fm:retained=[0],r=2,distill_steps=2", "offsite:adapter_layers=[1,0],emulator_layers=0,r=2"]
)
def test_metrics_of_the_full_model_stand_beside_the_stand_ins(
    strategy: str, tiny: Any, cli: Callable[..., Any], tmp_path: Path
) -> None:
    """The loss is that of the merged export, by plain transformers; the table has a line for it."""
    model = AutoModel.from_pretrained(tiny.base)
    for layer in model.encoder.layer:  # so narrow a model's blocks have hardly a say otherwise
        layer.intermediate.dense.weight.data *= 20
        layer.output.dense.weight.data *= 20
    model.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(tiny.base).save_pretrained(tmp_path / "base")
    keys = tiny.given(
        model_name_or_path=str(tmp_path / "base"),
        strategy=strategy,
        output_dir=str(tmp_path / "run"),
        validation_file=str(tiny.rows),
        max_steps=4,
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(keys), encoding="utf-8")
    outcome = cli("train", recipe)
    assert outcome.code == 0, outcome.err
    assert ", plugged in" in outcome.out
    result = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert bool(result.get("alignment")) is ("distill" in strategy)

    folder = export_run(tmp_path / "run", tmp_path / "merged", merge=True)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = [json.loads(line) for line in tiny.rows.read_text(encoding="utf-8").splitlines()]
    labels = torch.tensor([model.config.label2id[row["label"]] for row in rows])
    given = AutoTokenizer.from_pretrained(folder)([row["text"] for row in rows], return_tensors="pt")
    with torch.no_grad():
        logits = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits
    expected = torch.nn.functional.cross_entropy(logits, labels).item()
    assert result["plugged_in"]["loss"] == pytest.approx(expected, rel=1e-5)
    assert result["plugged_in"]["accuracy"] == pytest.approx((logits.argmax(1) == labels).float().mean().item())
    assert result["metrics"]["loss"] != pytest.approx(expected, rel=1e-4)
