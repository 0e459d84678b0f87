"""How many numbers k tasks on one frozen A take."""

from __future__ import annotations

import pytest

from tunery.benchmarks.studies.partially_decomposable import counts


def test_the_papers_counts() -> None:
    """RoBERTa-base, query and value, r=8, k=8: 1,327,104 against 2,359,296, 56.25 %, towards a half."""
    shapes, r = counts.MODELS["RoBERTa-base, query and value, r=8"]
    assert counts.stored(8, shapes, r) == 1_327_104
    assert counts.loras(8, shapes, r) == 2_359_296
    assert counts.trained(8, shapes, r) == 1_179_648
    assert counts.limit(shapes) == 0.5


@pytest.mark.parametrize(
    ("name", "ours"), [("GPT-2 medium, query and value, r=4", 786_432), ("GPT-2 medium, c_attn, r=4", 983_040)]
)
def test_the_papers_counts_of_gpt2(name: str, ours: int) -> None:
    """GPT-2 medium, r=4, k=3: 1,179,648 of three LoRAs; of Multi-LoRA, where c_attn is cut into parts, two thirds."""
    shapes, r = counts.MODELS[name]
    assert counts.stored(3, shapes, r) == ours
    assert counts.loras(3, shapes, r) == 1_179_648


def test_which_factor_is_frozen_decides_the_limit() -> None:
    """d=3072 outputs, m=1024 inputs: B takes three quarters of a LoRA, A the fourth; what is said names both tables."""
    shapes, _ = counts.MODELS["GPT-2 medium, c_attn, r=4"]
    assert (counts.limit(shapes), counts.limit(shapes, "b")) == (0.75, 0.25)
    finding = counts.finding()
    row = next(row for row in finding.rows if row[:2] == ("GPT-2 medium, c_attn, r=4", 3))
    assert row[3:5] == (983_040, 1_179_648)
    assert row[6:] == (0.75, 0.25)
    for number in ("1,327,104", "2,359,296", "786,432", "983,040", "1,179,648"):
        assert number in finding.verdict


@pytest.mark.parametrize("name", counts.MODELS)
def test_ratio_falls_to_its_limit(name: str) -> None:
    """From 1 at k = 1, where one task shares with nobody, by 1/k of what A takes."""
    shapes, r = counts.MODELS[name]
    limit = counts.limit(shapes)
    for k in counts.KS:
        ratio = counts.stored(k, shapes, r) / counts.loras(k, shapes, r)
        assert ratio == pytest.approx(limit + (1 - limit) / k)
