"""Several tasks in one run: how often their rows come, in which order, and how a batch holds them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tunery.core.data import DataArguments
from tunery.core.data.mixing import JointCollator, JointRows, Mixing, MixingSampler, check_kinds
from tunery.registry.context import Task, TaskKind
from tunery.registry.errors import DataError

SIZES = [5, 40, 15]


@pytest.mark.parametrize(
    ("mixing", "counts"),
    [
        (Mixing(name="proportional"), [5, 40, 15]),
        (Mixing(name="round_robin"), [40, 40, 40]),
        (Mixing(name="size_capped", cap=10), [5, 10, 10]),
        (Mixing(name="temperature", temperature=1.0), [5, 40, 15]),
    ],
)
def test_rows_an_epoch_takes_of_each_task(mixing: Mixing, counts: list[int]) -> None:
    """By the formulas."""
    assert mixing.counts(SIZES) == counts
    drawn = Counter(task_of(position) for position in MixingSampler(SIZES, mixing, seed=0))
    assert [drawn[task] for task in range(3)] == counts


def test_temperature_takes_tasks_by_the_root_of_their_size() -> None:
    """T=2: proportional to the square root, in whole numbers that sum to all rows."""
    counts = Mixing(name="temperature", temperature=2.0).counts(SIZES)
    roots = [math.sqrt(size) for size in SIZES]
    assert sum(counts) == 60
    assert counts == pytest.approx([60 * root / sum(roots) for root in roots], abs=1)


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    temperature=st.floats(1, 100),
    seed=st.integers(0, 10),
    name=st.sampled_from(["proportional", "temperature", "round_robin", "size_capped"]),
)
def test_task_gives_every_row_once_before_any_again(sizes: list[int], temperature: float, seed: int, name: str) -> None:
    """Whatever the mixing: a row comes at most once more often than any other of its task."""
    sampler = MixingSampler(sizes, Mixing(name=name, temperature=temperature, cap=7), seed)
    positions = list(sampler)
    assert len(positions) == len(sampler)
    times = Counter(positions)
    start = 0
    for size in sizes:
        often = [times[position] for position in range(start, start + size)]
        assert max(often) - min(often) <= 1
        start += size


def test_round_robin_alternates() -> None:
    """One row of each task in turn: a batch of a multiple of k rows holds equally many of each."""
    order = [task_of(position) for position in MixingSampler(SIZES, Mixing(name="round_robin"), seed=3)]
    assert order == [0, 1, 2] * 40


def test_order_depends_on_seed_and_epoch_alone() -> None:
    """The same seed and epoch give the same order, so that a run resumes; others give others."""
    first, again = (MixingSampler(SIZES, Mixing(), seed=1) for _ in range(2))
    assert list(first) == list(again)
    epochs = []
    for epoch in (0, 1):
        first.set_epoch(epoch)
        epochs.append(list(first))
    assert epochs[0] != epochs[1]
    assert epochs[0] == list(again)
    assert list(MixingSampler(SIZES, Mixing(), seed=2)) != list(again)


def task_of(position: int) -> int:
    return 0 if position < 5 else 1 if position < 45 else 2


def test_rows_know_their_task() -> None:
    """End to end, each with the number of its task; outside there is none."""
    rows = JointRows([[{"x": 1}], [{"x": 2}, {"x": 3}]], Mixing())
    assert [rows[index] for index in range(len(rows))] == [
        {"x": 1, "task_ids": 0},
        {"x": 2, "task_ids": 1},
        {"x": 3, "task_ids": 1},
    ]
    with pytest.raises(IndexError):
        rows[3]


def test_batch_lies_task_by_task() -> None:
    """Sorted by task, labels with their rows; floats where one task has them."""

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}

    rows = [{"labels": 2, "task_ids": 1}, {"labels": 0, "task_ids": 0}, {"labels": 1, "task_ids": 1}]
    batch = JointCollator(collate, float_labels=False)(rows)
    assert batch["task_ids"].tolist() == [0, 1, 1]
    assert batch["labels"].tolist() == [0, 2, 1]
    assert JointCollator(collate, float_labels=True)(rows)["labels"].dtype == torch.float32


def test_label_beside_language_modelling_stands_first() -> None:
    """A class number or a target takes the first place among a row's positions; token ids keep theirs, beyond 2**8 too."""

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        pads = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        return {
            key: torch.tensor([[*row[key], *[pad] * (3 - len(row[key]))] for row in rows]) for key, pad in pads.items()
        }

    rows = [
        {"input_ids": [5, 6], "attention_mask": [1, 1], "token_type_ids": [0, 0], "labels": 0.25, "task_ids": 2},
        {"input_ids": [7], "attention_mask": [1], "labels": 1, "task_ids": 0},
        {"input_ids": [8, 9, 50257], "attention_mask": [1, 1, 1], "labels": [-100, 9, 50257], "task_ids": 1},
    ]
    batch = JointCollator(collate, float_labels=True, words=frozenset({1}))(rows)
    assert batch["labels"].tolist() == [[1, -100, -100], [-100, 9, 50257], [0.25, -100, -100]]
    assert batch["input_ids"].tolist() == [[7, 0, 0], [8, 9, 50257], [5, 6, 0]]
    assert batch["task_ids"].tolist() == [0, 1, 2] and set(batch) == {*rows[1]}


def test_tasks_that_need_different_models_are_refused() -> None:
    """Text and images, and two tasks of one name."""
    tasks = {kind: Task(name=kind.value, kind=kind) for kind in TaskKind}
    check_kinds([tasks[TaskKind.CLASSIFICATION], tasks[TaskKind.REGRESSION], tasks[TaskKind.CAUSAL_LM]])
    for other in (TaskKind.CAUSAL_LM, TaskKind.CLASSIFICATION):
        with pytest.raises(DataError, match="different models"):
            check_kinds([tasks[other], tasks[TaskKind.IMAGE_CLASSIFICATION]])
    with pytest.raises(DataError, match="two tasks are called 'regression'"):
        check_kinds([tasks[TaskKind.REGRESSION]] * 2)


def test_tasks_share_what_they_do_not_say() -> None:
    """Top-level data keys hold for every task, and its own keys win."""
    args = DataArguments(
        max_length=64, tasks=[{"name": "a", "train_file": "a.csv"}, {"train_file": "b.csv", "max_length": 32}]
    )
    (name, first), (unnamed, second) = args.each()
    assert (name, unnamed) == ("a", None)
    assert (first.train_file, first.max_length, first.tasks) == ("a.csv", 64, None)
    assert (second.train_file, second.max_length) == ("b.csv", 32)


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ([{"trian_file": "a.csv"}], "no key 'trian_file'; in tasks.0.; did you mean 'train_file'"),
        ([{"mixing": "temperature"}], "no key 'mixing'"),
        ([{"max_length": "long"}], "max_length='long'"),
        ([], "tasks="),
        ("cola", "tasks='cola'"),
    ],
)
def test_bad_tasks_are_one_line(tasks: Any, words: str) -> None:
    """Unknown keys with the nearest known one."""
    with pytest.raises(DataError, match=words) as error:
        DataArguments(tasks=tasks).each()
    assert "\n" not in str(error.value)
