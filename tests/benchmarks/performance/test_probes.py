"""The script on what probes cost, with a model so small that only its workings show."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tunery.benchmarks.performance import probes, workloads
from tunery.benchmarks.performance.claims import Run
from tunery.benchmarks.performance.paired import Memory
from tunery.plugins.perturbation import gaussian_stds


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes and a one-layer BERT stand in for MiniLM."""
    monkeypatch.setattr(workloads, "minilm", workloads.tiny)
    monkeypatch.setattr(workloads, "minilm_rows", lambda length: workloads.byte_rows(32))
    monkeypatch.setattr(workloads, "trainer", partial(workloads.trainer, use_cpu=True))
    monkeypatch.setattr(probes, "QUICK_ROWS", 16)


def test_as_many_evaluations_as_the_probe_makes(tmp_path: Path) -> None:
    """Both sides of the claim evaluate equally often, and the probe leaves the weights."""
    trainer = probes.prepared(str(tmp_path), probes.GAUSSIAN, 16)
    plain, calls = trainer.evaluation_loop, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return plain(*args, **kwargs)

    trainer.evaluation_loop = counted
    probes.probe(trainer)
    assert calls == 3
    probes.evaluations(trainer)
    assert calls == 6


def test_what_is_counted_as_a_copy_is_what_gets_noise(tmp_path: Path) -> None:
    """The weights of the memory claim are those the probe disturbs."""
    trainer = probes.prepared(str(tmp_path), probes.GAUSSIAN, 8)
    noisy = gaussian_stds(trainer.subject(), "init", "gaussian")
    assert {name for name, _ in trainer.model.named_parameters() if probes.disturbed(name)} == noisy.keys()


def test_claim_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the probe needs beyond an evaluation, in copies of what gets noise; both sides run on their own."""
    trainer = probes.prepared(str(tmp_path), probes.GAUSSIAN, 8)
    copy = sum(p.numel() * 4 for name, p in trainer.model.named_parameters() if probes.disturbed(name))
    peaks = iter([Memory(host=5 * copy, device=2 * copy), Memory(host=4 * copy, device=copy)])
    measured: list[Any] = []

    def peak_memory(work: Any) -> Memory:
        work()
        measured.append(work.args[0])
        return next(peaks)

    monkeypatch.setattr(probes, "peak_memory", peak_memory)
    monkeypatch.setattr(probes, "calm", lambda: None)
    found = probes.gaussian_memory(str(tmp_path))
    assert measured == [probes.probe, probes.evaluations]
    assert (found.value, found.goal) == (2.0, 1.0)


def test_claims_of_time(tmp_path: Path) -> None:
    """Each compares the probe to the passes it needs."""
    torch.manual_seed(0)
    for claim, goal in ((probes.gaussian_time, 1.05), (probes.hessian_time, 1.1)):
        found = claim(Run(quick=True), str(tmp_path))
        assert found.value > 0
        assert found.goal == goal
