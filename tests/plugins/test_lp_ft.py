"""LP-FT against a head trained by hand on the frozen encoder's features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tunery.plugins.strategies.lp_ft import LpFt
from tunery.registry.conformance.models import MODELS, base_model
from tunery.registry.conformance.trials import Trial, tiny_process
from tunery.registry.errors import CompatibilityError

ROWS, RATE, EPOCHS = 8, 0.5, 3
TINY = MODELS["bert_classifier"]
TRIAL = Trial(
    strategy=f"lp_ft:head_epochs={EPOCHS},head_learning_rate={RATE}",
    dropout=True,
    rows=ROWS,
    steps=1,
    options={"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0},
)


def head_of(trial: Trial) -> dict[str, torch.Tensor]:
    """Return what the head's stage ended with."""
    return load_file(trial.run().folder / "stages" / "head" / "model.safetensors")


def test_first_stage_moves_the_head_alone():
    """The encoder, pooler included, is the base model's to the bit."""
    start, after = TINY.load(base_model("bert_classifier", dropout=True)).state_dict(), head_of(TRIAL)
    moved = {name for name, value in after.items() if not torch.equal(value, start[name])}
    assert moved == {"classifier.weight", "classifier.bias"}


def test_first_stage_is_gradient_descent_on_the_features():
    """Three epochs of one batch: three steps of softmax regression on the encoder's output without dropout, in float64."""
    model = TINY.load(base_model("bert_classifier", dropout=True)).double().eval()
    batch = transformers.default_data_collator(TINY.rows(ROWS))
    labels = torch.nn.functional.one_hot(batch.pop("labels"), model.config.num_labels).double()
    with torch.no_grad():
        features = model.bert(**batch).pooler_output
    weight, bias = model.classifier.weight.detach(), model.classifier.bias.detach()
    for _ in range(EPOCHS):
        error = (features @ weight.T + bias).softmax(dim=1) - labels
        weight, bias = weight - RATE * error.T @ features / ROWS, bias - RATE * error.mean(dim=0)
    after = head_of(TRIAL)
    torch.testing.assert_close(after["classifier.weight"], weight.float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(after["classifier.bias"], bias.float(), rtol=0, atol=1e-6)


def test_then_everything_trains_with_the_runs_own_rate():
    """All weights that a gradient reaches move on from the head's stage."""
    start, after = head_of(TRIAL), TRIAL.run().weights
    still = {name for name, value in after.items() if torch.equal(value, start[name])}
    assert still == set()


def test_dropout_counts_in_the_second_stage_unless_in_eval_mode():
    """In eval mode a model with dropout ends as the one without; else it does not."""
    for mode, same in ((True, True), (False, False)):
        trial = Trial(strategy=f"lp_ft:head_epochs=1,eval_mode={str(mode).lower()}", steps=3)
        assert (trial.run().bits == trial.but(dropout=True).run().bits) is same


def test_rate_and_epochs_of_the_head_default_to_sense():
    """Three epochs at the run's own rate."""
    head, last = LpFt(LpFt.Config()).stages(torch.nn.Linear(1, 1), None)
    assert (head.num_train_epochs, head.learning_rate, head.objective) == (3, None, None)
    assert last.num_train_epochs is None


@pytest.mark.parametrize(("regularizers", "model"), [((), "llama_causal_lm")])
def test_refuses_a_model_without_a_fresh_head(regularizers: tuple[str, ...], model: str, tmp_path: Path):
    """One line, before anything is written."""
    with pytest.raises(CompatibilityError, match="'lp_ft' does not take task kind 'causal_lm'") as caught:
        Trial(strategy="lp_ft", model=model, regularizers=regularizers).trainer(tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_flags_hooks_and_modes_come_back_after_the_first_stage(tmp_path: Path):
    """Also where the stage ends in an error."""
    with tiny_process():
        trainer = Trial(strategy="lp_ft").trainer(tmp_path)
    model: Any = trainer.model
    with (
        pytest.raises(RuntimeError, match="amid"),
        trainer.recipe.strategy.staged(model, trainer.run, trainer.stages[0]) as module,
    ):
        assert module is model
        assert {n for n, p in model.named_parameters() if p.requires_grad} == {"classifier.weight", "classifier.bias"}
        model.train()
        model(**transformers.default_data_collator(TINY.rows(2)))
        assert not model.bert.training
        raise RuntimeError("amid")
    assert all(parameter.requires_grad for parameter in model.parameters())
    model.train()
    model(**transformers.default_data_collator(TINY.rows(2)))
    assert model.bert.training
