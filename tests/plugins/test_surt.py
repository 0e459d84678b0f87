"""SURT: the loss of its first stage by hand, what that stage sees, reaches and leaves behind, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional

import tunery
from tunery.core.data.unlabelled import UnlabelledRows, pad_rows
from tunery.plugins.strategies.surt import Surt
from tunery.registry.conformance.models import MODELS, base_model
from tunery.registry.conformance.trials import Trial, tiny_process
from tunery.registry.context import TaskKind
from tunery.registry.errors import CompatibilityError

TRIAL = Trial(strategy="surt:lm_epochs=1", dropout=False, steps=1, batch=8, rows=8, tokenizer=True)
WORDS = "bert.embeddings.word_embeddings.weight"


def retrained(trial: Trial) -> dict[str, torch.Tensor]:
    """Return what the first stage ended with."""
    return load_file(trial.run().folder / "stages" / "retraining" / "model.safetensors")


def log_of(folder: Path) -> list[dict[str, Any]]:
    """Return what the first stage logged."""
    state = folder / "stages" / "retraining" / "trainer_state.json"
    history: list[dict[str, Any]] = json.loads(state.read_text(encoding="utf-8"))["log_history"]
    return history


def language_model(trainer: Any) -> Any:
    """Return the context with the module of the first stage."""
    return trainer.recipe.strategy.staged(trainer.model, trainer.run, trainer.stages[0])


@pytest.mark.parametrize("model", ["bert_classifier", "llama_causal_lm", "gpt2_causal_lm"])
def test_first_loss_is_that_of_language_modelling(model: str, tmp_path: Path):
    """Cross-entropy over what is predicted, masked or next, by hand in float64."""
    trial = TRIAL.but(model=model)
    tiny = MODELS[model]
    with tiny_process():
        trainer = trial.trainer(tmp_path)
        (stage, _) = trainer.stages
        rows = UnlabelledRows(tiny.rows(8), tiny.tokenizer(), stage, trial.seed)
        batch = pad_rows(tiny.tokenizer())([rows[index] for index in range(8)])
        labels = batch.pop("labels")
        transformers.set_seed(trial.seed)
        with language_model(trainer) as module, torch.no_grad():
            logits = module.double().eval()(**batch).logits
    if stage.objective is TaskKind.CAUSAL_LM:
        logits, labels = logits[:, :-1], labels[:, 1:]
    expected = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert log_of(trial.run().folder)[0]["loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_every_epoch_has_masks_of_its_own():
    """With a rate of next to nothing only the masks can change the loss of the same rows."""
    trial = TRIAL.but(strategy="surt:lm_epochs=3,lm_learning_rate=1e-30")
    losses = [row["loss"] for row in log_of(trial.run().folder) if "loss" in row]
    assert len(set(losses)) == 3


def test_first_stage_never_sees_a_label(tmp_path: Path):
    """Other labels, the same re-training to the bit; no forward pass of it is given a class."""
    seen = []
    results = []
    for shift in (0, 1):
        with tiny_process():
            trainer = TRIAL.trainer(tmp_path / str(shift))
            for row in trainer.train_dataset:
                row["labels"] = (row["labels"] + shift) % 3
            hook = trainer.model.bert.register_forward_pre_hook(
                lambda _m, _a, kw: seen.append(set(kw)), with_kwargs=True
            )
            trainer.train()
            hook.remove()
        results.append(load_file(tmp_path / str(shift) / "stages/retraining/model.safetensors"))
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())
    assert seen
    assert not any("labels" in names for names in seen)


def test_first_stage_trains_what_the_loss_reaches():
    """The backbone moves but for the pooler, which masked language modelling has no use for; its head is in the folder."""
    start, after = (
        MODELS["bert_classifier"].load(base_model("bert_classifier", dropout=False)).state_dict(),
        retrained(TRIAL),
    )
    moved = {name for name, value in after.items() if name in start and not torch.equal(value, start[name])}
    assert moved == {name for name in start if name.startswith("bert.") and ".pooler." not in name}
    assert "cls.predictions.transform.dense.weight" in after
    assert "classifier.weight" not in after


def test_the_language_modelling_head_is_dropped():
    """The run's own files hold the keys of full fine-tuning."""
    assert TRIAL.run().weights.keys() == TRIAL.but(strategy="full").run().weights.keys()


def test_a_fresh_head_is_tied_to_the_embeddings_of_the_model(tmp_path: Path):
    """One matrix, the task model's own; the seed draws the rest."""
    drawn = []
    for seed in (1, 1, 2):
        trainer = TRIAL.trainer(tmp_path)
        transformers.set_seed(seed)
        with language_model(trainer) as module:
            assert module.cls.predictions.decoder.weight is trainer.model.bert.embeddings.word_embeddings.weight
            assert module.bert is trainer.model.bert
            drawn.append(module.cls.predictions.transform.dense.weight.clone())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_what_was_drawn_before_training_does_not_matter(tmp_path: Path):
    """A fresh head is the seed's, also where something else has drawn random numbers since the Trainer was made."""
    with tiny_process():
        trainer = TRIAL.trainer(tmp_path)
        torch.rand(3)
        trainer.train()
    after = load_file(tmp_path / "stages/retraining/model.safetensors")
    assert all(torch.equal(value, after[name]) for name, value in retrained(TRIAL).items())


def test_a_head_of_the_checkpoint_is_used(tmp_path: Path):
    """A base model that was saved with its language-modelling head keeps it for the first stage."""
    config = MODELS["bert_classifier"].config(0.0)
    transformers.set_seed(3)
    pretrained = transformers.BertForMaskedLM(config)
    pretrained.save_pretrained(tmp_path / "base")
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "base")
    args = tunery.TrainingArguments(output_dir=str(tmp_path / "run"), strategy="surt", use_cpu=True, report_to="none")
    tokenizer = MODELS["bert_classifier"].tokenizer()
    trainer = tunery.Trainer(model=model, args=args, train_dataset=[], processing_class=tokenizer)
    with language_model(trainer) as module:
        found = module.state_dict()
        for name, value in pretrained.cls.state_dict().items():
            assert torch.equal(found[f"cls.{name}"], value), name


def test_a_causal_model_learns_with_its_own_head(tmp_path: Path):
    """No second model is made; a classifier of the same family gets the head of the checkpoint."""
    trainer = TRIAL.but(model="llama_causal_lm").trainer(tmp_path)
    with language_model(trainer) as module:
        assert module is trainer.model
    base = base_model("llama_causal_lm", dropout=False)
    model = transformers.LlamaForSequenceClassification.from_pretrained(base, num_labels=2)
    args = tunery.TrainingArguments(output_dir=str(tmp_path), strategy="surt", use_cpu=True, report_to="none")
    tokenizer = MODELS["llama_causal_lm"].tokenizer()
    trainer = tunery.Trainer(model=model, args=args, train_dataset=[], processing_class=tokenizer)
    with language_model(trainer) as module:
        assert isinstance(module, transformers.LlamaForCausalLM)
        assert module.model is model.model
        assert torch.equal(module.lm_head.weight, MODELS["llama_causal_lm"].load(base).lm_head.weight)


def test_head_tuning_on_the_retrained_encoder():
    """The encoder ends as the first stage left it; the head has moved."""
    trial = TRIAL.but(strategy="surt:lm_epochs=1,tuning=head")
    start = MODELS["bert_classifier"].load(base_model("bert_classifier", dropout=False)).state_dict()
    middle, end = retrained(trial), trial.run().weights
    assert all(torch.equal(value, middle[name]) for name, value in end.items() if name.startswith("bert."))
    assert not torch.equal(end[WORDS], start[WORDS])
    assert not torch.equal(end["classifier.weight"], start["classifier.weight"])


def test_options_reach_the_first_stage(tmp_path: Path):
    """Epochs, rate and masking probability."""
    strategy = "surt:lm_epochs=2,lm_learning_rate=0.25,mlm_probability=0.4"
    stage = TRIAL.but(strategy=strategy).trainer(tmp_path).stages[0]
    assert (stage.num_train_epochs, stage.learning_rate, stage.mlm_probability) == (2, 0.25, 0.4)
    assert stage.objective is TaskKind.MASKED_LM


@pytest.mark.parametrize(
    "model",
    [
        torch.nn.Linear(2, 2),
        transformers.T5ForConditionalGeneration(
            transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=20)
        ),
        transformers.ViTForImageClassification(MODELS["vit_classifier"].config(0.0)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_refuses_models_that_cannot_model_language(model: Any):
    """One line, from the strategy itself, whatever the task is called."""
    with pytest.raises(CompatibilityError, match=f"cannot re-train {type(model).__name__}") as caught:
        Surt(Surt.Config()).prepare(model, None)
    assert "\n" not in str(caught.value)


def test_refuses_head_tuning_without_a_fresh_head(tmp_path: Path):
    """A causal language model has none."""
    with pytest.raises(CompatibilityError, match="finds no fresh head"):
        TRIAL.but(model="llama_causal_lm", strategy="surt:tuning=head").trainer(tmp_path)


def test_a_base_model_that_is_gone_is_one_line(tmp_path: Path):
    """Its language-modelling head cannot be looked for."""
    trainer = TRIAL.trainer(tmp_path)
    trainer.model.config._name_or_path = str(tmp_path / "gone")
    with (
        pytest.raises(CompatibilityError, match="cannot load a language-modelling head") as caught,
        language_model(trainer),
    ):
        pass
    assert "\n" not in str(caught.value)
