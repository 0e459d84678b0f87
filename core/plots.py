"""Pictures of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CURVE = "training_curve.png"


def plot_training_curve(history: Sequence[Mapping[str, Any]], path: Path, title: str, metric: str | None) -> None:
    """Draw training loss, evaluation loss and the main metric against the optimizer step.

    Args:
        history: the Trainer's ``state.log_history``.
        path: the PNG to write, under a temporary name first.
        title: what was trained.
        metric: main metric, without ``eval_``; ``None`` to draw losses only.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    losses = figure.add_subplot()
    drawn = []
    for key, label, colour, style in (
        ("loss", "training loss", "C0", "-"),
        ("eval_loss", "evaluation loss", "C3", "o-"),
    ):
        points = [(row["step"], row[key]) for row in history if key in row]
        if points:
            drawn += losses.plot(*zip(*points, strict=True), style, color=colour, label=label, markersize=4)
    losses.set(xlabel="optimizer step", ylabel="loss", title=title)
    losses.grid(alpha=0.3)
    points = [(row["step"], row[f"eval_{metric}"]) for row in history if f"eval_{metric}" in row]
    if metric and points:
        scores = losses.twinx()
        drawn += scores.plot(
            *zip(*points, strict=True), "s--", color="C2", label=metric.replace("_", " "), markersize=4
        )
        scores.set_ylabel(metric.replace("_", " "))
    if drawn:
        losses.legend(handles=drawn, loc="best", frameon=False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, dpi=150, format="png")
    temporary.replace(path)
