"""Text to pre-train on, and a byte-level BPE tokenizer made from it."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from ....core.data.python_docs import HELD_OUT
from ....registry.errors import DataError

DOCUMENT = 2000  # characters, about
_EOS = "<|endoftext|>"
_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "__pycache__", *HELD_OUT}


def documents(sources: Sequence[str]) -> list[str]:
    """Return texts of about :data:`DOCUMENT` characters, each once.

    Args:
        sources: files, or folders with them: ``.txt``, or ``.jsonl`` with a column ``text``; none means the standard library.

    Raises:
        DataError: a source that is not there or holds no text.
    """
    paths = [path for source in sources for path in _files(Path(source).expanduser())] or list(_standard_library())
    found = list(dict.fromkeys(piece for path in paths for text in _texts(path) for piece in _pieces(text)))
    if len(found) < 20:
        raise DataError(f"{len(found)} documents to pre-train on", owner=", ".join(sources), remedy="give more text")
    return found


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    found = sorted(path for suffix in ("txt", "jsonl") for path in source.rglob(f"*.{suffix}"))
    if not found:
        raise DataError(f"no .txt or .jsonl in {source}", remedy="give --data_files a file or a folder of them")
    return found


def _standard_library() -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not _LEFT_OUT.intersection(path.relative_to(root).parts):
            yield path


def _texts(path: Path) -> Iterator[str]:
    try:
        content = path.read_text(encoding="utf-8")
        if path.suffix != ".jsonl":
            yield content
        else:
            yield from (json.loads(line)["text"] for line in content.splitlines() if line.strip())
    except (UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        if path.suffix != ".py":  # the standard library has files in other encodings
            raise DataError(f"cannot read {path}: {error}", remedy='UTF-8 text, or rows with a "text"') from None


def _pieces(text: str) -> Iterator[str]:
    """Cut at empty lines, where a piece is long enough."""
    piece = ""
    for paragraph in text.split("\n\n"):
        piece = f"{piece}\n\n{paragraph}" if piece else paragraph
        if len(piece) >= DOCUMENT:
            yield piece
            piece = ""
    if piece.strip():
        yield piece


def split(texts: Iterable[str], share: int = 20) -> tuple[list[str], list[str]]:
    """Return texts to train on and every ``share``-th one held out, chosen by its hash, whatever the others are."""
    parts: tuple[list[str], list[str]] = ([], [])
    for text in texts:
        parts[hashlib.sha256(text.encode()).digest()[0] % share == 0].append(text)
    return parts


def train_tokenizer(texts: Sequence[str], vocab_size: int, model_max_length: int) -> Any:
    """Return a byte-level BPE tokenizer; every text can be written with it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast: Any = PreTrainedTokenizerFast  # it comes without types
    return fast(tokenizer_object=tokenizer, eos_token=_EOS, pad_token=_EOS, model_max_length=model_max_length)
