"""The study as a user runs it."""

from __future__ import annotations

import json

import pytest

from tunery.benchmarks.studies.partially_decomposable.findings import findings
from tunery.benchmarks.studies.report import main


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Return the numbers of a quick run."""
    out = tmp_path_factory.mktemp("study")
    assert main(findings, "partially_decomposable", "", ["--quick", "--output_dir", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"results.json", "counterexample.png", "counts.png", "table_3.png"}
    return json.loads((out / "results.json").read_text())["findings"]


def test_what_holds(result):
    """The decomposition is exact, joint training is training alone, no bound is broken."""
    assert result["gradient_decomposition"]["verdict"].startswith("Claim 4.2 holds")
    assert "to the last bit" in result["frozen_a"]["verdict"]
    assert result["constants"]["verdict"].startswith("Both bounds hold")
    assert "bounds hold" in result["pointwise_bounds"]["verdict"]
    for row in result["constants"]["rows"]:
        assert row["Lipschitz: largest measured"] == pytest.approx(row["Lipschitz: exact"], rel=1e-6)
        assert row["smooth: largest measured"] == pytest.approx(row["smooth: exact"], rel=1e-6)


def test_what_does_not_hold(result):
    """The counterexample is none, the condition is not needed, the printed Hessian is wrong."""
    three = next(row for row in result["counterexample"]["rows"] if row["k"] == 3)
    assert three["paper's matrix: smallest eigenvalue"] == pytest.approx(-1.196, abs=5e-4)
    assert three["true Hessian: smallest eigenvalue"] == pytest.approx(1.443, abs=5e-4)
    assert not three["condition of Lemma 4.8 met"]
    assert result["strong_convexity"]["verdict"].startswith("The condition is unnecessary")
    for row in result["softmax_regression"]["rows"]:
        assert row["corrected Hessian: worst"] < 1e-12
        assert row["printed Hessian (B.4): median"] > 1


def test_table_3(result):
    """gamma comes back in size; alpha, beta and M do not, and the study says so."""
    verdict = result["table_3"]["verdict"]
    assert "gamma reproduces" in verdict
    for column in ("alpha", "beta", "m"):
        assert f"{column} does not reproduce" in verdict
    assert all(row["alpha: true"] < 0 for row in result["table_3"]["rows"])
