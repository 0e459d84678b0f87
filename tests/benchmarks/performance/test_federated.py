"""The script on what a stand-in saves its client, with a model so small that only its workings show."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

from tunery.benchmarks.performance import federated, workloads
from tunery.benchmarks.performance.claims import Run


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four narrow layers stand in for twelve wide ones."""

    def model() -> torch.nn.Module:
        transformers.set_seed(0)
        width = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 128}
        return transformers.BertForSequenceClassification(transformers.BertConfig(**width))

    monkeypatch.setattr(federated, "bert_base", model)
    monkeypatch.setattr(workloads, "trainer", partial(workloads.trainer, use_cpu=True))


def test_step_and_operations_of_a_client(tmp_path: Path) -> None:
    """Both compare the sub-model with the whole one; a narrower block has fewer operations."""
    step = federated.client_step(Run(quick=True), str(tmp_path), 2, 8)
    assert (step.name, step.goal) == ("client step, 2 x 8", 0.65)
    assert step.value > 0
    operations = federated.client_operations(str(tmp_path), 2, 8)
    assert 0.5 < operations.value < 0.95
    assert federated.client_operations(str(tmp_path), 2, 8).value == operations.value


def test_construction_is_timed_three_times() -> None:
    """The longest counts."""
    claim = federated.construction()
    assert 0 < claim.value <= claim.goal == 5.0
    assert claim.detail.count(" s") == 3
