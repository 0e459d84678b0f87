"""Runs of several tasks: beside runs of one task each they are one result a task, and none is counted twice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tunery.benchmarks.cells import failure
from tunery.benchmarks.comparison import AVERAGE, standings
from tunery.benchmarks.regression import compare_to_baseline, write_baseline
from tunery.benchmarks.reporting.layout import failures, grid
from tunery.benchmarks.reporting.scatter import costs
from tunery.benchmarks.reporting.words import conclusions, overview
from tunery.benchmarks.results import OUT_OF_100, Results, file_name, read_results, sealed
from tunery.benchmarks.suite import read_suite
from tunery.benchmarks.suite_file import write_suite
from tunery.core.data.metrics import GENERATED

LEVEL = {"multi_lora": 0.70, "lora": 0.72, "fine_tune": 0.71, "pre_trained": 0.5}


def made_up(suite: str, folder: Path, seeds: int = 3, **changes: Any) -> Results:
    """Write what the cells of a shipped suite would measure, and read it: scores from a formula, no run."""
    chosen = read_suite(suite).model_copy(update={"seeds": list(range(seeds))})
    folder.mkdir(exist_ok=True)
    write_suite(chosen, folder)
    for cell in chosen.cells({}):
        keys = cell.recipe.get("tasks") or [{"name": "", **cell.recipe}]
        main = {task["name"]: (task.get("metrics") or cell.recipe["metrics"])[0] for task in keys}
        scores = {}
        for place, (name, metric) in enumerate(main.items()):
            score = LEVEL[cell.method] + 0.01 * cell.seed**2 + 0.002 * place * cell.seed
            scores[name] = (100 if metric in GENERATED else 1) * score
        content: dict[str, Any] = {
            "format": 1,
            "suite": cell.suite,
            "task": cell.task,
            "method": cell.method,
            "seed": cell.seed,
            "status": "done",
            "error": None,
            "inputs": {"recipe": dict(cell.recipe), "fingerprint": "0"},
            "metrics": {f"{name}_{metric}" if name else metric: scores[name] for name, metric in main.items()},
            "main_metric": "mean" if len(main) > 1 else main[""],
            "higher_is_better": True,
            "majority": None,
            "curve": [],
            "train_info": {"seconds": 60.0 * len(main), "parameters": {"trainable": 1000}},
            "run_info": {"strategy": cell.method},
            "meta_info": {},
        }
        if len(main) > 1:
            content["run_info"]["tasks"] = {
                name: {"main_metric": metric, "majority": 0.4, "curve": [[5, 0.5]]} for name, metric in main.items()
            }
            content |= changes
        path = folder / file_name(cell.task, cell.method, cell.seed)
        path.write_text(json.dumps(sealed(content)), encoding="utf-8")
    return read_results(folder)


@pytest.fixture(scope="module")
def glue(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Table 1 of Multi-LoRA, made up."""
    return made_up("multi_lora_table1", tmp_path_factory.mktemp("joint") / "glue")


def test_a_joint_run_stands_in_every_column(glue: Results):
    """Each method has a number on each task and on average, and is compared with the joint one seed by seed."""
    table = standings(glue)
    laid = grid(table)
    tasks = ("cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb")
    assert laid.columns == (*tasks, AVERAGE)
    assert list(laid.rows) == ["multi_lora", "lora", "fine_tune", "pre_trained"]
    texts = [cell.text for cell in laid.rows["multi_lora"]]
    assert [float(text.split("\N{PLUS-MINUS SIGN}")[0]) for text in texts] == pytest.approx(
        [71.67 + 0.2 * place for place in range(8)] + [71.67 + 0.7], abs=0.01
    )
    assert table.versus["stsb", "lora"].comparison.count == table.versus[AVERAGE, "lora"].comparison.count == 3
    said = {one.method: one for one in conclusions(table)}
    assert said["pre_trained"].verdict == "worse"
    assert "over multi_lora" in said["lora"].text
    assert glue.of("stsb", "multi_lora")[0].main_metric == "pearson"
    assert glue.of("stsb", "multi_lora")[0].curve == ((5, 0.5),)
    assert glue.of("stsb", "multi_lora")[0].majority == 0.4


def test_what_a_joint_run_costs_is_counted_once(glue: Results):
    """Its seconds and parameters are shared out; no cell is missing; the reader is told."""
    table = standings(glue)
    assert costs(table, AVERAGE)["seconds"]["multi_lora"] == 60
    assert costs(table, AVERAGE)["parameters"]["multi_lora"] == 1000 / 8
    (told,) = overview(table)[1:]
    assert told.startswith("multi_lora trains cola, mnli, mrpc, qnli, qqp, rte, sst2 and stsb in one run, glue;")


def test_a_joint_run_that_failed_is_missed_on_every_task(tmp_path: Path):
    """Beside the others' scores it is a failure in each column, not a column of its own."""
    found = made_up("multi_lora_table1", tmp_path / "glue", seeds=1, **failure("out of memory"))
    table = standings(found, "lora")
    assert "glue" not in found.tasks
    assert (failures(table, "multi_lora"), failures(table, "lora")) == ("8 of 8", "0 of 8")
    assert {cell.main_metric for cell in found.of("cola", "multi_lora")} == {"matthews_correlation"}


def test_two_results_of_one_task_are_kept_apart(tmp_path: Path, glue: Results):
    """Where a method ran a task alone as well, that part of its joint run is a column of its own."""
    for path in glue.folder.glob("*--seed0.json"):
        content = json.loads(path.read_text())
        if content["method"] == "lora" and content["task"] == "rte":
            content["method"] = "multi_lora"
        name = file_name(content["task"], content["method"], 0)
        (tmp_path / name).write_text(json.dumps(sealed(content)))
    found = read_results(tmp_path)
    ours = {cell.task: cell.joint for cell in found.cells if cell.method == "multi_lora"}
    assert (ours["rte"], ours["glue.rte"], ours["cola"], len(ours)) == ("", "glue", "glue", 9)


def test_names_that_begin_alike(tmp_path: Path, glue: Results):
    """A metric belongs to the task with the longest name that it begins with."""
    content = json.loads((glue.folder / "glue--multi_lora--seed0.json").read_text())
    own = {"main_metric": "accuracy", "majority": None, "curve": []}
    content["run_info"]["tasks"] = {"a": own, "a_b": own}
    content["metrics"] = {"a_accuracy": 0.1, "a_b_accuracy": 0.2, "mean": 0.15}
    (tmp_path / "glue--multi_lora--seed0.json").write_text(json.dumps(sealed(content)))
    found = {cell.task: dict(cell.metrics) for cell in read_results(tmp_path).cells}
    assert found == {"a": {"accuracy": 0.1}, "a_b": {"accuracy": 0.2}}


def test_bleu_is_in_points(tmp_path: Path):
    """Measured on 0..100, it is shown, averaged and checked in the points of any other score, however low it is."""
    assert OUT_OF_100 == GENERATED
    found = made_up("multi_lora_table2", tmp_path / "nlg")
    laid = grid(standings(found))
    assert laid.columns == ("e2e", "dart", "webnlg", AVERAGE)
    assert laid.rows["lora"][0].text == "73.67\N{PLUS-MINUS SIGN}2.08"
    write_baseline(found, tmp_path / "baseline.json")
    for points, ok in ((0.4, True), (0.6, False)):
        _lower(found.folder, "e2e--lora--*", points)
        assert compare_to_baseline(read_results(found.folder), tmp_path / "baseline.json").ok == ok
        _lower(found.folder, "e2e--lora--*", -points)
    for cell in found.of("e2e", "lora"):
        _lower(found.folder, f"e2e--lora--seed{cell.seed}.json", cell.metrics["bleu"] - 0.5)  # nearly no word is right
    assert standings(read_results(found.folder)).summaries["e2e", "lora"].mean == pytest.approx(0.005)


def _lower(folder: Path, which: str, points: float) -> None:
    """Take points off a single task's BLEU."""
    for path in folder.glob(which):
        content: Mapping[str, Any] = json.loads(path.read_text())
        content = {**content, "metrics": {"bleu": content["metrics"]["bleu"] - points}}
        path.write_text(json.dumps(sealed(content)))
