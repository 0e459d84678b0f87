"""What the data tests share: files on disk, a private dataset cache, and a tokenizer whose ids can be written down."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

Rows = Sequence[Mapping[str, Any]]
# [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, <eos> 4, then a 5, b 6, ... j 14.
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "<eos>")
LETTERS = "abcdefghij"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write rows to a file and return its path."""

    def write_rows(name: str, rows: Rows) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write_rows


@pytest.fixture
def make_tokenizer() -> Callable[..., Any]:
    """Build a word tokenizer: one id a letter, ``[CLS] a [SEP] b [SEP]`` around sequences if asked to."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    def make(*, frame: bool = True, eos: bool = False, **options: Any) -> PreTrainedTokenizerFast:
        vocabulary = {token: number for number, token in enumerate([*SPECIAL, *LETTERS])}
        words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        if frame:
            words.post_processor = processors.TemplateProcessing(
                single="[CLS] $A [SEP]",
                pair="[CLS] $A [SEP] $B:1 [SEP]:1",
                special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
            )
        names: dict[str, Any] = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
        names |= {"eos_token": "<eos>"} if eos else {}
        return PreTrainedTokenizerFast(tokenizer_object=words, **(names | options))

    return make
