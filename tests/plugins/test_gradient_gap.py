"""The gradient gap against gradients that plain autograd takes of two separate models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tunery.core.probe_points import probe_run
from tunery.plugins.probes.gradient_gap import GradientGap
from tunery.registry.conformance.models import MODELS, base_model
from tunery.registry.conformance.trials import Trial
from tunery.registry.errors import CompatibilityError, ConfigError

PROXIES = {
    "proxy_sub_fm": "proxy_sub_fm:retained=[0],ratio=0.5,r=2,dropout=0",
    "offsite": "offsite:adapter_layers=[1,1],emulator_layers=1,r=2,dropout=0",
}


def measured(trainer: Any, **options: Any) -> dict[tuple[str, Any], float]:
    """Return what the probe measures of a trainer's model, by name and layer."""
    trainer.model.eval()
    found = GradientGap(GradientGap.Config(**options)).measure(trainer.subject())
    return {(row.name, row.where.get("layer")): row.value for row in found}


def trained(folder: Path, strategy: str, kind: str) -> Any:
    options = {"per_device_eval_batch_size": 3}
    trial = Trial(model=kind, strategy=strategy, probes=("gradient_gap",), steps=2, options=options)
    trainer = trial.trainer(folder)
    trainer.train()
    return trainer


def by_hand(model: Any, kind: str, rows: int) -> dict[str, torch.Tensor]:
    """Return the gradient of the mean loss over the first rows, in one batch, in float64, by parameter."""
    batch = transformers.default_data_collator(MODELS[kind].rows(rows))
    given = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    model = model.double().eval()
    model.zero_grad()
    model(**given).loss.backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("kind", ["deep_bert_classifier", "llama_causal_lm"])
@pytest.mark.parametrize("name", PROXIES)
def test_is_the_distance_of_two_gradients(name: str, kind: str, tmp_path: Path) -> None:
    """Of a trained stand-in, and of the full model it is plugged into, a model apart; over batches of unequal weight."""
    strategy = PROXIES[name]
    if kind == "llama_causal_lm" and name == "offsite":
        strategy = "offsite:adapter_layers=[1,0],emulator_layers=0,r=2,dropout=0"
    trainer = trained(tmp_path, strategy, kind)
    found = measured(trainer)
    plugged = trainer.recipe.strategy.plug_in(
        MODELS[kind].load(base_model(kind, dropout=False)), trainer.model, trainer.run
    )
    rows = len(trainer.eval_dataset)
    rename = getattr(trainer.recipe.strategy, "_renamed", str)
    theirs = by_hand(plugged, kind, rows)
    ours = {rename(key): value for key, value in by_hand(trainer.model, kind, rows).items()}
    assert ours.keys() == theirs.keys()
    gap = sum(float((ours[key] - theirs[key]).square().sum()) for key in ours)
    norms = [sum(float(value.square().sum()) for value in values.values()) for values in (theirs, ours)]
    product = sum(float((ours[key] * theirs[key]).sum()) for key in ours)
    assert gap > 1e-6
    assert found["gap", None] == pytest.approx(gap, rel=1e-3)
    assert [found["gradient", None], found["proxy_gradient", None]] == pytest.approx(norms, rel=1e-3)
    assert found["ratio", None] == pytest.approx(gap / norms[0], rel=1e-3)
    assert found["proxy_ratio", None] == pytest.approx(gap / norms[1], rel=1e-3)
    assert found["cosine", None] == pytest.approx(product / (norms[0] * norms[1]) ** 0.5, rel=1e-3)
    first = [key for key in ours if "layers.0." in key or "layer.0." in key]
    part = sum(float((ours[key] - theirs[key]).square().sum()) for key in first)
    assert found["ratio", 0] == pytest.approx(part / sum(float(theirs[key].square().sum()) for key in first), rel=1e-3)


def test_a_stand_in_with_nothing_removed_has_no_gap(tmp_path: Path) -> None:
    """Both gradients are the same to the bit."""
    found = measured(trained(tmp_path, "proxy_sub_fm:ratio=0,r=2", "bert_classifier"))
    assert found["gap", None] == found["ratio", None] == 0.0
    assert found["gradient", None] > 0


def test_condition_10_with_a_known_optimum(tmp_path: Path) -> None:
    """<delta, x - x*> by hand: zero at the optimum itself, and linear in the way there."""
    trainer = trained(tmp_path / "run", PROXIES["proxy_sub_fm"], "bert_classifier")
    trainer.save_model(str(tmp_path / "best"))
    assert measured(trainer, optimum=str(tmp_path / "best"))["descent", None] == 0.0
    step: dict[str, torch.Tensor] = {}
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            step[name] = 0.01 * torch.randn_like(parameter)
            parameter.data.add_(step[name])
    found = measured(trainer, optimum=str(tmp_path / "best"))
    base = MODELS["bert_classifier"].load(base_model("bert_classifier", dropout=False))
    plugged = trainer.recipe.strategy.plug_in(base, trainer.model, trainer.run)
    rows = len(trainer.eval_dataset)
    theirs, ours = by_hand(plugged, "bert_classifier", rows), by_hand(trainer.model, "bert_classifier", rows)
    descent = sum(float(((ours[name] - theirs[name]) * value).sum()) for name, value in step.items())
    assert found["descent", None] == pytest.approx(descent, rel=1e-2)
    assert found["learning_rate_bound", None] == pytest.approx(descent / found["gap", None], rel=1e-2)


def test_an_optimum_of_something_else_is_one_line(tmp_path: Path) -> None:
    """No adapter there, or one of another rank."""
    trainer = trained(tmp_path / "run", PROXIES["proxy_sub_fm"], "bert_classifier")
    other = Trial(strategy="proxy_sub_fm:retained=[0],r=4", steps=1).run().folder
    for folder, says in ((tmp_path / "nowhere", "holds no adapter_model.safetensors"), (other, "has no ")):
        with pytest.raises(ConfigError, match=says) as caught:
            measured(trainer, optimum=str(folder))
        assert "\n" not in str(caught.value)


def test_without_a_stand_in_or_rows_it_says_so(tmp_path: Path) -> None:
    """LoRA trains the model itself; a finished run is probed without an evaluation set."""
    options = {"probe_moments": ["end"]}
    late = Trial(strategy="lora:r=2", probes=("gradient_gap",), steps=1, options=options).trainer(tmp_path / "lora")
    with pytest.raises(CompatibilityError, match="trains the model itself") as caught:
        late.train()
    assert "\n" not in str(caught.value)
    assert late.state.global_step == 0  # and not at the end, when there is a model to lose
    folder = Trial(strategy=PROXIES["proxy_sub_fm"], steps=1).run().folder
    with pytest.raises(CompatibilityError, match="needs an evaluation set"):
        probe_run("gradient_gap", folder)


def test_fewer_batches_on_request(tmp_path: Path) -> None:
    """The first batch alone gives another gradient than all of them."""
    trainer = trained(tmp_path, PROXIES["proxy_sub_fm"], "bert_classifier")
    assert measured(trainer, batches=1)["gradient", None] != measured(trainer)["gradient", None]
