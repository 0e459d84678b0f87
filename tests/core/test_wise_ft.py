"""Exports on the way from the pre-trained to the trained weights: the formula, adapters, heads, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForSequenceClassification, BertModel, GPT2Config, GPT2LMHeadModel

from tunery.core.artifacts import read_manifest
from tunery.core.context import infer_task, make_context
from tunery.core.finished import export_run, load_run
from tunery.core.wise_ft import interpolate
from tunery.registry.errors import ArtifactError, CompatibilityError, RecipeError

Finished = Callable[[str], Path]


class Args:
    """What a context needs of training arguments."""

    seed = 0


def weights(folder: Path) -> dict[str, np.ndarray]:
    file = next(folder.glob("*model.safetensors"))
    return {name: value.double().numpy() for name, value in load_file(file).items()}


def pretrained(tiny: Any) -> dict[str, np.ndarray]:
    state = BertModel.from_pretrained(tiny.base).state_dict()
    return {f"bert.{name}": value.double().numpy() for name, value in state.items()}


class Counting(nn.Module):
    """A weight and a counter."""

    def __init__(self, value: tuple[float, ...], count: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(value))
        self.register_buffer("count", torch.tensor(count))


def test_worked_example():
    """alpha = 0.25 on the way from (0, 4) to (4, 0) gives (1, 3); an integer buffer stays."""
    model, base = Counting((4.0, 0.0), 7), Counting((0.0, 4.0), 2)
    interpolate(model, base.state_dict(), make_context(base, Args(), [infer_task(base)]), 0.25)
    assert model.w.tolist() == [1.0, 3.0]
    assert model.count.item() == 7


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_full(alpha: float, finished: Finished, tiny: Any, tmp_path: Path):
    """Every pre-trained weight lies at alpha on the line between both; the head, which had no start, is the trained one."""
    run = finished("full")
    found, trained, start = weights(export_run(run, tmp_path / "out", wise_ft=alpha)), weights(run), pretrained(tiny)
    assert found.keys() == trained.keys()
    for name, value in found.items():
        expected = (1 - alpha) * start[name] + alpha * trained[name] if name in start else trained[name]
        np.testing.assert_allclose(value, expected, rtol=0, atol=0 if alpha in (0, 1) else 1e-7)
    assert start.keys() == {name for name in found if not name.startswith("classifier")}
    assert read_manifest(tmp_path / "out")["wise_ft"] == alpha
    assert "wise_ft" not in read_manifest(run)


def test_lora(finished: Finished, tiny: Any, tmp_path: Path):
    """Kept apart, the adapter is a PEFT folder of the scaled update; folded in, both are the same model."""
    run = finished("lora:r=2")
    apart = export_run(run, tmp_path / "apart", wise_ft=0.5)
    merged = export_run(run, tmp_path / "merged", wise_ft=0.5, merge=True)
    base = AutoModelForSequenceClassification.from_pretrained(tiny.base)
    adapted = PeftModel.from_pretrained(base, apart)
    trained, scaled = load_file(run / "adapter_model.safetensors"), load_file(apart / "adapter_model.safetensors")
    assert any("lora_B" in name for name in trained)
    for name, value in trained.items():
        assert torch.equal(scaled[name], 0.5 * value if "lora_B" in name else value), name
    plain = AutoModelForSequenceClassification.from_pretrained(merged)
    for name, value in adapted.merge_and_unload().state_dict().items():
        torch.testing.assert_close(plain.state_dict()[name], value, rtol=0, atol=1e-6)
    whole, start = load_run(run).model.merge_and_unload().state_dict(), pretrained(tiny)
    for name, value in plain.state_dict().items():
        expected = torch.from_numpy(start[name]).lerp(whole[name].double(), 0.5) if name in start else whole[name]
        torch.testing.assert_close(value.double(), expected.double(), rtol=0, atol=1e-6)


def test_other_adapters_are_folded_in(finished: Finished, tmp_path: Path):
    """What scales activations has no update to scale: it is refused apart, and interpolated when merged."""
    run = finished("peft:peft_type=IA3")
    with pytest.raises(CompatibilityError, match=r"cannot scale this adapter of PEFT type IA3.*add --merge"):
        export_run(run, tmp_path / "apart", wise_ft=0.5)
    merged = weights(export_run(run, tmp_path / "merged", wise_ft=0.5, merge=True))
    whole = weights(export_run(run, tmp_path / "whole", merge=True))
    assert any(not np.array_equal(merged[name], whole[name]) for name in whole)


def test_tied_weights_move_once():
    """GPT-2's output layer is its embedding: half way is half way."""
    torch.manual_seed(0)
    base, model = (GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=4, n_layer=1, n_head=1)) for _ in range(2))
    start, end = (m.transformer.wte.weight.detach().clone() for m in (base, model))
    run = make_context(base, Args(), [infer_task(base)])
    interpolate(model, base.state_dict(), run, 0.5)
    torch.testing.assert_close(model.lm_head.weight.data, (start + end) / 2)


@pytest.mark.parametrize("alpha", ["1.5", "-0.1", "nan"])
def test_out_of_range_is_one_line(alpha: str, finished: Finished, tmp_path: Path, cli: Any):
    """A share outside 0 to 1 is refused before anything is loaded or written."""
    code, _, err = cli("export", finished("full"), "--output_dir", tmp_path / "out", "--wise_ft", alpha)
    assert code == 2
    assert "is no share of the trained weights" in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()
    with pytest.raises(RecipeError):
        export_run(finished("full"), tmp_path / "out", wise_ft=float(alpha))


def test_a_frozen_encoder_has_nothing_to_interpolate(finished: Finished, tmp_path: Path):
    """One line says that head tuning left every pre-trained weight alone."""
    with pytest.raises(CompatibilityError, match="wise_ft would do nothing"):
        export_run(finished("head"), tmp_path / "out", wise_ft=0.5)
    assert not (tmp_path / "out").exists()


def test_another_base_is_refused(
    finished: Finished, other_base: Path, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The pre-trained weights must be those the run began with."""
    from tunery.core import finished as finished_module

    load = finished_module.load_class
    monkeypatch.setattr(
        finished_module, "load_class", lambda cls, _name, **kwargs: load(cls, str(other_base), **kwargs)
    )
    with pytest.raises(ArtifactError, match="is not the base model"):
        export_run(finished("full"), tmp_path / "out", wise_ft=0.5)
