"""Tiny base models and datasets, the same bits every time: what the laws train.

Each model is built from a config, with its head, and saved once a session, so that it has a real path which adapters
remember and from which they load again. Rows have unequal numbers of valid tokens, so that a mean taken per batch, per rank
or per micro-batch shows.
"""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..context import Task, TaskKind

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

VOCABULARY = 61
LENGTH = 12
LABELS = 3
PIXELS = 8
EVALUATED = 8
_LABELS: dict[str, Any] = {"num_labels": LABELS}
_WIDTH: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_DEEP = 5
_SPREAD = 0.2  # of initial weights; with the usual 0.02 so narrow a model has hardly a gradient below its head


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """One architecture the laws know.

    Attributes:
        name: how a test names it.
        kind: the task it is trained for.
        auto: the class of transformers that loads it.
        config: from a dropout probability to its config.
        saved_names: what parts of parameters' names are called in its checkpoint, where that differs.
    """

    name: str
    kind: TaskKind
    auto: str
    config: Callable[[float], PretrainedConfig]
    saved_names: Mapping[str, str] = field(default_factory=dict)

    def load(self, folder: str | Path, labels: int = 0) -> PreTrainedModel:
        """Load it, or what was exported from it, as its users do; with ``labels`` with a new head of that width."""
        head: dict[str, Any] = {"num_labels": labels, "ignore_mismatched_sizes": True} if labels else {}
        model: PreTrainedModel = self._loader(labels).from_pretrained(str(folder), **head)
        return model

    def _loader(self, labels: int) -> Any:
        """Return the class of transformers that loads it, or the classifier that a task with labels makes of a decoder."""
        import transformers

        classifies = labels and self.kind.is_language_modelling
        return getattr(transformers, "AutoModelForSequenceClassification" if classifies else self.auto)

    def load_exported(self, folder: str | Path, labels: int = 0) -> Any:
        """Load a folder that was exported, with transformers or PEFT alone; ``labels`` of its task, if not the model's own."""
        from peft import PeftConfig, PeftModel

        if not (Path(folder) / "adapter_config.json").is_file():
            return self._loader(labels).from_pretrained(str(folder))
        base = self.load(PeftConfig.from_pretrained(str(folder)).base_model_name_or_path, labels)
        return PeftModel.from_pretrained(base, str(folder))

    def logits(self, model: Any, tasks: int = 1) -> torch.Tensor:
        """Return what ``model`` answers to the first rows in eval mode."""
        import torch
        from transformers import default_data_collator

        batch = default_data_collator(self.rows(EVALUATED, tasks))
        batch.pop("labels")
        with torch.no_grad():
            answer: torch.Tensor = model.eval()(**batch).logits
        return answer

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return a tokenizer of one word a token, with pad and mask tokens; ``None`` for images."""
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        if self.kind is TaskKind.IMAGE_CLASSIFICATION:
            return None
        words = Tokenizer(models.WordLevel({f"word{number}": number for number in range(VOCABULARY)}, "word2"))
        return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=words, pad_token="word0", mask_token="word1", unk_token="word2", model_max_length=LENGTH
        )

    def rows(self, count: int, tasks: int = 1) -> list[dict[str, Any]]:
        """Return ``count`` examples, padded, with labels; of several tasks, one after the other in turn."""
        if self.kind is TaskKind.IMAGE_CLASSIFICATION:
            rows = _image_rows(count)
        else:
            rows = _text_rows(count, every_token=self.kind.is_language_modelling)
        return rows if tasks == 1 else [self._row_of(row, number % tasks) for number, row in enumerate(rows)]

    def tasks(self, count: int) -> list[Task]:
        """Return several tasks; classifiers differ in their labels, one of three is a regression, and decoders do all three."""
        return [
            Task(name=f"task{number}", kind=self._kind(number), label_names=self._labels(number))
            for number in range(count)
        ]

    def _kind(self, task: int) -> TaskKind:
        if self.kind is TaskKind.CAUSAL_LM:
            return (TaskKind.CAUSAL_LM, TaskKind.CLASSIFICATION, TaskKind.REGRESSION)[task % 3]
        return TaskKind.REGRESSION if self.kind is TaskKind.CLASSIFICATION and task % 3 == 1 else self.kind

    def _labels(self, task: int) -> tuple[str, ...]:
        if self._kind(task).is_language_modelling or self._kind(task) is TaskKind.REGRESSION:
            return ()
        return tuple(f"LABEL_{label}" for label in range(LABELS - task % 2))

    def _row_of(self, row: dict[str, Any], task: int) -> dict[str, Any]:
        labels = row["labels"]
        if not self._kind(task).is_language_modelling:
            labels = labels % (LABELS - task % 2)
            if self.kind.is_language_modelling:  # a label beside those of every token
                labels[1:] = -100
        return {**row, "labels": labels, "task_ids": task}


def _deep_bert(dropout: float) -> PretrainedConfig:
    config = _bert(dropout)
    config.num_hidden_layers = _DEEP
    return config


def _bert(dropout: float) -> PretrainedConfig:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=_SPREAD,
        **_LABELS,
        **_WIDTH,
    )


def _llama(dropout: float) -> PretrainedConfig:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        num_key_value_heads=1,
        attention_dropout=dropout,
        pad_token_id=0,
        initializer_range=_SPREAD,
        **_WIDTH,
    )


def _gpt2(dropout: float) -> PretrainedConfig:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=_WIDTH["hidden_size"],
        n_layer=_WIDTH["num_hidden_layers"],
        n_head=_WIDTH["num_attention_heads"],
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        attn_pdrop=dropout,
        initializer_range=_SPREAD,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def _vit(dropout: float) -> PretrainedConfig:
    from transformers import ViTConfig

    return ViTConfig(
        image_size=PIXELS,
        patch_size=PIXELS // 2,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=_SPREAD,
        **_LABELS,
        **_WIDTH,
    )


MODELS = {
    model.name: model
    for model in (
        TinyModel(
            name="bert_classifier",
            kind=TaskKind.CLASSIFICATION,
            auto="AutoModelForSequenceClassification",
            config=_bert,
        ),
        TinyModel(
            name="old_bert_classifier",  # the names of BERT's first checkpoints, which are still what people load
            kind=TaskKind.CLASSIFICATION,
            auto="AutoModelForSequenceClassification",
            config=_bert,
            saved_names={"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
        ),
        TinyModel(
            name="deep_bert_classifier",  # for what needs layers between the ends
            kind=TaskKind.CLASSIFICATION,
            auto="AutoModelForSequenceClassification",
            config=_deep_bert,
        ),
        TinyModel(name="bert_masked_lm", kind=TaskKind.MASKED_LM, auto="AutoModelForMaskedLM", config=_bert),
        TinyModel(name="llama_causal_lm", kind=TaskKind.CAUSAL_LM, auto="AutoModelForCausalLM", config=_llama),
        TinyModel(name="gpt2_causal_lm", kind=TaskKind.CAUSAL_LM, auto="AutoModelForCausalLM", config=_gpt2),
        TinyModel(
            name="vit_classifier",
            kind=TaskKind.IMAGE_CLASSIFICATION,
            auto="AutoModelForImageClassification",
            config=_vit,
        ),
    )
}


@cache
def workspace() -> Path:
    """Return a folder for the files of this process's laws; it goes when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="tunery-laws-", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    return Path(folder.name)


@cache
def base_model(name: str, dropout: bool) -> Path:
    """Return the folder of a tiny base model, saved on first use.

    Args:
        name: a key of ``MODELS``.
        dropout: whether it has dropout; runs that split a batch differently draw other masks, so comparing them takes none.
    """
    import torch
    import transformers

    tiny = MODELS[name]
    folder = workspace() / "models" / f"{name}{'-dropout' if dropout else ''}"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, tiny.auto).from_config(tiny.config(0.1 if dropout else 0.0))
    model.save_pretrained(folder)
    if tiny.saved_names:
        _rename(folder / "model.safetensors", tiny.saved_names)
    return folder


def _rename(file: Path, names: Mapping[str, str]) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(file)
    for ours, theirs in names.items():
        state = {name.replace(ours, theirs): value for name, value in state.items()}
    save_file(state, file, metadata={"format": "pt"})


def _text_rows(count: int, every_token: bool) -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(count):
        tokens = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        valid = int(torch.randint(3, LENGTH + 1, (), generator=generator))
        mask = (torch.arange(LENGTH) < valid).long()
        labels = tokens.masked_fill(mask == 0, -100) if every_token else torch.randint(LABELS, (), generator=generator)
        rows.append({"input_ids": tokens * mask, "attention_mask": mask, "labels": labels})
    return rows


def _image_rows(count: int) -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    return [
        {
            "pixel_values": torch.randn(3, PIXELS, PIXELS, generator=generator),
            "labels": torch.randint(LABELS, (), generator=generator),
        }
        for _ in range(count)
    ]
