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


@pytest.mark.parametrize("name", counts.MODELS)
def test_ratio_falls_to_its_limit(name: str) -> None:
    """From 1 at k = 1, where one task shares with nobody, by 1/k of what A takes."""
    shapes, r = counts.MODELS[name]
    limit = counts.limit(shapes)
    for k in counts.KS:
        ratio = counts.stored(k, shapes, r) / counts.loras(k, shapes, r)
        assert ratio == pytest.approx(limit + (1 - limit) / k)
