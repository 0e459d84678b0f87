"""How often the inflection point is found where there is one, and where there is none.

Series of a perturbed metric over six points are simulated: flat (noise alone), falling all the way (more pre-training always
helps), and falling then rising, with the turn planted at the third point. Draws share part of their noise over points, as
draws of one noise on several checkpoints do. A false alarm is an inflection point reported where none was planted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

from ...core.inflection import find_inflection
from .report import Finding, Run, main

POINTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
CURVES = {
    "noise alone": (0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    "monotone": (5.0, 4.0, 3.2, 2.6, 2.2, 2.0),
    "planted at 4": (5.0, 3.5, 2.5, 3.0, 3.8, 5.0),
}
DRAWS = (3, 5, 10)
NOISE = 0.5


def simulate(curve: str, draws: int, series: int, seed: int, noise: float = NOISE) -> list[tuple[float | None, bool]]:
    """Return for each simulated series where it was found to turn, and whether the interval holds the planted point.

    Args:
        curve: one of :data:`CURVES`.
        draws: values at each point.
        series: how many.
        seed: of the noise.
        noise: standard deviation of the part a point has to itself; the part that a draw has everywhere is as large.
    """
    random = np.random.default_rng(seed)
    found = []
    for _ in range(series):
        shared = noise * random.standard_normal((1, draws))
        values = np.array(CURVES[curve])[:, None] + shared + noise * random.standard_normal((len(POINTS), draws))
        one = find_inflection(POINTS, values, resamples=500)
        covers = one.low is not None and one.high is not None and one.low <= 4.0 <= one.high
        found.append((one.at, covers))
    return found


def findings(run: Run) -> Iterator[Finding]:
    """Simulate everything."""
    series, rows = run.count(1000, 100), []
    for curve in CURVES:
        for draws in DRAWS:
            found = simulate(curve, draws, series, run.seed)
            reported = [covers for at, covers in found if at is not None]
            planted = curve.startswith("planted")
            rows.append(
                (
                    curve,
                    draws,
                    len(reported) / series,
                    sum(at == 4.0 for at, _ in found) / series if planted else None,
                    sum(reported) / len(reported) if planted and reported else None,
                )
            )
    alarms = max(row[2] for row in rows if row[0] == "noise alone")
    yield Finding(
        name="inflection",
        title=f"Inflection points in {series} simulated series a row, significance level 5 %",
        columns=("series", "draws", "found", "found where planted", "interval holds it, if found"),
        rows=rows,
        verdict=f"False alarms on noise alone: at most {alarms:.1%} of {series} series; on monotone ones "
        f"{max(row[2] for row in rows if row[0] == 'monotone'):.1%}.",
    )


if __name__ == "__main__":
    sys.exit(main(findings, "inflection", __doc__, None))
