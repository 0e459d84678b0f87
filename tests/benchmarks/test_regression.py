"""A baseline in a file: what got worse beyond noise is told, what did not is not, and nothing is compared by mistake."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tunery.benchmarks.errors import ResultError
from tunery.benchmarks.regression import Check, compare_to_baseline, write_baseline
from tunery.benchmarks.results import CellResult, Results

Scores = Mapping[str, Mapping[str, list[float | None]]]
BASE: Scores = {
    "rte": {"full": [0.60, 0.62, 0.61, 0.63, 0.60], "mmr": [0.64, 0.62, 0.65, 0.63, 0.66]},
    "cb": {"full": [0.80, 0.82, 0.81, 0.83, 0.80], "mmr": [0.84, 0.82, 0.85, 0.83, 0.86]},
}


def results(scores: Scores, **changes: Any) -> Results:
    """Return cells with these scores by task, method and seed; ``None`` is a crash."""
    cells = [
        CellResult(
            **{
                "suite": "small",
                "task": task,
                "method": method,
                "seed": seed,
                "status": "failed" if score is None else "done",
                "error": None,
                "inputs": {},
                "metrics": {} if score is None else {"accuracy": score, "f1": score},
                "main_metric": "accuracy",
                "higher_is_better": True,
                "majority": None,
                "curve": (),
                "train_info": {},
                "run_info": {},
                "meta_info": {},
            }
            | changes
        )
        for task, methods in scores.items()
        for method, values in methods.items()
        for seed, score in enumerate(values)
    ]
    return Results(Path("results/small"), {}, tuple(cells), {})


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., Check]:
    """Compare scores with ``BASE`` through the file."""

    def compare(now: Scores, base: Scores = BASE, **changes: Any) -> Check:
        write_baseline(results(base, **changes), tmp_path / "baseline.json")
        return compare_to_baseline(results(now, **changes), tmp_path / "baseline.json")

    return compare


def shifted(by: list[float], method: str = "mmr", task: str = "rte") -> Scores:
    """Return ``BASE`` with one method's scores on one task shifted seed by seed."""
    values = [float(old or 0) + change for old, change in zip(BASE[task][method], by, strict=True)]
    return {**BASE, task: {**BASE[task], method: values}}


def test_same_results_are_not_worse(check: Callable[..., Check]):
    """What is equal to the bit passes, and says that nothing is missing."""
    found = check(BASE)
    assert (found.ok, found.missing, len(found.changes)) == (True, (), 2 + 4)
    assert {change.difference for change in found.changes} == {0}


def test_a_real_drop_is_told(check: Callable[..., Check]):
    """A method that lost about three points on one task is worse there and on average, and no other is."""
    found = check(shifted([-0.03, -0.028, -0.033, -0.031, -0.029]))
    assert {(change.task, change.method) for change in found.worse} == {("average", "mmr"), ("rte", "mmr")}
    text = str(found.worse[-1])
    assert text.startswith("mmr on rte: worse; -0.0302 over 5 seeds; one-sided p = ")


@pytest.mark.parametrize(
    "by",
    [
        [-0.03, 0.02, -0.04, 0.03, -0.02],  # noise larger than the drop
        [-0.003, -0.0031, -0.0029, -0.003, -0.0032],  # certain, and too small to matter
        [0.03, 0.028, 0.033, 0.031, 0.029],  # better
    ],
)
def test_noise_trifles_and_gains_pass(by: list[float], check: Callable[..., Check]):
    assert check(shifted(by)).ok


@pytest.mark.parametrize(("drop", "ok"), [(-0.004, True), (-0.006, False)])
def test_without_noise_the_margin_decides(drop: float, ok: bool, check: Callable[..., Check]):
    """Differences that are all equal, and a single seed, have no spread to test against."""
    assert check(shifted([drop] * 5)).ok == ok
    one = {"rte": {"mmr": [0.7]}}
    found = check({"rte": {"mmr": [0.7 + drop]}}, one)
    assert found.ok == ok
    assert "no noise to judge by: the margin decides" in str(found.changes[0])


def test_lost_runs_are_worse(check: Callable[..., Check]):
    """A cell that had a score and crashes now is worse; one that has not run yet is only missing."""
    crashed = {**BASE, "rte": {**BASE["rte"], "mmr": [0.64, None, 0.65, 0.63, 0.66]}}
    found = check(crashed)
    assert [(change.task, change.method, change.lost) for change in found.worse] == [("rte", "mmr", (1,))]
    assert "no score any more with seed 1" in str(found.worse[0])
    unfinished = {**BASE, "rte": {"full": BASE["rte"]["full"], "mmr": [0.64]}}
    found = check(unfinished)
    assert found.ok
    assert found.missing == tuple(f"rte--mmr--seed{seed}" for seed in range(1, 5))


def test_a_task_that_only_fails_is_worse(tmp_path: Path):
    """Its runs never got as far as a metric: that they lost their scores is told all the same, and can be a baseline."""
    path = tmp_path / "baseline.json"
    write_baseline(results(BASE), path)
    now = results({**BASE, "cb": {"full": [None] * 5}})
    nameless = [replace(cell, main_metric="") if cell.task == "cb" else cell for cell in now.cells]
    now = replace(now, cells=tuple(nameless))
    assert [(change.task, change.method, len(change.lost)) for change in compare_to_baseline(now, path).worse] == [
        ("cb", "full", 5)
    ]
    write_baseline(now, path)
    assert json.loads(path.read_text())["tasks"].keys() == {"rte"}
    assert compare_to_baseline(results(BASE), path).ok


def test_only_points_are_averaged(check: Callable[..., Check]):
    """Losses have no mean over tasks, here as in the report."""
    assert "average" in {change.task for change in check(BASE).changes}
    assert "average" not in {change.task for change in check(BASE, higher_is_better=False).changes}


def test_lower_is_better(check: Callable[..., Check]):
    """Of a loss, a rise is worse."""
    base: Scores = {"rte": {"mmr": [2.0, 2.1, 2.2, 2.05]}}
    assert not check({"rte": {"mmr": [2.3, 2.42, 2.49, 2.36]}}, base, higher_is_better=False).ok
    assert check({"rte": {"mmr": [1.7, 1.82, 1.89, 1.76]}}, base, higher_is_better=False).ok


def test_false_alarms_are_rare(check: Callable[..., Check]):
    """Of runs that differ by noise alone, few are called worse: at most 5 % a family, two families."""
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(120):
        base, now = ({t: {m: list(rng.normal(0.7, 0.02, 5)) for m in "abc"} for t in ("x", "y")} for _ in range(2))
        alarms += not check(now, base).ok
    assert alarms <= 120 * 0.1 + 3 * (120 * 0.1 * 0.9) ** 0.5


def test_new_methods_and_tasks_do_not_matter(check: Callable[..., Check]):
    """What the baseline does not know is not judged."""
    assert check({**BASE, "new": {"mmr": [0.1] * 5}, "rte": {**BASE["rte"], "lora": [0.1] * 5}}).ok


def test_refusals(tmp_path: Path):
    """Another metric, nothing in common, and a file that was edited, is none or comes from the future: one line each."""
    path = tmp_path / "baseline.json"
    write_baseline(results(BASE), path)
    with pytest.raises(ResultError, match=r"task '(rte|cb)' is scored by f1 here and by accuracy in the baseline"):
        compare_to_baseline(results(BASE, main_metric="f1"), path)
    with pytest.raises(ResultError, match="share no task, method and seed"):
        compare_to_baseline(results({"trec": {"mmr": [0.5]}}), path)
    content = json.loads(path.read_text())
    content["cells"][0]["scores"]["0"] = 0.1
    path.write_text(json.dumps(content))
    with pytest.raises(ResultError, match="does not match its hash; it is damaged or was edited"):
        compare_to_baseline(results(BASE), path)
    for text in ("[1]", "half", "[" * 10**5):
        path.write_text(text)
        with pytest.raises(ResultError, match="is no baseline"):
            compare_to_baseline(results(BASE), path)
    with pytest.raises(
        ResultError, match=r"cannot read .*nowhere: .*; tunery report RESULTS --write_baseline FILE writes one"
    ):
        compare_to_baseline(results(BASE), tmp_path / "nowhere")
    with pytest.raises(ResultError, match="holds no score"):
        write_baseline(results({"rte": {"mmr": [None]}}), path)
    with pytest.raises(ResultError, match="cannot write"):
        write_baseline(results(BASE), tmp_path / "no" / "folder.json")
