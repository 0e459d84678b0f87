"""The picture of a federation: loss and main metric against the round."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CURVE = "rounds.png"


def plot_rounds(rows: Sequence[Mapping[str, Any]], path: Path, title: str, metric: str) -> None:
    """Draw the clients' mean training loss and the server's main metric, and mark the rounds that end with an alignment.

    Args:
        rows: those of ``rounds.jsonl``.
        path: the PNG to write, under a temporary name first.
        title: what was trained.
        metric: the main metric.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    losses = figure.add_subplot()
    numbers = [row["round"] for row in rows]
    drawn = losses.plot(numbers, [row["loss"] for row in rows], color="C0", label="clients' training loss")
    losses.set(xlabel="round", ylabel="loss", title=title)
    losses.grid(alpha=0.3)
    scores = losses.twinx()
    points = [(row["round"], row["metrics"][metric]) for row in rows if metric in row.get("metrics", ())]
    if points:
        drawn += scores.plot(
            *zip(*points, strict=True), "s--", color="C2", label=metric.replace("_", " "), markersize=4
        )
        scores.set_ylabel(metric.replace("_", " "))
    for row in rows:
        if "aligned" in row:
            losses.axvline(row["round"], color="0.7", linewidth=0.8, zorder=0)
    losses.legend(handles=drawn, loc="best", frameon=False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, dpi=150, format="png")
    temporary.replace(path)
