"""The paper's figures 4, 5, 6 and 8 for a study of one's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.curves import mark_places, marks_of, names_for
from ...core.inflection import short
from .analysis import IN_DOMAIN, OUT_OF_DOMAIN, Analysis


def draw_all(analysis: Analysis, folder: Path, title: str) -> list[str]:
    """Draw every picture into ``folder``; return the file names."""
    drawn: dict[str, Callable[[Any, Analysis], None]] = {
        "fixed_learning_rate.png": _fixed,
        "sensitivity.png": _sensitivity,
        "tuned_learning_rate.png": _tuned,
        "distance.png": _distance,
    }
    for name, draw in drawn.items():
        _draw(analysis, folder / name, title, draw)
    return list(drawn)


def _draw(analysis: Analysis, path: Path, title: str, draw: Callable[[Any, Analysis], None]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    wide = draw in (_fixed, _tuned)
    figure = Figure(figsize=(13 if draw is _tuned else 10.5 if wide else 6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    draw(figure, analysis)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, dpi=150, format="png")
    temporary.replace(path)


def _fixed(figure: Any, analysis: Analysis) -> None:
    """Figure 5: both perplexities over checkpoints, a line a learning rate."""
    axes = figure.subplots(1, 2)
    marks = "k--" if analysis.turns else "k_"
    for metric, ax in zip((OUT_OF_DOMAIN, IN_DOMAIN), axes, strict=True):
        for number, (rate, curve) in enumerate(analysis.fixed.items()):
            _line(ax, analysis, curve.values(metric), f"{rate:g}", f"C{number}")
        ax.plot(analysis.tuned.at, analysis.base[metric], marks, markersize=16, label="not fine-tuned")
        _place(ax, analysis, analysis.title(metric))
    axes[0].legend(title="learning rate", frameon=False, fontsize="small")


def _sensitivity(figure: Any, analysis: Analysis) -> None:
    """Figure 4: by how much fine-tuning raises the out-of-domain perplexity."""
    ax = figure.add_subplot()
    for number, rate in enumerate(analysis.fixed):
        _line(ax, analysis, analysis.sensitivity(rate), f"{rate:g}", f"C{number}")
    _place(ax, analysis, f"rise of {OUT_OF_DOMAIN}", scale="symlog")
    ax.legend(title="learning rate", frameon=False, fontsize="small")


def _tuned(figure: Any, analysis: Analysis) -> None:
    """Figure 6, and the optimal learning rate beside it."""
    axes = figure.subplots(1, 3)
    for metric, ax in zip((OUT_OF_DOMAIN, IN_DOMAIN), axes, strict=False):
        _line(ax, analysis, analysis.tuned.values(metric), "learning rate tuned", "C0")
        found = analysis.tuned.inflection(metric).at if analysis.turns else None
        if found is not None:
            ax.axvline(found, color="C3", linestyle=":")
        _place(ax, analysis, analysis.title(metric), scale="linear")
    axes[2].plot(analysis.tuned.at, analysis.optimal, marks_of(_names(analysis)))
    _place(axes[2], analysis, "optimal learning rate")


def _distance(figure: Any, analysis: Analysis) -> None:
    """Figure 8: distance against learning rate, a line a checkpoint."""
    ax = figure.add_subplot()
    rates = list(analysis.fixed)
    labels = _names(analysis) or [f"{short(place)} {analysis.unit}" for place in analysis.tuned.at]
    for number, label in enumerate(labels):
        means = [analysis.fixed[rate].distance[number].mean() for rate in rates]
        ax.plot(rates, means, "o-", label=label)
    ax.set(xlabel="learning rate", ylabel="L2 distance to the weights before", xscale="log", yscale="log")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, fontsize="small")


def _names(analysis: Analysis) -> Sequence[str]:
    return names_for(analysis.labels, analysis.unit)


def _line(ax: Any, analysis: Analysis, values: np.ndarray[Any, Any], label: str, colour: str) -> None:
    style = {"fmt": marks_of(_names(analysis)), "color": colour, "markersize": 4}
    ax.errorbar(analysis.tuned.at, values.mean(axis=1), yerr=values.std(axis=1), label=label, **style)


def _place(ax: Any, analysis: Analysis, ylabel: str, scale: str = "log") -> None:
    ax.set(ylabel=ylabel, yscale=scale)
    mark_places(ax, analysis.unit, analysis.tuned.at, _names(analysis))
