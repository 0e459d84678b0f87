"""Stratified sampling: every class in every micro-batch, every row once an epoch, the same on any number of ranks."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from tunery.core.arguments import TrainingArguments
from tunery.core.sampling import StratifiedSampler, asked_sampler, classes_of
from tunery.plugins.regularizers.mmr import MMR
from tunery.registry.conformance.models import LABELS
from tunery.registry.conformance.trials import Trial, tiny_process
from tunery.registry.errors import CompatibilityError


def windows(classes: list[int], order: list[int], window: int) -> list[Counter[int]]:
    whole = len(order) // window
    return [Counter(classes[row] for row in order[i * window : (i + 1) * window]) for i in range(whole)]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 12), st.integers(0, 5))
def test_every_row_once_and_classes_spread(classes: list[int], window: int, epoch: int) -> None:
    """A permutation; of two windows none has two rows of a class more than the other, leaving out what fills none."""
    sampler = StratifiedSampler(classes, window, seed=1)
    sampler.set_epoch(epoch)
    order = list(sampler)
    assert sorted(order) == list(range(len(classes))) and len(sampler) == len(classes)
    found = windows(classes, order, window)
    for name in set(classes):
        counts = [counter[name] for counter in found]
        assert not counts or max(counts) - min(counts) <= 1


def test_rare_rows_reach_every_window() -> None:
    """Ten rows among a hundred are one in each of ten micro-batches, which chance would not give."""
    classes = [1] * 10 + [0] * 90
    for epoch in range(5):
        sampler = StratifiedSampler(classes, 10, seed=0)
        sampler.set_epoch(epoch)
        assert all(counter[1] == 1 for counter in windows(classes, list(sampler), 10))
    assert sampler.rare_classes() == []
    assert StratifiedSampler(classes, 5, seed=0).rare_classes() == [1]


@pytest.mark.parametrize(("ones", "zeros", "window"), [(3, 7, 3), (10, 95, 10), (4, 10, 3), (5, 7, 5), (2, 9, 5)])
def test_rows_that_fill_no_window_cost_none_its_share(ones: int, zeros: int, window: int) -> None:
    """What is left over is what a class has too many of: 3 rows are in each of 3 windows, and the tenth is of the 7."""
    classes = [1] * ones + [0] * zeros
    last = set()
    for epoch in range(200):
        sampler = StratifiedSampler(classes, window, seed=0)
        sampler.set_epoch(epoch)
        order = list(sampler)
        found = windows(classes, order, window)
        for name, rows in ((1, ones), (0, zeros)):
            share = rows // len(found)
            assert all(share <= counter[name] <= share + 1 for counter in found)
        last.update(order[len(found) * window :])
    assert len(last) > len(classes) % window  # others with every epoch


def test_more_is_left_over_than_classes_have_too_many() -> None:
    """Then the most frequent class goes short by one row in a window, and a rare one keeps its place."""
    classes = [1] * 3 + [0] * 32
    for epoch in range(50):
        sampler = StratifiedSampler(classes, 10, seed=0)
        sampler.set_epoch(epoch)
        assert [counter[1] for counter in windows(classes, list(sampler), 10)] == [1, 1, 1]


@pytest.mark.parametrize("several", [False, True])
def test_no_second_order_of_rows(several: bool) -> None:
    """A sampling strategy of transformers beside an order that tunery makes is refused, not dropped."""
    rows: Any = type("Mixed", (), {"sampler": staticmethod(range)})() if several else [{"labels": 0}, {"labels": 1}]
    args = TrainingArguments(
        output_dir="unused", use_cpu=True, report_to="none", train_sampling_strategy="group_by_length"
    )
    regularizers = () if several else (MMR(MMR.Config(stratified=True)),)
    with pytest.raises(CompatibilityError, match=r"train_sampling_strategy='group_by_length' beside .*; leave"):
        asked_sampler(rows, regularizers, args, 2, logging.getLogger("tunery"))
    assert asked_sampler([{"labels": 0}], (), args, 2, logging.getLogger("tunery")) is None


def test_epochs_and_seeds_differ_and_come_back() -> None:
    """Each epoch of each seed has its order, always the same one."""

    def order(seed: int, epoch: int) -> tuple[int, ...]:
        sampler = StratifiedSampler([0, 1] * 20, 8, seed)
        sampler.set_epoch(epoch)
        return tuple(sampler)

    orders = {(seed, epoch): order(seed, epoch) for seed in range(3) for epoch in range(3)}
    assert len(set(orders.values())) == 9
    assert order(1, 2) == orders[1, 2]


@pytest.mark.parametrize("rows", [[{"labels": 1}, {"labels": 0}], Dataset.from_dict({"labels": [1, 0]})])
def test_classes_of(rows: Any) -> None:
    """Rows may be a list or a dataset."""
    assert classes_of(rows) == [1, 0]


@pytest.mark.parametrize("rows", [[{"input_ids": [1]}], [{"labels": [1, 0]}], iter([])])
def test_refuses_rows_without_a_class(rows: Any) -> None:
    """One line says so."""
    with pytest.raises(CompatibilityError, match="takes rows with one class in 'labels'") as caught:
        classes_of(rows)
    assert "\n" not in str(caught.value)


def test_mmr_sees_every_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the option every step of six epochs has every class, without it some have not; and the order changes."""
    seen: list[set[int]] = []
    penalty = MMR.penalty
    monkeypatch.setattr(
        MMR, "penalty", lambda self, batch: (seen.append(set(batch.inputs["labels"].tolist())), penalty(self, batch))[1]
    )
    found = {}
    for option in ("true", "false"):
        seen.clear()
        with tiny_process():
            Trial(strategy="full", regularizers=(f"mmr:stratified={option}",), steps=30, batch=8).trainer(
                tmp_path
            ).train()
        found[option] = [len(classes) for classes in seen]
    assert len(found["true"]) == 30
    assert set(found["true"]) == {LABELS}
    assert min(found["false"]) < LABELS


def test_says_which_class_is_too_rare(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """More micro-batches than rows of a class: the log names it, training goes on."""
    trial = Trial(strategy="full", regularizers=("mmr:stratified=true",), steps=1, batch=2)
    with tiny_process(), caplog.at_level(logging.WARNING, logger="tunery"):
        trial.trainer(tmp_path).train()
    assert "mmr: too few rows of class" in caplog.text


def test_two_ranks_take_the_same_rows() -> None:
    """Two ranks with micro-batches of 4 see the losses of one process with 8."""
    trial = Trial(strategy="full", regularizers=("mmr:stratified=true",), steps=12)
    assert trial.run("ddp").logged("loss") == pytest.approx(trial.run().logged("loss"), rel=1e-5)
