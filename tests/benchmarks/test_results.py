"""Result files: what was written is read, and what is not as it was written is named and moved aside."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tunery.benchmarks.cells import failure
from tunery.benchmarks.errors import ResultError
from tunery.benchmarks.results import CellResult, digest, file_name, read_cell, read_results, sealed


def content(**changes: Any) -> dict[str, Any]:
    """Return the unsealed content of a cell's file."""
    return {
        "format": 1,
        "suite": "small",
        "task": "rte",
        "method": "mmr",
        "seed": 3,
        "status": "done",
        "error": None,
        "inputs": {"fingerprint": "0" * 64},
        "metrics": {"accuracy": 0.625, "loss": 0.5},
        "main_metric": "accuracy",
        "higher_is_better": True,
        "majority": 0.5,
        "curve": [[10, 0.5], [20, 0.625]],
        "train_info": {"seconds": 1.5, "peak_memory_bytes": 10, "steps": 20, "train_loss": 0.4, "parameters": {}},
        "run_info": {"strategy": "full", "regularizers": ["mmr"], "learning_rate": 1e-3, "recipe": {}},
        "meta_info": {"versions": {}, "plugins": [], "started": "", "finished": ""},
    } | changes


def write(folder: Path, name: str | None = None, **changes: Any) -> Path:
    """Write a cell's file as bench does, under its name or another."""
    cell = sealed(content(**changes))
    path = folder / (name or file_name(cell["task"], cell["method"], cell["seed"]))
    path.write_text(json.dumps(cell, indent=2), encoding="utf-8")
    return path


def test_cell_is_read(tmp_path: Path):
    """What a cell measured comes back, by name."""
    cell = read_cell(write(tmp_path))
    assert (cell.key, cell.score, cell.failed) == (("rte", "mmr", 3), 0.625, False)
    assert cell.curve == ((10, 0.5), (20, 0.625))


def test_hash_is_of_canonical_json():
    """Anyone can check a file with the standard library, however it is indented."""
    canonical = json.dumps(content(), sort_keys=True, separators=(",", ":")).encode()
    assert digest(sealed(content())) == hashlib.sha256(canonical).hexdigest()


@pytest.mark.parametrize(
    ("changes", "score", "degenerate", "failed"),
    [
        ({}, 0.625, False, False),
        ({"majority": None}, 0.625, False, False),
        ({"majority": 0.625}, 0.625, True, True),  # no better than the majority class
        ({"higher_is_better": False, "majority": 0.7}, 0.625, False, False),
        ({"higher_is_better": False, "majority": 0.6}, 0.625, True, True),
        ({"status": "failed", "error": "CUDA out of memory"}, None, False, True),
        ({"metrics": {"accuracy": float("nan")}}, None, False, True),
        ({"metrics": {}}, None, False, True),
    ],
)
def test_failed(changes: dict[str, Any], score: float | None, degenerate: bool, failed: bool, tmp_path: Path):
    """A run counts as failed without a finite score, and when the majority class would have done as well."""
    cell = read_cell(write(tmp_path, **changes))
    assert (cell.score, cell.degenerate, cell.failed) == (score, degenerate, failed)


def test_a_failed_cell_is_of_its_tasks_metric(tmp_path: Path):
    """It has none of its own; the done ones of its task say which, and whether less of it is better."""
    write(tmp_path, main_metric="loss", higher_is_better=False)
    write(tmp_path, seed=4, **failure("out of memory"))
    write(tmp_path, task="cb", **failure("out of memory"))
    found = {cell.key: (cell.main_metric, cell.higher_is_better) for cell in read_results(tmp_path).cells}
    assert found["rte", "mmr", 4] == found["rte", "mmr", 3] == ("loss", False)
    assert found["cb", "mmr", 3] == ("", True)  # nothing of it is done


def test_damaged_files_are_moved_aside(tmp_path: Path):
    """One flipped digit, half a file, a copy under another seed's name: each is named, moved and not averaged."""
    whole = write(tmp_path)
    flipped = write(tmp_path, seed=4)
    flipped.write_text(flipped.read_text().replace("0.625,", "0.925,"), encoding="utf-8")
    torn = write(tmp_path, seed=5)
    torn.write_text(torn.read_text()[:200], encoding="utf-8")
    write(tmp_path, name="rte--mmr--seed6.json")
    write(tmp_path, seed=7, status="perhaps")
    write(tmp_path, seed=8, curve=[[1, 2, 3]])
    write(tmp_path, seed=9, majority="half")
    (tmp_path / "rte--mmr--seed10.json").write_text("[" * 10**5, encoding="utf-8")
    results = read_results(tmp_path)
    assert [cell.seed for cell in results.cells] == [3]
    assert [path.name for path in sorted(tmp_path.glob("*.json"))] == [whole.name]
    told = {path.name: why for path, why in results.damaged.items()}
    assert [told[f"rte--mmr--seed{seed}.json"] for seed in range(4, 10)] == [
        "rte--mmr--seed4.json does not match its hash",
        "rte--mmr--seed5.json is not JSON: " + told["rte--mmr--seed5.json"].split(": ", 1)[1],
        "rte--mmr--seed6.json holds what belongs in rte--mmr--seed3.json",
        "rte--mmr--seed7.json has status 'perhaps'; known: done, failed",
        "rte--mmr--seed8.json has a curve that is no list of (step, value)",
        "rte--mmr--seed9.json has majority = 'half'",
    ]
    assert all(path.exists() for path in results.damaged)


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    """Where a damaged file cannot be moved aside, it is named in one line."""
    write(tmp_path).write_text("half", encoding="utf-8")
    (tmp_path / "damaged").touch()
    with pytest.raises(ResultError, match=r"cannot move rte--mmr--seed3.json to .*damaged: File exists"):
        read_results(tmp_path)


def test_quarantine_keeps_what_it_holds(tmp_path: Path):
    """A second damaged file of the same cell takes a free name."""
    for text in ("first", "second"):
        (tmp_path / "rte--mmr--seed3.json").write_text(text, encoding="utf-8")
        read_results(tmp_path)
    kept = {path.name: path.read_text() for path in (tmp_path / "damaged").iterdir()}
    assert kept == {"rte--mmr--seed3.json": "first", "rte--mmr--seed3.2.json": "second"}


def test_newer_format_stays_where_it_is(tmp_path: Path):
    """A result that only a newer tunery reads is not damaged."""
    path = write(tmp_path, format=2)
    with pytest.raises(ResultError, match="has format 2; known: 1; pip install --upgrade tunery"):
        read_results(tmp_path)
    assert path.exists()


def test_suite_gives_the_order(tmp_path: Path):
    """Tasks and methods come as the suite lists them, unlisted ones after; without a suite by alphabet."""
    for task, method in (("cb", "mixout"), ("rte", "mmr"), ("rte", "fine_tune"), ("cb", "another")):
        write(tmp_path, task=task, method=method)
    assert read_results(tmp_path).methods == ("another", "fine_tune", "mixout", "mmr")
    suite = {"name": "small", "tasks": ["rte", "cb"], "methods": [{"name": "fine_tune"}, {"name": "mmr"}]}
    (tmp_path / "suite.json").write_text(json.dumps(suite), encoding="utf-8")
    results = read_results(tmp_path)
    assert (results.tasks, results.methods) == (("rte", "cb"), ("fine_tune", "mmr", "another", "mixout"))
    assert [cell.method for cell in results.of("cb", "mixout")] == ["mixout"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: folder / "nowhere", "no folder .*nowhere; tunery bench SUITE writes one"),
        (lambda folder: folder, "holds no results; tunery bench SUITE writes them"),
        (lambda folder: _nested(folder), "holds no results; known: small; name one of the suites in it"),
        (lambda folder: _suite_of(folder, '{"name": '), "cannot read .*suite.json"),
        (lambda folder: _suite_of(folder, "[" * 10**5), "cannot read .*suite.json"),
        (lambda folder: _suite_of(folder, "[]"), "suite.json is no suite; remove it"),
        (lambda folder: _suite_of(folder, '{"tasks": 5}'), "suite.json is no suite"),
        (lambda folder: _suite_of(folder, '{"methods": [{"nam": "a"}]}'), "suite.json is no suite"),
        (lambda folder: _suite_of(folder, '{"seeds": 3}'), "suite.json is no suite"),
        (lambda folder: _suite_of(folder, '{"overrides": [{"tasks": 5}]}'), "suite.json is no suite"),
    ],
)
def test_folder_that_is_none(make: Any, says: str, tmp_path: Path):
    """A folder without results is answered in one line."""
    with pytest.raises(ResultError, match=says):
        read_results(make(tmp_path))


def _nested(folder: Path) -> Path:
    (folder / "small").mkdir()
    (folder / "small" / "suite.json").write_text("{}", encoding="utf-8")
    return folder


def _suite_of(folder: Path, text: str) -> Path:
    (folder / "suite.json").write_text(text, encoding="utf-8")
    return folder


def test_cell_fields_are_the_files():
    """Every key of a file but its format is a field of the dataclass, the hash as ``seal``; ``joint`` is in no file."""
    assert set(CellResult.__dataclass_fields__) == set(content()) - {"format"} | {"seal", "joint"}
