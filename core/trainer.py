"""``PluginTrainerMixin``: any ``transformers.Trainer`` subclass with a strategy, regularizers and probes; and ``Trainer``.

The order of a run: seed -> strategy.prepare -> regularizer.attach -> transformers' own constructor -> the strategy's
earlier stages, each by a trainer of its own -> training, with the objective in ``compute_loss`` -> probes at their moments
-> checkpoints that appear whole or not at all.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from peft import PeftModel
from torch import nn
from transformers.trainer_utils import set_seed

from ..registry.context import Stage, Task
from ..registry.errors import CompatibilityError, RecipeError
from ..registry.proxy import ProxyStrategy
from .alignment import align
from .arguments import PLUGIN_FIELDS, TrainingArguments
from .artifacts import describe_base, manifest, read_manifest
from .checkpointing import check_belongs
from .context import infer_task, make_context, optimizer_name
from .dropout import asked_dropout
from .joint import check_joint, clip_each, on_device
from .models import align_tokens
from .moments import Moments, ProbedTrainer
from .objective import Objective, last_output, predicts_next
from .probing import Snapshot
from .recipe import choose, observe
from .sampling import asked_sampler
from .sharding import ModelSharding
from .staging import asked_place, check_stages, go_through, points_to_resume, stage_arguments, stage_keywords
from .updates import Updates
from .weights import load_stored, name_revision


class PluginTrainerMixin(ProbedTrainer):
    """Mix into a Trainer: ``class MySFT(PluginTrainerMixin, trl.SFTTrainer)``, with arguments that have the plugin fields.

    Args:
        model: a model, loaded; a strategy changes it in place or wraps it.
        args: arguments with the fields of :class:`tunery.core.arguments.PluginArguments`.
        task: what the model is trained for, or several tasks whose rows say theirs in ``task_ids``; default: told from the
            model's class and config.
        base_model: the name the manifest records for the base model; default: what its config remembers.
        base_revision: its commit, branch or tag on the hub, where that is not ``main``.
        kwargs: everything else the Trainer takes, by keyword.

    Raises:
        TuneryError: a selection, combination or model that cannot work; nothing has been written then.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        task: Task | Sequence[Task] | None = None,
        base_model: str | None = None,
        base_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(model, str):
            raise RecipeError(
                f"model {model!r} is a name", remedy="load it first: AutoModelFor....from_pretrained(name)"
            )
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        self.recipe = choose(*(getattr(args, field, None) for field in PLUGIN_FIELDS))
        self._given = kwargs
        self._given_task = task
        self._base_reference, self._base_revision = base_model, base_revision
        # transformers seeds in its constructor, which is after adapters and heads are drawn.
        set_seed(args.seed)
        if model is not None:
            model = self._equip(model, args)
        super().__init__(model=model, args=args, **kwargs)
        # Only causal-LM losses really divide by num_items_in_batch (transformers#47688), and not those of several tasks.
        shifts = len(self._tasks) == 1 and self._loss_shifts_labels and predicts_next(self.run.task, True)
        self.model_accepts_loss_kwargs = bool(self.model_accepts_loss_kwargs and shifts)
        if len(self.run.tasks) > 1:
            self.label_names = ["labels", "task_ids"]
        self.add_callback(Moments(self))

    # ---- building the model

    objective: Objective
    stages: tuple[Stage, ...]
    finished_stages: Sequence[Mapping[str, Any]] = ()
    alignment: Mapping[str, float] = {}  # what a stand-in's measured, if there was one; never changed in place
    _stage: Stage | None = None  # the one this trainer trains, where it is not the last

    def _equip(self, model: nn.Module, args: Any) -> nn.Module:
        """Give the model its strategy and regularizers, before anything is moved, sharded or wrapped."""
        align_tokens(model, self._given.get("processing_class"))
        # Files hold the names of the live model. transformers writes those of the checkpoint the model came from
        # (BERT's LayerNorm.gamma), which its own resume then skips without an error.
        for module in model.modules():
            if isinstance(module, transformers.PreTrainedModel):
                module._weight_conversions = []  # type: ignore[assignment]
        given = self._given_task or infer_task(model)
        context = make_context(model, args, [given] if isinstance(given, Task) else given, self._base_revision)
        names = tuple(regularizer.name for regularizer in self.recipe.regularizers)
        optimizer = optimizer_name(args, self._given)
        self.run = dataclasses.replace(context, regularizers=names, stage=self._stage, optimizer=optimizer)
        self.recipe.check(model, self.run)
        check_joint(self.run, args)
        self.recipe.check_arguments(args)
        self._base = describe_base(model, self.run, self._base_reference)
        self._base |= asked_dropout(model, args)
        self.recipe.check_base(model, self.run, self._base)
        strategy = self.recipe.strategy
        if strategy is not None:
            if isinstance(model, PeftModel):
                raise CompatibilityError(
                    f"the model already is a {type(model).__name__}",
                    remedy="hand in the base model or leave strategy out",
                )
            model = strategy.prepare(model, self.run)
            name_revision(model, self.run.revision)
        cast(ModelSharding, self.run.sharding).watch(model)
        self.stages = self._checked_stages(model, args)
        self._reference = Snapshot(model, self.run.sharding) if self.recipe.probes else None
        for regularizer in self.recipe.regularizers:
            regularizer.attach(model, self.run)
        self.objective = Objective(self.recipe.regularizers, self.run.tasks)
        # Who hands in rows later, as a federation does, aligns a stand-in itself.
        self._to_align = isinstance(strategy, ProxyStrategy) and self._given.get("train_dataset") is not None
        self._updates = Updates()
        self._tasks = self.run.tasks if strategy is None else strategy.tasks(self.run)
        return model

    def _build_accelerator_args(self, **kwargs: Any) -> Any:
        """Leave DeepSpeed's plugin out in an earlier stage: the process has it already, and may have only one."""
        arguments: Any = super()._build_accelerator_args(**kwargs)
        return arguments | {"deepspeed_plugin": None} if self._stage else arguments

    def _checked_stages(self, model: nn.Module, args: Any) -> tuple[Stage, ...]:
        strategy = self.recipe.strategy
        if strategy is None:
            return (Stage(name="fine_tuning"),)
        owner = str(self.recipe.chosen[0].entry.origin)
        stages = strategy.stages(model, self.run)
        return check_stages(stages, f"strategy {strategy.name!r} of {owner}", args, self._given, len(self.run.tasks))

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Build the model with ``model_init`` and equip it; a second trial starts from fresh plugins."""
        model = super().call_model_init(trial)
        args = self.args
        self.recipe = choose(*(getattr(args, field, None) for field in PLUGIN_FIELDS))
        return self._equip(model, args)

    def _manifest(self) -> dict[str, Any]:
        return manifest(dataclasses.replace(self.run, tasks=self._tasks), self._base, self.recipe.describe())

    def _stored_names(self) -> Sequence[str]:
        strategy = self.recipe.strategy
        return () if strategy is None else strategy.stored(self._equipped, self.run)

    def _settle(self) -> None:
        for regularizer in self.recipe.regularizers:
            regularizer.settle()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the model's own weights, as they would be saved now."""
        self._settle()
        return super().evaluation_loop(*args, **kwargs)

    def detach(self) -> None:
        """Take every regularizer off the model, which is plain again afterwards."""
        for regularizer in reversed(self.recipe.regularizers):
            regularizer.detach(self._equipped)

    # ---- the loss

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer; see :class:`.updates.Updates` for what happens right before each of its steps."""
        optimizer = super().create_optimizer(*args, **kwargs)
        strategy, zero = self.recipe.strategy, self.run.sharding.zero_stage  # which steps all parameters as one
        groups = () if strategy is None or zero else strategy.gradient_groups(self._equipped, self.run)
        self._updates.hook(optimizer, self.recipe.regularizers, groups)
        return optimizer

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Fetch the micro-batches of one optimizer step and weigh them."""
        samples, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._updates.expect(self.optimizer)
        self.objective.plan(
            samples,
            shifts_labels=self._loss_shifts_labels,
            accelerator=self.accelerator,
            across_ranks=self.args.average_tokens_across_devices,
            step=self.state.global_step,
        )
        return samples, num_items

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        prepared: dict[str, Any] = super()._prepare_inputs(inputs)
        return on_device(prepared, inputs) if len(self.run.tasks) > 1 else prepared

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the task loss, plus penalties while training; see :mod:`tunery.core.objective`."""
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        share = self.objective.next_share()
        given = dict(inputs)  # label smoothing pops the labels
        self.objective.begin(given)
        with last_output(model) as seen:
            result: Any = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, returned = result if return_outputs else (result, None)
        normalised = getattr(self, "loss_is_scaled_for_ga", None)  # newer transformers: what a subclass says of itself
        if normalised is None:
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            normalised = counted or self.compute_loss_func is not None
        outputs = seen[0] if seen else None
        total = self.objective.total(loss, outputs, given, model, share, normalised)
        return (total, returned) if return_outputs else total

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log; a training loss is joined by its terms, ``loss/task`` and ``loss/<regularizer>``."""
        if "loss" in logs:
            logs.update(self.objective.drain(self.accelerator))
        super().log(logs, *args, **kwargs)

    # ---- batches and gradients

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return the sampler that the dataset or a regularizer asks for, else transformers'."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        asked = asked_sampler(dataset, self.recipe.regularizers, self.args, self._train_batch_size, self.run.logger)
        return super()._get_train_sampler(train_dataset) if asked is None else asked

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip the gradient, task by task where the strategy keeps tasks apart; return its norm before, all together."""
        strategy = self.recipe.strategy
        groups = [] if strategy is None else strategy.gradient_groups(self._equipped, self.run)
        if len(groups) < 2:
            return super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        return clip_each(self.accelerator, groups, self.args.max_grad_norm)

    # ---- a run

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, as ``transformers.Trainer.train``; a checkpoint to resume from is checked first.

        A strategy's earlier stages are trained before, or taken over where they are finished; what they came to is in
        ``finished_stages``. A checkpoint of an earlier stage, or the folder ``stages`` of a run, can be resumed from too.

        Raises:
            ArtifactError: no whole checkpoint, or one that is damaged or belongs to another base model.
        """
        *earlier, last = points_to_resume(self.stages, asked_place(resume_from_checkpoint, self._run_dir))
        if last is not None:
            self.check_belongs(last)
        if earlier:
            self._train_earlier_stages(earlier)
        if self.model_init is not None and self._stored_names():
            raise CompatibilityError(
                "a stand-in that is aligned before it trains does not go with model_init", remedy="pass model"
            )
        if last is not None:
            load_stored(self._equipped, last)
        elif self._to_align and self._stored_names():
            self.alignment = align(self)
        self._to_align = False
        self._clear_staging(self._run_dir)  # what a killed run was writing
        output = super().train(None if last is None else str(last), *args, **kwargs)
        observe("tunery_run_end", run=self.run, result=output.metrics)
        return output

    def check_belongs(self, folder: Path) -> None:
        """Check that a checkpoint, or a finished stage, is one that this trainer can go on with; see the function."""
        base = None if self.model_init is not None else self._base
        check_belongs(read_manifest(folder), folder, self.recipe, self._tasks, base, self._stage)
        if base is not None:
            self._check_adopted(folder)

    def _train_earlier_stages(self, points: Sequence[Path | None]) -> None:
        """Train the stages before the last, without regularizers, which then start from what was learnt."""
        strategy = self.recipe.strategy
        assert strategy is not None
        self.detach()
        self.accelerator.wait_for_everyone()  # every rank has seen what there is before any of it changes
        self.finished_stages = []
        for stage, point in zip(self.stages, points, strict=False):
            set_seed(self.args.seed)
            with strategy.staged(self._equipped, self.run, stage) as module:
                row = go_through(self._stage_trainer(stage, module), stage, point)
            self.finished_stages.append(row)
        set_seed(self.args.seed)
        for regularizer in self.recipe.regularizers:
            regularizer.attach(self._equipped, self.run)

    def _stage_trainer(self, stage: Stage, module: nn.Module) -> PluginTrainerMixin:
        """Return the trainer of an earlier stage: one like this for the task's own objective, else a plain one."""
        # The copy keeps what a subclass has set; the constructor below makes everything else anew.
        trainer = Trainer.__new__(Trainer) if stage.objective else copy.copy(self)
        trainer._stage = stage
        keywords = stage_keywords(self, stage, self._given)
        arguments = stage_arguments(self.args, stage)
        keywords |= {"base_model": self._base_reference, "base_revision": self._base_revision}
        PluginTrainerMixin.__init__(trainer, module, arguments, **keywords)
        return trainer


class Trainer(PluginTrainerMixin, transformers.Trainer):
    """``transformers.Trainer`` with plugins chosen by name in its arguments."""
