"""The run of one cell: ``tunery train``'s or ``tunery federate``'s own, and what its result file keeps of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..core.data.metrics import MEAN
from ..core.inflection import lower_is_better
from ..registry.errors import RecipeError
from ..registry.loading import load_plugins
from .inputs import without_caches
from .suite import Cell

_MAJORITY = "majority"


def measure(cell: Cell, place: Path) -> dict[str, Any]:
    """Train and score a cell in an empty folder; return the content of its result.

    Raises:
        TuneryError: the recipe cannot be used.
    """
    return _federated(cell, place) if cell.command == "federate" else _trained(cell, place)


def _trained(cell: Cell, place: Path) -> dict[str, Any]:
    from .. import build_options, train

    quiet = {"report_to": "none", "save_strategy": "no", "logging_strategy": "epoch", "disable_tqdm": True}
    keys = {**quiet, **cell.keys, "baselines": [_MAJORITY]}
    searched = {}
    for rate in cell.protocol.learning_rates:
        trial = {**keys, "learning_rate": rate, "do_predict": False, "output_dir": str(place / f"rate-{rate:g}")}
        found = train(build_options(trial))
        searched[rate] = found["metrics"][_main(found)]
    if searched:
        finite = {rate: score for rate, score in searched.items() if math.isfinite(score)}
        if not finite:
            raise RecipeError("learning_rate_search: the model diverged with every rate", remedy="add smaller ones")
        better = min if _lower_is_better(found) else max
        keys["learning_rate"] = better(finite, key=lambda rate: finite[rate])
    options = build_options({**keys, "output_dir": str(place / "run")})
    result = train(options)
    history = json.loads((place / "run" / "trainer_state.json").read_text(encoding="utf-8"))
    on_test = cell.protocol.scored_on == "test"
    content = _content(cell, result, options.training, history["global_step"])
    content["run_info"]["learning_rate_search"] = {f"{rate:g}": score for rate, score in searched.items()}
    content["run_info"]["validation_metrics"] = _of_split(result, on_test=False)
    majority = _of_split({**result, **result["baselines"][_MAJORITY]}, on_test=on_test)
    curves = {name: _curve(history["log_history"], f"eval_{name}") for name in result["main_metrics"]}
    if len(curves) > 1:  # of several tasks, each one's main metric, and their mean
        content["run_info"]["tasks"] = {
            task: {"main_metric": name.removeprefix(f"{task}_"), "majority": majority.get(name), "curve": curves[name]}
            for task, name in zip(result["task"].split("+"), result["main_metrics"], strict=False)
        }
    return content | {
        "metrics": _of_split(result, on_test=on_test),
        "majority": majority.get(_main(result)),
        "curve": curves[_main(result)],
    }


def _curve(history: Iterable[Mapping[str, Any]], key: str) -> list[list[float]]:
    return [[row["step"], row[key]] for row in history if key in row]


def _federated(cell: Cell, place: Path) -> dict[str, Any]:
    from .. import build_federated_options, federate
    from ..core.data import load_tasks
    from ..core.data.metrics import majority_baseline
    from ..core.federated.checkpoint import LOG

    options = build_federated_options({"disable_tqdm": True, **cell.keys, "output_dir": str(place / "run")})
    result = federate(options)
    args, main = options.run.training, _main(result)
    (data,) = load_tasks(options.run.data, seed=args.seed if args.data_seed is None else args.data_seed)
    labels = [data.splits[name]["labels"] for name in ("train", "validation")] if data.task.label_names else [[], []]
    rows = [json.loads(line) for line in (place / "run" / LOG).read_text(encoding="utf-8").splitlines()]
    content = _content(cell, result, args, result["rounds"])
    content["train_info"] |= {key: result[key] for key in ("rounds", "clients", "client_seconds", "bytes")}
    return content | {
        "metrics": dict(result["metrics"]),
        "majority": majority_baseline(data.task, *labels).get(main) if data.task.label_names else None,
        "curve": [[row["round"], row["metrics"][main]] for row in rows if main in row.get("metrics", ())],
    }


def _content(cell: Cell, result: Mapping[str, Any], args: Any, steps: int) -> dict[str, Any]:
    """Return what both kinds of runs have in common; ``steps`` are those of the curve."""
    info = ("seconds", "peak_memory_bytes", "train_loss", "parameters", "examples")
    recipe = without_caches(cell.recipe, load_plugins().catalog)
    return {
        "status": "done",
        "error": None,
        "main_metric": _main(result),
        "higher_is_better": not _lower_is_better(result),
        "train_info": {**{key: result[key] for key in info}, "steps": steps},
        "run_info": {
            "command": cell.command,
            "strategy": recipe.get("strategy"),
            "regularizers": args.regularizers or [],
            "learning_rate": args.learning_rate,
            "recipe": recipe,
        },
        "meta_info": {"plugins": result["plugins"]},
    }


def _main(result: Mapping[str, Any]) -> str:
    return str(result["main_metrics"][-1])


def _lower_is_better(result: Mapping[str, Any]) -> bool:
    """Whether less of the main metric is better; of a mean, what holds for each of its tasks."""
    return lower_is_better(result["main_metrics"][0] if _main(result) == MEAN else _main(result))


def _of_split(result: Mapping[str, Any], *, on_test: bool) -> dict[str, float]:
    """Return the metrics of the test or of the validation split, under plain names.

    Those of the test split begin with ``test_``; of several tasks, what they generate with ``<task>_test_``.
    """
    found = {}
    for key, value in result["metrics"].items():
        task = next((f"{name}_" for name in result["task"].split("+") if key.startswith(f"{name}_test_")), "")
        is_test = key.removeprefix(task).startswith("test_")
        if is_test == on_test:
            found[task + key.removeprefix(task).removeprefix("test_") if is_test else key] = value
    return found
