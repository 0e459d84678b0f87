"""From a task's rows to what the model takes, and the collator that makes batches of it.

Text is encoded once, in memory, and nothing is written: no cache file can go stale. Images are encoded as they are read,
since a picture grows a hundredfold when it becomes floats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ...registry.context import TaskKind
from ...registry.errors import DataError
from .loading import quiet
from .tasks import TaskData

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

    Rows: TypeAlias = "Dataset | ImageRows"

IGNORE_INDEX = -100
BATCH_SIZE = 1000


@dataclass(frozen=True, kw_only=True)
class EncodedData:
    """What a ``transformers.Trainer`` takes as ``train_dataset``, ``eval_dataset`` and ``data_collator``.

    Attributes:
        train: rows of ``input_ids``, ``attention_mask``, perhaps ``token_type_ids``, or ``pixel_values``; with ``labels``.
        validation: the same.
        test: the same, or ``None`` where there is no labelled test split.
        data_collator: makes a batch of rows.
    """

    train: Rows
    validation: Rows
    test: Rows | None
    data_collator: Callable[[list[Any]], Mapping[str, Any]]


def encode(data: TaskData, processing_class: Any) -> EncodedData:
    """Encode every split of ``data``.

    * Classification and regression: one text or a pair, cut to ``max_length`` at the end of the longer part, padded batch
      by batch.
    * Causal LM, one column: the documents end to end, an eos token after each where the tokenizer has one, cut into blocks
      of exactly ``max_length``; the remainder is left out unless it is all there is.
    * Causal LM, two columns: ``prompt``, a line break, ``completion``, eos. Prompt tokens carry the label -100 and are cut
      from the left where a row is longer than ``max_length``.
    * Images: in RGB, through the image processor.

    Args:
        data: the task and its rows.
        processing_class: a tokenizer for text, an image processor for images.

    Raises:
        DataError: the processor does not fit the task, ``max_length`` is more than the tokenizer's, the tokenizer cannot
            pad, or the images cannot be read.
    """
    from transformers import PreTrainedTokenizerBase

    is_tokenizer = isinstance(processing_class, PreTrainedTokenizerBase)
    if is_tokenizer == bool(data.columns.image):
        needed = "an image processor" if data.columns.image else "a tokenizer"
        raise DataError(f"{data.task.kind} needs {needed}, not {type(processing_class).__name__}", owner=data.task.name)
    rows, collator = _images(data, processing_class) if data.columns.image else _texts(data, processing_class)
    return EncodedData(
        train=rows["train"], validation=rows["validation"], test=rows.get("test"), data_collator=collator
    )


def _texts(data: TaskData, tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, Rows], Callable[..., Any]]:
    from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, default_data_collator

    if data.max_length > tokenizer.model_max_length:
        raise DataError(
            f"max_length={data.max_length} is more than the {tokenizer.model_max_length} tokens of this tokenizer",
            owner=data.task.name,
        )
    is_lm = data.task.kind is TaskKind.CAUSAL_LM
    is_blocks = is_lm and len(data.columns.text) == 1
    if not is_blocks and tokenizer.pad_token is None:
        raise DataError(
            "this tokenizer has no pad token, and rows of different lengths need one",
            owner=data.task.name,
            remedy="set tokenizer.pad_token and the model's config.pad_token_id, for example to the eos token",
        )
    collator: Callable[..., Any]
    if is_blocks:
        encoder, collator = _blocks, default_data_collator
    elif is_lm:
        encoder, collator = _completions, DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORE_INDEX)
    else:
        encoder, collator = _sequences, DataCollatorWithPadding(tokenizer)
    with quiet():
        return {name: encoder(split, data, tokenizer) for name, split in data.splits.items()}, collator


def _map(
    split: Dataset,
    encode_batch: Callable[[dict[str, list[Any]]], dict[str, Any]],
    *,
    kept: Sequence[str] = (),
    made: Sequence[str] = (),
) -> Dataset:
    """Encode in batches; columns ``made`` are integer lists even where the first batch has no tokens to tell it by."""
    from datasets import Features, List, Value

    return split.map(
        encode_batch,
        batched=True,
        batch_size=BATCH_SIZE,
        remove_columns=[column for column in split.column_names if column not in kept],
        features=Features({column: List(Value("int32")) for column in made}) if made else None,
        keep_in_memory=True,
        load_from_cache_file=False,
        # Given, because computing one would pickle the tokenizer, and nothing is cached by it.
        new_fingerprint=f"encoded-{split._fingerprint}",
        desc="encoding",
    )


def _joined(batch: dict[str, list[Any]], columns: Sequence[str]) -> list[str]:
    return [" ".join(parts) for parts in zip(*(batch[column] for column in columns), strict=True)]


def _sequences(split: Dataset, data: TaskData, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    first, *others = data.columns.text

    def encode_batch(batch: dict[str, list[Any]]) -> dict[str, Any]:
        second = _joined(batch, others) if others else None
        return dict(tokenizer(batch[first], second, truncation=True, max_length=data.max_length))

    return _map(split, encode_batch, kept=("labels",))


def _completions(split: Dataset, data: TaskData, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    first, *others = data.columns.text

    def encode_batch(batch: dict[str, list[Any]]) -> dict[str, Any]:
        prompts = encode_prompts(batch[first], tokenizer)
        completions = _documents(_joined(batch, others), tokenizer, add_special_tokens=False)
        rows = []
        for prompt, completion in zip(prompts, completions, strict=True):
            learnt = [*completion, *_eos(completion, tokenizer)][: data.max_length]
            room = data.max_length - len(learnt)
            rows.append((prompt[len(prompt) - min(room, len(prompt)) :], learnt))
        return {
            "input_ids": [prompt + learnt for prompt, learnt in rows],
            "attention_mask": [[1] * len(prompt + learnt) for prompt, learnt in rows],
            "labels": [[IGNORE_INDEX] * len(prompt) + learnt for prompt, learnt in rows],
        }

    return _map(split, encode_batch, made=("input_ids", "attention_mask", "labels"))


def encode_prompts(prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of prompts as they stand before a completion, the line break included."""
    return _documents([f"{prompt}\n" for prompt in prompts], tokenizer)


def _blocks(split: Dataset, data: TaskData, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    import numpy as np
    from datasets import Dataset

    (column,) = data.columns.text

    def encode_batch(batch: dict[str, list[Any]]) -> dict[str, Any]:
        documents = _documents(batch[column], tokenizer)
        return {"input_ids": [[*document, *_eos(document, tokenizer)] for document in documents]}

    documents = _map(split, encode_batch, made=("input_ids",))
    chunks = documents.data.column("input_ids").chunks
    tokens = np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks])
    if len(tokens) < 2:
        raise DataError(f"column {column!r} holds no text to learn from", owner=data.task.name)
    length = min(data.max_length, len(tokens))
    blocks = tokens[: len(tokens) // length * length].reshape(-1, length)
    return Dataset.from_dict({"input_ids": blocks, "attention_mask": np.ones_like(blocks), "labels": blocks})


def _documents(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool = True
) -> list[list[int]]:
    """Tokenize whole texts; an empty text has no tokens, not even special ones."""
    # Not verbose: a document longer than the model is no news, it is cut into blocks later.
    encoded = tokenizer(texts, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False)
    return [ids if text else [] for text, ids in zip(texts, encoded["input_ids"], strict=True)]


def _eos(document: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return what ends ``document``: nothing where it is empty or ends with eos already, or there is no such token."""
    eos = tokenizer.eos_token_id
    return [eos] if document and eos is not None and document[-1] != eos else []


class ImageRows:
    """A map-style dataset that runs the image processor on a row when it is asked for."""

    def __init__(self, split: Dataset, column: str, shape: tuple[int, ...], processor: Callable[..., Any]) -> None:
        self.split = split
        self.column = column
        self.shape = shape
        self.processor = processor

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return ``pixel_values``, float (channels, height, width), and the class number ``labels``."""
        row = self.split[int(index)]
        pixels = self.processor(images=self.image(row[self.column]), return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels[0], "labels": row["labels"]}

    def image(self, value: Image | bytes) -> Image:
        """Return the picture in RGB.

        Args:
            value: a picture as ``datasets`` decodes it, the bytes of an image file, or, with a shape, raw uint8 values.
        """
        import io

        import numpy as np
        from PIL import Image as PILImage

        if not isinstance(value, bytes):
            return value.convert("RGB")
        if self.shape:
            return PILImage.fromarray(np.frombuffer(value, np.uint8).reshape(self.shape).squeeze()).convert("RGB")
        return PILImage.open(io.BytesIO(value)).convert("RGB")


def _images(data: TaskData, processor: Callable[..., Any]) -> tuple[dict[str, Rows], Callable[..., Any]]:
    from PIL import UnidentifiedImageError
    from transformers import default_data_collator

    column = str(data.columns.image)
    rows: dict[str, Rows] = {}
    for name, split in data.splits.items():
        encoded = ImageRows(split, column, data.columns.image_shape, processor)
        try:
            encoded.image(split[0][column])
        except (OSError, ValueError) as error:
            reason = "these bytes are no image file" if isinstance(error, UnidentifiedImageError) else str(error)
            raise DataError(
                f"image column {column!r} of {name!r} cannot be read: {reason}",
                owner=data.task.name,
                remedy="for raw uint8 bytes give image_shape: height, width and, for colour, channels",
            ) from error
        rows[name] = encoded
    return rows, default_data_collator
