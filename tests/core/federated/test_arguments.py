"""What a federated run cannot do is refused where it is asked for, and what it does anyway is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunery.core.federated.arguments import build_federated_options, read_federated_options
from tunery.registry.errors import RecipeError


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("do_predict", True, "do_predict=True has no place in a federation; .* validation split"),
        ("warmup_ratio", 0.1, "learning_rate_decay"),
        ("warmup_steps", 5, "learning_rate_decay"),
        ("logging_strategy", "epoch", "rounds.jsonl"),
        ("report_to", "tensorboard", "rounds.jsonl"),
        ("report_to", ["tensorboard"], "rounds.jsonl"),
        ("resume_from_checkpoint", "runs/one/rounds/round-00003", "names a place"),
        ("resume_from_checkpoint", "false", "names a place"),
    ],
)
def test_refused(key: str, value: Any, words: str, given: Callable[..., dict[str, Any]], tmp_path: Path):
    """In one line, from Python as from a recipe."""
    with pytest.raises(RecipeError, match=words) as caught:
        build_federated_options(given(tmp_path, **{key: value}))
    assert key in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("do_predict", False),
        ("warmup_steps", 0),
        ("logging_strategy", "no"),
        ("eval_strategy", "no"),
        ("lr_scheduler_type", "constant"),
        ("report_to", "none"),
        ("resume_from_checkpoint", "last"),
        ("resume_from_checkpoint", True),
        ("resume_from_checkpoint", False),
    ],
)
def test_what_rounds_do_anyway(key: str, value: Any, given: Callable[..., dict[str, Any]], tmp_path: Path):
    """A key that says what holds in every federation is taken."""
    build_federated_options(given(tmp_path, **{key: value}))


def test_flags_that_resume(given: Callable[..., dict[str, Any]], tmp_path: Path):
    """The bare flag goes on, and so does the word a server's job gives."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("".join(f"{key}: {value}\n" for key, value in given(tmp_path).items()), encoding="utf-8")
    for flags in (["--resume_from_checkpoint"], ["--resume_from_checkpoint", "last", "--report_to", "none"]):
        assert read_federated_options(recipe, flags).run.training.resume_from_checkpoint == "last"
