"""The report on the console and in files: the numbers are those of the result files, the marks are where they belong."""

from __future__ import annotations

import csv
import html
import io
import itertools
import json
import re
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunery.benchmarks.comparison import standings
from tunery.benchmarks.errors import ResultError
from tunery.benchmarks.reporting.layout import Grid, failures, grid, steadier
from tunery.benchmarks.reporting.sheets import runs_csv, statistics_csv
from tunery.benchmarks.reporting.tables import latex, markdown
from tunery.benchmarks.reporting.words import (
    MINUS,
    NONE,
    Conclusion,
    conclusions,
    headline,
    mean_and_sd,
    number,
    overview,
)
from tunery.benchmarks.reporting.writing import write_report
from tunery.benchmarks.results import read_results, sealed


@pytest.fixture(scope="module")
def table(made_up: Path) -> Any:
    """The made-up suite, summarized."""
    return standings(read_results(made_up))


def stored(folder: Path, task: str, method: str) -> list[float]:
    """Return the accuracies as they stand in the files, read without tunery."""
    cells = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{task}--{method}--*.json"))]
    return [cell["metrics"]["accuracy"] for cell in cells if cell["status"] == "done"]


def small(folder: Path, cells: Callable[..., Any], scores: dict[str, list[float]], **changes: Any) -> Path:
    """Write one task's cells with these scores by method and seed."""
    for method, values in scores.items():
        for seed, value in enumerate(values):
            content = cells("rte", method, seed, metrics={"accuracy": value}, majority=None, **changes)
            (folder / f"rte--{method}--seed{seed}.json").write_text(json.dumps(sealed(content)))
    return folder


def test_numbers_are_those_of_the_files(table: Any, made_up: Path):
    """Means and sample standard deviations are Python's own statistics of what the files hold."""
    laid = grid(table)
    for method, cells in laid.rows.items():
        for task, shown in zip(laid.columns[:-1], cells, strict=False):
            found = stored(made_up, task, method)
            assert shown.text == f"{100 * statistics.mean(found):.2f}±{100 * statistics.stdev(found):.2f}"
        means, sds = zip(*(map(float, shown.text.split("±")) for shown in cells[:-1]), strict=True)
        mean, sd = map(float, cells[-1].text.split("±"))  # as the papers average
        assert (mean, sd) == (
            pytest.approx(statistics.mean(means), abs=0.01),
            pytest.approx(statistics.mean(sds), abs=0.01),
        )


def test_marks(table: Any):
    """One best and one second mean a column; the baseline has neither shade nor difference; failures are counted."""
    laid = grid(table)
    for column in range(len(laid.columns)):
        cells = [row[column] for row in laid.rows.values()]
        means = [float(cell.text.split("±")[0]) for cell in cells]
        assert means[[cell.place for cell in cells].index(1)] == max(means)
        assert sorted(cell.place for cell in cells) == [0, 0, 0, 1, 2]
    assert all(cell.steadier is None and cell.delta == "" for cell in laid.rows["fine_tune"])
    assert [failures(table, method) for method in laid.rows] == [f"{count} of 20" for count in (1, 2, 0, 0, 1)]


def test_steadier():
    """Half the spread is half a shade of green, twice the spread half a shade of red."""
    assert (steadier(1, 2), steadier(2, 1), steadier(1, 1), steadier(0, 0)) == (0.5, -0.5, 0, 0)
    assert steadier(None, 1) is None


def test_equal_means_share_the_place(tmp_path: Path, cells: Callable[..., Any]):
    """What prints alike is marked alike."""
    folder = small(tmp_path, cells, {"fine_tune": [0.5, 0.6], "mmr": [0.6, 0.5], "lora": [0.4, 0.5]})
    laid: Grid = grid(standings(read_results(folder)))
    assert {method: row[0].place for method, row in laid.rows.items()} == {"fine_tune": 1, "mmr": 1, "lora": 2}


@pytest.mark.parametrize(
    ("value", "scale", "sign", "text"),
    [
        (0.8346, 100, False, "83.46"),
        (0.012, 100, True, "+1.20"),
        (-0.012, 100, True, f"{MINUS}1.20"),
        (-0.00001, 100, True, "0.00"),
        (12.3456, 1, False, "12.35"),
        (None, 100, False, NONE),
    ],
)
def test_number(value: float | None, scale: float, sign: bool, text: str):
    assert number(value, scale, sign=sign) == text


def test_one_seed_has_no_spread():
    assert mean_and_sd(0.5, None, 100) == "50.00"


def test_conclusions(tmp_path: Path, cells: Callable[..., Any]):
    """A clear gain, a clear loss and noise are told apart, each with what the seeds could have shown."""
    base = [0.60, 0.61, 0.59, 0.62, 0.60]
    better = [0.639, 0.651, 0.630, 0.662, 0.640]
    worse = [0.559, 0.571, 0.550, 0.579, 0.561]
    noise = [0.63, 0.58, 0.61, 0.59, 0.62]
    folder = small(tmp_path, cells, {"fine_tune": base, "mmr": better, "lora": worse, "mixout": noise})
    found = {one.method: one for one in conclusions(standings(read_results(folder), "fine_tune"))}
    assert {method: one.verdict for method, one in found.items()} == {
        "mmr": "better",
        "lora": "worse",
        "mixout": "open",
    }
    assert found["mmr"].text.startswith(
        "+4.04 points over fine_tune (95 % 3.90 to 4.18, p < 0.001 after Holm; 5 seeds can show"
    )
    assert found["lora"].text.startswith(f"{MINUS}4.00 points against fine_tune")
    assert re.search(r"no difference shown: \+0\.20 points .* 5 seeds can show \d\.\d\d points", str(found["mixout"]))


@pytest.mark.parametrize(
    ("verdicts", "tasks", "says"),
    [
        ("better open", 4, "On average over 4 tasks, a is better than z; no difference to it is shown of b."),
        ("better better worse", 1, "a and b are better than z; c is worse than z."),
        ("open open open", 1, "No difference to z is shown of a, b and c."),
        ("few few", 1, "Too few seeds have run to tell a and b from z."),
        ("none", 2, "On average over 2 tasks, nothing could be compared."),
    ],
)
def test_headline(verdicts: str, tasks: int, says: str):
    """One sentence says who differs; a method's name keeps its first letter."""
    found = [Conclusion(name, verdict, "") for name, verdict in zip("abc", verdicts.split(), strict=False)]
    assert headline(found, "z", tasks) == says


def test_seed_without_a_score_is_said(table: Any):
    """A crashed run takes its seed out of the comparison of averages, and the reader is told."""
    found = {one.method: one.text for one in conclusions(table)}
    assert "Compared on the seeds with a score on every task, 3 of 5." in found["mixout"]
    assert "Compared on" not in found["mmr"]
    assert overview(table) == [
        "4 tasks x 5 methods x 5 seeds: 98 runs with a score, 2 failed, 2 no better than the majority class."
    ]


def test_missing_cells_are_said(tmp_path: Path, cells: Callable[..., Any]):
    """What the suite lists and has not run is told; what its overrides skip was never asked for."""
    small(tmp_path, cells, {"fine_tune": [0.5, 0.6], "lora": [0.5]})
    skip = {"tasks": "c*", "methods": "lora", "keys": {}, "skip": True}
    keys = {"tasks": "*", "methods": "*", "keys": {"max_steps": 1}, "skip": False}
    suite = {
        "tasks": [{"name": "rte", "keys": {}}, {"name": "cb", "keys": {}}],
        "methods": [{"name": name, "keys": {}} for name in ("fine_tune", "lora")],
        "seeds": [0, 1],
        "overrides": [skip, keys],
    }
    (tmp_path / "suite.json").write_text(json.dumps(suite))
    said = "3 cells of the suite have no result yet."  # rte by lora once, cb by fine_tune twice
    assert overview(standings(read_results(tmp_path)))[1:] == [said]


def test_seeds_of_different_recipes_are_said(tmp_path: Path, cells: Callable[..., Any], capsys: Any):
    """A method whose seed 0 ran longer than the others is named with what differs, wherever the report is read."""
    for method, seed in itertools.product(("fine_tune", "lora"), range(3)):
        steps = 20 if (method, seed) == ("lora", 0) else 12
        recipe = {"max_steps": steps, "seed": seed, "strategy": method}
        content = cells("rte", method, seed, inputs={"fingerprint": f"{method}{seed}", "recipe": recipe})
        (tmp_path / f"rte--{method}--seed{seed}.json").write_text(json.dumps(sealed(content)))
    results = read_results(tmp_path)
    said = "Runs of different inputs are averaged: lora on rte, recipe.max_steps: 20 -> 12."
    assert overview(standings(results))[1:] == [said]
    write_report(results, tmp_path / "report")
    assert said in capsys.readouterr().out
    for name in ("report.md", "report.html"):
        assert html.unescape((tmp_path / "report" / name).read_text()).count(said) == 1


def test_a_plugin_in_two_versions_is_said_once(tmp_path: Path, cells: Callable[..., Any]):
    """What differs in many methods and tasks alike is one line."""
    for task, method, seed in itertools.product(("rte", "cb", "mrpc"), ("fine_tune", "lora"), range(2)):
        inputs = {"plugins": {"strategy full": f"tunery 0.{seed}"}}
        (tmp_path / f"{task}--{method}--seed{seed}.json").write_text(
            json.dumps(sealed(cells(task, method, seed, inputs=inputs)))
        )
    (said,) = overview(standings(read_results(tmp_path)))[1:]
    assert said.startswith("Runs of different inputs are averaged: 6 methods and tasks, plugins.strategy full: ")


def test_loss_is_not_shown_in_points(tmp_path: Path, cells: Callable[..., Any]):
    """Of a metric that is better when lower, the best is the lowest, and a drop is a gain."""
    scores = {"fine_tune": [3.5, 3.6, 3.7], "mmr": [3.25, 3.3, 3.5]}
    table = standings(read_results(small(tmp_path, cells, scores, higher_is_better=False)))
    laid = grid(table)
    assert (laid.columns, laid.rows["mmr"][0].text, laid.rows["mmr"][0].place) == (("rte",), "3.35±0.1323", 1)
    assert laid.rows["mmr"][0].delta == "+0.25"
    assert conclusions(table)[0].text.startswith("+0.25 over fine_tune (95 % 0.1258 to 0.3742, p = 0.013")


def test_markdown(table: Any):
    """Every line of the table has as many cells as the header; names are escaped; the best mean is bold."""
    text = markdown(table, ["a note"]).partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {8}
    assert lines[2].startswith(r"| fine\_tune |")
    assert all(line.count("**") in (0, 2, 4, 6, 8, 10) for line in lines)


def test_latex(table: Any):
    """Rows end as LaTeX wants them, nothing is left unescaped, shades follow the sign of the change in spread."""
    text = latex(table, ["a note"])
    body = text[text.index(r"\midrule") : text.index(r"\bottomrule")].splitlines()[1:]
    assert len(body) == 5
    assert all(line.endswith(r" \\") and line.count("&") == 6 for line in body)
    assert not re.search(rf"[±{MINUS}{NONE}]|(?<!\\)_", "".join(body))
    laid = grid(table)
    for line, cells in zip(body, laid.rows.values(), strict=True):
        shades = re.findall(r"cellcolor\{(green|red)!", line)
        assert shades == [
            "green" if c.steadier > 0 else "red" for c in cells if c.steadier and round(55 * abs(c.steadier))
        ]


def test_the_papers_table_stands_below(table: Any):
    """What a suite quotes is a second table of its own in Markdown and LaTeX too, said to be printed and not run."""
    ours, quoted = markdown(table, []).split("## Table 2 of a paper")
    assert quoted.startswith("\n\nas printed; not run here.\n\n| method | rte | mrpc | cb |\n")
    assert r"| mmr | 75.59±0.55 (" in quoted
    assert "lnsr" not in ours
    ours, quoted = latex(table, []).split("% Table 2 of a paper: as printed; not run here\n")
    assert quoted.startswith("\\begin{tabular}{lrrr}\n")
    assert quoted.count(r"$\pm$") == 4 * 3
    assert "lnsr" not in ours
    bare = replace(table, results=replace(table.results, suite={}))
    assert markdown(bare, []).count("| --- |") == latex(bare, []).count("tabular}{") == 1


def test_csv_holds_every_digit(table: Any, made_up: Path):
    """A spreadsheet gets full precision, a line a comparison and a line a run."""
    rows = list(csv.DictReader(io.StringIO(statistics_csv(table))))
    assert len(rows) == 4 * 5 + 5
    one = next(row for row in rows if (row["task"], row["method"]) == ("cb", "mmr"))
    assert float(one["mean"]) == pytest.approx(statistics.mean(stored(made_up, "cb", "mmr")), rel=1e-15)
    assert float(one["worst"]) == min(stored(made_up, "cb", "mmr"))
    runs = list(csv.DictReader(io.StringIO(runs_csv(table))))
    assert len(runs) == 100
    assert {row["status"] for row in runs} == {"done", "failed", "degenerate"}


@pytest.mark.parametrize(
    ("baseline", "says"), [("mmmr", "no method 'mmmr'; known: fine_tune, mixout, mmr.*did you mean 'mmr'?")]
)
def test_unknown_baseline(baseline: str, says: str, made_up: Path):
    with pytest.raises(ResultError, match=says):
        standings(read_results(made_up), baseline)


def test_mixed_metrics_are_refused(tmp_path: Path, cells: Callable[..., Any]):
    """Runs of one task scored by two metrics have no mean."""
    small(tmp_path, cells, {"fine_tune": [0.5]})
    small(tmp_path, cells, {"mmr": [0.5]}, main_metric="f1")
    with pytest.raises(ResultError, match="the runs of task 'rte' have different main metrics; known: accuracy, f1"):
        standings(read_results(tmp_path))
