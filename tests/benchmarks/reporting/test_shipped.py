"""The papers' tables that shipped suites quote: every one is readable, and averages as its paper says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunery.benchmarks.reporting.reference import read_reference
from tunery.benchmarks.results import Results
from tunery.benchmarks.suite import read_suite, shipped_suites

SUITES = {name: suite for name in shipped_suites() if (suite := read_suite(name)).reference}


@pytest.mark.parametrize("name", list(SUITES))
def test_reference_is_readable(name: str):
    """A suite's quoted table has a cell for every column of every row."""
    suite = SUITES[name]
    found = read_reference(Results(Path(name), suite.model_dump(mode="json"), (), {}), next(iter(suite.methods)))
    assert found is not None
    assert found.title
    assert all(cell.text for row in found.grid.rows.values() for cell in row)


def test_rounds_are_better_when_fewer():
    """Of the two suites that quote rounds, their columns and no other's: FedPETuning's 18 are SST-2's best."""
    rounds = {"fedpft_table10": ["BERT rounds", "RoBERTa rounds"], "fedpft_table11": ["SST-2", "QNLI", "QQP", "MNLI"]}
    assert {name: found for name in SUITES if (found := SUITES[name].reference.get("lower_is_better"))} == rounds
    suite = SUITES["fedpft_table11"]
    found = read_reference(Results(Path("table11"), suite.model_dump(mode="json"), (), {}), "fedot")
    assert found is not None
    places = {method: cells[0].place for method, cells in found.grid.rows.items()}
    assert places == {"fedpetuning": 1, "fedpft": 2, "fedot": 0}


@pytest.mark.parametrize("table", [2, 3, 4, 5])
def test_quoted_averages(table: int):
    """What a suite quotes of the stability paper averages to what it quotes as the average, within 0.01."""
    quoted = SUITES[f"stability_table{table}"].reference
    assert len(quoted["rows"]) == 6
    for row in quoted["rows"].values():
        *tasks, average = ([float(part) for part in cell.split("±")] for cell in row)
        for place in (0, 1):
            assert sum(task[place] for task in tasks) / len(tasks) == pytest.approx(average[place], abs=0.0101)


@pytest.mark.parametrize(("name", "rows"), [("multi_lora_table1", 4), ("multi_lora_table2", 3)])
def test_quoted_averages_of_multi_lora(name: str, rows: int):
    """The same of the Multi-LoRA paper, whose tables have one digit behind the point."""
    quoted = SUITES[name].reference
    assert len(quoted["rows"]) == rows
    for row in quoted["rows"].values():
        *tasks, average = (float(str(cell).split("±")[0]) for cell in row)
        assert sum(tasks) / len(tasks) == pytest.approx(average, abs=0.06)
