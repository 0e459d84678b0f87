"""Federated suites: rounds read off curves made by hand, bytes and seconds, and where they are shown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunery.benchmarks.comparison import standings
from tunery.benchmarks.reporting.page import page
from tunery.benchmarks.reporting.rounds import rounds, rows
from tunery.benchmarks.reporting.sheets import rounds_csv
from tunery.benchmarks.reporting.words import NONE
from tunery.benchmarks.reporting.writing import write_report
from tunery.benchmarks.results import Results, file_name, read_results, sealed

CURVES = {  # by method and seed, what was scored after rounds 1, 2, ...
    ("lora", 0): [0.50, 0.72, 0.80, 0.797, 0.80],
    ("lora", 1): [0.50, 0.60, 0.70, 0.796, 0.80],
    ("fedot", 0): [0.50, 0.55, 0.60, 0.696, 0.70],
    ("fedot", 1): [0.50, 0.55, 0.60, 0.72, 0.71],
    ("sub_fm", 0): [0.50, 0.40, 0.65, 0.66, 0.60],  # never as good
    ("sub_fm", 1): [0.50, 0.71, 0.75, 0.60, 0.60],
}


@pytest.fixture
def federated(tmp_path: Path, cells: Callable[..., Any]) -> Results:
    """Three methods, two seeds, five rounds."""
    (tmp_path / "suite.json").write_text(json.dumps({"name": "rounds", "command": "federate"}))
    for (method, seed), values in CURVES.items():
        content = cells("rte", {"lora": "lora"}.get(method, "mmr"), seed, metrics={"accuracy": values[-1]})
        content |= {"method": method, "majority": None, "curve": [[n, value] for n, value in enumerate(values, 1)]}
        content["run_info"]["strategy"] = {"lora": "lora:r=8", "fedot": "offsite:r=8", "sub_fm": "proxy_sub_fm"}[method]
        sent = {"down_adapter": 2e6, "down_stand_in": 0.0 if method == "lora" else 7e6, "up_adapter": 1e6 + seed * 1e6}
        content["train_info"] |= {"rounds": 5, "clients": 4, "client_seconds": 30.0 + seed, "bytes": sent}
        (tmp_path / file_name("rte", method, seed)).write_text(json.dumps(sealed(content)))
    return read_results(tmp_path)


def test_rounds_are_read_off_the_curves(federated: Results):
    """The first round with FedOT's final score of the same seed, and the first within half a point of the run's best."""
    found = {one.method: (one.reached, one.converged) for one in rounds(standings(federated))}
    assert found == {
        "lora": ((2, 4), (3, 4)),  # FedOT ends at 0.70 with seed 0, at 0.71 with seed 1
        "fedot": ((5, 4), (4, 4)),
        "sub_fm": ((2,), (4, 3)),
    }


def test_a_loss_falls_to_the_target(federated: Results):
    """Where less is better, a round counts that is at most what is asked for."""
    for path in federated.folder.glob("*--seed?.json"):
        content = json.loads(path.read_text())
        content |= {"higher_is_better": False, "curve": [[n, 1 - value] for n, value in content["curve"]]}
        content["metrics"]["accuracy"] = 1 - content["metrics"]["accuracy"]
        path.write_text(json.dumps(sealed(content)))
    found = {one.method: one.reached for one in rounds(standings(read_results(federated.folder)))}
    assert (found["lora"], found["sub_fm"]) == ((2, 4), (2,))


def test_table_says_what_it_cost(federated: Results):
    """Means over seeds, in MB; a method that gets there with one seed only says so."""
    header, *found = rows(standings(federated))
    assert header[2] == "rounds to fedot's score"
    assert {row[1]: row[2:] for row in found} == {
        "lora": ("3", "3.5", "2.00", "0.00", "1.50", "30.5"),
        "fedot": ("4.5", "4", "9.00", "7.00", "1.50", "30.5"),
        "sub_fm": ("2 (1 of 2)", "3.5", "9.00", "7.00", "1.50", "30.5"),
    }
    lines = {line["method"]: line for line in csv.DictReader(io.StringIO(rounds_csv(standings(federated))))}
    assert (lines["lora"]["rounds_to_target"], lines["lora"]["bytes_up_adapter"]) == ("3.0", "1500000.0")
    assert (lines["sub_fm"]["reached"], lines["sub_fm"]["target"]) == ("1", "fedot")


def test_report_shows_rounds(federated: Results, tmp_path: Path):
    """The table is on the page, in Markdown and as CSV, and the curves are drawn against rounds."""
    write_report(federated, tmp_path / "report")
    text = (tmp_path / "report" / "report.html").read_text()
    assert "<h2>Rounds and traffic</h2>" in text
    assert ">round</text>" in text
    assert "optimizer step" not in text
    lines = (tmp_path / "report" / "report.md").read_text().splitlines()
    assert r"| rte | sub\_fm | 2 (1 of 2) | 3.5 | 9.00 | 7.00 | 1.50 | 30.5 |" in lines
    assert (tmp_path / "report" / "rounds.csv").read_text().count("\n") == 4


def test_without_offsite_the_baseline_is_the_target(federated: Results):
    for path in federated.folder.glob("*--fedot--*.json"):
        path.unlink()
    found = rows(standings(read_results(federated.folder), "lora"))
    assert found[0][2] == "rounds to lora's score"
    assert [row[2] for row in found[1:]] == ["4", NONE]


def test_no_rounds_no_table(made_up: Path):
    """A suite of ordinary runs has none of this."""
    text = page(standings(read_results(made_up)), {})
    assert "Rounds and traffic" not in text
    assert ">optimizer step</text>" in text
