"""What models are evaluated on: a run's own data, and what is wrong with the keys that change them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tunery.core.point_data import Source
from tunery.core.points import Point
from tunery.registry.errors import DataError


@pytest.fixture
def run(tmp_path: Path) -> Point:
    """A folder that records data which are gone."""
    (tmp_path / "run").mkdir()
    recorded = {"seed": 1, "data": {"train_file": str(tmp_path / "gone.jsonl")}}
    (tmp_path / "run" / "result.json").write_text(json.dumps(recorded), encoding="utf-8")
    return Point(reference=str(tmp_path / "run"))


def test_data_that_are_gone_are_left_to_the_probe(run: Point):
    """One that needs none works without."""
    assert Source({}, 0).of(run) is None


def test_keys_that_were_given_are_not_dropped(run: Point):
    """Whoever says how long rows are wants to have them read."""
    with pytest.raises(DataError, match=r"gone\.jsonl"):
        Source({"max_length": 16}, 0).of(run)
    with pytest.raises(DataError, match="max_length=1"):
        Source({"max_length": 1}, 0).of(run)
