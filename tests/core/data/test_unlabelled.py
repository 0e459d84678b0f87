"""Rows without labels: what is masked, what is predicted, and that nothing but seed, epoch and row decides it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tunery.core.data.unlabelled import EpochOf, UnlabelledRows, pad_rows
from tunery.registry.context import Stage, TaskKind
from tunery.registry.errors import DataError

PAD, CLS, SEP, MASK = 0, 2, 3, 5


@pytest.fixture
def tokenizer(make_tokenizer: Any) -> Any:
    """``[PAD]`` 0, ``[CLS]`` 2, ``[SEP]`` 3, the mask 5, then letters up to 14."""
    return make_tokenizer(mask_token="a", cls_token="[CLS]", sep_token="[SEP]")


def rows_of(
    tokenizer: Any, rows: Any, kind: TaskKind = TaskKind.MASKED_LM, probability: float = 0.15
) -> UnlabelledRows:
    return UnlabelledRows(rows, tokenizer, Stage(name="s", objective=kind, mlm_probability=probability), seed=1)


def text(length: int, label: Any = 0) -> dict[str, Any]:
    """A row of letters between the special tokens, with a label and a column no model takes."""
    tokens = [CLS, *(6 + (index * 7) % 9 for index in range(length)), SEP]
    return {"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": label, "text": "words"}


def test_masks_as_bert_does(tokenizer: Any):
    """15 % of the tokens are predicted; of these 80 % show the mask, 10 % a random token, 10 % themselves."""
    rows = rows_of(tokenizer, [text(200) for _ in range(200)])
    counts: Counter[str] = Counter()
    for index in range(len(rows)):
        row, original = rows[index], torch.tensor(rows.rows[index]["input_ids"])
        predicted = row["labels"] != -100
        assert torch.equal(row["labels"][predicted], original[predicted])
        assert torch.equal(row["input_ids"][~predicted], original[~predicted])
        shown, truth = row["input_ids"][predicted], original[predicted]
        counts["predicted"] += int(predicted.sum())
        counts["mask"] += int((shown == MASK).sum())
        counts["kept"] += int((shown == truth).sum())
    total = 200 * 200
    assert counts["predicted"] / total == pytest.approx(0.15, abs=0.01)
    # A random token is the mask or the right one once in 15 each.
    assert counts["mask"] / counts["predicted"] == pytest.approx(0.8 + 0.1 / 15, abs=0.02)
    assert counts["kept"] / counts["predicted"] == pytest.approx(0.1 + 0.1 / 15, abs=0.02)


def test_never_masks_special_tokens_or_padding(tokenizer: Any):
    """Also where a row comes padded, and where every other token is predicted."""
    row = {"input_ids": [CLS, 6, 7, SEP, PAD, PAD], "attention_mask": [1, 1, 1, 1, 0, 0]}
    made = rows_of(tokenizer, [row], probability=0.999)[0]
    assert made["labels"].tolist() == [-100, 6, 7, -100, -100, -100]
    assert made["input_ids"].tolist()[3:] == [SEP, PAD, PAD]


def test_every_row_has_something_to_predict(tokenizer: Any):
    """A short one is drawn again until it has; one of special tokens alone is predicted as it stands."""
    short = rows_of(tokenizer, [text(1) for _ in range(50)])
    assert all((short[index]["labels"] != -100).sum() == 1 for index in range(50))
    empty = rows_of(tokenizer, [text(0)])[0]
    assert empty["labels"].tolist() == empty["input_ids"].tolist() == [CLS, SEP]


def test_masks_depend_on_seed_epoch_and_row_alone(tokenizer: Any):
    """The same whenever asked and however padded; other rows, epochs and seeds have others. Torch's own state stays."""
    rows = rows_of(tokenizer, [text(40), text(40)])
    state = torch.get_rng_state()
    first = rows[0]["labels"]
    assert torch.equal(torch.get_rng_state(), state)
    rows[1]
    assert torch.equal(rows[0]["labels"], first)
    assert not torch.equal(rows[1]["labels"], first)
    assert not torch.equal(
        UnlabelledRows(rows.rows, tokenizer, Stage(name="s", objective=TaskKind.MASKED_LM), 2)[0]["labels"], first
    )
    EpochOf(rows).on_epoch_begin(None, SimpleNamespace(epoch=1.4), None)
    assert rows.epoch == 1
    assert not torch.equal(rows[0]["labels"], first)
    EpochOf(rows).on_epoch_begin(None, SimpleNamespace(epoch=None), None)
    assert torch.equal(rows[0]["labels"], first)


def test_causal_rows_predict_every_real_token(tokenizer: Any):
    """A prompt's as well, whose label hides it from the task; never padding."""
    row = {"input_ids": [6, 7, 8, PAD], "attention_mask": [1, 1, 1, 0], "labels": [-100, -100, 8, -100]}
    made = rows_of(tokenizer, [row], TaskKind.CAUSAL_LM)[0]
    assert made["labels"].tolist() == [6, 7, 8, -100]
    assert made["input_ids"].tolist() == [6, 7, 8, PAD]


@pytest.mark.parametrize("kind", [TaskKind.MASKED_LM, TaskKind.CAUSAL_LM])
def test_labels_are_never_read(tokenizer: Any, kind: TaskKind):
    """A row whose labels cannot even be looked at gives the same; no other column gets through."""

    class Secret(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            assert key in ("input_ids", "attention_mask")
            return super().__getitem__(key)

    plain, secret = rows_of(tokenizer, [text(20)], kind)[0], rows_of(tokenizer, [Secret(text(20, label=1))], kind)[0]
    assert plain.keys() == {"input_ids", "attention_mask", "labels"}
    assert all(torch.equal(plain[name], secret[name]) for name in plain)


def test_batches_are_padded_without_labels_for_the_padding(tokenizer: Any):
    """Rows of different lengths; what is predicted stays at its place."""
    rows = rows_of(tokenizer, [text(3), text(8)])
    batch = pad_rows(tokenizer)([rows[0], rows[1]])
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 10)
    assert batch["labels"][0, :5].tolist() == rows[0]["labels"].tolist()
    assert batch["labels"][0, 5:].tolist() == [-100] * 5
    assert batch["attention_mask"].sum(dim=1).tolist() == [5, 10]


def test_rows_that_were_not_encoded_are_refused(tokenizer: Any):
    """One line says what they hold."""
    with pytest.raises(DataError, match="learns from input_ids, and the training rows hold text, labels"):
        rows_of(tokenizer, [{"text": "a", "labels": 0}])
