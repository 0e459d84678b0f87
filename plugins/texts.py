"""Unlabelled text that a plugin reads for itself: documents of a file or a dataset, joined and cut into blocks of tokens.

Shapes: N blocks, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from ..registry.errors import CompatibilityError, DataError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options that say how text is read.

    Attributes:
        data_config: which configuration of a dataset that has several.
        split: which split of a dataset, as ``datasets.load_dataset`` takes it.
        max_documents: read no more than the first so many; of a dataset, no more is downloaded then (it is streamed).
        column: where a dataset has its text.
        length: tokens of a row of text; documents are joined, an eos token after each where there is one, and cut.
        tokenizer: name or folder; default: that of the base model. Not needed for ``input_ids``.
    """

    data_config: str | None = None
    split: str = "train"
    max_documents: Annotated[int, Ge(1)] | None = None
    column: str = "text"
    length: Annotated[int, Ge(2)] = 128
    tokenizer: str | None = None


@dataclass(frozen=True, kw_only=True)
class DistillationText(TextOptions):
    """Options of a stand-in that learns from the model on unlabelled text of its own, before it is tuned.

    Attributes:
        distill_steps: steps of the alignment before tuning; 0 leaves it out.
        data: unlabelled text for it; default: the run's own training inputs, or a federation's server's. A ``.txt`` file with
            a document a line, a ``.jsonl`` file with ``text`` or ``input_ids`` in each line, or the name or folder of a
            dataset as ``datasets.load_dataset`` takes it.
        batch_size: rows of a step on ``data``, the same on every rank.
    """

    distill_steps: Annotated[int, Ge(0)] = 0
    data: str | None = None
    batch_size: Annotated[int, Ge(1)] = 32

    def __post_init__(self) -> None:
        if self.data is not None and not self.distill_steps:
            raise ValueError("option data: with distill_steps=0 nothing is learnt from it; set distill_steps")


class TextBatches:
    """Batches of the text that a stand-in learns from, on its device, in an order the seed gives, anew in each pass.

    Args:
        config: where the text is; ``data`` is given.
        model: the stand-in.
        seed: of the order.
        owner: who asks, for messages.

    Raises:
        DataError: no such text, not readable, too short, or nothing to tokenize it with.
        CompatibilityError: the model takes no text, or no rows of that length.
    """

    def __init__(self, config: DistillationText, model: Any, seed: int, owner: str) -> None:
        import torch

        assert config.data is not None
        if getattr(model, "main_input_name", "input_ids") != "input_ids":
            raise CompatibilityError(f"{owner}: data={config.data!r} is text, and this model takes none")
        tokenizer = Tokenizer(config.tokenizer or model.config._name_or_path, owner)
        self._blocks_NT = read_blocks(config, config.data, tokenizer, model, owner)
        self._batch_size = config.batch_size
        self._device = next(model.parameters()).device
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        import torch

        order = torch.randperm(len(self._blocks_NT), generator=self._generator)
        for numbers in torch.split(order, self._batch_size):
            tokens = self._blocks_NT[numbers].to(self._device)
            yield {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def read_blocks(options: TextOptions, data: str, tokenizer: Tokenizer, model: Any, owner: str) -> torch.Tensor:
    """Return text as blocks of token numbers, (N, T); what is left at the end is left out.

    Args:
        options: how it is read, and how long blocks are.
        data: where it is.
        tokenizer: makes tokens of it.
        model: what shall take the blocks.
        owner: who asks, for messages.

    Raises:
        DataError: no such text, not readable, too short, or nothing to tokenize it with.
        CompatibilityError: ``length`` is more than the model takes.
    """
    import torch

    longest = _longest(model)
    if longest is not None and options.length > longest:
        raise CompatibilityError(f"{owner}: length={options.length} is more than the {longest} positions of the model")
    words = model.config.vocab_size
    tokens = [token for document in _documents(options, data, tokenizer, owner) for token in document]
    count = len(tokens) // options.length
    strange = [token for token in tokens if not (isinstance(token, int) and 0 <= token < words)]
    if count == 0 or strange:
        what = f"token {strange[0]!r:.40} of a vocabulary of {words}" if strange else "fewer tokens than one block"
        raise DataError(f"{owner}: {data} has {what}", remedy="give other data or length")
    return torch.tensor(tokens[: count * options.length]).reshape(count, -1)


def _longest(model: Any) -> int | None:
    """Return how many tokens a model takes; RoBERTa and its kin count positions from behind the pad's."""
    longest: int | None = getattr(model.config, "max_position_embeddings", None)
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    behind = [table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None]
    return longest if longest is None else longest - max(behind, default=0)


class Tokenizer:
    """The tokenizer of a model, loaded when it is needed.

    Args:
        name: the model's name or folder.
        owner: who asks, for messages.
    """

    def __init__(self, name: str, owner: str) -> None:
        self.name = name
        self._owner = owner
        self._loaded: Any = None

    @property
    def loaded(self) -> Any:
        """transformers' tokenizer."""
        if self._loaded is None:
            from transformers import AutoTokenizer

            try:
                self._loaded = AutoTokenizer.from_pretrained(self.name)
            except (OSError, ValueError, KeyError) as error:
                first = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise DataError(
                    f"{self._owner} finds no tokenizer in {self.name!r}: {first}", remedy="name one as tokenizer"
                ) from None
        return self._loaded

    def required(self, name: str) -> int:
        """Return one of its tokens by name, for example ``mask_token_id``."""
        value = getattr(self.loaded, name)
        if value is None:
            raise DataError(f"{self._owner}: the tokenizer of {self.name!r} has no {name}", remedy=f"give {name}")
        return int(value)

    def encoded(self, text: str) -> list[int]:
        """Return a document's tokens, an eos after them where there is one."""
        tokens: list[int] = self.loaded(text, add_special_tokens=False, verbose=False)["input_ids"]
        eos = self.loaded.eos_token_id
        return [*tokens, eos] if tokens and eos is not None else tokens


def _documents(options: TextOptions, data: str, tokenizer: Tokenizer, owner: str) -> Iterator[list[Any]]:
    """Yield the tokens of every document."""
    for row in islice(_records(options, data, owner), options.max_documents):
        if isinstance(row, Mapping) and isinstance(row.get("input_ids"), list):
            yield row["input_ids"]
        elif isinstance(row, Mapping) and isinstance(row.get(options.column), str):
            yield tokenizer.encoded(row[options.column])
        else:
            known = sorted(map(str, row)) if isinstance(row, Mapping) else []
            raise DataError(f"{owner}: {data} has no text {options.column!r}", known=known)


def _records(options: TextOptions, data: str, owner: str) -> Iterator[Any]:
    import json

    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    path = Path(data)
    try:
        if path.is_file():
            with path.open(encoding="utf-8") as lines:
                for line in lines:
                    if line.strip():
                        yield json.loads(line) if path.suffix == ".jsonl" else {options.column: line.strip()}
        else:
            streaming = options.max_documents is not None
            yield from load_dataset(data, options.data_config, split=options.split, streaming=streaming)
    except (DatasetsError, OSError, ValueError) as error:
        first = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
        remedy = "" if path.is_file() else "see data_config and split"
        raise DataError(f"{owner} cannot read {data}: {first}", remedy=remedy) from None
