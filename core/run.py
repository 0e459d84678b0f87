"""The story of a run: options -> data, model, trainer -> result. Read this first: ``train`` is what ``tunery train`` does.

What becomes of a finished run is in :mod:`.finished`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, set_seed

from ..registry.errors import DataError, RecipeError
from .alignment import evaluate_whole
from .artifacts import MANIFEST, RESULT, read_manifest, versions, write_json
from .context import make_context
from .data import DataArguments, TaskData, encode, encode_jointly, load_tasks
from .data.generation import PREDICTIONS, Writer, questions, score
from .data.metrics import (
    add_perplexity,
    main_metrics,
    majority_baseline,
    mean_of_main,
)
from .joint import best_alone, head_task, scoring
from .models import commit_of, load_model, load_processor
from .options import Options
from .plots import CURVE, plot_training_curve
from .probing import MEASUREMENTS
from .recipe import choose
from .sharding import parameter_counts
from .staging import STAGES, place_to_resume, stage_history
from .trainer import Trainer

MAJORITY = "majority"
_FILES = (MANIFEST, RESULT, MEASUREMENTS, PREDICTIONS, CURVE)
_EARLIER = (*_FILES, "baselines", STAGES, "checkpoint-*", "*.safetensors", "adapter_config.json")


def train(options: Options) -> dict[str, Any]:
    """Train, evaluate and save one run; return what ``result.json`` holds.

    ``train_loss`` and ``seconds`` are those since the run was last resumed.

    Raises:
        TuneryError: anything a user can mend; nothing has been trained then.
    """
    args, output_dir = options.training, options.output_dir
    chosen = choose(args.strategy, args.regularizers, args.probes)  # a wrong name should cost no loading of models
    resume, earlier = _prepare_output(options)

    set_seed(args.seed)
    with args.main_process_first(desc="reading the data"):
        data = load_tasks(options.data, seed=args.seed if args.data_seed is None else args.data_seed)
    tasks = [item.task for item in data]
    reference, revision = options.run.model_name_or_path, options.run.model_revision
    processor = load_processor(reference, tasks[0], revision)
    model = load_model(reference, head_task([*tasks, *chosen.earlier_tasks]), revision, options.run.dtype)
    encoded = encode_jointly(data, processor, options.mixing) if len(data) > 1 else encode(data[0], processor)
    if args.do_predict and encoded.test is None:
        raise DataError("do_predict without a labelled test split", owner=", ".join(task.name for task in tasks))
    asked = questions(data, processor, model.config, args.metric_for_best_model)
    for name in options.run.baselines or ():
        for task in tasks:
            choose(None if name == MAJORITY else name).check(model, make_context(model, args, [task]))

    trainer = Trainer(
        model=model,
        args=args,
        task=tasks,
        base_model=reference,
        base_revision=commit_of(reference, revision),
        train_dataset=encoded.train,
        eval_dataset=encoded.validation,
        data_collator=encoded.data_collator,
        processing_class=processor,
        **scoring(tasks, args.metric_for_best_model),
    )
    if options.run.early_stopping_patience:
        trainer.add_callback(EarlyStoppingCallback(options.run.early_stopping_patience))
    if trainer.is_world_process_zero():
        remove(earlier)
    started = time.monotonic()
    outcome = trainer.train(resume_from_checkpoint=resume)
    seconds = time.monotonic() - started
    metrics = _final_metrics(trainer)
    if args.do_predict:
        rows: Any = encoded.test
        metrics |= _without_timing(trainer.predict(rows).metrics or {}, "test")
    if len(tasks) == 1 and tasks[0].kind.is_language_modelling:
        for prefix in ("eval", "test") if args.do_predict else ("eval",):
            metrics = add_perplexity(metrics, prefix)
    plugged_in = _without_timing(evaluate_whole(trainer), "eval")
    if plugged_in and tasks[0].kind.is_language_modelling:
        plugged_in = add_perplexity(plugged_in, "eval")
    trainer.save_model()
    trainer.save_state()
    if asked:
        writer = Writer(
            model=trainer.model,
            tokenizer=processor,
            accelerator=trainer.accelerator,
            batch_size=args.per_device_eval_batch_size,
            several_tasks=len(tasks) > 1,
            show_progress=not args.disable_tqdm,
        )
        metrics |= score(asked, writer, output_dir)
        if len(tasks) > 1:
            plain = {key.removeprefix("eval_"): value for key, value in metrics.items()}
            metrics |= {**mean_of_main(tasks, plain), **mean_of_main(tasks, plain, "test_")}

    trained: Any = trainer.model
    result = {
        "task": "+".join(task.name for task in tasks),
        "metrics": {key.removeprefix("eval_"): value for key, value in metrics.items()},
        "main_metrics": main_metrics(tasks),
        "train_loss": outcome.training_loss,
        "examples": _examples(data),
        "parameters": {
            **parameter_counts(trained),
            "stored": stored_parameters(output_dir),
            **(trainer.recipe.strategy.counts(trained) if trainer.recipe.strategy else {}),
        },
        "seconds": seconds,
        "peak_memory_bytes": peak_memory(),
        "seed": args.seed,
        "plugins": trainer.recipe.describe(),
        "base_model": reference,
        "data": data_keys(options),
        "versions": versions(),
    }
    if trainer.finished_stages:
        result["stages"] = trainer.finished_stages
    if trainer.alignment:
        result["alignment"] = dict(trainer.alignment)
    if plugged_in:
        result["plugged_in"] = {key.removeprefix("eval_"): value for key, value in plugged_in.items()}
    if trainer.is_world_process_zero():
        for stage in trainer.finished_stages:
            folder = output_dir / STAGES / stage["name"]
            plot_training_curve(stage_history(folder), folder / CURVE, f"{result['task']}: {stage['name']}", None)
        plot_training_curve(
            trainer.state.log_history,
            output_dir / CURVE,
            f"{result['task']}: {args.strategy or 'as given'}",
            result["main_metrics"][-1],
        )
        write_json(output_dir / RESULT, result)
    if options.run.baselines:
        result["baselines"] = {name: _baseline(options, name, data) for name in options.run.baselines}
        if trainer.is_world_process_zero():
            write_json(output_dir / RESULT, result)
    return result


def _prepare_output(options: Options) -> tuple[str | None, list[Path]]:
    """Return the checkpoint to resume from and what to remove of an earlier run; refuse to mix two runs in one folder."""
    output_dir, asked = options.output_dir, options.training.resume_from_checkpoint
    check_writable(output_dir)
    if asked:
        found = place_to_resume(output_dir) if str(asked).lower() in ("last", "true") else Path(asked)
        if found is not None and found.name != STAGES:
            read_manifest(found)
        return None if found is None else str(found), []
    return None, refuse_mixing(output_dir, _EARLIER, options.run.overwrite_output_dir)


def check_writable(output_dir: Path) -> None:
    """Check that a run's folder can be made or written to.

    Raises:
        RecipeError: it cannot.
    """
    parent = next(path for path in (output_dir, *output_dir.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise RecipeError(f"cannot write to {output_dir}", owner=str(parent), remedy="choose another --output_dir")


def refuse_mixing(output_dir: Path, patterns: Iterable[str], overwrite: bool) -> list[Path]:
    """Return what an earlier run has left in a folder, by the patterns of its names, if it may be removed.

    Raises:
        RecipeError: there is something, and ``overwrite`` is not asked for.
    """
    earlier = [path for pattern in patterns for path in output_dir.glob(pattern)]
    if earlier and not overwrite:
        raise RecipeError(
            f"{output_dir} holds a run already",
            remedy="add --resume_from_checkpoint to go on with it, or --overwrite_output_dir true, or another --output_dir",
        )
    return earlier


def remove(paths: Iterable[Path]) -> None:
    """Remove files and folders."""
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _final_metrics(trainer: Trainer) -> dict[str, float]:
    """Return the evaluation of the final weights, from the log where the last step was evaluated."""
    last = next((row for row in reversed(trainer.state.log_history) if "eval_loss" in row), None)
    if last is None or last["step"] != trainer.state.global_step or trainer.args.load_best_model_at_end:
        last = trainer.evaluate()
    return _without_timing(last, "eval")


def _without_timing(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    timing = [
        f"{prefix}_{key}" for key in ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
    ]
    return {key: value for key, value in metrics.items() if key.startswith(f"{prefix}_") and key not in timing}


def data_keys(options: Options) -> dict[str, Any]:
    """Return the data keys that were given, with the seed of the rows where it is not the run's."""
    names = [*(item.name for item in dataclasses.fields(DataArguments)), "data_seed"]
    return {name: options.given[name] for name in names if options.given.get(name) is not None}


def _examples(data: Sequence[TaskData]) -> dict[str, int]:
    """Return how many examples each split holds, of all tasks together."""
    sizes = Counter[str]()
    for item in data:
        sizes.update({name: len(split) for name, split in item.splits.items()})
    return dict(sizes)


def _baseline(options: Options, name: str, data: Sequence[TaskData]) -> dict[str, Any]:
    """Return the metrics of one baseline: the majority class, or a strategy trained alone on each task, same arguments."""
    rows = {item.task.name: _baseline_of(options, name, number, item) for number, item in enumerate(data)}
    if len(rows) == 1:
        return next(iter(rows.values()))
    metrics = {f"{task}_{key}": value for task, row in rows.items() for key, value in row["metrics"].items()}
    tasks = [item.task for item in data]
    main = {f"{task.name}_{task.metrics[0]}": math.nan for task in tasks}
    parameters = Counter[str]()
    for row in rows.values():
        parameters.update(row["parameters"])
    return {
        "metrics": {**metrics, **mean_of_main(tasks, {**main, **metrics})},
        "parameters": dict(parameters),
        "seconds": sum(row.get("seconds", 0.0) for row in rows.values()),
    }


def _baseline_of(options: Options, name: str, number: int, data: TaskData) -> dict[str, Any]:
    if name == MAJORITY:
        labels = {name: split["labels"] for name, split in data.splits.items() if "labels" in split.column_names}
        known = labels.get("train", [])
        metrics = majority_baseline(data.task, known, labels.get("validation", []))
        if options.training.do_predict:
            tested = majority_baseline(data.task, known, labels.get("test", []))
            metrics |= {f"test_{key}": value for key, value in tested.items()}
        return {"metrics": metrics, "parameters": {"trainable": 0}}
    folder = options.output_dir / "baselines" / name.replace(":", "-").replace("=", "").replace(",", "-")
    changes: dict[str, Any] = {"strategy": name, "baselines": None, "regularizers": None, "probes": None}
    if options.data.tasks:
        folder /= data.task.name
        changes |= dataclasses.asdict(options.data.each()[number][1])
        share = options.training.per_device_train_batch_size // len(options.data.tasks)
        changes["per_device_train_batch_size"] = max(1, share)  # what the joint batch holds of a task
        if options.given.get("metric_for_best_model"):
            changes |= best_alone(data.task, options.given["metric_for_best_model"])
    if (folder / RESULT).is_file():  # an interrupted run had finished this baseline
        return dict(json.loads((folder / RESULT).read_text(encoding="utf-8")))
    return train(options.replace(**changes, output_dir=str(folder), resume_from_checkpoint="last"))


def stored_parameters(folder: Path) -> int:
    """Return how many numbers the weight files of a folder hold."""
    from safetensors import safe_open

    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  # not a mapping
                total += int(torch.Size(file.get_slice(key).get_shape()).numel())
    return total


def peak_memory() -> int:
    """Return the most memory this process has used, in bytes: on the GPU if there is one, else resident."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
