"""A suite that sweeps one quantity: what is drawn and tabled against it, by numpy and from the files themselves."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tunery.benchmarks.comparison import standings
from tunery.benchmarks.errors import ResultError
from tunery.benchmarks.reporting.sheets import sweep_csv
from tunery.benchmarks.reporting.sweep import note, panels, picture, place, sweep
from tunery.benchmarks.reporting.writing import write_report
from tunery.benchmarks.results import file_name, read_results, sealed

RATES = (5e-6, 2e-5, 1e-4)
AXIS = {"name": "learning rate", "field": "learning_rate", "scale": "log"}


@pytest.fixture
def swept(cells: Callable[..., dict[str, Any]]) -> Callable[..., Path]:
    """What writes results of two tasks by three learning rates, for every regularizer; and a method that says no rate."""

    def write(folder: Path, seeds: int = 4, regularizers: Sequence[str | None] = (None,), axis: Any = AXIS) -> Path:
        along = {f"rate_{rate}{name or ''}": (name, rate) for name in regularizers for rate in RATES}
        folder.mkdir(exist_ok=True)
        methods = [{"name": method, "keys": {}} for method in (*along, "other")]
        (folder / "suite.json").write_text(json.dumps({"name": "made_up", "axis": axis, "methods": methods}))
        for task, seed, method in itertools.product(("rte", "mrpc"), range(seeds), (*along, "other")):
            name, rate = along.get(method, (None, None))
            recipe = {"strategy": "full", "learning_rate": rate, "regularizers": name and [f"{name}:weight=1"]}
            gain = 0.02 * len(name or "") + (0.1 if task == "rte" else 0)
            value = 0.6 + gain + 0.01 * seed * (1 + RATES.index(rate) if rate else 1)
            content = cells(task, "fine_tune", seed, inputs={"fingerprint": "0", "recipe": recipe})
            content |= {"method": method, "metrics": {"accuracy": value}, "curve": []}
            (folder / file_name(task, method, seed)).write_text(json.dumps(sealed(content)))
        return folder

    return write


def scores(folder: Path) -> dict[tuple[str, float], list[float]]:
    """Return what the files say, by task and rate."""
    found: dict[tuple[str, float], list[float]] = {}
    for path in folder.glob("*--rate*.json"):
        content = json.loads(path.read_text())
        key = content["task"], content["inputs"]["recipe"]["learning_rate"]
        found.setdefault(key, []).append(content["metrics"]["accuracy"])
    return found


def drawn(svg: str, gid: str) -> np.ndarray:
    """Return the corners of a line in a picture."""
    path = re.search(rf'id="{gid}:5e-06".*? d="(.*?)"', svg, re.DOTALL)
    assert path is not None, gid
    return np.array(re.findall(r"[ML] (\S+) (\S+)", path[1]), dtype=float)


@pytest.mark.parametrize("value", ["sd", "mean"])
def test_drawn_points_are_the_files_numbers(value: str, swept: Callable[..., Path], tmp_path: Path):
    """On the page every corner of every line is one affine map away from (log rate, numpy's number of the files)."""
    folder = swept(tmp_path)
    table = standings(read_results(folder))
    found = sweep(table)
    assert found is not None
    svg, numbers = picture(table, found), scores(folder)
    corners, wanted = [], []
    for task in ("rte", "mrpc"):
        line = drawn(svg, f"sweep:{value}:{task}:full")
        assert len(line) == len(RATES)
        corners += [*line]
        for rate in RATES:
            of = numbers[task, rate]
            wanted.append((np.log10(rate), np.std(of, ddof=1) if value == "sd" else np.mean(of)))
    for place_of in (0, 1):
        x, y = np.array(wanted)[:, place_of], np.array(corners)[:, place_of]
        slope, start = np.polyfit(x, y, 1)
        np.testing.assert_allclose(slope * x + start, y, atol=1e-3)
        assert abs(slope) > 1
    # The last map was that of values to heights: the intervals, too, and all of them inside the picture.
    top, height = map(float, re.findall(r'<rect x="\S+" y="(\S+)" width="\S+" height="(\S+)"/>', svg)[0])
    bars = re.findall(rf'id="sweep:bar:{value}:.*? d="M \S+ (\S+)\s*L \S+ (\S+)', svg, re.DOTALL)
    assert len(bars) == 6
    for bar, row in zip(bars, csv.DictReader(io.StringIO(sweep_csv(found))), strict=True):
        ends = [float(row[key]) for key in (("sd_low", "sd_high") if value == "sd" else ("low", "high"))]
        np.testing.assert_allclose(slope * np.array(ends) + start, [float(y) for y in bar], atol=1e-3)
        assert all(top <= float(y) <= top + height for y in bar)


def test_tables_hold_the_same_numbers(swept: Callable[..., Path], tmp_path: Path):
    """CSV in full, Markdown and LaTeX in points, with the axis as a column; the page has picture and table."""
    folder = swept(tmp_path)
    results = read_results(folder)
    write_report(results, tmp_path / "out")
    rows = list(csv.DictReader((tmp_path / "out" / "sweep.csv").read_text().splitlines()))
    assert [(row["task"], float(row["x"])) for row in rows] == [(task, r) for task in ("mrpc", "rte") for r in RATES]
    for row in rows:
        of = scores(folder)[row["task"], float(row["x"])]
        assert float(row["sd"]) == pytest.approx(np.std(of, ddof=1))
        assert float(row["mean"]) == pytest.approx(np.mean(of))
        assert float(row["sd_low"]) < float(row["sd"]) < float(row["sd_high"])
    texts = [(tmp_path / "out" / f"report.{ending}").read_text() for ending in ("md", "tex", "html")]
    sd, mean = (number(scores(folder)["rte", 2e-5]) * 100 for number in (lambda of: np.std(of, ddof=1), np.mean))
    assert f"| rte | 2e-5 | 4 | {sd:.2f} | " in texts[0]
    assert f"rte & 2e-5 & 4 & {sd:.2f} & " in texts[1]
    assert all(f"{mean:.2f}" in text and "Not on the axis" in text and "learning" in text for text in texts)
    assert "sweep.csv" in texts[2]
    names = re.findall(r'id="(sweep:[^"]+)"', texts[2])
    assert (
        len(names) == len(set(names)) == 2 * 2 * (1 + len(RATES))
    )  # sd and mean, of two tasks: a line and its intervals
    assert 'id="axis"><h2>Against learning rate</h2>' in texts[2]


def test_several_methods_are_lines(swept: Callable[..., Path], tmp_path: Path):
    """With and without a regularizer: a picture a task, a line each."""
    found = sweep(table := standings(read_results(swept(tmp_path, regularizers=(None, "mmr")))))
    assert found is not None
    laid = panels(table, found)
    assert {title: list(lines) for title, lines in laid.items()} == {
        task: ["full", "full + mmr:weight=1"] for task in ("rte", "mrpc")
    }
    assert all([point.x for point in points] == [*RATES] for lines in laid.values() for points in lines.values())
    assert drawn(picture(table, found), r"sweep:sd:mrpc:full\+mmr:weight=1").shape == (3, 2)


def test_few_seeds_have_no_interval(swept: Callable[..., Path], tmp_path: Path):
    """Of two seeds there is a standard deviation; of one there is a mean, and the picture is drawn all the same."""
    for seeds, has_sd in ((2, True), (1, False)):
        table = standings(read_results(swept(tmp_path / str(seeds), seeds=seeds)))
        found = sweep(table)
        assert found is not None
        assert found.off == ("other",)
        assert "other" in note(found)
        row = next(csv.DictReader(io.StringIO(sweep_csv(found))))
        assert (row["sd"] != "", row["sd_low"]) == (has_sd, "")
        assert len(drawn(picture(table, found), "sweep:mean:rte:full")) == 3


def test_without_an_axis_there_is_no_section(swept: Callable[..., Path], tmp_path: Path):
    """Nor where nothing stands on it; what is no axis is one line."""
    for axis in (None, {"name": "heads", "field": "mhloss:heads"}):
        results = read_results(swept(tmp_path / "a", 1, axis=axis))
        assert sweep(standings(results)) is None
    write_report(results, tmp_path / "out")
    assert not (tmp_path / "out" / "sweep.csv").exists()
    assert "<h2>Against" not in (tmp_path / "out" / "report.html").read_text()
    with pytest.raises(ResultError, match=r"axis.field: .*suite.json") as caught:
        sweep(standings(read_results(swept(tmp_path / "b", 1, axis={"name": "x", "field": 5}))))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("x", "text"), [(5e-6, "5e-6"), (1e-4, "1e-4"), (0.4, "0.4"), (0, "0"), (200.0, "200")])
def test_places_as_text(x: float, text: str):
    assert place(x) == text
