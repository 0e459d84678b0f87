"""The training curve: a picture whatever was logged, appearing whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tunery.core.plots import plot_training_curve

LOSSES = [{"step": step, "loss": 1 / step} for step in (1, 2, 3)]
EVALUATIONS = [{"step": step, "eval_loss": 2 / step, "eval_accuracy": step / 4} for step in (1, 3)]


def colours(path: Path) -> set[tuple[int, int, int]]:
    """Return the colours that fill more than a few pixels."""
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        counts = picture.convert("RGB").getcolors(maxcolors=2**24)
    return {colour for count, colour in counts if count > 30}


BLUE, RED, GREEN = (31, 119, 180), (214, 39, 40), (44, 160, 44)  # matplotlib's C0, C3, C2


@pytest.mark.parametrize(
    ("history", "metric", "drawn"),
    [
        (LOSSES + EVALUATIONS, "accuracy", {BLUE, RED, GREEN}),
        (LOSSES + EVALUATIONS, None, {BLUE, RED}),
        (LOSSES + EVALUATIONS, "no_such_metric", {BLUE, RED}),
        (LOSSES, "accuracy", {BLUE}),
        (EVALUATIONS, "accuracy", {RED, GREEN}),
        ([], "accuracy", set()),
        ([{"step": 1, "loss": float("nan")}, *LOSSES], "accuracy", {BLUE}),
    ],
)
def test_curve(history: list[Any], metric: str | None, drawn: set[Any], tmp_path: Path):
    """What was logged is drawn, each in its colour, and nothing else."""
    path = tmp_path / "curve.png"
    plot_training_curve(history, path, "a title", metric)
    assert colours(path) & {BLUE, RED, GREEN} == drawn
    assert list(tmp_path.iterdir()) == [path]


def test_curve_replaces_the_old_one(tmp_path: Path):
    """A second drawing takes the place of the first."""
    path = tmp_path / "curve.png"
    path.write_bytes(b"old")
    plot_training_curve(LOSSES, path, "a title", None)
    assert BLUE in colours(path)


def test_drawing_leaves_pyplot_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No window system is looked for and no figure stays open in the caller's pyplot."""
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    plot_training_curve(LOSSES, tmp_path / "curve.png", "a title", None)
    assert (tmp_path / "curve.png").is_file()
