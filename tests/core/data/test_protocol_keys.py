"""The keys a protocol is made of: which split is scored, what is held out and left out, and by which seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tunery.core.data import DataArguments, TaskData, load_task_data
from tunery.registry.errors import DataError

Write = Callable[..., str]


@pytest.fixture
def load(write: Write) -> Callable[..., TaskData]:
    """Load 100 training and 30 validation rows whose texts number them."""
    train = [{"text": f"t{row}", "label": row % 2} for row in range(100)]
    validation = [{"text": f"v{row}", "label": row % 2} for row in range(30)]
    files = {"train_file": write("train.jsonl", train), "validation_file": write("validation.jsonl", validation)}
    return lambda seed=0, **args: load_task_data(DataArguments(**files | args), seed=seed)


def test_validation_as_test(load: Callable[..., TaskData]):
    """The published validation split becomes the test split, whole, and 10 % of train the validation split, by class."""
    splits = load(test_split="validation").splits
    assert {name: len(split) for name, split in splits.items()} == {"train": 90, "validation": 10, "test": 30}
    assert {text[0] for text in splits["test"]["text"]} == {"v"}
    assert {text[0] for text in (*splits["train"]["text"], *splits["validation"]["text"])} == {"t"}
    assert not set(splits["train"]["text"]) & set(splits["validation"]["text"])
    assert sum(splits["validation"]["labels"]) == 5


def test_validation_as_test_needs_one(write: Write):
    """Without a validation split there is nothing to score."""
    rows = [{"text": "a", "label": row % 2} for row in range(20)]
    with pytest.raises(DataError, match=r"test_split='validation' without a validation split"):
        load_task_data(DataArguments(train_file=write("only.jsonl", rows), test_split="validation"), seed=0)


def test_leave_out(load: Callable[..., TaskData]):
    """A tenth of the training rows is missing, another tenth with every seed; nothing else changes."""
    kept = [load(seed=seed, leave_out=0.1).splits for seed in (0, 1, 0)]
    whole = set(load().splits["train"]["text"])
    assert [len(splits["train"]) for splits in kept] == [90, 90, 90]
    left_out = [whole - set(splits["train"]["text"]) for splits in kept]
    assert left_out[0] != left_out[1]
    assert left_out[0] == left_out[2]
    assert kept[0]["validation"]["text"] == kept[1]["validation"]["text"]


def test_split_seed(load: Callable[..., TaskData]):
    """Runs with one ``split_seed`` share held-out rows and samples whatever their own seed; without, they do not."""
    asked = {"test_split": "validation", "max_train_samples": 40, "max_eval_samples": 8}

    def rows(seed: int, **args: int) -> list[list[str]]:
        return [split["text"][:] for split in load(seed=seed, **asked, **args).splits.values()]

    assert rows(1, split_seed=7) == rows(2, split_seed=7)
    assert rows(1) != rows(2)
    assert rows(7) == rows(1, split_seed=7)


def test_rows_left_out_follow_the_run_under_one_split_seed(load: Callable[..., TaskData]):
    """The perturbation differs between seeds that share their splits."""
    first, second = (load(seed=seed, split_seed=0, leave_out=0.2).splits["train"]["text"][:] for seed in (1, 2))
    assert first != second
