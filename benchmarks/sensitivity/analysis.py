"""What the scores of a sensitivity study say: curves at fixed and at tuned learning rates, and which scenario it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import linregress

from ...core.curves import UNPERTURBED_TOO, base_degrades, places
from ...core.inflection import Inflection, find_inflection, short
from ...core.points import Point
from .cells import Scores
from .plan import BASE, PERPLEXITY, Cell

IN_DOMAIN, OUT_OF_DOMAIN = "in-domain perplexity", "out-of-domain perplexity"
_SCENARIOS = {
    (True, True): "scenario 1 of the paper (both degrade; expected with a constant optimal learning rate)",
    (False, True): "scenario 2 of the paper (only out-of-domain degrades; expected with a slowly decreasing one)",
    (False, False): "scenario 3 of the paper (neither degrades; expected with a quickly decreasing one)",
    (True, False): "none of the paper's scenarios (only in-domain degrades)",
}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Scores over checkpoints.

    Attributes:
        at: tokens, steps or numbers of the checkpoints.
        test: in-domain perplexity, shape (checkpoints, seeds).
        out_of_domain: the other one, same shape.
        distance: between the weights before and after, same shape.
        validation: in-domain perplexity that learning rates are tuned on, same shape.
        accuracy: in domain, same shape; ``nan`` where no classes are scored.
    """

    at: Sequence[float]
    test: np.ndarray[Any, Any]
    out_of_domain: np.ndarray[Any, Any]
    distance: np.ndarray[Any, Any]
    validation: np.ndarray[Any, Any]
    accuracy: np.ndarray[Any, Any]

    def values(self, metric: str) -> np.ndarray[Any, Any]:
        """Return one of the two perplexities."""
        return self.test if metric == IN_DOMAIN else self.out_of_domain

    def inflection(self, metric: str) -> Inflection:
        """Return where one of them turns for the worse."""
        return find_inflection(self.at, self.values(metric))


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Everything that is drawn and said.

    Attributes:
        unit: of the checkpoints' places; ``models`` for those in no order.
        labels: the checkpoints.
        base: in-domain and out-of-domain perplexity without fine-tuning, one value a checkpoint.
        fixed: by learning rate, over the checkpoints.
        tuned: at each checkpoint's best learning rate.
        optimal: those learning rates: least mean in-domain validation perplexity.
        accuracy: in domain without fine-tuning, one value a checkpoint; empty where no classes are scored.
        scored: the name of the perplexity in domain.
    """

    unit: str
    labels: Sequence[str]
    base: Mapping[str, Sequence[float]]
    fixed: Mapping[float, Curve]
    tuned: Curve
    optimal: Sequence[float]
    accuracy: Sequence[float]
    scored: str

    def title(self, metric: str) -> str:
        """Return what one of the two perplexities is called."""
        return f"in-domain {self.scored.replace('_', ' ')}" if metric == IN_DOMAIN else metric

    @property
    def turns(self) -> bool:
        """Whether there can be an inflection point: checkpoints at several places on an axis."""
        return self.unit != "models" and len(self.tuned.at) > 1

    def sensitivity(self, rate: float) -> np.ndarray[Any, Any]:
        """Return how much fine-tuning at ``rate`` raises out-of-domain perplexity, shape (checkpoints, seeds)."""
        before = np.asarray(self.base[OUT_OF_DOMAIN])[:, None]
        rise: np.ndarray[Any, Any] = self.fixed[rate].out_of_domain - before
        return rise

    def scenario(self) -> str:
        """Say which of the paper's three scenarios it is, by what degrades beyond noise, and how the optimum moves."""
        ends = [self.tuned.inflection(metric) for metric in (IN_DOMAIN, OUT_OF_DOMAIN)]
        if math.isnan(ends[0].p_value) or math.isnan(ends[1].p_value):
            return "no scenario can be told: it takes two checkpoints and two seeds"
        first, last = self.optimal[0], self.optimal[-1]
        moved = (
            f"stays {first:g}"
            if len(set(self.optimal)) == 1
            else f"goes from {first:g} to {last:g}, a factor of {last / first:.2g}"
        )
        edges = sum(rate in (min(self.fixed), max(self.fixed)) for rate in self.optimal)
        if edges:
            moved += f", for {edges} of {len(self.optimal)} checkpoints the least or largest that was tried: try more"
        return f"{_SCENARIOS[ends[0].at is not None, ends[1].at is not None]}; the optimal learning rate {moved}"

    def distance_law(self) -> str:
        """Say how the distance grows with the learning rate (figure 8: in proportion, whatever the checkpoint)."""
        rates = sorted(self.fixed)
        means = np.array([self.fixed[rate].distance.mean(axis=1) for rate in rates])  # (rates, checkpoints)
        if len(rates) < 2 or not (means > 0).all() or not np.isfinite(means).all():
            return "distance against learning rate: not enough learning rates"
        slopes = [float(linregress(np.log(rates), np.log(column)).slope) for column in means.T]
        spread = float((means.max(axis=1) / means.min(axis=1)).max())
        return (
            f"distance grows as learning rate to the {min(slopes):.2f} ... {max(slopes):.2f} (in proportion: 1); between "
            f"checkpoints it differs by a factor of at most {spread:.2f}"
        )

    def sentences(self) -> list[str]:
        """Return what is to be said, one finding a line; of models in no order, neither where they turn nor a scenario."""
        curves = {f"at learning rate {rate:g}": curve for rate, curve in self.fixed.items()}
        said = [
            f"{self.title(metric)} {which}: {self._turn(curve, metric)}"
            for which, curve in {**curves, "with the best learning rate": self.tuned}.items()
            for metric in (IN_DOMAIN, OUT_OF_DOMAIN)
        ]
        scenario = [] if self.unit == "models" else [self.scenario()]
        return [*(said if self.turns else ()), self.distance_law(), *scenario]

    def _turn(self, curve: Curve, metric: str) -> str:
        found = curve.inflection(metric)
        too = base_degrades(found, curve.at, self.base[metric], "perplexity")
        return found.sentence(self.unit) + (UNPERTURBED_TOO if too else "")

    def table(self) -> list[dict[str, Any]]:
        """Return a row a checkpoint: before, and at its best learning rate."""
        return [
            {
                "model": label,
                **({} if self.unit == "models" else {self.unit: short(self.tuned.at[number])}),
                "in-domain before": self.base[IN_DOMAIN][number],
                "out-of-domain before": self.base[OUT_OF_DOMAIN][number],
                "optimal learning rate": self.optimal[number],
                "in-domain tuned": float(self.tuned.test[number].mean()),
                "out-of-domain tuned": float(self.tuned.out_of_domain[number].mean()),
                "distance": float(self.tuned.distance[number].mean()),
                **self._accuracies(number),
            }
            for number, label in enumerate(self.labels)
        ]

    def _accuracies(self, number: int) -> dict[str, float]:
        if not self.accuracy:
            return {}
        return {"accuracy before": self.accuracy[number], "accuracy tuned": float(self.tuned.accuracy[number].mean())}


def analyse(scores: Mapping[Cell, Scores], points: Sequence[Point], scored: str = PERPLEXITY) -> Analysis | None:
    """Put scores together; checkpoints, learning rates and seeds that are not complete are left out.

    A checkpoint counts if it was scored without fine-tuning and has every learning rate of the one with most. Two
    checkpoints at one place cannot both count; the first does.

    Args:
        scores: of every cell that is done.
        points: the checkpoints, in order.
        scored: the name of the perplexity in domain.

    Returns:
        ``None`` where nothing is complete.
    """
    done = {(cell.point, cell.learning_rate, cell.seed): found for cell, found in scores.items()}
    runs: dict[Point, set[tuple[float, int]]] = {
        point: {(rate, seed) for other, rate, seed in done if other == point and rate != BASE} for point in points
    }
    most = max((len(found) for found in runs.values()), default=0)
    base = {cell.point: found for cell, found in scores.items() if cell.learning_rate == BASE}
    chosen = [point for point in points if point in base and len(runs[point]) == most > 0]
    if not chosen:
        return None
    at, unit = places(chosen)
    chosen = [point for number, point in enumerate(chosen) if at[number] not in at[:number]]
    at = sorted(set(at))
    both = set.intersection(*(runs[point] for point in chosen))
    rates = sorted({rate for rate, _ in both})
    seeds = [seed for seed in sorted({seed for _, seed in both}) if all((rate, seed) in both for rate in rates)]
    if not seeds:
        return None

    def curve(chosen_rates: Sequence[float]) -> Curve:
        cells = [[done[point, rate, seed] for seed in seeds] for point, rate in zip(chosen, chosen_rates, strict=True)]
        names = ("test", "out_of_domain", "distance", "validation", "accuracy")
        values = {name: np.array([[getattr(one, name) for one in row] for row in cells], dtype=float) for name in names}
        return Curve(at=at, **values)

    fixed = {rate: curve([rate] * len(chosen)) for rate in rates}
    tried = np.array([np.nan_to_num(fixed[rate].validation, nan=math.inf).mean(axis=1) for rate in rates])
    optimal = [rates[best] for best in tried.argmin(axis=0)]
    return Analysis(
        unit=unit,
        labels=[point.label for point in chosen],
        base={
            IN_DOMAIN: [base[point].test for point in chosen],
            OUT_OF_DOMAIN: [base[point].out_of_domain for point in chosen],
        },
        fixed=fixed,
        tuned=curve(optimal),
        optimal=optimal,
        accuracy=[found.accuracy for found in (base[point] for point in chosen) if found.accuracy is not None],
        scored=scored,
    )
