"""Comparisons of methods and of runs: paired as they should be, corrected for as many as there are."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from tunery.benchmarks.cells import failure
from tunery.benchmarks.comparison import AVERAGE, compare_runs, every_pair, standings
from tunery.benchmarks.errors import ResultError
from tunery.benchmarks.results import Results, file_name, read_results, sealed


@pytest.fixture(scope="module")
def table(made_up: Path) -> Any:
    """The made-up suite, summarized."""
    return standings(read_results(made_up))


def scores(folder: Path, method: str) -> dict[int, dict[str, float]]:
    """Return the stored accuracies by seed and task, read without tunery."""
    found: dict[int, dict[str, float]] = {}
    for path in folder.glob(f"*--{method}--*.json"):
        cell = json.loads(path.read_text())
        if cell["status"] == "done":
            found.setdefault(cell["seed"], {})[cell["task"]] = cell["metrics"]["accuracy"]
    return found


def written(folder: Path, contents: list[dict[str, Any]]) -> Results:
    """Write cells and read them back."""
    folder.mkdir()
    for cell in contents:
        (folder / file_name(cell["task"], cell["method"], cell["seed"])).write_text(json.dumps(sealed(cell)))
    return read_results(folder)


@pytest.mark.parametrize("method", ["mmr", "mixout"])
def test_average_is_paired_by_seed(method: str, table: Any, made_up: Path):
    """A seed's value is its mean over the tasks; seeds without a score on every task are left out of both."""
    ours, theirs = scores(made_up, method), scores(made_up, "fine_tune")
    whole = [seed for seed in ours if len(ours[seed]) == len(theirs[seed]) == 4]
    gains = [statistics.mean(ours[seed].values()) - statistics.mean(theirs[seed].values()) for seed in whole]
    found = table.versus[AVERAGE, method].comparison
    assert found.count == len(gains) == (5 if method == "mmr" else 3)
    assert found.difference == pytest.approx(statistics.mean(gains))
    assert found.sd == pytest.approx(statistics.stdev(gains))


@pytest.mark.parametrize(("average", "tests"), [(True, 4), (False, 16)])
def test_correction_counts_the_family(average: bool, tests: int, table: Any):
    """The smallest p of a family is multiplied by how many tests it has; no p falls by the correction."""
    family = [one for one in table.versus.values() if (one.task == AVERAGE) == average]
    assert len(family) == tests
    first = min(family, key=lambda one: one.comparison.p)
    assert first.p == pytest.approx(min(1, tests * first.comparison.p))
    assert all(one.p >= one.comparison.p for one in family)


def test_every_two_methods_are_compared(table: Any, made_up: Path):
    """Ten pairs of five methods on average, by scipy's paired t test and Holm's correction for ten."""
    found = {(one.method, one.other): one for one in every_pair(table)}
    names = ("fine_tune", "mixout", "mmr", "mhloss", "lora")
    assert list(found) == list(itertools.combinations(names, 2))
    assert {one.task for one in found.values()} == {AVERAGE}
    wanted = {}
    for pair, one in found.items():
        ours, theirs = (scores(made_up, method) for method in pair)
        both = [seed for seed in ours if seed in theirs and len(ours[seed]) == len(theirs[seed]) == 4]
        means = [[statistics.mean(by_seed[seed].values()) for seed in both] for by_seed in (ours, theirs)]
        assert one.comparison.count == len(both)
        assert one.comparison.difference == pytest.approx(statistics.mean(means[0]) - statistics.mean(means[1]))
        wanted[pair] = stats.ttest_rel(*means).pvalue
    largest = 0.0
    for rank, pair in enumerate(sorted(wanted, key=lambda pair: wanted[pair])):
        largest = max(largest, min(1.0, (10 - rank) * wanted[pair]))
        assert found[pair].p == pytest.approx(largest)


def test_pairs_without_an_average(cells: Callable[..., Any], tmp_path: Path):
    """Losses have no average: three pairs a task, corrected for three; of two methods there is nothing to add."""
    loss = {"main_metric": "loss", "higher_is_better": False, "majority": None}
    values = {"mmr": [2.0, 2.1, 2.3], "lora": [2.5, 2.65, 2.71], "mixout": [2.2, 2.6, 2.1]}
    contents = [
        cells(task, method, seed, metrics={"loss": value}, **loss)
        for task in ("rte", "cb")
        for method, of in values.items()
        for seed, value in enumerate(of)
    ]
    found = every_pair(standings(written(tmp_path / "three", contents)))
    assert [one.task for one in found] == ["cb"] * 3 + ["rte"] * 3
    one = next(one for one in found if {one.method, one.other} == {"mmr", "lora"})
    assert one.comparison.difference * (1 if one.method == "mmr" else -1) == pytest.approx(0.4867, abs=1e-4)
    assert min(one.p for one in found[:3]) == pytest.approx(3 * min(one.comparison.p for one in found[:3]))
    two = [content for content in contents if content["method"] != "mixout"]
    assert every_pair(standings(written(tmp_path / "two", two))) == []


def test_what_seeds_can_show_counts_the_family_too(cells: Callable[..., Any], tmp_path: Path):
    """Four methods at once need a larger difference than one, as large as leaves 0.8 at a quarter of the level."""
    methods = ["fine_tune", "mixout", "mmr", "mhloss", "lora"]
    able = []
    for count in (2, 5):
        made = [cells("rte", method, seed) for method in methods[:count] for seed in range(3)]
        able.append(standings(written(tmp_path / f"{count}", made), "fine_tune").versus["rte", "mixout"].comparison)
    one, four = able
    assert four.detectable > one.detectable
    shift = four.detectable / four.sd * 3**0.5
    assert stats.nct.sf(stats.t.ppf(1 - 0.05 / 4 / 2, 2), 2, shift) == pytest.approx(0.8)


def test_any_method_may_be_the_baseline(table: Any, made_up: Path):
    """Turned round, a comparison changes its sign and keeps its p."""
    other = standings(read_results(made_up), "mmr")
    forth, back = table.versus["cb", "mmr"].comparison, other.versus["cb", "fine_tune"].comparison
    assert back.difference == pytest.approx(-forth.difference)
    assert (back.p, back.wilcoxon) == (pytest.approx(forth.p), forth.wilcoxon)


def test_runs_are_compared_where_both_ran(cells: Callable[..., Any], tmp_path: Path):
    """Of two folders, only the tasks, methods and seeds in both count."""
    before = written(tmp_path / "before", [cells("rte", "mmr", s, metrics={"accuracy": 0.5}) for s in (0, 1, 2)])
    now = [cells("rte", "mmr", s, metrics={"accuracy": 0.5 + s / 100}) for s in (1, 2, 3)]
    found = compare_runs(written(tmp_path / "now", [*now, cells("cb", "mmr", 0), cells("rte", "lora", 0)]), before)
    assert [(one.task, one.method, one.comparison.count) for one in found] == [("rte", "mmr", 2)]
    assert found[0].comparison.difference == pytest.approx(0.015)


def test_a_task_without_any_score_refuses_no_other(cells: Callable[..., Any], tmp_path: Path):
    """Here or there, a task whose runs all failed has no metric to differ by; the others are compared."""
    gone = cells("cb", "mmr", 0) | failure("out of memory")
    whole = written(tmp_path / "whole", [cells("rte", "mmr", 0), cells("cb", "mmr", 0)])
    half = written(tmp_path / "half", [cells("rte", "mmr", 0), gone])
    for pair in ((whole, half), (half, whole)):
        assert [(one.task, one.method) for one in compare_runs(*pair)] == [("rte", "mmr")]


def test_runs_that_share_nothing_are_refused(cells: Callable[..., Any], tmp_path: Path):
    """Other cells, or the same task by another metric: one line."""
    here = written(tmp_path / "here", [cells("rte", "mmr", 0)])
    with pytest.raises(ResultError, match="share no task, method and seed that ran in both"):
        compare_runs(here, written(tmp_path / "other", [cells("rte", "mmr", 1)]))
    other = written(tmp_path / "metric", [cells("rte", "mmr", 0, main_metric="loss", higher_is_better=False)])
    with pytest.raises(ResultError, match="task 'rte' is scored by accuracy here and by loss there"):
        compare_runs(here, other)
