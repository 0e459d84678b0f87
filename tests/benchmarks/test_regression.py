"""``--check``: worse beyond noise is found, noise is not, and what cannot be told is not claimed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tunery.benchmarks.regression import Check, check, save_baseline
from tunery.benchmarks.results import CellResult, ResultError, Results

Scores = Mapping[str, Mapping[int, float | None]]


def results(scores: Scores, folder: Path, higher: bool = True) -> Results:
    """Return cells of one task with these scores by method and seed; ``None`` is a failed one."""
    cells = [
        CellResult(
            suite="s",
            task="t",
            method=method,
            seed=seed,
            status="failed" if score is None else "done",
            error=None,
            inputs={},
            metrics={} if score is None else {"m": score},
            main_metric="m",
            higher_is_better=higher,
            majority=None,
            curve=[],
            train_info={},
            run_info={},
            meta_info={},
        )
        for method, found in scores.items()
        for seed, score in found.items()
    ]
    return Results(folder, {}, tuple(cells), {})


def checked(tmp_path: Path, before: Scores, now: Scores, higher: bool = True) -> dict[str, Check]:
    save_baseline(results(before, tmp_path, higher), tmp_path / "baseline.json")
    return {one.method: one for one in check(results(now, tmp_path, higher), tmp_path / "baseline.json")}


def test_worse_beyond_noise(tmp_path: Path):
    """The p is scipy's one-sided paired one, corrected for three methods; only the real loss is called worse."""
    rng = np.random.default_rng(0)
    before = {name: dict(enumerate(rng.normal(0.7, 0.02, 8))) for name in ("a", "b", "c")}
    shift = {"a": -0.05, "b": 0.0, "c": 0.05}
    now = {
        name: {seed: score + shift[name] + rng.normal(0, 0.01) for seed, score in before[name].items()}
        for name in before
    }
    found = checked(tmp_path, before, now)
    p = stats.ttest_rel(
        [now["a"][seed] for seed in range(8)], [before["a"][seed] for seed in range(8)], alternative="less"
    )
    assert found["a"].p == pytest.approx(3 * p.pvalue)
    assert {name: one.worse for name, one in found.items()} == {"a": True, "b": False, "c": False}
    assert found["c"].difference == pytest.approx(0.05, abs=0.01)


def test_a_loss_is_worse_when_higher(tmp_path: Path):
    before = {"a": {0: 1.0, 1: 1.1, 2: 0.9, 3: 1.0}}
    now = {"a": {0: 2.0, 1: 2.2, 2: 1.9, 3: 2.1}}
    assert checked(tmp_path, before, now, higher=False)["a"].worse
    assert not checked(tmp_path, before, now, higher=True)["a"].worse


def test_without_noise(tmp_path: Path):
    """The same bits are the same; every seed down by the same amount is worse; two seeds show nothing."""
    before = {name: {0: 0.5, 1: 0.75, 2: 0.25} for name in ("same", "down")} | {"few": {0: 0.5, 1: 0.5}}
    now = {"same": before["same"], "down": {0: 0.375, 1: 0.625, 2: 0.125}, "few": {0: 0.25, 1: 0.25}}
    found = checked(tmp_path, before, now)
    assert [found[name].verdict for name in ("same", "down", "few")] == ["the same", "worse", "too few seeds to say"]


def test_failing_now_is_worse(tmp_path: Path):
    """A seed that had a score and runs without one counts; one that was not run does not."""
    found = checked(tmp_path, {"a": {0: 0.5, 1: 0.5}, "b": {0: 0.5, 1: 0.5}}, {"a": {0: 0.5, 1: None}, "b": {0: 0.5}})
    assert found["a"].verdict == "worse: no score any more with seed 1"
    assert not found["b"].worse


def test_refused(tmp_path: Path):
    path = tmp_path / "baseline.json"
    now = results({"a": {0: 0.5}}, tmp_path)
    with pytest.raises(ResultError, match=r"no baseline .*--save_baseline"):
        check(now, path)
    save_baseline(now, path)
    with pytest.raises(ResultError, match="shares no task, method and seed"):
        check(results({"b": {0: 0.5}}, tmp_path), path)
    path.write_text(path.read_text().replace("0.5", "0.6"))
    with pytest.raises(ResultError, match="does not match its hash"):
        check(now, path)
    path.write_text("[]")
    with pytest.raises(ResultError, match="is no baseline"):
        check(now, path)
