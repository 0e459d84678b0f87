"""Files of a run that appear whole or not at all, on top of what transformers, PEFT and DeepSpeed write."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from ..registry.context import Stage, Task
from ..registry.errors import ArtifactError
from .artifacts import MANIFEST, seal, strategy_of, tasks_of
from .recipe import Recipe, choose
from .sharding import ModelSharding, adopted_parameters, companion_names, is_sharded
from .weights import STORED

if TYPE_CHECKING:
    # The mixin stands in front of any subclass of Trainer; only the type checker is told so.
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

ADOPTED = "regularizers.safetensors"
_STAGING = ".saving"
_WRITING = ".writing-"


class WholeCheckpoints(_Trainer):
    """Writes every checkpoint under a temporary name and renames it; the manifest is the last file of a folder."""

    _staging: Path | None = None
    _adopted: Mapping[str, torch.Tensor] = {}  # never changed in place
    _stored: Mapping[str, torch.Tensor] = {}

    def _manifest(self) -> dict[str, Any]:
        """Return what the manifest of every folder says, without its files."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Have the model's own weights say what its files shall hold."""
        raise NotImplementedError

    def _stored_names(self) -> Sequence[str]:
        """Return the names of frozen parameters that every folder must hold."""
        raise NotImplementedError

    @property
    def _equipped(self) -> nn.Module:
        """The model, not wrapped, as the type checker should know it."""
        return cast(nn.Module, self.model)

    @property
    def _run_dir(self) -> Path:
        return Path(self.args.output_dir or "tmp_trainer")

    def _clear_staging(self, run_dir: Path) -> None:
        if self.args.local_process_index == 0:
            shutil.rmtree(run_dir / _STAGING, ignore_errors=True)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging) if self._staging is not None else super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staging is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write the checkpoint under a temporary name on every rank, then rename it."""
        args, state = self.args, self.state
        run_dir = Path(self._get_output_dir(trial))
        staging, name = run_dir / _STAGING, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        self._clear_staging(run_dir)
        self.accelerator.wait_for_everyone()
        self._staging = staging
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._staging = None
        self.accelerator.wait_for_everyone()
        if state.best_model_checkpoint == str(staging / name):
            state.best_model_checkpoint = str(run_dir / name)
        if args.should_save:
            state.save_to_json(str(staging / name / "trainer_state.json"))
        if args.local_process_index == 0 and (staging / name).exists():
            _replace_folder(staging / name, run_dir / name)
            staging.rmdir()
        self.accelerator.wait_for_everyone()
        if args.push_to_hub:
            self._push_from_checkpoint(str(run_dir / name))
        if args.should_save:
            rotate_checkpoints(
                output_dir=str(run_dir),
                save_total_limit=args.save_total_limit,
                best_model_checkpoint=state.best_model_checkpoint,
                use_mtime=True,
            )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; a checkpoint also gets what regularizers train beside it."""
        self._settle()
        self._adopted = {} if self._staging is None else _on_host(adopted_parameters(self._equipped))
        live = dict(self._equipped.named_parameters())
        self._stored = _on_host({name: live[name] for name in self._stored_names()})
        super().save_model(output_dir, _internal_call)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._load_adopted(Path(checkpoint))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._load_adopted(Path(str(self.state.best_model_checkpoint)))

    def _load_adopted(self, folder: Path) -> None:
        """Bring back what no state_dict has. ZeRO-3's engine has brought back its shards, ZeRO-1's and 2's only its copy."""
        whole = {name: value for name, value in adopted_parameters(self._equipped).items() if not is_sharded(value)}
        if whole:
            kept = load_file(folder / ADOPTED)
            for name, parameter in whole.items():
                parameter.data.copy_(kept[name])

    def _check_adopted(self, folder: Path) -> None:
        """Refuse to go on with a checkpoint whose regularizers trained other parameters than those there are now."""
        names = load_file(folder / ADOPTED) if (folder / ADOPTED).is_file() else {}
        found = {name: tuple(value.shape) for name, value in names.items()}
        live = adopted_parameters(self._equipped)
        if found != {name: tuple(getattr(value, "ds_shape", value.shape)) for name, value in live.items()}:
            raise ArtifactError(
                f"{folder} was trained with other regularizers: {', '.join(found) or 'nothing'} beside the model, "
                f"now {', '.join(live) or 'nothing'}",
                remedy="resume with the regularizers it began with",
            )

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write weights, config, tokenizer and manifest; each file is renamed into place, the manifest last."""
        target = self._run_dir if output_dir is None else Path(output_dir)
        if state_dict is not None:
            # DeepSpeed hands in copies, among which transformers no longer sees which weights are tied.
            tied = {key for key, source in _tied_weights(self._equipped).items() if source in state_dict}
            hidden = companion_names(self._equipped) | tied
            state_dict = {key: value for key, value in state_dict.items() if key not in hidden}
        temporary = target / f"{_WRITING}{os.getpid()}"
        if self.args.should_save:
            for left_behind in target.glob(f"{_WRITING}*"):
                shutil.rmtree(left_behind, ignore_errors=True)
        try:
            super()._save(str(temporary), state_dict)
            if self.args.should_save:
                for name, state in ((ADOPTED, self._adopted), (STORED, self._stored)):
                    if state:
                        save_file(dict(state), temporary / name)
                seal(temporary, self._manifest())
                for path in sorted(temporary.iterdir(), key=lambda path: path.name == MANIFEST):
                    path.replace(target / path.name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _on_host(parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return whole copies, on the CPU of every rank, one parameter gathered at a time."""
    state = {}
    for name, parameter in parameters.items():
        with ModelSharding().gathered([parameter]):
            state[name] = parameter.detach().to("cpu", copy=True)
    return state


def check_belongs(
    content: Mapping[str, Any],
    folder: Path,
    recipe: Recipe,
    tasks: Sequence[Task],
    base: Mapping[str, Any] | None,
    stage: Stage | None,
) -> None:
    """Check that a checkpoint, or a finished stage, belongs to the run that is to go on with it.

    Args:
        content: its manifest.
        folder: where it lies.
        recipe: the run's plugins.
        tasks: what the run's manifest says it is trained for.
        base: what the run's manifest says of its base model, where that can be compared.
        stage: the earlier stage that goes on with it, if it is not the run itself.

    Raises:
        ArtifactError: it is of another strategy, other options of it, other tasks, or another stage or base model.
    """
    recorded, strategies = content["base_model"], [p["name"] for p in content["plugins"] if p["kind"] == "strategy"]
    if strategies != [chosen.entry.name for chosen in recipe.chosen if chosen.entry.kind == "strategy"]:
        raise ArtifactError(
            f"{folder} was trained with strategy {', '.join(strategies) or 'none'}", remedy="resume with the same one"
        )
    _check_options(content, folder, recipe)
    if stage is None:
        _check_tasks(tasks_of(content), folder, tasks)
    known = None if stage is None else dataclasses.asdict(stage)
    if content.get("stage") != known:
        raise ArtifactError(
            f"{folder} was trained as stage {content.get('stage')}, not {known}", remedy="resume with the same options"
        )
    if base is not None and recorded["fingerprint"] != base["fingerprint"]:
        raise ArtifactError(
            f"{folder} was trained on another base model: {recorded['name_or_path'] or recorded['class']}",
            remedy="resume with the model it began with",
        )


def _check_options(content: Mapping[str, Any], folder: Path, recipe: Recipe) -> None:
    """Refuse to go on with other options of the strategy; one that the manifest does not know had its default."""
    then = choose(strategy=strategy_of(content)).chosen
    if not then:
        return
    # A manifest holds lists where a recipe may hold tuples.
    old, new = (json.loads(json.dumps(item.options())) for item in (then[0], recipe.chosen[0]))
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if changed:
        was, now = (",".join(f"{name}={options.get(name)}" for name in changed) for options in (old, new))
        raise ArtifactError(
            f"{folder} was trained with strategy {then[0].entry.name}:{was}, not {now}",
            remedy="resume with the same options",
        )


def _check_tasks(then: Sequence[Task], folder: Path, now: Sequence[Task]) -> None:
    """Refuse to go on with other labels or another kind of task; what a single task is called and scored by may change."""
    several = max(len(then), len(now)) > 1
    names = [[task.name for task in tasks] if several else [] for tasks in (then, now)]
    was, other = (", ".join(found) for found in names)
    if names[0] == names[1]:
        changed = [(a, b) for a, b in zip(then, now, strict=True) if (a.kind, a.label_names) != (b.kind, b.label_names)]
        if not changed:
            return
        was, other = _differences(*changed[0])
    raise ArtifactError(f"{folder} was trained for {was}, not {other}", remedy="resume with the same tasks and labels")


def _differences(then: Task, now: Task) -> list[str]:
    """Return of each the kind, the name, and those labels that the other does not have in that place."""
    pairs = [pair for pair in zip_longest(then.label_names, now.label_names) if pair[0] != pair[1]]
    told = []
    for side, task in enumerate((then, now)):
        labels = ", ".join(pair[side] for pair in pairs if pair[side] is not None)
        words = f"{task.kind.value} {task.name}" + (f" of {labels}" if labels else "")
        told.append(shorten(words, 100, placeholder=" ..."))
    return told


def _tied_weights(model: nn.Module) -> Mapping[str, str]:
    """Return the names of weights that are another one's, with that one's name."""
    return getattr(model, "all_tied_weights_keys", None) or {}


def _replace_folder(source: Path, target: Path) -> None:
    """Put ``source`` where ``target`` is; the old one steps aside first, since a full folder cannot be overwritten."""
    old = target.with_name(f".old-{target.name}")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.replace(old)
    source.replace(target)
    shutil.rmtree(old, ignore_errors=True)
