"""The script on what regularizers cost, with a model so small that only its workings show."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tunery.benchmarks.performance import regularizers, workloads
from tunery.benchmarks.performance.claims import Run
from tunery.benchmarks.performance.paired import MIB, Memory


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes and a one-layer BERT stand in for MiniLM."""
    monkeypatch.setattr(workloads, "minilm", workloads.tiny)
    monkeypatch.setattr(workloads, "minilm_rows", lambda length: workloads.byte_rows(min(length, 32)))
    monkeypatch.setattr(regularizers, "VARIANTS", regularizers.VARIANTS | {"lnsr": "lnsr:layer=0"})
    monkeypatch.setattr(regularizers, "EPOCHS", 1)
    options = partial(workloads.trainer, use_cpu=True)
    monkeypatch.setattr(workloads, "trainer", options)


@pytest.mark.slow
def test_a_claim_for_each_regularizer(tmp_path: Path) -> None:
    """Each has its ratio to the plain step, and the goal of its size."""
    for rows, goal in ((8, 1.0), (32, 0.9)):
        found = {claim.name: claim for claim in regularizers.steps(Run(quick=True), str(tmp_path), rows, 4 * rows)}
        size = f"{rows} x {4 * rows}"
        assert found.keys() == {
            *(f"{name}, step, {size}" for name in regularizers.GOALS),
            f"lnsr, what it adds over its layers, {size}",
        }
        assert found[f"mixout p=0.9, step, {size}"].goal == goal
        assert all(claim.value > 0 for claim in found.values() if claim.name.endswith(f"step, {size}"))


def test_upper_layers_run_forward_and_backward() -> None:
    """The upper half of the layers gets gradients, and is left without; it is called with the model's own mask of pads."""
    model = workloads.tiny()
    layer = model.bert.encoder.layer[0]
    rows = [
        {**row, "attention_mask": torch.arange(32) < 32 - 9 * i} for i, row in enumerate(workloads.byte_rows(32)[:2])
    ]
    masks: list[Any] = []
    layer.attention.self.register_forward_pre_hook(
        lambda _m, args, kwargs: masks.append(args[1] if len(args) > 1 else kwargs["attention_mask"]), with_kwargs=True
    )
    work = regularizers.upper_layers(model, rows)
    seen: list[torch.Tensor] = []
    layer.register_full_backward_hook(lambda _m, _i, output: seen.append(output[0].detach().clone()))
    work()
    assert [gradient.shape for gradient in seen] == [(2, 32, 32)]
    assert all(parameter.grad is None for parameter in layer.parameters())
    as_the_model, alone = masks
    assert torch.equal(alone, as_the_model)
    assert not alone.all()


def test_mixout_memory_is_in_copies_of_the_mixed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What training with MixOut holds beyond plain, over the matrices that it mixes: neither embeddings nor the head."""
    asked = []
    train, mebibytes = workloads.trainer, {("mixout:p=0.9",): 9, None: 5}

    def trainer(*args: object, **options: Any) -> Any:
        asked.append(None if options["regularizers"] is None else tuple(options["regularizers"]))
        return train(*args, **options)

    def measured(work: Callable[[], object], gaps: bool) -> Memory:
        assert not gaps
        work()
        return Memory(host=mebibytes[asked[-1]] * MIB, device=0)

    monkeypatch.setattr(workloads, "trainer", trainer)
    monkeypatch.setattr(regularizers, "peak_memory", measured)
    claim = regularizers.mixout_memory(str(tmp_path))
    mixed = [
        value.numel()
        for name, value in workloads.tiny().named_parameters()
        if value.dim() == 2 and "embedding" not in name and name != "classifier.weight"
    ]
    assert set(asked) == {("mixout:p=0.9",), None}
    assert claim.value == pytest.approx((9 - 5) * MIB / (4 * sum(mixed)))
    assert claim.goal == 1.0


def test_cached_features_count_all_seeds(tmp_path: Path) -> None:
    """The claim compares five seeds of each, of which quick measures one that runs the encoder every time."""
    claim = regularizers.cached_features(Run(quick=True), str(tmp_path))
    assert claim.value > 0
    assert claim.goal == 0.05
    assert "1 epochs x 5 seeds of 128 rows" in claim.detail
