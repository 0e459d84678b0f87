"""The page: whole by itself, well-formed, and honest about what it shows."""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tunery.benchmarks.cells import failure
from tunery.benchmarks.comparison import standings
from tunery.benchmarks.errors import ResultError
from tunery.benchmarks.reporting.figures import overall
from tunery.benchmarks.reporting.page import page
from tunery.benchmarks.reporting.reference import read_reference
from tunery.benchmarks.reporting.scatter import costs, pareto
from tunery.benchmarks.reporting.words import MINUS, NONE
from tunery.benchmarks.results import file_name, read_results, sealed
from tunery.benchmarks.suite import read_suite
from tunery.benchmarks.suite_file import write_suite

VOID = {"meta", "br", "link", "img", "hr"}
LIKE = ("fine_tune", "mixout", "mhloss", "lora", "mmr")
ALL = ["findings", "scores", "seeds", "cost", "stability", "curves", "tests", "failures", "protocol", "provenance"]


class Document(HTMLParser):
    """What a page holds: its text by section, every address, and tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sections: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "section":
            self.sections.append(str(found["id"]))
        self.ids += [str(found["id"])] if "id" in found else []
        self.addresses += [str(found[key]) for key in ("href", "src", "xlink:href", "action") if key in found]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag("br", attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def made_page(made_up: Path) -> str:
    """The page of the made-up suite."""
    return page(standings(read_results(made_up)), {"runs.csv": "task,score\nrte,0.5\n"})


def write(folder: Path, contents: list[dict[str, Any]], suite: dict[str, Any] | None = None) -> Any:
    """Write cells and, if given, a suite; return them as read."""
    folder.mkdir(exist_ok=True)
    for content in contents:
        path = folder / file_name(content["task"], content["method"], content["seed"])
        path.write_text(json.dumps(sealed(content)))
    if suite is not None:
        (folder / "suite.json").write_text(json.dumps(suite))
    return read_results(folder)


def test_page_is_whole(made_page: str):
    """Tags match, every section is there, nothing is fetched: addresses stay on the page or hold their data."""
    document = Document(made_page)
    assert document.open == []
    assert document.sections == ALL
    assert all(address.startswith(("#", "data:")) for address in document.addresses)
    assert not re.search(r"url\((?!#)|@import|<script|<link|<iframe|<img", made_page)
    assert "default-src 'none'" in made_page
    assert made_page.count("<svg role=") == 5
    targets = {address[1:] for address in document.addresses if address.startswith("#")}
    assert targets <= set(document.ids)


def test_pictures_follow_the_page(made_page: str):
    """No stand-in colour is left, text is text in the page's font and colour, and ids belong to one picture each."""
    for stand_in in ("#010203", "#040506", "#070809"):
        assert stand_in not in made_page
    assert "currentColor" in made_page
    assert "DejaVu" not in re.sub(r"<style>.*?</style>", "", made_page, count=1, flags=re.DOTALL)
    assert re.search(r"<text[^>]*>fine_tune</text>", made_page)
    defined = re.findall(r'<(?:clipPath|path|marker)[^>]* id="([^"]+)"', made_page)
    assert len(defined) == len(set(defined))


def test_page_is_the_same_twice(made_up: Path, made_page: str):
    """The same results give the same bytes: a page can be compared and kept under version control."""
    assert page(standings(read_results(made_up)), {"runs.csv": "task,score\nrte,0.5\n"}) == made_page


def test_page_says_what_the_files_hold(made_page: str):
    """Conclusion, scores, errors as plain text, provenance, protocol, seeds, the paper's table, the data itself."""
    document = Document(made_page)
    for said in (
        "On average over 4 tasks, mmr is better than fine_tune",
        "5 seeds can show",
        "loss became nan at step 40 <b>&c.</b>",
        "52.70 is no better than the majority class, 52.70",
        "Protocol: dev_as_test, early_stopping. Seeds: 0, 1, 2, 3, 4.",
        "Table 2 of a paper",
        "as printed; not run here",
        "learning_rate: 0.0003",
        "mixoutfullmixout0.0003",
        "10 comparisons of every two methods",
        "mmrloraaverage5+",
        "python 3.11.9, torch 2.13.0, tunery 0.1.0, cpu x86_64, gpu none",
    ):
        assert said in document.text
    data = next(address for address in document.addresses if address.startswith("data:text/csv"))
    assert base64.b64decode(data.split(",")[1]) == b"task,score\nrte,0.5\n"


def test_shade_follows_spread(made_up: Path, made_page: str):
    """As in the paper: green where the sd is smaller than the baseline's, red where it is larger, deeper with more."""
    table = standings(read_results(made_up))
    row = re.search(r"<tr><th>mhloss</th>(.*?)</tr>", made_page, re.DOTALL)
    assert row is not None
    cells = re.findall(r"<td[^>]*?(?:rgba\(var\(--(green|red)\),calc\(var\(--depth\) \* ([\d.]+)\)\))?\"?>", row[1])
    for task, (colour, depth) in zip(table.results.tasks, cells, strict=False):
        ours, base = (table.summaries[task, method].sd for method in ("mhloss", "fine_tune"))
        assert ours is not None
        assert base is not None
        assert colour == ("green" if ours < base else "red")
        assert float(depth) == pytest.approx(abs(base - ours) / max(base, ours), abs=1e-3)


def test_reference_is_never_mixed_in(made_up: Path, made_page: str):
    """A method that only the paper ran stands in the paper's table and nowhere else."""
    quoted = made_page[made_page.index('class="scroll quoted"') :]
    quoted = quoted[: quoted.index("</table>")]
    assert "<th>lnsr</th>" in quoted
    assert "lnsr" not in made_page.replace(quoted, "")
    found = read_reference(read_results(made_up), "fine_tune")
    assert found is not None
    assert [cell.text for cell in found.grid.rows["mmr"]] == ["75.59±0.55", "89.58±0.59", "80.00±3.81"]
    assert found.grid.rows["mmr"][0].steadier == pytest.approx((2.04 - 0.55) / 2.04)


@pytest.mark.parametrize(
    ("quoted", "says"),
    [
        ({"columns": ["rte"], "rows": {}}, "KeyError: 'title'"),
        ({"title": "T", "columns": ["rte"], "rows": {"mmr": ["75±x"]}}, "could not convert"),
        ({"title": "T", "columns": ["rte", "cb"], "rows": {"mmr": [1]}}, "row 'mmr' has 1 cells for 2 columns"),
        ({"title": "T", "columns": ["rte"], "rows": ["mmr"]}, "AttributeError"),
        ({"title": "T", "columns": ["rte"], "rows": {}, "lower_is_better": ["rounds"]}, "no column 'rounds'"),
        ({"title": "T", "columns": ["rte"], "rows": {}, "lower_is_better": True}, "TypeError"),
    ],
)
def test_reference_that_cannot_be_read(quoted: Any, says: str, cells: Callable[..., Any], tmp_path: Path):
    results = write(tmp_path, [cells("rte", "mmr", 0)], {"reference": quoted})
    with pytest.raises(ResultError, match=f"cannot read the suite's reference: .*{says}.*it has title, columns"):
        read_reference(results, "mmr")


def test_reference_cells(cells: Callable[..., Any], tmp_path: Path):
    """A mean alone, mean and sd as a list, and a gap are all a paper may print."""
    rows = {"mmr": [75.5, [80, 1.5], None], "lora": ["70", None, "-"]}
    quoted = {"title": "T", "columns": ["rte", "cb", "AVG"], "rows": rows}
    found = read_reference(write(tmp_path, [cells("rte", "mmr", 0)], {"reference": quoted}), "mmr")
    assert found is not None
    texts = {method: [cell.text for cell in row] for method, row in found.grid.rows.items()}
    assert texts == {"mmr": ["75.50", "80.00±1.50", NONE], "lora": ["70.00", NONE, NONE]}
    assert found.grid.rows["lora"][0].delta == f"{MINUS}5.50"


def test_reference_of_which_less_is_better(cells: Callable[..., Any], tmp_path: Path):
    """Of rounds to a score the fewest are the best, and fewer than the baseline's are a gain."""
    rows = {"lora": [80, 80], "mmr": [70, 70]}
    quoted = {"title": "T", "columns": ["F1", "rounds"], "rows": rows, "lower_is_better": ["rounds"]}
    found = read_reference(write(tmp_path, [cells("rte", "lora", 0)], {"reference": quoted}), "lora")
    assert found is not None
    up, down = zip(*found.grid.rows.values(), strict=True)
    assert ([cell.place for cell in down], down[1].delta) == ([2, 1], "+10.00")
    assert ([cell.place for cell in up], up[1].delta) == ([1, 2], f"{MINUS}10.00")


def small_suites(cells: Callable[..., Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the contents of suites that lack something."""
    bare = {"curve": [], "train_info": {}, "meta_info": {}, "run_info": {}, "inputs": {}}
    gone = failure("out of memory")
    loss = {"main_metric": "loss", "higher_is_better": False, "majority": None}
    return {
        "one cell": [cells("rte", "mmr", 0)],
        "one method": [cells("rte", "mmr", seed) for seed in range(5)],
        "one seed": [cells(task, method, 0) for task in ("rte", "cb") for method in ("mmr", "lora")],
        "nothing recorded": [cells("rte", method, seed, **bare) for method in ("mmr", "lora") for seed in range(3)],
        "all failed": [cells("rte", method, seed, **gone) for method in ("mmr", "lora") for seed in range(3)],
        "baseline failed": [
            cells("rte", method, seed, **(gone if method == "lora" else {}))
            for method in ("lora", "mmr")
            for seed in range(3)
        ],
        "a loss": [
            cells(task, method, seed, metrics={"loss": 2 + seed / 10 + (method == "mmr")}, **loss)
            for task in ("rte", "cb")
            for method in ("mmr", "lora")
            for seed in range(3)
        ],
        "equal scores": [
            cells("rte", method, seed, metrics={"accuracy": 0.75}) for method in ("mmr", "lora") for seed in range(3)
        ],
        "awkward names": [
            {**cells("rte", "mmr", seed), "task": "a<b>&c", "method": f"$x_{n}$", "suite": "<i>"}
            for n in range(12)
            for seed in range(2)
        ],
    }


@pytest.mark.parametrize("kind", list(small_suites(lambda *a, **k: {})))
def test_page_of_what_there_is(kind: str, cells: Callable[..., Any], tmp_path: Path):
    """Whatever is missing, the page is whole and says what is there."""
    results = write(tmp_path / "small", small_suites(cells)[kind])
    document = Document(page(standings(results), {}))
    assert document.open == []
    assert {"findings", "scores", "seeds", "protocol", "provenance"} <= set(document.sections)
    for method in results.methods:
        assert method in document.text


def test_page_of_smoke(cells: Callable[..., Any], tmp_path: Path):
    """One task, five methods, three seeds, none failed: every section but that of failed runs, every picture."""
    suite = read_suite("smoke")
    write_suite(suite, tmp_path)
    (task,) = suite.tasks
    for (method, like), seed in itertools.product(zip(suite.methods, LIKE, strict=True), suite.seeds):
        content = cells("rte", like, seed) | {"task": task, "method": method}
        (tmp_path / file_name(task, method, seed)).write_text(json.dumps(sealed(content)))
    results = read_results(tmp_path)
    assert len(results.cells) == 15
    document = Document(text := page(standings(results), {}))
    assert document.sections == [section for section in ALL if section != "failures"]
    pictures = set(re.findall(r'<svg role="img" aria-label="([^"]+)"', text))
    assert pictures == {
        "Differences to fine_tune",
        "Scores of every seed, by task",
        "Score against parameters, memory and time",
        "Spread over seeds against score",
        "Learning curves",
    }
    assert set(suite.methods) == set(re.findall(r"<tr><th>(\w+)</th><td", text))


def test_pareto():
    """A method is on the front if none is better at the same cost or less; of two at one cost, the better one."""
    points = {"cheap": (1.0, 0.5), "worse": (2.0, 0.4), "good": (3.0, 0.7), "twin": (3.0, 0.6), "dear": (9.0, 0.7)}
    assert pareto(points) == ["cheap", "good"]
    assert pareto({name: (cost, -score) for name, (cost, score) in points.items()}, higher=False) == ["cheap", "good"]
    dominated = {
        name
        for name, (cost, score) in points.items()
        if any((c <= cost and s > score) or (c < cost and s >= score) for c, s in points.values())
    }
    assert set(points) - dominated == set(pareto(points))


def test_costs_are_means_of_runs_with_a_score(made_up: Path):
    """Memory in GB, seconds and parameters, of the runs that count."""
    table = standings(read_results(made_up))
    found = costs(table, "average")
    seconds = [
        json.loads(path.read_text())["train_info"]["seconds"]
        for path in made_up.glob("*--mixout--*.json")
        if json.loads(path.read_text())["status"] == "done"
    ]
    assert len(seconds) == 18
    assert found["seconds"]["mixout"] == pytest.approx(np.mean(seconds))
    assert found["parameters"]["lora"] == 147_000
    assert 0.5 < found["memory"]["lora"] < 0.52
    assert set(overall(table)) == {"average"}


def test_plugin_in_two_versions_is_said(cells: Callable[..., Any], tmp_path: Path):
    """Results of two versions of one plugin stand in one table; the page warns."""
    contents = [cells("rte", "mmr", seed) for seed in range(2)]
    contents[1]["meta_info"]["plugins"][1]["version"] = "0.2.0"
    contents[1]["meta_info"]["versions"]["torch"] = "2.14.0"
    text = page(standings(write(tmp_path, contents)), {})
    assert "mmr: more than one version made these results." in text
    assert "<b>torch 2.13.0 and 2.14.0</b>" in text
