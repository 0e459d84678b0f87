"""The statistics against closed forms, published tables and exact enumeration; never against scipy's same call."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from tunery.benchmarks.statistics import (
    bootstrap_interval,
    compare,
    detectable_difference,
    holm,
    sd_interval,
    standard_deviation,
    summarize,
    t_interval,
    variance_p,
    wilcoxon_p,
    worse_p,
)
from tunery.benchmarks.studies.coverage import findings
from tunery.benchmarks.studies.report import main

# Tables 2-5 of "A stability analysis of fine-tuning a pre-trained model": mean and sd by task, last the printed average.
TABLES = """
59.21±2.32 88.84±0.97 76.21±2.04 79.11±2.77 54.33±5.48 39.67±8.13 93.04±0.48 54.65±3.44 78.70±1.10 44.22±0.85 68.07±1.19 66.91±2.61
59.85±1.94 89.42±0.66 75.63±1.52 78.57±3.29 51.92±6.88 39.67±8.13 93.13±0.42 54.75±2.45 78.54±0.78 44.81±0.82 68.67±1.12 66.82±2.55
60.69±1.65 89.21±0.65 74.26±0.97 80.71±2.74 52.79±4.68 39.61±8.07 93.31±0.38 55.62±1.47 78.36±0.57 41.66±1.06 68.68±1.34 66.81±2.14
59.64±2.37 88.43±0.78 77.11±0.93 79.64±2.79 61.35±4.75 40.17±7.03 93.13±0.42 55.92±1.27 79.59±0.53 43.77±1.24 67.51±0.96 67.84±2.10
60.96±1.75 89.58±0.59 75.59±0.55 80.00±3.81 54.13±3.57 38.83±7.26 93.18±0.31 54.79±2.31 76.96±1.23 44.73±0.66 67.74±0.37 66.95±2.04
60.64±1.46 89.35±0.91 76.03±1.00 78.21±1.56 52.88±2.47 40.42±9.12 93.18±0.36 53.80±4.22 78.86±0.81 43.38±0.62 68.09±1.30 66.80±2.17
40.03±1.69 77.77±0.73 56.72±1.16 75.52±6.31 58.75±3.86 61.76±2.75
39.64±2.09 77.09±0.65 56.28±1.19 76.43±5.58 58.75±3.86 61.64±2.67
39.43±1.92 77.48±0.35 57.44±0.92 76.96±6.05 58.85±3.43 62.03±2.53
39.91±0.67 77.42±1.09 56.41±0.90 78.75±5.50 63.46±1.14 63.19±1.86
39.11±2.08 77.63±0.56 56.68±0.75 78.57±6.13 61.63±1.90 62.73±2.28
39.25±1.12 77.44±0.55 55.11±1.74 78.75±5.67 62.21±2.55 62.55±2.33
60.17±1.84 88.61±1.01 75.02±1.56 83.04±3.93 57.88±5.42 72.94±2.75
60.24±1.51 88.59±0.84 74.91±1.79 83.75±2.93 58.75±5.43 73.25±2.50
60.11±1.26 88.88±0.84 72.27±2.31 84.46±3.20 55.29±4.81 72.20±2.48
60.35±1.20 88.41±0.85 74.77±1.22 85.00±3.01 61.92±4.30 74.09±2.12
60.84±1.39 89.66±0.89 71.05±1.25 85.54±3.43 56.73±4.26 72.76±2.24
60.04±1.68 88.67±0.70 75.16±1.29 86.79±2.42 54.13±5.47 72.96±2.31
64.63±2.19 90.41±0.84 83.42±2.05 84.95±5.13 67.60±3.25 78.20±2.69
65.19±1.87 90.48±0.88 84.04±2.33 85.54±4.48 66.35±2.43 78.32±2.40
64.80±1.07 90.57±0.71 82.95±1.07 84.13±4.79 66.06±3.77 77.70±2.28
65.48±1.24 90.44±0.45 84.26±0.97 86.61±4.87 64.33±2.90 78.22±2.09
63.45±1.75 90.54±0.56 84.51±1.49 85.36±4.06 68.17±2.49 78.41±2.07
60.75±1.04 90.09±0.70 84.30±1.57 87.76±5.18 68.94±4.10 78.37±2.52
""".strip().splitlines()

# Darwin's maize, Fisher, The Design of Experiments: crossed minus self-fertilized height in eighths of an inch.
DARWIN = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]


@pytest.mark.parametrize("row", TABLES)
def test_averages_of_the_papers_tables(row: str):
    """The mean over tasks of means and of standard deviations is what the paper prints, within 0.01, 24 times."""
    *tasks, average = ([float(part) for part in cell.split("±")] for cell in row.split())
    for place in (0, 1):
        ours = summarize([task[place] for task in tasks]).mean
        assert ours == pytest.approx(average[place], abs=0.01)


def test_twenty_four_rows():
    assert len(TABLES) == 24


def test_summary_by_hand():
    """Mean, sample standard deviation, median, worst seed and share of failed runs of four scores and a crash."""
    summary = summarize([0.2, 0.4, 0.4, 0.6], failed=2, runs=5)
    assert summary.mean == pytest.approx(0.4)
    assert summary.sd == pytest.approx(math.sqrt(0.08 / 3))  # ddof = 1
    assert (summary.median, summary.worst, summary.failed) == (0.4, 0.2, 0.4)
    assert summarize([0.2, 0.6], higher=False).worst == 0.6


def test_students_interval_by_table():
    """t(0.975, 4) is 2.776 in any table; the interval is symmetric about the mean."""
    interval = t_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert interval is not None
    assert interval.high - 3 == pytest.approx(2.776445 * math.sqrt(2.5) / math.sqrt(5), rel=1e-6)
    assert interval.low + interval.high == pytest.approx(6)


def test_interval_of_a_spread_by_table():
    """Five values: printed quantiles of chi-square at four degrees of freedom. None of two, nor of equal ones."""
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    interval = sd_interval(values)
    assert interval is not None
    bounds = [math.sqrt(10 / 11.1433), math.sqrt(10 / 0.484419)]  # 10: the sum of squares
    assert (interval.low, interval.high) == pytest.approx(bounds, rel=1e-5)
    assert sd_interval(values[:2]) is sd_interval([0.5] * 5) is None


def test_darwins_maize():
    """Fisher computed t = 2.148 with 14 degrees of freedom, just past the 2.145 of the 5 % level."""
    found = compare(DARWIN, [0] * 15)
    assert found.difference == pytest.approx(20.93, abs=0.005)
    assert found.p == pytest.approx(0.0497, abs=5e-5)
    assert found.interval is not None
    assert found.interval.low == pytest.approx(20.933 - 2.14479 * 37.744 / math.sqrt(15), abs=0.01)
    assert found.sd == pytest.approx(37.74, abs=0.005)


@pytest.mark.parametrize("values", [[1, 2, 3, 4, 5], [-1, 2, 3, -4, 5.5], DARWIN[:8], [0, 0, 2, 3, 1]])
def test_wilcoxon_by_enumeration(values: list[float]):
    """The p is the share of all sign patterns at least as extreme; zeros are left out."""
    kept = [value for value in values if value]
    order = sorted(abs(value) for value in kept)
    ranks = [order.index(abs(value)) + 1 for value in kept]
    middle = sum(ranks) / 2
    observed = abs(sum(r for r, v in zip(ranks, kept, strict=True) if v > 0) - middle)
    patterns = itertools.product((0, 1), repeat=len(kept))
    extreme = [abs(sum(itertools.compress(ranks, signs)) - middle) >= observed - 1e-9 for signs in patterns]
    assert wilcoxon_p(values) == pytest.approx(sum(extreme) / len(extreme))


def test_wilcoxon_cannot_convince_with_five_seeds():
    assert compare([5, 6, 7, 8, 99], [0, 0, 0, 0, 0]).wilcoxon == 0.0625
    assert wilcoxon_p([0, 0, 0]) == 1


@pytest.mark.parametrize(
    ("p_values", "expected"),
    [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),  # the textbook example
        ([0.5, 0.9], [1.0, 1.0]),
        ([0.01, None, 0.02], [0.02, None, 0.02]),
        ([], []),
    ],
)
def test_holm(p_values: list[float | None], expected: list[float | None]):
    """Smallest times how many there are, next times one fewer, never falling."""
    assert holm(p_values) == [None if p is None else pytest.approx(p) for p in expected]


def test_brown_forsythe_is_anova_of_distances_to_the_median():
    """Two groups: the squared t of the absolute distances, whose p with 8 degrees of freedom is in the table."""
    ours, theirs = [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 4.0, 9.0, 16.0, 25.0]
    a, b = np.abs(np.array(ours) - 3), np.abs(np.array(theirs) - 9)
    pooled = (a.var(ddof=1) + b.var(ddof=1)) / 2
    t = (b.mean() - a.mean()) / math.sqrt(pooled * 2 / 5)
    x = 8 / (8 + t * t)  # P(|T| > t) with 8 degrees of freedom, in closed form
    root = math.sqrt(1 - x)
    inside = root * (1 + x / 2 + 3 * x**2 / 8 + 5 * x**3 / 16)
    assert variance_p(ours, theirs) == pytest.approx(1 - inside, abs=1e-9)
    assert variance_p(ours, ours) == pytest.approx(1)
    assert variance_p([1, 1, 1], [2, 2, 2]) == 1
    assert variance_p([1, 2], [1, 2, 3]) is None


def test_detectable_difference_of_the_power_tables():
    """Cohen's d = 0.5 takes 34 pairs at alpha = 0.05 and power 0.8, d = 0.8 takes 15, d = 0.2 takes 199."""
    for effect, pairs in ((0.5, 34), (0.8, 15), (0.2, 199)):
        assert detectable_difference(1.0, pairs) < effect < detectable_difference(1.0, pairs - 1)
    assert detectable_difference(2.0, 10) == pytest.approx(2 * detectable_difference(1.0, 10))


def test_worse_is_one_sided():
    """Half the two-sided p when the difference is negative, the rest of 1 when it is positive."""
    drop = [-3.0, -1.0, -2.0, -4.0]
    two_sided = compare(drop, [0.0] * 4).p
    assert two_sided is not None
    assert worse_p(drop) == pytest.approx(two_sided / 2)
    assert worse_p([-value for value in drop]) == pytest.approx(1 - two_sided / 2)
    assert worse_p([-1.0, -2.0]) is None
    assert worse_p([-1.0, -1.0, -1.0]) is None


def test_lower_is_better_turns_the_sign():
    """Of a loss, a drop is a gain."""
    assert compare([1.0, 1.5, 1.0], [2.0, 2.0, 2.0], higher=False).difference == pytest.approx(5 / 6)


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_seeds_claim_nothing(count: int):
    """One or two seeds give a mean and no interval, test or promise."""
    found = compare([0.5, 0.7][:count], [0.4, 0.5][:count])
    assert (found.interval, found.p, found.wilcoxon, found.detectable) == (None, None, None, None)
    summary = summarize([0.5, 0.7][:count])
    assert (summary.interval, summary.bootstrap) == (None, None)
    assert standard_deviation([0.5]) is None


def test_equal_seeds():
    """Runs without any spread have an interval of no width; a t test would divide by zero, so Wilcoxon's p stands in."""
    summary = summarize([0.1 + 0.2, 0.3, 0.3])
    assert summary.sd == 0
    assert summary.bootstrap is not None
    assert summary.bootstrap.low == summary.bootstrap.high == pytest.approx(0.3)
    found = compare([0.5, 0.6, 0.7, 0.8, 0.9], [0.4, 0.5, 0.6, 0.7, 0.8])
    assert (found.sd, found.p, found.detectable) == (0, 0.0625, None)
    assert compare([0.5] * 3, [0.5] * 3).p == 1


def test_bootstrap_of_many_values_is_the_normal_interval():
    """With 400 values both intervals agree within a twentieth of their width; the same call gives the same bits."""
    values = np.random.default_rng(0).normal(size=400)
    ours, student = bootstrap_interval(values), t_interval(values)
    assert ours is not None
    assert student is not None
    width = student.high - student.low
    assert abs(ours.low - student.low) < width / 20
    assert abs(ours.high - student.high) < width / 20
    assert bootstrap_interval(values) == ours


def test_coverage_study(tmp_path: Path):
    """Student's interval keeps its promise on normal scores at any number of seeds, the bootstrap's does not at five."""
    assert main(findings, "coverage", "", ["--quick", "--output_dir", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "results.json").read_text())["findings"]
    normal = {row["seeds"]: row for row in result["coverage"]["rows"] if row["scores"] == "normal"}
    for row in normal.values():  # 100 samples: three standard errors are 6.5 points
        assert abs(row["Student's t"] - 0.95) < 0.066
    assert normal[5]["BCa bootstrap"] < 0.9
    for row in result["tests"]["rows"]:
        assert row["t, no difference"] < 0.12
        assert abs(row["t, detectable difference"] - 0.8) < 0.12
