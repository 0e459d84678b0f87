"""Clipping and noise follow their formulas, on adapters and on statistics."""

from __future__ import annotations

import pytest
import torch

from tunery.core.federated.protection import Protection

BEFORE = {"a": torch.zeros(3), "b": torch.ones(2, 2)}
AFTER = {"a": torch.tensor([3.0, 0.0, 0.0]), "b": torch.tensor([[1.0, 5.0], [1.0, 1.0]])}  # a change of norm 5


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_off_is_off():
    """Without a clip norm, nothing changes."""
    kept = Protection().adapter(BEFORE, AFTER, seeded())
    assert all(torch.equal(kept[name], AFTER[name]) for name in AFTER)
    assert torch.equal(Protection(clip_norm=1.0).statistics(AFTER, seeded())["a"], AFTER["a"])


def test_nothing_told_is_nothing_to_clip():
    """A client without statistics sends none, whatever its clip norm."""
    assert Protection(statistics_clip_norm=1.0, noise_multiplier=1.0).statistics({}, seeded()) == {}


@pytest.mark.parametrize(("norm", "scale"), [(1.0, 0.2), (5.0, 1.0), (50.0, 1.0)])
def test_clipping_scales_the_change(norm: float, scale: float):
    """The change keeps its direction and gets at most the norm, over all tensors together."""
    kept = Protection(clip_norm=norm).adapter(BEFORE, AFTER, seeded())
    for name, trained in AFTER.items():
        assert kept[name].dtype == torch.float32
        torch.testing.assert_close(kept[name], BEFORE[name] + scale * (trained - BEFORE[name]))
    told = Protection(statistics_clip_norm=norm).statistics({"n": torch.tensor([3.0, 4.0]).double()}, seeded())
    torch.testing.assert_close(told["n"], scale * torch.tensor([3.0, 4.0]).double())


def test_noise_has_the_size_asked_for():
    """A standard deviation of noise_multiplier clip norms, on both; a change of nothing gets noise too."""
    same = {"a": torch.zeros(40_000)}
    protection = Protection(clip_norm=2.0, statistics_clip_norm=3.0, noise_multiplier=0.5)
    assert protection.adapter(same, same, seeded())["a"].std().item() == pytest.approx(1.0, rel=0.02)
    assert protection.statistics(same, seeded())["a"].std().item() == pytest.approx(1.5, rel=0.02)
    first, second = (protection.adapter(same, same, seeded(n))["a"] for n in (1, 2))
    assert not torch.equal(first, second)
