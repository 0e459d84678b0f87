"""What comes out of the data layer goes into transformers' own Trainer: it trains, evaluates and is scored."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from tunery.core.data import DataArguments, encode
from tunery.core.data.metrics import add_perplexity, compute_metrics
from tunery.core.data.tasks import build

TEXTS = {"text": ["a b c", "d e", "a b", "d e f g"] * 4, "label": ["abc", "def"] * 8}


def _trained(
    path: Path, rows: dict[str, list[Any]], processor: Any, make_model: Callable[..., Any], **args: Any
) -> Any:
    """Train two steps and return task, encoded data, Trainer and the evaluation's metrics."""
    split = Dataset.from_dict(rows)
    raw = DatasetDict(train=split, validation=split)
    data = build(DataArguments(dataset_name="d", max_length=8, **args), raw, seed=0)
    encoded = encode(data, processor)
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(path),
        max_steps=2,
        per_device_eval_batch_size=3,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model=make_model(data.task.num_labels),
        args=arguments,
        train_dataset=encoded.train,
        eval_dataset=encoded.validation,
        data_collator=encoded.data_collator,
        compute_metrics=compute_metrics(data.task),
    )
    trainer.train()
    return data, encoded, trainer, trainer.evaluate()


def _bert(num_labels: int) -> BertForSequenceClassification:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForSequenceClassification(BertConfig(vocab_size=16, num_labels=num_labels, **sizes))


def test_classification_is_scored_on_the_models_own_predictions(
    tmp_path: Path, make_tokenizer: Callable[..., Any]
) -> None:
    """The Trainer's accuracy is the share of validation rows whose largest logit is the label's."""
    data, encoded, trainer, metrics = _trained(tmp_path, TEXTS, make_tokenizer(), _bert)
    rows = [encoded.data_collator([row]) for row in encoded.validation]
    with torch.no_grad():
        right = [int(trainer.model.eval()(**row).logits.argmax() == row["labels"]) for row in rows]
    assert metrics["eval_accuracy"] == pytest.approx(np.mean(right))
    assert data.task.label_names == ("abc", "def")


def test_language_modelling_reports_perplexity(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    """Perplexity is exp of the mean token loss over all blocks."""

    def llama(num_labels: int) -> LlamaForCausalLM:
        assert num_labels == 0
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        return LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))

    tokenizer = make_tokenizer(frame=False, eos=True, pad_token=None)
    _, encoded, trainer, metrics = _trained(tmp_path, {"text": TEXTS["text"] * 3}, tokenizer, llama)
    blocks = torch.tensor(encoded.validation["input_ids"][:])
    with torch.no_grad():
        logits = trainer.model.eval()(input_ids=blocks).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 16), blocks[:, 1:].reshape(-1)).item()
    assert add_perplexity(metrics)["eval_perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def test_images_pass_the_trainers_column_filter(tmp_path: Path) -> None:
    """Pictures are encoded when read, though the Trainer drops columns the model does not know."""

    def processor(images: Any, return_tensors: str) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.tensor(np.asarray(images) / 255, dtype=torch.float32).permute(2, 0, 1)[None]}

    def vit(num_labels: int) -> ViTForImageClassification:
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        return ViTForImageClassification(ViTConfig(image_size=4, patch_size=2, num_labels=num_labels, **sizes))

    pixels = [bytes([shade] * 48) for shade in (10, 120, 240)] * 4
    rows = {"pixels": pixels, "label": [0, 1, 2] * 4}
    *_, metrics = _trained(tmp_path, rows, processor, vit, image_shape=[4, 4, 3])
    assert 0 <= metrics["eval_accuracy"] <= 1
    assert {"eval_macro_f1", "eval_loss"} <= set(metrics)
