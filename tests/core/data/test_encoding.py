"""Encoding: ids against hand-written ones, batches as the Trainer gets them, and processors that do not fit."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from PIL import Image

from tunery.core.data import DataArguments, EncodedData, TaskData, encode
from tunery.core.data.tasks import build
from tunery.registry.errors import DataError

BERT_INPUTS = ["input_ids", "token_type_ids", "attention_mask"]
CLS, SEP, EOS = 2, 3, 4
A, B, C, D, E = 5, 6, 7, 8, 9


def _data(rows: dict[str, list[Any]], **args: Any) -> TaskData:
    split = Dataset.from_dict(rows)
    raw = DatasetDict(train=split, validation=split.select([0]))
    return build(DataArguments(dataset_name="d", **args), raw, seed=0)


def _batch(encoded: EncodedData, *rows: int) -> dict[str, Any]:
    batch = encoded.data_collator([encoded.train[row] for row in rows])
    return {name: value.tolist() for name, value in batch.items()}


def test_single_texts_become_padded_class_batches(make_tokenizer: Callable[..., Any]) -> None:
    """Texts are cut to max_length and padded to the longest of the batch."""
    data = _data({"text": ["a b c d", "e"], "label": ["x", "y"]}, max_length=5)
    encoded = encode(data, make_tokenizer(model_input_names=BERT_INPUTS))
    assert _batch(encoded, 0, 1) == {
        "input_ids": [[CLS, A, B, C, SEP], [CLS, E, SEP, 0, 0]],
        "attention_mask": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]],
        "token_type_ids": [[0] * 5, [0] * 5],
        "labels": [0, 1],
    }
    assert set(encoded.train.column_names) == {"input_ids", "attention_mask", "token_type_ids", "labels"}
    assert (len(encoded.validation), encoded.test) == (1, None)


def test_pairs_keep_both_parts(make_tokenizer: Callable[..., Any]) -> None:
    """The longer part is cut first; columns after the second are joined to it; float labels stay floats."""
    rows = {"one": ["a", "a b c"], "two": ["b", "d"], "three": ["c", "e"], "label": [0.5, 2.0]}
    data = _data(rows, text_columns=["one", "two", "three"], max_length=7)
    assert _batch(encode(data, make_tokenizer(model_input_names=BERT_INPUTS)), 0, 1) == {
        "input_ids": [[CLS, A, SEP, B, C, SEP, 0], [CLS, A, B, SEP, D, E, SEP]],
        "attention_mask": [[1, 1, 1, 1, 1, 1, 0], [1] * 7],
        "token_type_ids": [[0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1]],
        "labels": [0.5, 2.0],
    }


def test_documents_become_blocks(make_tokenizer: Callable[..., Any]) -> None:
    """Documents are joined by eos, empty ones add none, and the remainder is left out."""
    tokenizer = make_tokenizer(frame=False, eos=True, pad_token=None)
    encoded = encode(_data({"text": ["a b", "", "c d e", "a b"]}, max_length=4), tokenizer)
    assert encoded.train["input_ids"][:] == encoded.train["labels"][:] == [[A, B, EOS, C], [D, E, EOS, A]]
    assert _batch(encoded, 0)["attention_mask"] == [[1, 1, 1, 1]]
    # The validation split is one document shorter than a block: all there is.
    assert encoded.validation["input_ids"][:] == [[A, B, EOS]]


def test_documents_without_eos_keep_their_own_frame(make_tokenizer: Callable[..., Any]) -> None:
    """A tokenizer without eos adds nothing between documents but its own special tokens."""
    encoded = encode(_data({"text": ["a", "b"]}, max_length=3), make_tokenizer())
    assert encoded.train["input_ids"][:] == [[CLS, A, SEP], [CLS, B, SEP]]


def test_a_corpus_of_many_batches_loses_only_its_last_tokens(make_tokenizer: Callable[..., Any]) -> None:
    """Blocks run across the batches of the tokenizer, also when the first one is empty."""
    documents = [""] * 1100 + ["a b c"] * 2500
    raw = DatasetDict(train=Dataset.from_dict({"text": documents}), validation=Dataset.from_dict({"text": ["a"]}))
    data = build(DataArguments(dataset_name="d", max_length=7), raw, seed=0)
    encoded = encode(data, make_tokenizer(frame=False, eos=True))
    tokens = np.concatenate(encoded.train["input_ids"][:])
    assert len(tokens) == 10_000 // 7 * 7
    assert tokens.tolist() == ([A, B, C, EOS] * 2500)[: len(tokens)]


def test_prompts_are_read_and_completions_learnt(make_tokenizer: Callable[..., Any]) -> None:
    """Prompt labels are -100, completions end in eos, and what is too long is cut from the prompt's left."""
    data = _data({"prompt": ["a b", "a b c d"], "completion": ["c", "d e"]}, max_length=5)
    assert _batch(encode(data, make_tokenizer(frame=False, eos=True)), 0, 1) == {
        "input_ids": [[A, B, C, EOS, 0], [C, D, D, E, EOS]],
        "attention_mask": [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        "labels": [[-100, -100, C, EOS, -100], [-100, -100, D, E, EOS]],
    }


def test_encoding_twice_gives_the_same_and_writes_nothing(make_tokenizer: Callable[..., Any], tmp_path: Any) -> None:
    """No cache file, no dependence on what was encoded before."""
    data = _data({"text": ["a b", "c"], "label": [0, 1]})
    longer, shorter = (encode(data, make_tokenizer(model_max_length=size)) for size in (512, 256))
    assert longer.train.to_list() == shorter.train.to_list()
    cut = encode(_data({"text": ["a b", "c"], "label": [0, 1]}, max_length=3), make_tokenizer())
    assert cut.train["input_ids"][0] == [CLS, A, SEP]
    assert not longer.train.cache_files
    assert not list(tmp_path.iterdir())


class Halves:
    """An image processor: values of (height, width, 3) to (3, height, width), as a share of 510."""

    def __call__(self, images: Image.Image, return_tensors: str) -> dict[str, torch.Tensor]:
        assert return_tensors == "pt"
        values = torch.tensor(np.asarray(images), dtype=torch.float32).permute(2, 0, 1)
        return {"pixel_values": values[None] / 510}


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("spelling", ["feature", "png bytes", "raw bytes"])
def test_images_become_pixel_values(spelling: str) -> None:
    """The three ways to hold a picture give the same values."""
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    picture = Image.fromarray(pixels)
    column: list[Any] = {
        "feature": [picture, picture],
        "png bytes": [_png(picture)] * 2,
        "raw bytes": [pixels.tobytes()] * 2,
    }[spelling]
    shape = {"image_shape": [2, 3, 3]} if spelling == "raw bytes" else {}
    encoded = encode(_data({"image": column, "label": [0, 1]}, **shape), Halves())
    batch = encoded.data_collator([encoded.train[row] for row in range(len(encoded.train))])
    assert batch["labels"].tolist() == [0, 1]
    assert torch.equal(batch["pixel_values"][1], torch.tensor(pixels, dtype=torch.float32).permute(2, 0, 1) / 510)


def test_grey_pixels_become_rgb() -> None:
    """A shape of height and width means grey; models take three channels."""
    encoded = encode(_data({"pixels": [bytes([0, 51, 102, 255])] * 2, "label": [0, 1]}, image_shape=[2, 2]), Halves())
    assert encoded.train[0]["pixel_values"].shape == (3, 2, 2)
    assert encoded.train[0]["pixel_values"][:, 0, 1].tolist() == pytest.approx([0.1, 0.1, 0.1])


def test_what_cannot_be_encoded_is_one_line(make_tokenizer: Callable[..., Any]) -> None:
    """Processor, length, padding and pictures must fit."""
    text = _data({"text": ["a", "b"], "label": [0, 1]}, max_length=64)
    pixels = {"pixels": [bytes(12)] * 2, "label": [0, 1]}
    refused: list[tuple[TaskData, Any, str]] = [
        (text, Halves(), "classification needs a tokenizer, not Halves; in d"),
        (text, make_tokenizer(model_max_length=32), "max_length=64 is more than the 32 tokens of this tokenizer"),
        (text, make_tokenizer(pad_token=None), "no pad token.*set tokenizer.pad_token"),
        (_data({"text": ["", ""]}), make_tokenizer(), "column 'text' holds no text to learn from"),
        (_data(pixels, image_shape=[2, 2, 3]), make_tokenizer(), "needs an image processor, not TokenizersBackend"),
        (_data(pixels), Halves(), "'pixels' of 'train' cannot be read: these bytes are no image file.*image_shape"),
        (_data(pixels, image_shape=[2, 2]), Halves(), "cannot reshape array of size 12 into shape"),
    ]
    for data, processor, message in refused:
        with pytest.raises(DataError, match=rf"^[^\n]*{message}[^\n]*$"):
            encode(data, processor)
