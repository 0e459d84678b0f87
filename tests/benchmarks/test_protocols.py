"""Protocols: what each piece stands for, and how pieces go together."""

from __future__ import annotations

from typing import Any

import pytest

from tunery.benchmarks.protocols import read_protocol
from tunery.core.options import build_options
from tunery.registry.errors import RecipeError


def test_the_papers_protocol(tmp_path):
    """90/10, the published validation split scored, patience 20: keys that a run takes."""
    protocol = read_protocol(["dev_as_test", "early_stopping(20, accuracy)"])
    assert protocol.scored_on == "test"
    keys = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": str(tmp_path), "use_cpu": True}
    options = build_options({**protocol.keys, **keys})
    assert (options.data.test_split, options.data.validation_fraction) == ("validation", 0.1)
    assert options.run.early_stopping_patience == 20
    assert options.training.do_predict
    assert options.training.load_best_model_at_end
    assert options.training.metric_for_best_model == "accuracy"
    assert options.training.greater_is_better


def test_later_pieces_win():
    protocol = read_protocol(["leave_out(0.1)", "official_split(test)", "leave_out(0.2)", "official_split"])
    assert protocol.keys["leave_out"] == 0.2
    assert (protocol.scored_on, protocol.keys["do_predict"]) == ("validation", False)


def test_learning_rates_are_numbers():
    """YAML takes 1e-5 for text; a grid is of floats all the same."""
    assert read_protocol(["learning_rate_search(1e-5, 2e-5, 0.1)"]).learning_rates == (1e-5, 2e-5, 0.1)


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        ("dev_as_tset", "no protocol 'dev_as_tset'.*did you mean 'dev_as_test'"),
        ("early_stopping", "cannot read protocol 'early_stopping'"),
        ("dev_as_test(0.1, 0.2)", "cannot read protocol"),
        ("official_split(train)", "known: validation, test"),
        ("learning_rate_search(1e-5)", "without a choice"),
        ("learning_rate_search(low, high)", "cannot read protocol .*could not convert string to float"),
        ("leave_out(2000-99-99)", "cannot read protocol .*month must be"),
        ("", "no protocol ''"),
        (5, "no protocol 5"),
    ],
)
def test_refused(piece: Any, message: str):
    with pytest.raises(RecipeError, match=message):
        read_protocol([piece])
