"""``PluginTrainerMixin`` over any Trainer: what the other trainer can, it still can, and the plugins come on top."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

import tunery
from tunery.core.arguments import PluginArguments
from tunery.core.artifacts import read_manifest
from tunery.plugins.regularizers import mhloss
from tunery.plugins.regularizers.l2_sp import L2SP
from tunery.registry.context import TaskKind
from tunery.registry.errors import AnatomyError, ArtifactError, CompatibilityError, RecipeError

Trained = Callable[..., Any]


class MySFT(tunery.PluginTrainerMixin, trl.SFTTrainer):
    """trl's trainer with plugins, as the README writes it."""


@dataclass
class MySFTConfig(PluginArguments, trl.SFTConfig):
    """Its arguments."""


class MySeq2Seq(tunery.PluginTrainerMixin, transformers.Seq2SeqTrainer):
    """Another trainer of transformers' own."""


@dataclass
class MySeq2SeqArguments(PluginArguments, transformers.Seq2SeqTrainingArguments):
    """Its arguments."""


@pytest.fixture(scope="module")
def tokenizer(tiny: Any) -> Any:
    return AutoTokenizer.from_pretrained(tiny.base)


@pytest.fixture(scope="module")
def rows(tiny: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """Encoded rows of one length, so that batches of any size see the same padding."""
    pick = random.Random(0)
    texts = [" ".join(pick.choice("abcdef") for _ in range(6)) for _ in range(16)]
    return [{**tokenizer(text), "labels": index % 2} for index, text in enumerate(texts)]


@pytest.fixture
def train(tiny: Any, rows: Any, tmp_path: Path) -> Trained:
    """Train a tiny BERT for a few steps with any Trainer class; return the trainer."""

    def run(
        cls: type = tunery.Trainer,
        arguments: type = tunery.TrainingArguments,
        *,
        trainer: Mapping[str, Any] | None = None,
        model: Any = None,
        resume: Any = None,
        **given: Any,
    ) -> Any:
        defaults = {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 4,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "save_strategy": "no",
            "logging_steps": 1,
        }
        fixed = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False}
        args = arguments(**fixed, **(defaults | given))
        set_seed(1)
        model = base(tiny) if model is None else model
        parts = {"train_dataset": rows, "eval_dataset": rows[:6]} | dict(trainer or {})
        if "model_init" not in parts:
            parts["model"] = model
        made = cls(args=args, **parts)
        made.train(resume_from_checkpoint=resume)
        return made

    return run


def base(tiny: Any) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(tiny.base)


def plain_trainer(**given: Any) -> Any:
    """transformers' own Trainer, its loss repaired where transformers#47688 inflates it."""
    given["model"].accepts_loss_kwargs = False
    return transformers.Trainer(**given)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def logged(trainer: Any, key: str) -> list[float]:
    return [row[key] for row in trainer.state.log_history if key in row]


# ---- nothing chosen


@pytest.mark.parametrize(
    "given", [{}, {"gradient_accumulation_steps": 2}, {"label_smoothing_factor": 0.1}, {"max_grad_norm": 0.0}]
)
def test_without_plugins_it_is_transformers_trainer(given: dict[str, Any], train: Trained):
    """With no plugin selected the weights and the logged losses are transformers' own, to the bit."""
    ours = train(**given)
    theirs = train(plain_trainer, transformers.TrainingArguments, **given)
    assert same(weights(ours), weights(theirs))
    assert logged(ours, "loss") == logged(theirs, "loss")
    assert not [key for row in ours.state.log_history for key in row if key.startswith("loss/")]


def cross_entropy_sum(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss function as transformers documents it: a sum over labels, divided by their number in the step."""
    loss = nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
    return loss / (len(labels) if num_items_in_batch is None else num_items_in_batch)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_compute_loss_func(accumulation: int, train: Trained):
    """A loss function of the user's own is taken as it is, like in transformers, and equals the built-in loss here."""
    parts = {"compute_loss_func": cross_entropy_sum}
    sizes = {"per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
    ours = train(trainer=parts, **sizes)
    theirs = train(transformers.Trainer, transformers.TrainingArguments, trainer=parts, **sizes)
    assert same(weights(ours), weights(theirs))
    assert logged(ours, "loss") == pytest.approx(logged(train(**sizes), "loss"), rel=1e-4)
    penalised = train(trainer=parts, regularizers=["l2_sp"], **sizes)
    for total, task, penalty in zip(
        *(logged(penalised, key) for key in ("loss", "loss/task", "loss/l2_sp")), strict=True
    ):
        assert task + penalty == pytest.approx(total, rel=1e-5)


def test_label_smoothing_with_a_penalty(train: Trained):
    """Smoothing, which takes the labels out of the inputs, goes together with penalties and does not change them."""
    smooth = train(label_smoothing_factor=0.2, regularizers=["l2_sp"])
    sharp = train(regularizers=["l2_sp"])
    assert logged(smooth, "loss/l2_sp")[0] == logged(sharp, "loss/l2_sp")[0]
    assert logged(smooth, "loss/task")[0] != logged(sharp, "loss/task")[0]


def test_regularizers_see_the_labels(train: Trained, monkeypatch: pytest.MonkeyPatch):
    """Smoothing pops the labels out of the inputs; a regularizer gets them before and after the forward pass all the same."""
    seen: list[set[str]] = []
    begin, penalty = L2SP.begin, L2SP.penalty
    monkeypatch.setattr(L2SP, "begin", lambda self, inputs: (seen.append(set(inputs)), begin(self, inputs))[1])
    monkeypatch.setattr(L2SP, "penalty", lambda self, batch: (seen.append(set(batch.inputs)), penalty(self, batch))[1])
    train(label_smoothing_factor=0.2, regularizers=["l2_sp"], max_steps=1)
    assert len(seen) == 2
    assert all(keys >= {"input_ids", "labels"} for keys in seen)


def test_zero_weight_is_not_choosing(train: Trained):
    """A regularizer of weight zero leaves no trace."""
    assert same(weights(train(regularizers=["l2_sp:weight=0"])), weights(train()))


# ---- other trainers

quiet_trl = pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing`:FutureWarning", "ignore:`is_gradient_checkpointing`:FutureWarning"
)


@pytest.fixture(scope="module")
def llama() -> Callable[[], Any]:
    """Build a one-layer Llama, always the same one, with dropout in its attention."""

    def build() -> Any:
        set_seed(0)
        sizes = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = LlamaConfig(**sizes, intermediate_size=32, max_position_embeddings=32, pad_token_id=0, eos_token_id=3)
        return LlamaForCausalLM(config)

    return build


@pytest.fixture
def sft(train: Trained, llama: Any, tokenizer: Any) -> Trained:
    """Train the Llama with an SFT trainer on plain texts of different lengths."""
    texts = Dataset.from_list([{"text": "a b c d e f g h i"[: 9 + 2 * (index % 4)]} for index in range(16)])

    def run(cls: type, arguments: type, model: Any = None, **given: Any) -> Any:
        parts = {"train_dataset": texts, "eval_dataset": None, "processing_class": tokenizer}
        model = llama() if model is None else model
        return train(cls, arguments, trainer=parts, model=model, max_length=16, bf16=False, **given)

    return run


def with_lora(model: Any, dropout: float = 0.0) -> Any:
    """Put the adapter of ``lora:r=2`` on a model by PEFT itself, seeded as a trainer does."""
    config = LoraConfig(
        r=2, lora_alpha=16, lora_dropout=dropout, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    set_seed(42)
    return get_peft_model(model, config)


@quiet_trl
@pytest.mark.parametrize("accumulation", [1, 2])
def test_sft_with_lora_is_what_trl_and_peft_do(accumulation: int, sft: Trained, llama: Any):
    """``strategy="lora"`` over trl's trainer gives the weights, losses and metrics of trl with PEFT by hand, to the bit."""
    sizes = {"per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
    ours = sft(MySFT, MySFTConfig, strategy="lora:r=2,dropout=0.1", **sizes)
    theirs = sft(trl.SFTTrainer, trl.SFTConfig, with_lora(llama(), dropout=0.1), **sizes)
    assert same(weights(ours), weights(theirs))
    for key in ("loss", "entropy", "mean_token_accuracy", "num_tokens"):
        assert logged(ours, key) == logged(theirs, key)
        assert len(logged(ours, key)) == 4
    assert ours.run.task.kind is TaskKind.CAUSAL_LM


@quiet_trl
def test_sft_with_lora_and_l2_sp(sft: Trained, llama: Any, tmp_path: Path):
    """Strategy and regularizer together: terms logged, only the adapter moved, towards less; saved as PEFT reads it."""
    ours = sft(MySFT, MySFTConfig, strategy="lora:r=2", regularizers=["l2_sp:beta=10"])
    free = sft(MySFT, MySFTConfig, strategy="lora:r=2")
    for total, task, penalty in zip(*(logged(ours, key) for key in ("loss", "loss/task", "loss/l2_sp")), strict=True):
        assert task + penalty == pytest.approx(total, rel=1e-5)
        assert penalty > 0
    start = llama().state_dict()
    for name, value in weights(ours).items():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert "lora_" in name or torch.equal(value, start[plain]), name
    norms = [sum(v.norm().item() for n, v in weights(trainer).items() if "lora_" in n) for trainer in (ours, free)]
    assert norms[0] < norms[1]

    ours.save_model()
    llama().save_pretrained(tmp_path / "base")
    again = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "run")
    words = torch.arange(4, 12)[None]
    ours.detach()
    with torch.no_grad():
        assert torch.equal(again.eval()(words).logits, ours.model.eval()(words).logits)
    plugins = read_manifest(tmp_path / "run")["plugins"]
    assert [plugin["name"] for plugin in plugins] == ["lora", "l2_sp"]


@quiet_trl
def test_sft_runs_the_model_once_a_step(sft: Trained, llama: Any):
    """trl would run the model a second time to hand its outputs on; we do not ask it to."""
    model, calls = llama(), []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    sft(MySFT, MySFTConfig, model, regularizers=["l2_sp"])
    assert len(calls) == 4


def test_seq2seq(train: Trained, tmp_path: Path):
    """An encoder-decoder trains under Seq2SeqTrainer, generates in evaluation, and comes back as it was saved."""
    config = T5Config(
        vocab_size=16, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, pad_token_id=0, decoder_start_token_id=0
    )
    set_seed(0)
    model = T5ForConditionalGeneration(config)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    examples = [{"input_ids": [4, 5, 6, 3], "labels": [7, 8, 3]} for _ in range(16)]
    generated: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        generated.append(prediction.predictions)
        return {"tokens": float((prediction.predictions[:, 5:] != config.pad_token_id).sum())}

    trainer = train(
        MySeq2Seq,
        MySeq2SeqArguments,
        model=model,
        trainer={"train_dataset": examples, "eval_dataset": examples[:4], "compute_metrics": metrics},
        strategy="full",
        regularizers=["l2_sp"],
        predict_with_generate=True,
        generation_max_length=5,
        eval_strategy="steps",
        eval_steps=2,
    )
    assert logged(trainer, "eval_tokens") == [0.0, 0.0], "more was generated than generation_max_length"
    assert generated[0].shape[0] == 4
    assert generated[0].dtype.kind == "i"
    penalties = logged(trainer, "loss/l2_sp")
    assert penalties[0] == 0, "nothing has moved before the first step"
    assert min(penalties[1:]) > 0
    assert not torch.equal(trainer.model.lm_head.weight, start["lm_head.weight"])
    trainer.save_model()
    again = T5ForConditionalGeneration.from_pretrained(tmp_path / "run")
    assert same(again.state_dict(), weights(trainer))


# ---- decoders whose config names no pad token


@pytest.fixture
def decoder(train: Trained, rows: Any, tokenizer: Any) -> Trained:
    """Train a GPT-2 classifier, which learns of a pad token from the tokenizer, on rows of different lengths."""

    def cut(row: dict[str, Any], length: int) -> dict[str, Any]:
        return {key: row[key][:length] for key in ("input_ids", "attention_mask")} | {"labels": row["labels"]}

    def run(**given: Any) -> Any:
        set_seed(0)
        sizes = {"vocab_size": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "initializer_range": 0.3}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = GPT2ForSequenceClassification(GPT2Config(**sizes, **dropout, bos_token_id=2, eos_token_id=3))
        assert model.config.pad_token_id is None
        lengths = [cut(row, 3 + number % 4) for number, row in enumerate(rows)]
        parts = {"processing_class": tokenizer, "train_dataset": lengths, "eval_dataset": lengths}
        return train(trainer=parts, model=model, **given)

    return run


def test_cached_features_are_those_of_the_last_token(decoder: Trained):
    """They are kept of where the head reads."""
    cached, plain = (decoder(strategy=f"head:cache={cache}", learning_rate=0.1) for cache in ("true", "false"))
    assert logged(cached, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-4)


def test_regularizers_of_the_head_read_the_last_token(decoder: Trained, monkeypatch: pytest.MonkeyPatch):
    """What MHLoss scores is, in the mean over its heads, what the model answers."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    pooled, task_loss = mhloss.pooled, mhloss.MHLoss.task_loss

    def score(self: Any, batch: Any) -> Any:
        with monkeypatch.context() as patch:
            kept: list[torch.Tensor] = []
            patch.setattr(mhloss, "pooled", lambda *given: kept.append(pooled(*given)) or kept[0])
            loss = task_loss(self, batch)
        seen.append((kept[0].unflatten(-1, (3, -1)).mean(1), batch.outputs["logits"]))
        return loss

    monkeypatch.setattr(mhloss.MHLoss, "task_loss", score)
    decoder(strategy="full", regularizers=["mhloss:heads=3"])
    assert len(seen) == 4
    for found, expected in seen:
        torch.testing.assert_close(found, expected)


# ---- the rest of the Trainer's interface


def test_model_init(tiny: Any, train: Trained):
    """With ``model_init`` every ``train`` builds, equips and trains a model anew, and ends the same."""

    built: list[Any] = []

    def build() -> Any:
        built.append(base(tiny))
        return built[-1]

    trainer = train(trainer={"model_init": build}, strategy="lora:r=2", regularizers=["l2_sp"])
    first, model, plugins = weights(trainer), trainer.model, trainer.recipe.chosen
    assert model.get_base_model() is built[-1]
    trainer.train()
    assert trainer.model is not model
    assert trainer.model.get_base_model() is built[-1]
    assert not {item.plugin for item in plugins} & {item.plugin for item in trainer.recipe.chosen}
    assert same(weights(trainer), first)
    assert any(value.abs().sum() > 0 for name, value in first.items() if "lora_B" in name)


def test_model_init_does_not_go_with_alignment(tiny: Any, train: Trained):
    """A stand-in that is aligned belongs to the model that was passed."""
    with pytest.raises(CompatibilityError, match="aligned before it trains does not go with model_init; pass model"):
        train(trainer={"model_init": lambda: base(tiny)}, strategy="proxy_sub_fm:retained=[0],r=2,distill_steps=2")


def test_callbacks_see_the_run(train: Trained, tmp_path: Path):
    """A user's callback is called at every moment, sees the named terms, and finds each checkpoint in its place."""
    seen: list[str] = []
    terms: list[set[str]] = []

    class Watch(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append("begin")

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            seen.append("saved" if (folder / "tunery.json").is_file() else "nothing there")

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            terms.append({key for key in logs if key.startswith("loss/")})

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append("end")

    train(trainer={"callbacks": [Watch()]}, regularizers=["l2_sp"], save_strategy="steps", save_steps=2)
    assert seen == ["begin", "saved", "saved", "end"]
    assert terms[0] == {"loss/task", "loss/l2_sp"}


@pytest.mark.parametrize("strategy", ["full", "lora:r=2", "head"])
def test_load_best_model_at_end(strategy: str, train: Trained, rows: Any, tmp_path: Path):
    """The best checkpoint is remembered by its final place, survives ``save_total_limit``, and is what remains loaded."""

    class Rigged(tunery.Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            return super().evaluate(*args, **kwargs) | {"eval_rigged": -abs(self.state.global_step - 2)}

    trainer = train(
        Rigged,
        strategy=strategy,
        max_steps=6,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="rigged",
        greater_is_better=True,
    )
    best = tmp_path / "run" / "checkpoint-2"
    assert Path(trainer.state.best_model_checkpoint) == best
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-6"}
    stored = load_file(next(best.glob("*model.safetensors")))
    live = {plain(name): value for name, value in weights(trainer).items()}
    assert all(torch.equal(live[plain(name)], value) for name, value in stored.items())
    last = load_file(next((tmp_path / "run" / "checkpoint-6").glob("*model.safetensors")))
    assert any(not torch.equal(last[name], value) for name, value in stored.items())
    for folder in (best, tmp_path / "run" / "checkpoint-6"):
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        assert state["best_model_checkpoint"] == str(best)


def plain(name: str) -> str:
    """Return a parameter's name without what PEFT adds for its one adapter."""
    return name.replace("modules_to_save.default.", "").replace(".default", "")


def test_save_total_limit(train: Trained, tmp_path: Path):
    """Only the newest checkpoints stay, and no temporary folder among them."""
    train(strategy="full", save_strategy="steps", save_steps=1, save_total_limit=2)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint-3", "checkpoint-4"]


def test_save_only_model(train: Trained, tmp_path: Path):
    """Checkpoints without optimizer state are whole checkpoints too."""
    train(strategy="full", save_strategy="steps", save_steps=4, save_only_model=True)
    folder = tmp_path / "run" / "checkpoint-4"
    assert read_manifest(folder)["plugins"][0]["name"] == "full"
    assert not (folder / "optimizer.pt").exists()


def test_resume_through_the_trainer(train: Trained, tmp_path: Path):
    """``train(resume_from_checkpoint=True)`` takes the newest whole checkpoint, or says that there is none."""
    with pytest.raises(ArtifactError, match="no whole checkpoint in"):
        train(resume=True)
    once = train(strategy="lora:r=2", save_strategy="steps", save_steps=2)
    (tmp_path / "run" / "checkpoint-4" / "tunery.json").unlink()
    again = train(strategy="lora:r=2", save_strategy="steps", save_steps=2, resume=True)
    assert same(weights(once), weights(again))
    with pytest.raises(ArtifactError, match="was trained with strategy lora; resume with the same one"):
        train(strategy="full", resume=str(tmp_path / "run" / "checkpoint-2"))


def test_probes_measure_and_report(train: Trained, tmp_path: Path):
    """Probes run at their moments, are logged, and do not change the run by a bit."""
    given = {"strategy": "full", "eval_strategy": "steps", "eval_steps": 2}
    probed = train(probes=["weight_distance"], **given)
    assert same(weights(probed), weights(train(**given)))
    assert logged(probed, "probe/weight_distance/distance")[0] == 0
    lines = (tmp_path / "run" / "measurements.jsonl").read_text(encoding="utf-8").splitlines()
    moments = [(row["moment"], row["step"]) for row in map(json.loads, lines) if row["name"] == "relative_distance"]
    assert moments == [("begin", 0), ("evaluate", 2), ("evaluate", 4), ("end", 4)]


def test_probe_moments_are_chosen(train: Trained, tmp_path: Path):
    """With ``probe_moments`` a probe measures only then."""
    train(probes=["weight_distance"], probe_moments=["end"], eval_strategy="steps", eval_steps=2)
    lines = (tmp_path / "run" / "measurements.jsonl").read_text(encoding="utf-8").splitlines()
    assert {json.loads(line)["moment"] for line in lines} == {"end"}


def test_detach_makes_the_model_plain(train: Trained, tiny: Any):
    """After ``detach`` the model has the parameters and hooks it came with, and the trained output."""
    trainer = train(regularizers=["l2_sp"])
    batch = torch.tensor([[2, 5, 6, 3]])
    with torch.no_grad():
        before = trainer.model.eval()(batch).logits
    trainer.detach()
    fresh = base(tiny)
    assert [name for name, _ in trainer.model.named_parameters()] == [name for name, _ in fresh.named_parameters()]
    assert not any(module._forward_hooks for module in trainer.model.modules())
    with torch.no_grad():
        assert torch.equal(trainer.model(batch).logits, before)


# ---- what is refused


@contextmanager
def nothing_written(folder: Path) -> Iterator[None]:
    before = sorted(folder.rglob("*"))
    yield
    assert sorted(folder.rglob("*")) == before


def test_a_name_is_no_model(train: Trained, tmp_path: Path):
    """A model by name would be loaded too late to be seeded: it is refused."""
    with nothing_written(tmp_path), pytest.raises(RecipeError, match=r"'org/name' is a name; load it first: AutoModel"):
        train(model="org/name", strategy="full")


def test_a_peft_model_needs_no_strategy(train: Trained, tiny: Any, tmp_path: Path):
    """A model that is already adapted trains without a strategy; a strategy on top is refused."""
    config = LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    with nothing_written(tmp_path), pytest.raises(CompatibilityError, match="already is a PeftModelFor"):
        train(model=get_peft_model(base(tiny), config), strategy="lora:r=2")
    trainer = train(model=get_peft_model(base(tiny), config))
    assert any(value.abs().sum() > 0 for name, value in weights(trainer).items() if "lora_B" in name)


def test_head_needs_a_fresh_head(train: Trained, llama: Any, tmp_path: Path):
    """A strategy says which tasks it takes."""
    with nothing_written(tmp_path), pytest.raises(CompatibilityError, match="does not take task kind 'causal_lm'"):
        train(model=llama(), strategy="head")


def test_unknown_architecture(train: Trained, tmp_path: Path):
    """A method that must know a model's parts says so of one nobody described; one that need not still works."""
    config = transformers.AlbertConfig(
        vocab_size=16,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    with nothing_written(tmp_path), pytest.raises(AnatomyError, match="albert"):
        train(model=transformers.AlbertForSequenceClassification(config), strategy="lora")
    train(model=transformers.AlbertForSequenceClassification(config), strategy="full", max_steps=1)


def test_wrong_names_fail_before_the_model_changes(train: Trained, tiny: Any, tmp_path: Path):
    """A regularizer nobody offers leaves the model as it was."""
    model = base(tiny)
    before = [name for name, _ in model.named_parameters()]
    with nothing_written(tmp_path), pytest.raises(tunery.TuneryError, match="no regularizer is called 'mixup'"):
        train(model=model, strategy="lora:r=2", regularizers=["mixup"])
    assert [name for name, _ in model.named_parameters()] == before
