"""The picture of a federation: loss, main metric and what probes measured against the round."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .probes import overall

CURVE = "rounds.png"


def plot_rounds(
    rows: Sequence[Mapping[str, Any]],
    path: Path,
    title: str,
    metric: str,
    measured: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Draw the clients' mean training loss and the server's main metric, and mark the rounds that end with an alignment.

    Each probe has a panel of its own below, with its overall values: at an alignment one before it and one after it.

    Args:
        rows: those of ``rounds.jsonl``.
        path: the PNG to write, under a temporary name first.
        title: what was trained.
        metric: the main metric.
        measured: what :func:`~.probes.course` returns.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = overall(measured)
    probes = list(dict.fromkeys(row["probe"] for row in shown))
    figure = Figure(figsize=(7.5, 4.2 + 2.4 * len(probes)), layout="constrained")
    FigureCanvasAgg(figure)
    losses, *panels = figure.subplots(
        1 + len(probes), sharex=True, squeeze=False, height_ratios=[4.2] + [2.4] * len(probes)
    )[:, 0]
    numbers = [row["round"] for row in rows]
    drawn = losses.plot(numbers, [row["loss"] for row in rows], color="C0", label="clients' training loss")
    losses.set(ylabel="loss", title=title)
    (panels[-1] if panels else losses).set_xlabel("round")
    losses.grid(alpha=0.3)
    scores = losses.twinx()
    points = [(row["round"], row["metrics"][metric]) for row in rows if metric in row.get("metrics", ())]
    if points:
        drawn += scores.plot(
            *zip(*points, strict=True), "s--", color="C2", label=metric.replace("_", " "), markersize=4
        )
        scores.set_ylabel(metric.replace("_", " "))
    for probe, panel in zip(probes, panels, strict=True):
        _plot_probe(panel, probe, [row for row in shown if row["probe"] == probe])
    for row in rows:
        if "aligned" in row:
            for panel in (losses, *panels):
                panel.axvline(row["round"], color="0.7", linewidth=0.8, zorder=0)
    losses.legend(handles=drawn, loc="best", frameon=False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, dpi=150, format="png")
    temporary.replace(path)


def _plot_probe(panel: Any, probe: str, measured: Sequence[Mapping[str, Any]]) -> None:
    """Draw the values of one probe, on a logarithmic scale where they are all positive."""
    for name in dict.fromkeys(row["name"] for row in measured):
        points = [(row["round"], row["value"]) for row in measured if row["name"] == name]
        panel.plot(*zip(*points, strict=True), "o-", label=name.replace("_", " "), markersize=3)
    if all(row["value"] > 0 for row in measured):
        panel.set_yscale("log")
    panel.set(ylabel=probe)
    panel.grid(alpha=0.3)
    panel.legend(loc="best", frameon=False, fontsize="small")
