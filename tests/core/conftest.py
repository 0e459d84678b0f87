"""What the tests of core share: a tiny model and tokenizer in a folder, rows in a file, and the command line in process."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, when the hub client is imported

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
LETTERS = "abcdefghijkl"


class Outcome(NamedTuple):
    """How a command ended: its exit code, and what it wrote."""

    code: int
    out: str
    err: str


class Tiny(NamedTuple):
    """What a tiny run starts from.

    Attributes:
        base: folder of a two-layer BERT without a head, and its tokenizer.
        rows: a jsonl file of 48 texts with a yes/no label.
    """

    base: Path
    rows: Path

    def given(self, **changes: Any) -> dict[str, Any]:
        """Return the keys of a recipe of ten steps; ``None`` leaves a key out."""
        keys = {
            "model_name_or_path": str(self.base),
            "train_file": str(self.rows),
            "max_length": 16,
            "max_steps": 10,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "strategy": "full",
        }
        return {key: value for key, value in (keys | changes).items() if value is not None}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    """A model, a tokenizer and data, small enough to train in a second; one thread, since more only wait for each other."""
    import datasets

    import tunery.core.finished
    import tunery.core.run  # noqa: F401  # everything heavy, before the freeze

    folder = tmp_path_factory.mktemp("tiny")
    made = Tiny(folder / "base", folder / "rows.jsonl")
    save_base(made.base)
    pick = random.Random(0)
    texts = [[pick.choice(LETTERS) for _ in range(6)] for _ in range(48)]
    rows = [{"text": " ".join(words), "label": "yes" if "a" in words else "no"} for words in texts]
    made.rows.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a Trainer collects garbage as it starts: it need not walk through every imported module
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield made
    gc.unfreeze()
    torch.set_num_threads(threads)


def save_base(folder: Path, seed: int = 0) -> None:
    """Write a BERT of 16 hidden units with random weights, and a tokenizer of one id a letter."""
    words = Tokenizer(
        models.WordLevel({token: number for number, token in enumerate((*SPECIAL, *LETTERS))}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", eos_token="[SEP]", model_max_length=32
    )
    set_seed(seed)
    config = BertConfig(
        vocab_size=len(SPECIAL) + len(LETTERS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture
def other_base(tmp_path: Path, tiny: Tiny) -> Path:
    """A base model of the same shape and other weights."""
    save_base(tmp_path / "other_base", seed=1)
    return tmp_path / "other_base"


@pytest.fixture(scope="session")
def finished(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a finished run of a strategy, trained once a session with a checkpoint at step 5; only to read."""
    from tunery.core.options import build_options
    from tunery.core.run import train

    done: dict[str, Path] = {}

    def run(strategy: str) -> Path:
        if strategy not in done:
            folder = tmp_path_factory.mktemp("finished") / "run"
            train(
                build_options(
                    tiny.given(strategy=strategy, output_dir=str(folder), save_strategy="steps", save_steps=5)
                )
            )
            done[strategy] = folder
        return done[strategy]

    return run


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Run ``tunery ARGUMENTS`` in this process."""
    from transformers.utils import logging

    from tunery.core.commands import main

    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # what the command line sets, taken back afterwards
    verbosity = logging.get_verbosity()

    def run(*arguments: object) -> Outcome:
        assert not torch.distributed.is_initialized(), "the command line would end this process"
        monkeypatch.setattr(sys, "argv", ["tunery", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        logging.set_verbosity(verbosity)
        captured = capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return Outcome(stop.value.code, captured.out, captured.err)

    return run


@pytest.fixture
def listing() -> Callable[[Path], Mapping[str, bytes]]:
    """Return every file below a folder with its content; folders end with a slash."""

    def read(folder: Path) -> Mapping[str, bytes]:
        return {
            str(path.relative_to(folder)) + ("/" if path.is_dir() else ""): b"" if path.is_dir() else path.read_bytes()
            for path in sorted(folder.rglob("*"))
        }

    return read
