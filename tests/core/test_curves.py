"""What a probe's rows over several models say."""

from __future__ import annotations

import pytest

from tunery.core.curves import sentences
from tunery.core.points import Point
from tunery.core.probe_points import Measured


def perturbed_at(**place: float) -> Measured:
    """Return a model's perplexities before and after two draws of noise."""
    point = Point(reference=f"m{place}", **place)
    rows = [{"name": "perplexity", "value": 5.0, "gamma": 0.0, "draw": 0}]
    rows += [{"name": "perplexity", "value": 6.0 + draw, "gamma": 0.1, "draw": draw} for draw in range(2)]
    return Measured(point=point, rows=rows)


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ([perturbed_at(tokens=1e9), perturbed_at(tokens=2e9)], 1),
        ([perturbed_at(tokens=1e9), perturbed_at(tokens=1e9, step=3)], 0),
        ([perturbed_at(), perturbed_at(step=1)], 0),
    ],
    ids=["in-order", "at-one-place", "in-no-order"],
)
def test_a_turn_takes_two_places(measured: list[Measured], said: int):
    """Models of other seeds at one place, and models in no order, have no point beyond which they degrade."""
    assert len(sentences(measured)) == said
