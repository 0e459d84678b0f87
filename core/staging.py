"""Runs of several stages: each one before the last is an ordinary run in ``stages/<name>``, whose weights the next goes on with.

Only what is particular to stages is here: which combinations make no sense, what an earlier stage's arguments and data are,
where a killed run goes on, and how a stage ends so that the same parameters can be wrapped and sharded again.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ..registry.context import Stage, Task, TaskKind
from ..registry.errors import ArtifactError, CompatibilityError, InvalidPluginError
from .artifacts import MANIFEST, last_checkpoint
from .data.unlabelled import EpochOf, UnlabelledRows, pad_rows
from .weights import load_weights

if TYPE_CHECKING:
    from torch import nn

    from .trainer import PluginTrainerMixin

STAGES = "stages"
_OBJECTIVES = (None, TaskKind.MASKED_LM, TaskKind.CAUSAL_LM)


# ---- at start-up


def check_stages(
    stages: Sequence[Stage], owner: str, args: Any, given: Mapping[str, Any], num_tasks: int = 1
) -> tuple[Stage, ...]:
    """Return the stages of a strategy once it is clear that they can be trained.

    Args:
        stages: what the strategy says.
        owner: the strategy's name and origin, for messages.
        args: the run's training arguments.
        given: what else the Trainer was given, by keyword.
        num_tasks: how many tasks share a batch.

    Raises:
        InvalidPluginError: stages that no run can have.
        CompatibilityError: arguments that several stages cannot share.
    """
    names = [stage.name for stage in stages]
    if len(set(names)) < len(names) or not all(name.isidentifier() for name in names) or not names:
        raise InvalidPluginError(
            f"stages {', '.join(map(repr, names)) or 'none'}: a run has one or more, each with a name of its own",
            owner=owner,
        )
    *earlier, last = stages
    if last != Stage(name=last.name):
        raise InvalidPluginError(
            f"stage {last.name!r} is the last: it is the run itself and has only a name", owner=owner
        )
    for stage in earlier:
        _check_objective(stage, owner, given)
    if earlier:
        _check_shared(owner, args, given, num_tasks)
    return tuple(stages)


def _check_objective(stage: Stage, owner: str, given: Mapping[str, Any]) -> None:
    if stage.objective not in _OBJECTIVES:
        known = [kind.value for kind in _OBJECTIVES if kind]
        raise InvalidPluginError(f"stage {stage.name!r} has objective {stage.objective!r}", known=known, owner=owner)
    if stage.objective is None:
        return
    tokenizer, rows = given.get("processing_class"), given.get("train_dataset")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise CompatibilityError(
            f"stage {stage.name!r} learns from text and the Trainer was given no tokenizer",
            owner=owner,
            remedy="pass it as processing_class",
        )
    if stage.objective is TaskKind.MASKED_LM and tokenizer.mask_token is None:
        raise CompatibilityError(
            f"stage {stage.name!r} masks tokens and the tokenizer has no mask token",
            owner=owner,
            remedy="set tokenizer.mask_token",
        )
    if rows is not None and not hasattr(rows, "__len__"):
        raise CompatibilityError(
            f"stage {stage.name!r} needs rows by number, not a stream: {type(rows).__name__}",
            owner=owner,
            remedy="load the training rows without streaming",
        )


def _check_shared(owner: str, args: Any, given: Mapping[str, Any], num_tasks: int) -> None:
    plugin = getattr(args, "deepspeed_plugin", None)
    config = plugin.hf_ds_config.config if plugin is not None else {}
    made = [key for key in ("optimizer", "scheduler") if key in config]
    for asked, remedy in (
        ("several tasks" if num_tasks > 1 else "", "train one task at a time"),
        ("model_init" if given.get("model_init") is not None else "", "pass model"),
        ("optimizers" if given.get("optimizers", (None, None)) != (None, None) else "", "use optim and learning_rate"),
        (f"{' and '.join(made)} in the DeepSpeed config" if made else "", "use optim and lr_scheduler_type"),
        ("fsdp" if getattr(args, "fsdp", None) else "", "use deepspeed"),
    ):
        if asked:
            raise CompatibilityError(
                f"a strategy of several stages does not go with {asked}", owner=owner, remedy=remedy
            )


# ---- what an earlier stage trains with


def stage_arguments(args: Any, stage: Stage) -> Any:
    """Return the run's training arguments as ``stage`` has them: no plugins, no evaluation, a folder of its own."""
    changed = copy.copy(args)  # not dataclasses.replace, which would start DeepSpeed's configuration over
    changed.output_dir = str(Path(args.output_dir or "tmp_trainer") / STAGES / stage.name)
    changed.strategy = changed.regularizers = changed.probes = None
    changed.eval_strategy = IntervalStrategy.NO
    changed.eval_on_start = False
    changed.load_best_model_at_end = False
    changed.metric_for_best_model = None
    if args.save_strategy == SaveStrategy.BEST:
        changed.save_strategy = SaveStrategy.EPOCH
    changed.report_to = []
    changed.push_to_hub = False
    if stage.num_train_epochs is not None:
        changed.num_train_epochs, changed.max_steps = stage.num_train_epochs, -1
    if stage.learning_rate is not None:
        changed.learning_rate = stage.learning_rate
    if stage.objective is not None:
        changed.label_smoothing_factor = 0.0
        changed.dataloader_persistent_workers = False  # a worker that stays does not hear of a new epoch's masks
    return changed


def stage_keywords(trainer: PluginTrainerMixin, stage: Stage, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the Trainer of an earlier stage is given, by keyword.

    Args:
        trainer: the run's.
        stage: the stage.
        given: what the run's Trainer was given.

    Raises:
        DataError: rows without text to learn from.
    """
    if stage.objective is None:
        return {**given, "task": trainer.run.task, "callbacks": None}
    tokenizer: Any = trainer.processing_class
    rows = UnlabelledRows(trainer.train_dataset, tokenizer, stage, trainer.args.seed)
    return {
        "task": Task(name=trainer.run.task.name, kind=stage.objective),
        "train_dataset": rows,
        "data_collator": pad_rows(tokenizer),
        "processing_class": tokenizer,
        "callbacks": [EpochOf(rows)],
    }


# ---- where a killed run goes on


def place_to_resume(run_dir: Path) -> Path | None:
    """Return from where a run folder goes on: its newest whole checkpoint, else its folder of earlier stages."""
    stages = run_dir / STAGES
    return last_checkpoint(run_dir) or (stages if stages.is_dir() else None)


def asked_place(asked: str | bool | None, run_dir: Path) -> Path | None:
    """Return the checkpoint, or folder of stages, that a Trainer was asked to resume from; ``True``: the last of ``run_dir``.

    Raises:
        ArtifactError: there is none.
    """
    if asked is None or asked is False:
        return None
    place = place_to_resume(run_dir) if asked is True else Path(asked)
    if place is None:
        raise ArtifactError(f"no whole checkpoint in {run_dir}", remedy="train without --resume_from_checkpoint")
    return place


def points_to_resume(stages: Sequence[Stage], place: Path | None) -> list[Path | None]:
    """Return for each stage what it goes on from: a checkpoint, its own finished folder, or ``None`` for its beginning.

    Args:
        stages: the run's.
        place: a checkpoint of the last stage or of an earlier one, or a run's folder of earlier stages.

    Raises:
        ArtifactError: a stage before the checkpoint is not finished.
    """
    points: list[Path | None] = [None] * len(stages)
    names = [stage.name for stage in stages[:-1]]
    if place is None:
        return points
    if names and place.name == STAGES:
        folder, reached = place, None
    elif place.parent.parent.name == STAGES and place.parent.name in names:
        folder, reached = place.parent.parent, names.index(place.parent.name)
        points[reached] = place
    else:
        folder, reached = place.parent / STAGES, len(names)
        points[reached] = place
    for index, name in enumerate(names[:reached]):
        finished = folder / name
        if (finished / MANIFEST).is_file():
            points[index] = finished
        elif reached is None:
            points[index] = last_checkpoint(finished)
            break
        else:
            raise ArtifactError(f"{place} needs stage {name!r} before it, and {finished} is not finished")
    return points


# ---- one earlier stage


def go_through(trainer: PluginTrainerMixin, stage: Stage, point: Path | None) -> dict[str, Any]:
    """Train a stage, or take over what it learnt where it is finished.

    Args:
        trainer: the stage's own.
        stage: the stage.
        point: what it goes on from; see :func:`points_to_resume`.

    Returns:
        What a result says of it: name, objective, steps, mean training loss, seconds.

    Raises:
        ArtifactError: what it goes on from is damaged or belongs to another run.
    """
    folder, writes = trainer._run_dir, trainer.is_world_process_zero()
    if point is not None and point.name == stage.name:
        trainer.check_belongs(point)
        load_weights(trainer._equipped, point)
        history = stage_history(point)
        if writes and point.resolve() != folder.resolve():
            shutil.copytree(point, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("checkpoint-*"))
    else:
        if writes:
            _open_again(folder, anew=point is None)
        trainer.accelerator.wait_for_everyone()
        trainer.train(None if point is None else str(point))
        trainer.save_state()
        trainer.save_model()  # last, since its manifest says that the stage is finished
        history = trainer.state.log_history
    trainer.accelerator.wait_for_everyone()
    release(trainer)
    end = next(row for row in reversed(history) if "train_runtime" in row)
    return {
        "name": stage.name,
        "objective": stage.objective.value if stage.objective else "task",
        "steps": end["step"],
        "train_loss": end["train_loss"],
        "seconds": end["train_runtime"],
    }


def _open_again(folder: Path, anew: bool) -> None:
    if anew:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)


def release(trainer: PluginTrainerMixin) -> None:
    """Undo what training wrapped around a module, so that the next stage can wrap and shard its parameters afresh."""
    module: nn.Module = trainer._equipped
    accelerator: Any = trainer.accelerator
    _unwrap_forward(module)
    trainer.model_wrapped = module
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.callback_handler.optimizer = trainer.callback_handler.lr_scheduler = None
    trainer.deepspeed = None
    for parameter in module.parameters():
        parameter.grad = None
    accelerator.free_memory()  # destroys a DeepSpeed engine, and collects DDP's reducer with its hooks


def _unwrap_forward(module: nn.Module) -> None:
    """Take accelerate's autocast off ``forward``, and its mark, with which it would not prepare the module again.

    Its own ``unwrap_model`` goes too far: it also takes off what transformers decorates ``forward`` with.
    """
    kept = vars(module)
    kept.pop("_is_accelerate_prepared", None)
    original = kept.pop("_original_forward", None)
    if original is not None:
        kept.pop("forward")
        if module.forward != original:  # not the class's own: somebody had set it before
            module.forward = original


def stage_history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows that a finished stage logged."""
    content = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    history: list[dict[str, Any]] = content["log_history"]
    return history
