"""A finished run or checkpoint: loaded back, exported as what others load, its tasks dropped or renamed.

How it is probed is in :mod:`.probe_points`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, set_seed

from ..registry.context import RunContext
from ..registry.errors import ArtifactError
from .artifacts import (
    MANIFEST,
    describe_tasks,
    find_task,
    folder_in_place,
    read_manifest,
    seal,
    strategy_of,
    tasks_of,
)
from .artifacts import fingerprint as fingerprint_of
from .context import make_context
from .joint import head_task
from .models import align_tokens, label_config, load_class, model_class, reason
from .probing import Snapshot
from .recipe import Recipe, choose
from .weights import load_weights, name_revision
from .wise_ft import check_share, interpolate

_TOKENIZER, _ADAPTER = "tokenizer_config.json", "adapter_config.json"


@dataclass(frozen=True)
class LoadedRun:
    """A run or checkpoint, loaded back.

    Attributes:
        model: the model its strategy trained, or exported, in eval mode.
        run: its context.
        recipe: its strategy, configured as it was; of an export nothing, since it is a model as any other.
        manifest: what ``tunery.json`` says.
        reference: the base model's own weights, if asked for (a ``Reference``).
    """

    model: nn.Module
    run: RunContext
    recipe: Recipe
    manifest: Mapping[str, Any]
    reference: Snapshot | None = None


def load_run(folder: str | Path, *, with_reference: bool = False) -> LoadedRun:
    """Load a run, checkpoint or export back: base model, strategy or plain adapter, trained weights.

    Args:
        folder: what ``tunery train`` wrote, a ``checkpoint-N`` inside it, or what ``tunery export`` wrote.
        with_reference: keep the pre-trained values too; then also a fully fine-tuned run needs its base model.

    Raises:
        ArtifactError: damaged, from a newer tunery, its plugin missing, or its base model is another one.
        RecipeError: the base model cannot be loaded.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    exported = manifest.get("exported", False)
    tasks, base = tasks_of(manifest), manifest["base_model"]
    recipe = choose(strategy=None if exported else strategy_of(manifest))
    set_seed(manifest["seed"])
    adapted = (folder / _ADAPTER).is_file()
    whole = (folder / "config.json").is_file() and not adapted
    model = _empty_model(folder, base["class"]) if whole and not with_reference else _base_model(folder, manifest)
    if (folder / _TOKENIZER).is_file():
        align_tokens(model, _read(AutoTokenizer, folder, _TOKENIZER))
    run = make_context(model, _Bare(seed=manifest["seed"]), tasks, base.get("revision"))
    if recipe.strategy is not None:
        model = recipe.strategy.prepare(model, run)
    elif exported and adapted:
        model = _with_adapter(model, folder)
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
    return model_class(class_name)._from_config(_read(AutoConfig, folder, "config.json"))


def _read(auto: Any, folder: Path, file: str) -> Any:
    """Return what one of transformers' classes makes of a folder's files, of which ``file`` is the one to name."""
    try:
        return auto.from_pretrained(folder)
    except Exception as error:  # noqa: BLE001  # damaged files raise whatever their readers raise
        raise ArtifactError(f"cannot read {folder / file}: {reason(error)}") from None


def _with_adapter(model: Any, folder: Path) -> nn.Module:
    """Put an adapter of a folder's kind on a model, its parameters ready to train; its weights are loaded afterwards."""
    try:
        config = PeftConfig.from_pretrained(str(folder))
        config.inference_mode, config.base_model_name_or_path = False, None
        adapted: nn.Module = get_peft_model(model, config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"cannot use {folder / _ADAPTER}: {reason(error)}") from None
    return adapted


def _base_model(folder: Path, manifest: Mapping[str, Any]) -> Any:
    """Load the model that a run began with, and check that it is that one."""
    model, found = _named_base(manifest)
    if found != manifest["base_model"]["fingerprint"]:
        raise ArtifactError(
            f"{manifest['base_model']['name_or_path']} is not the base model that {folder} was trained on",
            owner=str(folder / MANIFEST),
            remedy="its weights have changed: get the revision the run began with",
        )
    return model


def _named_base(manifest: Mapping[str, Any]) -> tuple[Any, str]:
    """Load the base model that a manifest names; return it and its fingerprint."""
    task, base = head_task(tasks_of(manifest)), manifest["base_model"]
    if not base["name_or_path"]:
        raise ArtifactError(
            "the run does not name its base model", remedy="train from a hub name, folder or package: reference"
        )
    kwargs: dict[str, Any] = {} if task.kind.is_language_modelling or not task.num_labels else label_config(task)
    dtype = getattr(torch, base.get("dtype", "auto"), "auto")  # the precision it was loaded in, perhaps not its files'
    revision = base.get("revision") or "main"
    model = load_class(base["class"], base["name_or_path"], revision=revision, dtype=dtype, **kwargs)
    return model, fingerprint_of(model, make_context(model, _Bare(seed=manifest["seed"]), [task]))


def export_run(
    folder: str | Path,
    output_dir: str | Path,
    *,
    merge: bool = False,
    task: str | None = None,
    wise_ft: float | None = None,
) -> Path:
    """Write a run as what ``from_pretrained`` loads where tunery is not installed: a model, or a PEFT adapter.

    Args:
        folder: a run or checkpoint; not what was exported before.
        output_dir: a new folder.
        merge: fold an adapter into its base model.
        task: of several tasks, the one to write.
        wise_ft: the share of the trained weights in a mean with the pre-trained ones, see :mod:`.wise_ft`.

    Raises:
        TuneryError: the run cannot be loaded or ``output_dir`` is taken; nothing has been written then.
    """
    folder, target = Path(folder), Path(output_dir)
    if wise_ft is not None:
        check_share(wise_ft)
    if read_manifest(folder).get("exported"):
        raise ArtifactError(f"{folder} is an export already", remedy="export the run it was made from")
    loaded = load_run(folder)
    strategy, run = loaded.recipe.strategy, loaded.run
    if task is not None:
        run = dataclasses.replace(run, tasks=(find_task(run.tasks, task, str(folder)),))
    model: Any = loaded.model if strategy is None else strategy.export(loaded.model, run, merge=merge)
    content = {**loaded.manifest, "tasks": describe_tasks(run.tasks), "exported": True}
    left = type(model.get_base_model() if isinstance(model, PeftModel) else model).__name__
    if left != content["base_model"]["class"]:  # a classifier that was trained beside a language-modelling head
        content["base_model"] = {**content["base_model"], "class": left}
        content["base_model"]["fingerprint"] = _named_base(content)[1]
    if wise_ft is not None:
        interpolate(model, _base_model(folder, loaded.manifest).state_dict(), loaded.run, wise_ft)
        content["wise_ft"] = wise_ft
    return _write(model, folder, target, content)


def keep_tasks(folder: str | Path, output_dir: str | Path, names: Mapping[str, str]) -> Path:
    """Write a run of several tasks once more with some of them, perhaps under new names.

    Args:
        folder: a run or checkpoint.
        output_dir: a new folder.
        names: the tasks to keep, and what to call them.

    Raises:
        TuneryError: an unknown task, two of one name, or a strategy that does not hold tasks apart; nothing has been
            written then.
    """
    folder, target = Path(folder), Path(output_dir)
    loaded = load_run(folder)
    tasks = [dataclasses.replace(find_task(loaded.run.tasks, old, str(folder)), name=new) for old, new in names.items()]
    if loaded.recipe.strategy is None:
        raise ArtifactError(f"{folder} holds one task", remedy="there is nothing to drop or rename")
    loaded.recipe.strategy.keep_tasks(loaded.model, names)
    return _write(loaded.model, folder, target, {**loaded.manifest, "tasks": describe_tasks(tasks)})


def _write(model: Any, folder: Path, target: Path, content: Mapping[str, Any]) -> Path:
    """Write a model and the run's processor into a new folder, sealed."""
    with folder_in_place(target) as temporary:
        name_revision(model, content["base_model"].get("revision"))
        model.save_pretrained(temporary)
        _copy_processor(folder, temporary)
        seal(temporary, {key: value for key, value in content.items() if key != "files"})
    return target


def _copy_processor(folder: Path, target: Path) -> None:
    """Write the tokenizer or image processor that a run saved beside its weights."""
    for file, auto in ((_TOKENIZER, AutoTokenizer), ("preprocessor_config.json", AutoImageProcessor)):
        if (folder / file).is_file():
            _read(auto, folder, file).save_pretrained(target)
