"""Tasks of another kind added to a finished run: language modelling to classifiers, and classifiers to language modelling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import tunery
from tunery.core.options import build_options
from tunery.core.run import train
from tunery.registry.errors import ArtifactError, DataError, RecipeError

WORDS = [f"w{number}" for number in range(20)]
IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0]])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-layer Llama, whose output layer is no other's weight, with a tokenizer of one id a word."""
    folder = tmp_path_factory.mktemp("llama")
    words = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(["<eos>", "<unk>", *WORDS])}, "<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<eos>", "model_max_length": 32}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    torch.manual_seed(0)
    tokens = {"vocab_size": 22, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    width = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**tokens, **width, initializer_range=0.2)).save_pretrained(folder)
    return folder


def keys(base: Path, folder: Path, kinds: list[str], **changes: Any) -> dict[str, Any]:
    """Return the keys of a run of a few steps on tasks of these kinds, each named by its own."""
    folder.mkdir()
    labels: dict[str, Any] = {"words": {}, "kind": {"label": [0, 1]}, "grade": {"label": [0.5, 2.5]}}
    tasks = []
    for kind in kinds:
        rows = [{"text": " ".join(WORDS[n : n + 3 + n % 4])} for n in range(8)]
        rows = [row | {key: given[n % 2] for key, given in labels[kind].items()} for n, row in enumerate(rows)]
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        tasks.append({"name": kind, "train_file": str(folder / f"{kind}.jsonl")})
    few = {
        "max_steps": 3,
        "per_device_train_batch_size": 3,
        "learning_rate": 1e-2,
        "max_length": 8,
        "max_grad_norm": 0.5,
    }
    quiet = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    given = {"model_name_or_path": str(base), "tasks": tasks, "strategy": "multi_lora:r=2", **few, **quiet}
    return {**given, "output_dir": str(folder / "run"), **changes}


def files_of(folder: Path, task: str, target: Path) -> dict[str, bytes]:
    """What a task's export consists of."""
    exported = tunery.export_run(folder, target, task=task)
    return {
        p.name: p.read_bytes() for p in exported.iterdir() if p.suffix == ".safetensors" or p.stem == "adapter_config"
    }


@pytest.fixture(scope="module")
def classifiers(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on two classifiers."""
    given = keys(base, tmp_path_factory.mktemp("runs") / "first", ["kind", "grade"])
    train(build_options(given))
    return Path(given["output_dir"])


def test_language_modelling_is_added_to_classifiers(classifiers: Path, base: Path, tmp_path: Path) -> None:
    """The new one trains on the same A; the classifiers' exports stay as they were, byte for byte."""
    given = keys(
        base, tmp_path / "more", ["words"], strategy={"name": "multi_lora", "r": 2, "add_to": str(classifiers)}
    )
    result = train(build_options(given))
    assert {"words_perplexity", "perplexity"} & set(result["metrics"])
    folder = Path(given["output_dir"])
    assert [task.name for task in tunery.load_run(folder).run.tasks] == ["words", "kind", "grade"]
    for task in ("kind", "grade"):
        assert files_of(folder, task, tmp_path / f"new-{task}") == files_of(classifiers, task, tmp_path / f"old-{task}")
    config = json.loads((tunery.export_run(folder, tmp_path / "out", task="words") / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("CAUSAL_LM", None)


def test_classifier_is_added_to_language_modelling(base: Path, tmp_path: Path) -> None:
    """The base model keeps its head; both leave as what their own classes load, and answer as they did in the run."""
    first = keys(base, tmp_path / "first", ["words"], tasks=None, train_file=str(tmp_path / "first" / "words.jsonl"))
    train(build_options(first))
    changes = {"strategy": {"name": "multi_lora", "r": 2, "add_to": first["output_dir"]}}
    given = keys(base, tmp_path / "more", ["kind", "grade"], **changes)
    result = train(build_options(given))
    assert result["metrics"]["mean"] == (result["metrics"]["kind_accuracy"] + result["metrics"]["grade_pearson"]) / 2
    folder = Path(given["output_dir"])
    joint: Any = tunery.load_run(folder).model
    earlier = files_of(Path(first["output_dir"]), "words", tmp_path / "old")
    assert files_of(folder, "words", tmp_path / "words") == earlier
    asked = {"input_ids": IDS, "attention_mask": IDS.ne(0).long()}
    for name, head, labels in (
        ("words", AutoModelForCausalLM, {}),
        ("kind", AutoModelForSequenceClassification, {"num_labels": 2}),
        ("grade", AutoModelForSequenceClassification, {"num_labels": 1}),
    ):
        exported = tmp_path / "words" if name == "words" else tunery.export_run(folder, tmp_path / name, task=name)
        model = PeftModel.from_pretrained(head.from_pretrained(base, **labels), exported).eval()
        with joint.task(name), torch.no_grad():
            torch.testing.assert_close(model(**asked).logits, joint(**asked).logits, rtol=0, atol=1e-5)
            again: Any = tunery.load_run(exported).model
            assert torch.equal(again(**asked).logits, model(**asked).logits)


def test_metrics_of_all_kinds_and_no_mean_of_them(base: Path, tmp_path: Path) -> None:
    """Perplexity should shrink and accuracy grow: no mean is taken, and none chooses a checkpoint."""
    given = keys(base, tmp_path / "all", ["kind", "words", "grade"], mixing="round_robin", do_predict=False)
    with pytest.raises(
        DataError, match=r"='eval_mean' of tasks .*known: kind_accuracy, words_perplexity, grade_pearson"
    ):
        train(build_options({**given, "metric_for_best_model": "eval_mean"}))
    result = train(build_options(given))
    assert result["main_metrics"] == ["kind_accuracy", "words_perplexity", "grade_pearson"]
    assert set(result["main_metrics"]) <= set(result["metrics"]) and "mean" not in result["metrics"]


def test_other_backbone_is_still_refused(classifiers: Path, base: Path, tmp_path: Path) -> None:
    """A language model counts as a classifier's base only with the same weights below its head."""
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    model.save_pretrained(tmp_path / "other")
    PreTrainedTokenizerFast.from_pretrained(base).save_pretrained(tmp_path / "other")
    changes = {"strategy": {"name": "multi_lora", "r": 2, "add_to": str(classifiers)}}
    with pytest.raises(ArtifactError, match="was trained on another base model"):
        train(build_options(keys(tmp_path / "other", tmp_path / "more", ["words"], **changes)))


def test_encoder_models_no_language_beside_classifiers(tiny: Any, tmp_path: Path) -> None:
    """In one line, before anything is written."""
    given = keys(tiny.base, tmp_path / "both", ["kind", "words"])
    with pytest.raises(RecipeError, match="reads both ways and cannot model language causally; name a decoder"):
        train(build_options(given))
    assert not Path(given["output_dir"]).exists()
