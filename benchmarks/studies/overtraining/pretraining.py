"""Pre-training at several token budgets from one initialisation."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from ....core.artifacts import write_json
from ....core.inflection import short
from ....core.options import build_options
from ....core.run import RESULT, train
from ....registry.errors import RecipeError
from .text import documents, split, train_tokenizer

SETTINGS = "pretraining.json"
_FREE = ("budgets", "micro_batch_size")
_LONGEST_TOKEN = 6  # bytes, on average


@dataclass(frozen=True, kw_only=True)
class Size:
    """A decoder and how it is pre-trained; what the paper's Table 3 gives of its own.

    Attributes:
        num_hidden_layers, num_attention_heads, hidden_size, intermediate_size, vocab_size: of the decoder.
        max_length: tokens of a block.
        batch_size: blocks of a step.
        learning_rate: peak.
        attention_dropout: in training.
        tie_word_embeddings: whether input and output embeddings are one.
        budgets: tokens of each run where none are asked for.
        micro_batch_size: blocks of a forward pass; default: all of a step.
        bf16: mixed precision.
    """

    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int = 50304
    max_length: int = 1024
    batch_size: int = 256
    learning_rate: float = 3e-4
    attention_dropout: float = 0.1
    tie_word_embeddings: bool = False
    budgets: tuple[int, ...] = tuple(billions * 10**9 for billions in (4, 8, 16, 32, 64, 128))
    micro_batch_size: int | None = None
    bf16: bool = False


_SMALL: dict[str, Any] = {"max_length": 128, "attention_dropout": 0.0, "tie_word_embeddings": True}
SIZES = {
    "quick": Size(
        num_hidden_layers=1, num_attention_heads=2, hidden_size=32, intermediate_size=64, vocab_size=320,
        batch_size=4, learning_rate=1e-2, budgets=(2_000, 4_000, 8_000, 16_000, 32_000), **(_SMALL | {"max_length": 32}),
    ),
    "1m": Size(
        num_hidden_layers=4, num_attention_heads=4, hidden_size=128, intermediate_size=512, vocab_size=1024,
        batch_size=16, learning_rate=2e-3,
        budgets=(125_000, 250_000, 500_000, 1_000_000, 2_000_000, 4_000_000), **_SMALL,
    ),
    "15m": Size(num_hidden_layers=3, num_attention_heads=3, hidden_size=192, intermediate_size=768),
    "30m": Size(num_hidden_layers=6, num_attention_heads=6, hidden_size=384, intermediate_size=1536),
    "90m": Size(num_hidden_layers=9, num_attention_heads=9, hidden_size=576, intermediate_size=2304),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """Everything that decides the checkpoints.

    Attributes:
        size: the decoder.
        budgets: tokens of each run.
        sources: text, see :func:`.text.documents`.
        max_documents: how many of them, evenly spread; all by default.
        seed: of initialisation and order.
    """

    size: Size
    budgets: Sequence[int]
    sources: Sequence[str] = ()
    max_documents: int | None = None
    seed: int = 0


def pretrain(asked: Pretraining, folder: Path, tell: Callable[[str], None]) -> list[Path]:
    """Pre-train at every budget; return the folders of the runs. What is done stays done, a killed run resumes.

    Raises:
        RecipeError: the folder holds another study, or a budget or micro-batch cannot be had.
        DataError: there is no text.
    """
    for budget in asked.budgets:
        schedule(asked, budget)  # what is wrong with any should not be said after days of training
    folder.mkdir(parents=True, exist_ok=True)
    _settle(asked, folder)
    initial = folder / "initial"
    if not (initial / "tokenizer_config.json").is_file():
        _prepare(asked, folder, initial)
    return [_run(asked, budget, folder, initial, tell) for budget in sorted(set(asked.budgets))]


def _settle(asked: Pretraining, folder: Path) -> None:
    """Write down what is asked; budgets may be added later, micro-batches be others, anything else may not change."""
    settings = json.loads(json.dumps({key: value for key, value in asdict(asked).items() if key != "budgets"}))
    settings["size"] = {key: value for key, value in settings["size"].items() if key not in _FREE}
    path = folder / SETTINGS
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = [key for key in settings if before.get(key) != settings[key]]
        if changed:
            asked_for = f"{folder} holds checkpoints pre-trained with another {' and '.join(changed)}"
            raise RecipeError(asked_for, remedy="choose another --output_dir")
    write_json(path, settings)


def _prepare(asked: Pretraining, folder: Path, initial: Path) -> None:
    """Write text, the initialised decoder and, last, its tokenizer."""
    size = asked.size
    texts = documents(asked.sources)
    trained, held = split(texts[:: max(1, len(texts) // asked.max_documents)] if asked.max_documents else texts)
    for name, texts in (("train", trained), ("validation", held)):
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    tokenizer = train_tokenizer(trained, size.vocab_size, size.max_length)
    set_seed(asked.seed)
    config = LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_hidden_layers,
        num_attention_heads=size.num_attention_heads,
        max_position_embeddings=size.max_length,
        attention_dropout=size.attention_dropout,
        tie_word_embeddings=size.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(initial)
    tokenizer.save_pretrained(initial)


def held_out(asked: Pretraining, folder: Path, rows: int) -> dict[str, Any]:
    """Return the data keys of the text that was held out of pre-training."""
    return {
        "validation_file": str(folder / "validation.jsonl"),
        "task_kind": "causal_lm",
        "text_columns": ["text"],
        "max_length": asked.size.max_length,
        "max_eval_samples": rows,
    }


def schedule(asked: Pretraining, budget: int) -> dict[str, Any]:
    """Return the training keys of one budget: Table 3's AdamW, 10 % warmup, a cosine that ends at zero.

    Raises:
        RecipeError: a budget of less than a step, or a step that does not divide into micro-batches.
    """
    size = asked.size
    step, micro = size.batch_size * size.max_length, size.micro_batch_size or size.batch_size
    if budget < step:
        raise RecipeError(
            f"a budget of {short(budget)} tokens, where a step has {short(step)}", remedy="give larger --budgets"
        )
    if size.batch_size % micro:
        raise RecipeError(
            f"--pretrain_micro_batch_size {micro}", remedy=f"give a divisor of the {size.batch_size} blocks of a step"
        )
    steps = round(budget / step)
    return {
        "max_steps": steps,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": size.batch_size // micro,
        "bf16": size.bf16,
        "learning_rate": asked.size.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.1,
        "weight_decay": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "save_strategy": "steps",
        "save_steps": max(1, steps // 5),
    }


def _documents_for(budget: int, path: Path) -> int:
    """Return how many documents hold a budget of tokens for sure; there is no need to encode more."""
    with path.open("rb") as file:
        rows = sum(1 for _ in file)
    return math.ceil(budget * _LONGEST_TOKEN * rows / path.stat().st_size) + 20


def _run(asked: Pretraining, budget: int, folder: Path, initial: Path, tell: Callable[[str], None]) -> Path:
    place = folder / "pretrained" / f"tokens{short(budget).upper()}"
    if (place / RESULT).is_file():
        return place
    tell(f"pre-training on {short(budget)} tokens")
    keys: Mapping[str, Any] = {
        "model_name_or_path": str(initial.resolve()),
        **held_out(asked, folder, 20),
        "train_file": str(folder / "train.jsonl"),
        "max_train_samples": _documents_for(budget, folder / "train.jsonl"),
        **schedule(asked, budget),
        "seed": asked.seed,
        "save_total_limit": 1,
        "resume_from_checkpoint": "last",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 0.05,
        "output_dir": str(place),
    }
    with redirect_stdout(io.StringIO()):  # the Trainer's own lines; they are in trainer_state.json
        result = train(build_options(keys))
    for checkpoint in place.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    often = f"; text read {passes(place):.3g} times" if passes(place) > 1 else ""
    tell(f"  perplexity {result['metrics']['perplexity']:.4g} on held-out text, {result['seconds']:.0f} s{often}")
    return place


def passes(run: Path) -> float:
    """Return how often a run has read its text: above 1, text was repeated."""
    return float(json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))["epoch"])
