"""The study as a user runs it."""

from __future__ import annotations

import json

import pytest

from tunery.benchmarks.studies.head_tuning.findings import findings
from tunery.benchmarks.studies.report import main

FIGURES = [f"figure_{number}" for number in range(5, 10)]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Return the numbers of a quick run."""
    out = tmp_path_factory.mktemp("study")
    assert main(findings, "head_tuning", "", ["--quick", "--output_dir", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"results.json", *(f"{name}.png" for name in FIGURES)}
    return json.loads((out / "results.json").read_text())["findings"]


@pytest.mark.parametrize("name", ["figure_5", "figure_6", "figure_7", "figure_8"])
def test_the_papers_trends_come_back(result, name):
    """More heads, more samples, a larger margin, a nearer start."""
    assert result[name]["verdict"].startswith("Reproduces")


def test_stability_falls_as_one_over_n(result):
    """A lost sample is 1 / n of the data, and no less a part of the head."""
    products = [row["n x stability"] for row in result["figure_6"]["rows"]]
    assert max(products) < 1.6 * min(products)


def test_heads_average_their_start_away_and_nothing_else(result):
    """The distance to the head from zero falls about as H^-1/2; one lost sample matters no less with more heads."""
    rows = {row["H"]: row for row in result["figure_5"]["rows"]}
    to_zero = "distance to the head started at zero"
    assert rows[1][to_zero] / rows[100][to_zero] == pytest.approx(10, rel=0.35)
    assert rows[100]["stability, fresh start"] < 0.3 * rows[1]["stability, fresh start"]
    assert rows[100]["stability, same start"] > 0.5 * rows[1]["stability, same start"]
    bound, first_term = "Corollary 3.1, delta = 0.05", "Corollary 3.1's first term, delta = 0.05"
    assert rows[20][bound] is rows[20][first_term] is None
    for row in (rows[50], rows[100]):
        assert row["distance to the SVM"] <= row[first_term] < row[bound]
        assert max(row["stability, same start"], row["stability, fresh start"]) <= row[bound]


def test_why_the_bound_grows_matters(result):
    """Figure 9 comes back when noise makes samples longer, and not when features are only rescaled."""
    means: dict[str, list[float]] = {}
    for row in result["figure_9"]["rows"]:
        means.setdefault(row["why B grows"], []).append(row["stability"])
    assert means["noise grows"][-1] > 2 * means["noise grows"][0]
    assert means["features rescaled"][-1] < 1.5 * means["features rescaled"][0]


@pytest.mark.parametrize("name", FIGURES[1:])
def test_bounds_hold_and_steps_are_small_enough(result, name):
    """What the theorems grant is above what is measured, in every row."""
    for row in result[name]["rows"]:
        assert row["stability"] <= min(row["Theorem 2.4"], row["Corollary 2.5"])
        assert row["step / limit"] < 1


def test_theorem_2_2_needs_its_first_step(result):
    """As printed it fails close to mu = beta; corrected it holds everywhere."""
    rows = result["theorem_2_2"]["rows"]
    assert {row["mu / beta"] for row in rows if not row["holds"]} == {0.99}
    assert all(row["corrected holds"] for row in rows)
