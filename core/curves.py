"""What a probe found over many models: one table, one picture, and where a perturbed metric turns for the worse."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .inflection import Inflection, find_inflection, lower_is_better, sensitivity, short
from .points import Point, axis_of
from .probe_points import Measured

RESULTS = "results.json"
UNPERTURBED_TOO = "; so does the model as it is, which is not fragility"
_PLACES = ("gamma", "draw")  # what rows of a perturbation say: its strength, 0 for none, and which draw it was


@dataclass(frozen=True, kw_only=True)
class Perturbed:
    """A metric before and after perturbations, over points.

    Attributes:
        metric: its name.
        base: before, one value a point.
        draws: after, by strength gamma: shape (points, draws).
    """

    metric: str
    base: Sequence[float]
    draws: Mapping[float, np.ndarray[Any, Any]]


def perturbed(measured: Sequence[Measured]) -> Perturbed | None:
    """Collect a perturbation's rows, the main metric's where there are several; ``None`` for any other probe.

    Points with fewer draws than others set how many count.
    """
    rows = [[row for row in one.rows if all(key in row for key in _PLACES)] for one in measured]
    if not rows or not all(rows):
        return None
    names = [name for name in dict.fromkeys(row["name"] for row in rows[0]) if all(_has(name, other) for other in rows)]
    main = next((one.metric for one in measured if one.metric in names), "")
    metric = main or next((name for name in ("perplexity", "loss") if name in names), names[0] if names else "")
    if not metric:
        return None
    of_metric = [[row for row in point if row["name"] == metric] for point in rows]
    base = [next((row["value"] for row in point if not row["gamma"]), float("nan")) for point in of_metric]
    gammas = sorted({row["gamma"] for point in of_metric for row in point if row["gamma"]})
    draws = {}
    for gamma in gammas:
        values = [[row["value"] for row in point if row["gamma"] == gamma] for point in of_metric]
        count = min(map(len, values))
        if count:
            draws[gamma] = np.array([point[:count] for point in values], dtype=float)
    return Perturbed(metric=metric, base=base, draws=draws) if draws else None


def _has(name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    return any(row["name"] == name for row in rows)


def places(points: Sequence[Point]) -> tuple[list[float], str]:
    """Return where the points stand and in which unit: ``tokens``, ``steps`` or ``models``, counted from 1."""
    axis = axis_of(points)
    if axis is None:
        return [float(number) for number in range(1, len(points) + 1)], "models"
    return [float(getattr(point, axis)) for point in points], {"tokens": "tokens", "step": "steps"}[axis]


def inflections(curve: Perturbed, at: Sequence[float]) -> dict[float, Inflection]:
    """Return for each gamma where the perturbed metric turns; models at one place, say of other seeds, add draws to it."""
    unique = sorted(set(at))
    found = {}
    for gamma, values in curve.draws.items():
        joined = [np.concatenate([row for row, x in zip(values, at, strict=True) if x == place]) for place in unique]
        count = min(map(len, joined))
        found[gamma] = find_inflection(
            unique, np.stack([row[:count] for row in joined]), higher_is_better=not lower_is_better(curve.metric)
        )
    return found


def table(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return the table's rows: of a perturbation base, perturbed mean and sensitivity, else every overall value."""
    done = [one for one in measured if not one.error]
    curve = perturbed(done)
    at, unit = places([one.point for one in done]) if done else ([], "models")
    rows = []
    for number, one in enumerate(done):
        row: dict[str, Any] = {"model": one.point.label}
        if unit != "models":
            row[unit] = short(at[number])
        if curve:
            row[curve.metric] = float(curve.base[number])
            for gamma, values in curve.draws.items():
                mean, error = sensitivity(curve.base[number], values[number])
                row[f"at gamma {gamma:g}"] = float(values[number].mean())
                row[f"sensitivity at {gamma:g}"] = f"{mean:.4g} ± {error:.2g}" if np.isfinite(error) else f"{mean:.4g}"
        else:
            row |= overall(one)
        rows.append(row)
    return rows


def overall(one: Measured) -> dict[str, float]:
    """Return the values of a probe that belong to no layer, draw or other place."""
    known = {"model", "probe", "name", "value", "unit"}
    return {row["name"]: row["value"] for row in one.rows if not set(row) - known}


def sentences(measured: Sequence[Measured]) -> list[str]:
    """Return the inflection point for each gamma in words; nothing for other probes, fewer than two places, or no axis."""
    done = [one for one in measured if not one.error]
    curve = perturbed(done)
    if curve is None:
        return []
    at, unit = places([one.point for one in done])
    if unit == "models" or len(set(at)) < 2:
        return []
    said = []
    for gamma, found in inflections(curve, at).items():
        line = f"{curve.metric} at gamma {gamma:g}: {found.sentence(unit)} ({found.draws} draws)"
        said.append(line + (UNPERTURBED_TOO if base_degrades(found, at, curve.base, curve.metric) else ""))
    return said


def base_degrades(found: Inflection, at: Sequence[float], base: Sequence[float], metric: str) -> bool:
    """Whether the unmodified model is worse at the last point than where the modified one turns: then it is no fragility."""
    if found.at is None:
        return False
    turned, last = (
        np.mean([y for x, y in zip(at, base, strict=True) if x == place]) for place in (found.at, found.last)
    )
    return bool(last > turned if lower_is_better(metric) else last < turned)


def summary(measured: Sequence[Measured]) -> dict[str, Any]:
    """Return what ``results.json`` holds: the table, the inflection points, and what failed."""
    return {
        "table": table(measured),
        "inflection": sentences(measured),
        "failed": {one.point.label: one.error for one in measured if one.error},
    }


def draw(measured: Sequence[Measured], path: Path, title: str) -> bool:
    """Draw the values over the points into a PNG, under a temporary name first; nothing where there is nothing to draw."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    done = [one for one in measured if not one.error]
    if not done:
        return False
    at, unit = places([one.point for one in done])
    labels = names_for([one.point.label for one in done], unit)
    curve = perturbed(done)
    names = list(dict.fromkeys(name for one in done for name in overall(one)))
    if curve is None and not names:
        return False
    figure = Figure(figsize=(10.5, 4.2) if curve else (6.4, 1 + 2.8 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    if curve:
        _draw_perturbed(figure, curve, at, unit, labels)
    else:
        for number, name in enumerate(names):
            axes = figure.add_subplot(len(names), 1, number + 1)
            axes.plot(at, [overall(one).get(name, float("nan")) for one in done], marks_of(labels))
            axes.set(ylabel=name.replace("_", " "))
            mark_places(axes, unit, at, labels)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, dpi=150, format="png")
    temporary.replace(path)
    return True


def _draw_perturbed(figure: Any, curve: Perturbed, at: Sequence[float], unit: str, labels: Sequence[str]) -> None:
    """Draw the paper's figure 3: sensitivity on the left, the metric itself on the right, inflection points marked."""
    left, right = figure.subplots(1, 2)
    turned = inflections(curve, at) if len(set(at)) > 1 and not labels else {}
    marks = marks_of(labels)
    for number, (gamma, values) in enumerate(curve.draws.items()):
        colour = f"C{number}"
        mean, spread = values.mean(axis=1), values.std(axis=1)
        left.errorbar(at, mean - np.array(curve.base), yerr=spread, fmt=marks, color=colour, label=f"gamma {gamma:g}")
        right.errorbar(at, mean, yerr=spread, fmt=marks, color=colour)
        place = turned[gamma].at if gamma in turned else None
        if place is not None:
            right.axvline(place, color=colour, linestyle=":")
    right.plot(at, curve.base, "k_" if labels else "k--", markersize=16, label="not perturbed")
    name = curve.metric.replace("_", " ")
    left.set(ylabel=f"change of {name}")
    right.set(ylabel=name)
    for axes in (left, right):
        mark_places(axes, unit, at, labels)
        axes.legend(frameon=False, fontsize="small")


def names_for(labels: Sequence[str], unit: str) -> Sequence[str]:
    """Return what models in no order are called in a picture, in which they stand side by side; nothing on an axis."""
    return [label.rstrip("/").rpartition("/")[-1] for label in labels] if unit == "models" else ()


def marks_of(names: Sequence[str]) -> str:
    """Return how points are drawn: joined by a line, unless they are models in no order."""
    return "o" if names else "o-"


def mark_places(axes: Any, unit: str, at: Sequence[float], names: Sequence[str] = ()) -> None:
    """Label the axis by name, or at the points where these are few, and scale it by factors where they are far apart."""
    axes.grid(alpha=0.3)
    if names:
        axes.set_xticks(at, names, rotation=20, ha="right")
        axes.set_xlim(min(at) - 0.5, max(at) + 0.5)
        return
    axes.set(xlabel=unit)
    if min(at) > 0 and max(at) > 4 * min(at):
        axes.set_xscale("log")
    if len(set(at)) <= 10:
        axes.set_xticks(sorted(set(at)), [short(place) for place in sorted(set(at))])
        axes.minorticks_off()
