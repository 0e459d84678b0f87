"""The story of a run: options -> data, model, trainer -> result; and a finished run, loaded back or exported.

Read this first. ``train`` is what ``tunery train`` does; ``load_run`` and ``export_run`` take any run or checkpoint.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, set_seed

from ..registry.context import RunContext, Subject
from ..registry.errors import ArtifactError, RecipeError
from .artifacts import (
    MANIFEST,
    folder_in_place,
    last_checkpoint,
    load_weights,
    read_manifest,
    seal,
    strategy_of,
    tasks_of,
    versions,
    write_json,
)
from .artifacts import fingerprint as fingerprint_of
from .context import make_context
from .data import encode, load_task_data
from .data.metrics import add_perplexity, compute_metrics, majority_baseline
from .models import label_config, load_class, load_model, load_processor, model_class
from .options import Options
from .plots import CURVE, plot_training_curve
from .probing import MEASUREMENTS, Snapshot, measure
from .recipe import Recipe, choose
from .sharding import parameter_counts
from .trainer import Trainer
from .wise_ft import check_share, interpolate

RESULT = "result.json"
MAJORITY = "majority"
_EARLIER = (MANIFEST, RESULT, MEASUREMENTS, CURVE, "baselines", "checkpoint-*", "*.safetensors", "adapter_config.json")


def train(options: Options) -> dict[str, Any]:
    """Train, evaluate and save one run; return what ``result.json`` holds.

    Raises:
        TuneryError: anything a user can mend; nothing has been trained then.
    """
    args, output_dir = options.training, options.output_dir
    choose(args.strategy, args.regularizers, args.probes)  # a wrong name should cost no loading of models
    resume, earlier = _prepare_output(options)

    set_seed(args.seed)
    with args.main_process_first(desc="reading the data"):
        data = load_task_data(options.data, seed=args.seed if args.data_seed is None else args.data_seed)
    reference, revision = options.run.model_name_or_path, options.run.model_revision
    processor = load_processor(reference, data.task, revision)
    model = load_model(reference, data.task, revision, options.run.dtype)
    encoded = encode(data, processor)
    for name in options.run.baselines or ():
        choose(None if name == MAJORITY else name).check(model, make_context(model, args, data.task))

    trainer = Trainer(
        model=model,
        args=args,
        task=data.task,
        base_model=reference,
        train_dataset=encoded.train,
        eval_dataset=encoded.validation,
        data_collator=encoded.data_collator,
        processing_class=processor,
        compute_metrics=compute_metrics(data.task),
    )
    if trainer.is_world_process_zero():
        _remove(earlier)
    started = time.monotonic()
    outcome = trainer.train(resume_from_checkpoint=resume)
    seconds = time.monotonic() - started
    metrics = (
        add_perplexity(_final_metrics(trainer)) if data.task.kind.is_language_modelling else _final_metrics(trainer)
    )
    trainer.save_model()
    trainer.save_state()

    trained: Any = trainer.model
    result = {
        "task": data.task.name,
        "metrics": {key.removeprefix("eval_"): value for key, value in metrics.items()},
        "main_metric": data.task.metrics[0] if data.task.metrics else "loss",
        "train_loss": outcome.training_loss,
        "examples": {name: len(split) for name, split in data.splits.items()},
        "parameters": parameter_counts(trained) | {"stored": stored_parameters(output_dir)},
        "seconds": seconds,
        "peak_memory_bytes": peak_memory(),
        "seed": args.seed,
        "plugins": trainer.recipe.describe(),
        "base_model": reference,
        "versions": versions(),
    }
    if trainer.is_world_process_zero():
        plot_training_curve(
            trainer.state.log_history,
            output_dir / CURVE,
            f"{data.task.name}: {args.strategy or 'as given'}",
            result["main_metric"],
        )
    if options.run.baselines:
        result["baselines"] = {name: _baseline(options, name, data) for name in options.run.baselines}
    if trainer.is_world_process_zero():
        write_json(output_dir / RESULT, result)
    return result


def _prepare_output(options: Options) -> tuple[str | None, list[Path]]:
    """Return the checkpoint to resume from and what to remove of an earlier run; refuse to mix two runs in one folder."""
    output_dir, asked = options.output_dir, options.training.resume_from_checkpoint
    parent = next(path for path in (output_dir, *output_dir.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise RecipeError(f"cannot write to {output_dir}", owner=str(parent), remedy="choose another --output_dir")
    if asked:
        found = last_checkpoint(output_dir) if str(asked).lower() in ("last", "true") else Path(asked)
        if found is not None:
            read_manifest(found)
        return None if found is None else str(found), []
    earlier = [path for pattern in _EARLIER for path in output_dir.glob(pattern)]
    if earlier and not options.run.overwrite_output_dir:
        raise RecipeError(
            f"{output_dir} holds a run already",
            remedy="add --resume_from_checkpoint to go on with it, or --overwrite_output_dir true, or another --output_dir",
        )
    return None, earlier


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _final_metrics(trainer: Trainer) -> dict[str, float]:
    """Return the evaluation of the final weights, from the log where the last step was evaluated."""
    last = next((row for row in reversed(trainer.state.log_history) if "eval_loss" in row), None)
    if last is None or last["step"] != trainer.state.global_step or trainer.args.load_best_model_at_end:
        last = trainer.evaluate()
    timing = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    return {key: value for key, value in last.items() if key.startswith("eval_") and key not in timing}


def _baseline(options: Options, name: str, data: Any) -> dict[str, Any]:
    """Return the metrics of one baseline: the majority class, or a strategy trained with the same arguments."""
    if name == MAJORITY:
        splits = [data.splits[split] for split in ("train", "validation")]
        labels = [split["labels"] if "labels" in split.column_names else [] for split in splits]
        return {"metrics": majority_baseline(data.task, *labels), "parameters": {"trainable": 0}}
    folder = options.output_dir / "baselines" / name.replace(":", "-").replace("=", "").replace(",", "-")
    if (folder / RESULT).is_file():  # an interrupted run had finished this baseline
        return dict(json.loads((folder / RESULT).read_text(encoding="utf-8")))
    changes = {"strategy": name, "output_dir": str(folder), "baselines": None, "regularizers": None, "probes": None}
    return train(options.replace(**changes, resume_from_checkpoint="last"))


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


# ---- a finished run


@dataclass(frozen=True)
class LoadedRun:
    """A run or checkpoint, loaded back.

    Attributes:
        model: the model its strategy trained, in eval mode.
        run: its context.
        recipe: its strategy, configured as it was.
        manifest: what ``tunery.json`` says.
        reference: the base model's own weights, if asked for (a ``Reference``).
    """

    model: nn.Module
    run: RunContext
    recipe: Recipe
    manifest: Mapping[str, Any]
    reference: Snapshot | None = None


def load_run(folder: str | Path, *, with_reference: bool = False) -> LoadedRun:
    """Load a run or checkpoint folder back: base model, strategy, trained weights.

    Args:
        folder: what ``tunery train`` wrote, or a ``checkpoint-N`` inside it.
        with_reference: keep the pre-trained values too; then also a fully fine-tuned run needs its base model.

    Raises:
        ArtifactError: damaged, from a newer tunery, its plugin missing, or its base model is another one.
        RecipeError: the base model cannot be loaded.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    selection = strategy_of(manifest)
    task, base = tasks_of(manifest)[0], manifest["base_model"]
    recipe = choose(strategy=selection)
    set_seed(manifest["seed"])
    whole = (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file()
    model = _empty_model(folder, base["class"]) if whole and not with_reference else _base_model(folder, manifest)
    run = make_context(model, _Bare(seed=manifest["seed"]), task)
    if recipe.strategy is not None:
        model = recipe.strategy.prepare(model, run)
    reference = Snapshot(model, run.sharding) if with_reference else None
    load_weights(model, folder)
    return LoadedRun(model=model.eval(), run=run, recipe=recipe, manifest=manifest, reference=reference)


@dataclass(frozen=True)
class _Bare:
    """What a context needs of training arguments where nothing is trained."""

    seed: int
    activation_checkpointing: bool = False


def _empty_model(folder: Path, class_name: str) -> Any:
    """Build the model of a fully written run from its own config; its weights are loaded afterwards, all of them."""
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ArtifactError(f"cannot read {folder / 'config.json'}: {first}") from None
    return model_class(class_name)._from_config(config)


def _base_model(folder: Path, manifest: Mapping[str, Any]) -> Any:
    """Load the model that a run began with, and check that it is that one."""
    task, base = tasks_of(manifest)[0], manifest["base_model"]
    if not base["name_or_path"]:
        raise ArtifactError(
            "the run does not name its base model", remedy="train from a hub name, folder or package: reference"
        )
    kwargs: dict[str, Any] = {} if task.kind.is_language_modelling or not task.num_labels else label_config(task)
    model = load_class(base["class"], base["name_or_path"], **kwargs)
    if fingerprint_of(model, make_context(model, _Bare(seed=manifest["seed"]), task)) != base["fingerprint"]:
        raise ArtifactError(
            f"{base['name_or_path']} is not the base model that {folder} was trained on",
            owner=str(folder / MANIFEST),
            remedy="its weights have changed: get the revision the run began with",
        )
    return model


def export_run(
    folder: str | Path, output_dir: str | Path, *, merge: bool = False, wise_ft: float | None = None
) -> Path:
    """Write a run as what ``from_pretrained`` loads where tunery is not installed: a model, or a PEFT adapter.

    Args:
        folder: a run or checkpoint.
        output_dir: a new folder.
        merge: fold an adapter into its base model.
        wise_ft: the share of the trained weights in a mean with the pre-trained ones, see :mod:`.wise_ft`.

    Raises:
        TuneryError: the run cannot be loaded or ``output_dir`` is taken; nothing has been written then.
    """
    folder, target = Path(folder), Path(output_dir)
    if wise_ft is not None:
        check_share(wise_ft)
    loaded = load_run(folder)
    strategy = loaded.recipe.strategy
    model: Any = loaded.model if strategy is None else strategy.export(loaded.model, loaded.run, merge=merge)
    content = {key: value for key, value in loaded.manifest.items() if key != "files"}
    if wise_ft is not None:
        interpolate(model, _base_model(folder, loaded.manifest).state_dict(), loaded.run, wise_ft)
        content["wise_ft"] = wise_ft
    with folder_in_place(target) as temporary:
        model.save_pretrained(temporary)
        _copy_processor(folder, temporary)
        seal(temporary, content)
    return target


def _copy_processor(folder: Path, target: Path) -> None:
    """Write the tokenizer or image processor that a run saved beside its weights."""
    for file, auto in (("tokenizer_config.json", AutoTokenizer), ("preprocessor_config.json", AutoImageProcessor)):
        if (folder / file).is_file():
            auto.from_pretrained(folder).save_pretrained(target)


def probe_run(probe: str, folder: str | Path) -> list[dict[str, Any]]:
    """Measure a finished run or checkpoint with one probe; return rows as ``measurements.jsonl`` holds them.

    Raises:
        TuneryError: the probe or the run cannot be used.
    """
    chosen = choose(probes=[probe])
    loaded = load_run(folder, with_reference=True)
    assert loaded.reference is not None
    chosen.check(loaded.model, loaded.run)
    subject = Subject(model=loaded.model, run=loaded.run, reference=loaded.reference)
    return [
        {"model": str(folder), "probe": plugin.name, "name": m.name, "value": m.value, "unit": m.unit, **m.where}
        for plugin in chosen.probes
        for m in measure(plugin, subject)
    ]
