"""Figure 5: the mean of H heads nears the maximal margin faster; what of it is the heads' number and what their start."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import torch
from scipy.stats import linregress
from torch import Tensor

from ..report import Finding, Run
from . import heads
from .bounds import convergence_rate, corollary_3_1, corollary_3_1_rate, direction_constant
from .trials import RATE, weights_without

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADS = (1, 5, 10, 20, 50, 100)
DELTA = 0.05  # probability that Corollary 3.1 fails; it needs 26 heads then


def mean_direction(w_sDr: Tensor, count: int) -> Tensor:
    """Return the direction of the mean of the first ``count`` heads, shape (s, D)."""
    return heads.directions(w_sDr[..., :count].mean(-1))


def imbalance(w_sDr: Tensor, target_sD: Tensor) -> float:
    """Return xi of Corollary 3.1, mean over data sets: the longest head's part along the machine over the mean head's."""
    along = (w_sDr * target_sD[..., None]).sum(1)
    return float((along.abs().amax(1) / along.mean(1).abs()).mean())


def multi_head(run: Run) -> Finding:
    """Train 100 heads from independent starts, and one from zero; follow the mean of the first H."""
    generator = run.generator()
    sets, n, steps = run.count(50, 8), run.count(500, 100), run.count(1000, 200)
    z = heads.clusters(sets, n, generator)
    machines = [heads.machine(one) for one in z]
    target = heads.directions(torch.stack([machine.weights for machine in machines]))
    start, other = (heads.start(sets, HEADS[-1], generator) for _ in range(2))
    lacking = torch.randint(n, (sets, 1), generator=generator).expand(-1, HEADS[-1])
    without = [weights_without(z[s], machine, int(lacking[s, 0])) for s, machine in enumerate(machines)]
    times = sorted({round(steps ** (power / 15)) for power in range(16)})
    curves: dict[str, list[float]] = {label: [] for label in [*(f"H = {count}" for count in HEADS), "zero start"]}
    w, zero, before = start, torch.zeros_like(start[..., :1]), 0
    for t in times:
        w, zero = (heads.descend(z, one, t - before, RATE) for one in (w, zero))
        before = t
        for count in HEADS:
            curves[f"H = {count}"].append(_distance(mean_direction(w, count), target))
        curves["zero start"].append(_distance(mean_direction(zero, 1), target))
    same, fresh = (heads.descend(z, one, steps, RATE, lacking) for one in (start, other))
    literal = heads.descend(z, start, steps, RATE / HEADS[-1])
    rate = convergence_rate(steps)
    c = curves["H = 1"][-1] / rate
    of_both = c + _distance(mean_direction(same, 1), heads.directions(torch.stack(without))) / rate

    def bound(count: int, xi: float) -> float:
        """Return Corollary 3.1's mean over the data sets; C covers the way of both heads to their machines."""
        return statistics.fmean(
            corollary_3_1(
                n=n,
                heads=count,
                t=steps,
                c=of_both,
                xi=xi,
                delta=DELTA,
                nu=direction_constant(min(float(machine.weights.norm()), float(other.norm()))),
                regularization=machine.largest_regularization(n),
                bound=largest,
                margin=machine.margin,
            )
            for machine, other, largest in zip(machines, without, heads.sample_bound(z).tolist(), strict=True)
        )

    rows = []
    for count in HEADS:
        mean = mean_direction(w, count)
        enough = count > 2 + 8 * math.log(1 / DELTA)
        xi = imbalance(w[..., :count], target)
        rows.append(
            (
                count,
                curves[f"H = {count}"][-1],
                corollary_3_1_rate(heads=count, t=steps, c=c, xi=xi, delta=DELTA) if enough else None,
                _distance(mean, mean_direction(zero, 1)),
                _distance(mean, mean_direction(same, count)),
                _distance(mean, mean_direction(fresh, count)),
                bound(count, xi) if enough else None,
            )
        )
    floor = curves["zero start"][-1]
    spread = linregress([math.log(row[0]) for row in rows], [math.log(row[3]) for row in rows]).slope

    def draw(axes: Axes) -> None:
        for label, curve in curves.items():
            axes.plot(times, curve, "k--" if label == "zero start" else "-", label=label)
        axes.set(xlabel="step", ylabel="distance to the SVM's direction", xscale="log")

    first, last = rows[0], rows[-1]
    said = "Reproduces" if last[1] < first[1] else "Does not reproduce"
    below = min(row[1] for row in rows) < floor
    return Finding(
        name="figure_5",
        title=f"Figure 5: heads, each with the step of one; {sets} data sets of {n}, {steps} steps of {RATE}",
        columns=(
            "H",
            "distance to the SVM",
            f"Corollary 3.1's first term, delta = {DELTA}",
            "distance to the head started at zero",
            "stability, same start",
            "stability, fresh start",
            f"Corollary 3.1, delta = {DELTA}",
        ),
        rows=rows,
        verdict=f"{said}: {first[1]:.3f} with one head, {last[1]:.3f} with {HEADS[-1]}. What averaging removes is the "
        f"start: one head from zero has {floor:.3f}, the distance to it goes as H^{spread:.2f}, and "
        f"{'some' if below else 'no'} number of heads goes below it: Lemma A.4.1, by which the mean direction is the SVM's, "
        f"does not hold at finite t. From one head to {HEADS[-1]}, a fresh start matters {first[5]:.2g} -> {last[5]:.2g}, "
        f"a lost sample {first[4]:.2g} -> {last[4]:.2g}. Equation 10 with the step of one head, "
        f"which gives each 1 / H of it, has {_distance(mean_direction(literal, HEADS[-1]), target):.3f} with {HEADS[-1]}.",
        draw=draw,
    )


def _distance(u_sD: Tensor, v_sD: Tensor) -> float:
    return float((u_sD - v_sD).norm(dim=1).mean())
