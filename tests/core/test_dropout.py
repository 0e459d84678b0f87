"""``dropout``: every dropout of a model at one probability, for any strategy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tunery import TrainingArguments
from tunery.core.dropout import set_dropout
from tunery.registry.conformance.models import MODELS, base_model
from tunery.registry.conformance.trials import Trial
from tunery.registry.errors import CompatibilityError, RecipeError

WITH_DROPOUT = ["bert_classifier", "llama_causal_lm", "gpt2_causal_lm", "vit_classifier"]


def answer(model: Any, tiny: Any) -> torch.Tensor:
    """What the model answers in training mode, dropout drawn from a seed."""
    from transformers import default_data_collator

    torch.manual_seed(0)
    return model.train()(**default_data_collator(tiny.rows(8))).logits.detach()


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_training_is_without_it_and_evaluation_unchanged(name: str) -> None:
    """At 0 the training output is the evaluation's; modules, attention's own numbers and the config all say 0."""
    tiny = MODELS[name]
    model = tiny.load(base_model(name, dropout=True))
    expected = tiny.logits(model)
    assert not torch.allclose(answer(model, tiny), expected)
    assert set_dropout(model, 0.0) > 0
    torch.testing.assert_close(answer(model, tiny), expected)
    torch.testing.assert_close(tiny.logits(model), expected, rtol=0, atol=0)
    said = {key: value for key, value in model.config.to_dict().items() if "dropout" in key or "pdrop" in key}
    assert said and not any(said.values())


@pytest.mark.parametrize("strategy", ["full", "lora:r=2"])
def test_a_run_is_that_of_a_model_without(strategy: str) -> None:
    """The same bits as from a base model that has none, and the manifest says it."""
    asked = Trial(dropout=True, strategy=strategy, options={"dropout": 0.0}).run()
    assert asked.bits == Trial(strategy=strategy).run().bits
    assert asked.bits != Trial(dropout=True, strategy=strategy).run().bits
    manifest = json.loads((asked.folder / "tunery.json").read_text("utf-8"))
    assert manifest["base_model"]["dropout"] == 0.0
    assert manifest["base_model"]["dropouts"] > 1


def test_an_unknown_model_says_how_many() -> None:
    """Modules and numbers count, layers left out do not; a model without any is refused in one line."""

    class Own(PreTrainedModel):
        config_class = PreTrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.linear = nn.Linear(2, 2)
            self.first, self.second = nn.Dropout(0.1), nn.Dropout2d(0.2)
            self.attention_dropout, self.layerdrop, self.token_dropout = 0.3, 0.4, True

    model = Own(PreTrainedConfig())
    assert set_dropout(model, 0.5) == 3
    assert (model.first.p, model.second.p, model.attention_dropout) == (0.5, 0.5, 0.5)
    assert (model.layerdrop, model.token_dropout) == (0.4, True)
    assert set_dropout(nn.Linear(2, 2), 0.0) == 0


def test_refuses_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No probability, or no dropout to set."""
    with pytest.raises(RecipeError, match=r"^dropout=1 is no probability below 1$"):
        TrainingArguments(output_dir=str(tmp_path), dropout=1)
    monkeypatch.setattr("tunery.core.dropout.set_dropout", lambda *_: 0)
    with pytest.raises(CompatibilityError, match="dropout=0 finds no dropout in BertForSequenceClassification"):
        Trial(strategy="full", options={"dropout": 0}).trainer(tmp_path)
