"""A made-up suite's folder: four tasks, five methods, five seeds, two crashes, a few degenerate runs, a paper's table."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tunery.benchmarks.cells import failure
from tunery.benchmarks.results import file_name, sealed

TASKS = {"rte": (0.62, 0.527), "mrpc": (0.84, 0.684), "cb": (0.79, 0.5), "trec": (0.93, 0.188)}  # level, majority
METHODS = {  # gain, spread, trainable parameters, seconds, peak memory in MB
    "fine_tune": (0.0, 0.022, 22_700_000, 31.0, 820),
    "mixout": (0.004, 0.016, 22_700_000, 36.5, 960),
    "mmr": (0.021, 0.009, 22_700_000, 33.0, 850),
    "mhloss": (0.008, 0.012, 22_720_000, 32.0, 830),
    "lora": (-0.012, 0.02, 147_000, 24.0, 510),
}
PAPER = {
    "fine_tune": ["76.21±2.04", "88.84±0.97", "79.11±2.77"],
    "mixout": ["75.63±1.52", "89.42±0.66", "78.57±3.29"],
    "mmr": ["75.59±0.55", "89.58±0.59", "80.00±3.81"],
    "lnsr": ["74.26±0.97", "89.21±0.65", "80.71±2.74"],
}


def cell(task: str, method: str, seed: int, **changes: Any) -> dict[str, Any]:
    """Return the unsealed content of a made-up cell's file; the same arguments give the same numbers."""
    level, majority = TASKS[task]
    gain, spread, trainable, seconds, memory = METHODS[method]
    rng = np.random.default_rng(zlib.crc32(f"{task} {method} {seed}".encode()))
    shared = np.random.default_rng(zlib.crc32(f"{task} {seed}".encode())).normal(0, 0.006)
    score = float(np.clip(level + gain + shared + rng.normal(0, spread), 0, 1))
    steps = range(20, 201, 20)
    curve = [[s, float(score - (score - majority) * np.exp(-s / 45) + rng.normal(0, 0.004))] for s in steps]
    plugin = {"kind": "strategy", "name": "lora" if method == "lora" else "full"}
    regularizers = [] if method in ("fine_tune", "lora") else [method]
    plugins = [plugin, *({"kind": "regularizer", "name": name} for name in regularizers)]
    origin = {"distribution": "tunery", "version": "0.1.0", "file": "", "module": "", "config": {}}
    return {
        "format": 1,
        "suite": "made_up",
        "task": task,
        "method": method,
        "seed": seed,
        "status": "done",
        "error": None,
        "inputs": {"fingerprint": f"{zlib.crc32(f'{task}{method}'.encode()):064x}"},
        "metrics": {"accuracy": score, "loss": 0.5},
        "main_metric": "accuracy",
        "higher_is_better": True,
        "majority": majority,
        "curve": [*curve[:-1], [200, score]],
        "train_info": {
            "seconds": seconds * float(rng.uniform(0.95, 1.05)),
            "peak_memory_bytes": int(memory * 1e6 * rng.uniform(0.99, 1.01)),
            "steps": 200,
            "train_loss": 0.3,
            "parameters": {"trainable": trainable, "stored": trainable, "total": 22_700_000},
        },
        "run_info": {"strategy": plugin["name"], "regularizers": regularizers, "learning_rate": 3e-4, "recipe": {}},
        "meta_info": {
            "cpu": "x86_64",
            "gpu": None,
            "versions": {"python": "3.11.9", "torch": "2.13.0", "tunery": "0.1.0"},
            "plugins": [{**item, **origin} for item in plugins],
            "started": "2026-11-20T10:00:00+00:00",
            "finished": f"2026-11-20T10:{seed:02d}:31+00:00",
        },
    } | changes


def write_cell(folder: Path, content: Mapping[str, Any]) -> Path:
    """Seal a cell and write it under its name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(content["task"], content["method"], content["seed"])
    path.write_text(json.dumps(sealed(content), indent=2, sort_keys=True), encoding="utf-8")
    return path


def crash(content: dict[str, Any], error: str) -> dict[str, Any]:
    """Return a cell that failed, as bench records it: it never got as far as a metric."""
    return {**content, **failure(error), "meta_info": {**content["meta_info"], "plugins": []}}


def write_suite(folder: Path, **changes: Any) -> None:
    """Write ``suite.json``."""
    suite = {
        "name": "made_up",
        "description": "Numbers from a generator: what a report looks like, and nothing about the methods.",
        "tasks": [{"name": task, "keys": {"train_file": f"{task}.jsonl"}} for task in TASKS],
        "methods": [{"name": method, "keys": {"strategy": "full"}} for method in METHODS],
        "seeds": list(range(5)),
        "protocol": ["dev_as_test", "early_stopping"],
        "defaults": {"max_steps": 200, "learning_rate": 3e-4},
        "overrides": [],
        "threads": 1,
        "reference": {"title": "Table 2 of a paper", "columns": ["rte", "mrpc", "cb"], "rows": PAPER},
    } | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "suite.json").write_text(json.dumps(suite, sort_keys=True), encoding="utf-8")


def make_results(folder: Path) -> Path:
    """Write the whole made-up suite: 100 cells, of which two crashed and two learnt nothing."""
    write_suite(folder)
    for task, (_, majority) in TASKS.items():
        for method in METHODS:
            for seed in range(5):
                content = cell(task, method, seed)
                if (task, method, seed) in (("cb", "mixout", 3), ("trec", "mixout", 1)):
                    content = crash(content, "loss became nan at step 40 <b>&c.</b>")
                if (task, method, seed) in (("rte", "fine_tune", 4), ("rte", "lora", 2)):
                    content["metrics"] = {"accuracy": majority, "loss": 0.7}
                write_cell(folder, content)
    return folder


@pytest.fixture(scope="session")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The made-up suite's folder, read by many tests and changed by none."""
    return make_results(tmp_path_factory.mktemp("results") / "made_up")


@pytest.fixture
def cells() -> Callable[..., dict[str, Any]]:
    """What makes the content of a cell's file."""
    return cell
