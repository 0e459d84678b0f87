"""``PluginTrainerMixin``: any ``transformers.Trainer`` subclass with a strategy, regularizers and probes; and ``Trainer``.

The order of a run: seed -> strategy.prepare -> regularizer.attach -> transformers' own constructor -> training, with
the objective in ``compute_loss`` -> probes at their moments -> checkpoints that appear whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from torch import nn
from transformers.trainer_utils import set_seed

from ..registry.context import RunContext, Subject, Task, TaskKind
from ..registry.errors import ArtifactError, CompatibilityError, RecipeError
from .arguments import PLUGIN_FIELDS, PROBE_MOMENTS, TrainingArguments
from .artifacts import describe_base, last_checkpoint, manifest, read_manifest
from .checkpointing import WholeCheckpoints
from .context import infer_task, make_context
from .objective import Objective, last_output
from .probing import Probing, Snapshot
from .recipe import Recipe, choose, observe
from .sampling import StratifiedSampler, classes_of
from .updates import Updates


class PluginTrainerMixin(WholeCheckpoints):
    """Mix into a Trainer: ``class MySFT(PluginTrainerMixin, trl.SFTTrainer)``, with arguments that have the plugin fields.

    Args:
        model: a model, loaded; a strategy changes it in place or wraps it.
        args: arguments with the fields of :class:`tunery.core.arguments.PluginArguments`.
        task: what the model is trained for; default: told from the model's class and config.
        base_model: the name the manifest records for the base model; default: what its config remembers.
        kwargs: everything else the Trainer takes, by keyword.

    Raises:
        TuneryError: a selection, combination or model that cannot work; nothing has been written then.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        task: Task | None = None,
        base_model: str | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(model, str):
            raise RecipeError(
                f"model {model!r} is a name", remedy="load it first: AutoModelFor....from_pretrained(name)"
            )
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        self.recipe = choose(*(getattr(args, field, None) for field in PLUGIN_FIELDS))
        self._given_task = task
        self._base_reference = base_model
        # transformers seeds in its constructor, which is after adapters and heads are drawn.
        set_seed(args.seed)
        if model is not None:
            model = self._equip(model, args)
        super().__init__(model=model, args=args, **kwargs)
        # Only causal-LM losses really divide by num_items_in_batch (transformers#47688).
        self.model_accepts_loss_kwargs = bool(self.model_accepts_loss_kwargs and self._loss_shifts_labels)
        self.add_callback(_Moments(self))

    # ---- building the model

    recipe: Recipe
    run: RunContext
    objective: Objective

    def _equip(self, model: nn.Module, args: Any) -> nn.Module:
        """Give the model its strategy and regularizers, before anything is moved, sharded or wrapped."""
        # Files hold the names of the live model. transformers writes those of the checkpoint the model came from
        # (BERT's LayerNorm.gamma), which its own resume then skips without an error.
        for module in model.modules():
            if isinstance(module, transformers.PreTrainedModel):
                module._weight_conversions = []  # type: ignore[assignment]
        self.run = make_context(model, args, self._given_task or infer_task(model))
        self.recipe.check(model, self.run)
        self.recipe.check_loss(args)
        self._base = describe_base(model, self.run, self._base_reference)
        strategy = self.recipe.strategy
        if strategy is not None:
            if isinstance(model, PeftModel):
                raise CompatibilityError(
                    f"the model already is a {type(model).__name__}",
                    remedy="hand in the base model or leave strategy out",
                )
            model = strategy.prepare(model, self.run)
        self._reference = Snapshot(model, self.run.sharding) if self.recipe.probes else None
        for regularizer in self.recipe.regularizers:
            regularizer.attach(model, self.run)
        self.objective = Objective(self.recipe.regularizers, self.run.task)
        self._updates = Updates()
        return model

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Build the model with ``model_init`` and equip it; a second trial starts from fresh plugins."""
        model = super().call_model_init(trial)
        args = self.args
        self.recipe = choose(*(getattr(args, field, None) for field in PLUGIN_FIELDS))
        return self._equip(model, args)

    def _manifest(self) -> dict[str, Any]:
        return manifest(self.run, self._base, self.recipe.describe())

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

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return transformers' own sampler, or a stratified one where a regularizer asks for it."""
        asking = [regularizer for regularizer in self.recipe.regularizers if regularizer.stratified]
        if not asking:
            return super()._get_train_sampler(train_dataset)
        args: Any = self.args
        dataset = self.train_dataset if train_dataset is None else train_dataset
        ranks = 1 if args.accelerator_config.split_batches else args.world_size
        seed = args.seed if args.data_seed is None else args.data_seed
        sampler = StratifiedSampler(classes_of(dataset), self._train_batch_size * ranks, seed)
        if rare := sampler.rare_classes():
            self.run.logger.warning("%s: too few rows of class %s for every micro-batch", asking[0].name, rare)
        return sampler

    # ---- the loss

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer; regularizers that change weights themselves do so right before each of its steps."""
        optimizer = super().create_optimizer(*args, **kwargs)
        self._updates.hook(optimizer, self.recipe.regularizers)
        return optimizer

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Fetch the micro-batches of one optimizer step and weigh them."""
        samples, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._updates.expect(self.optimizer)
        self.objective.plan(
            samples,
            # transformers does not know of GPT-2's loss that it shifts; the task does
            shifts_labels=self._loss_shifts_labels or self.run.task.kind is TaskKind.CAUSAL_LM,
            accelerator=self.accelerator,
            across_ranks=self.args.average_tokens_across_devices,
            step=self.state.global_step,
        )
        return samples, num_items

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

    # ---- a run

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, as ``transformers.Trainer.train``; a checkpoint to resume from is checked first.

        Raises:
            ArtifactError: no whole checkpoint, or one that is damaged or belongs to another base model.
        """
        resume_from_checkpoint = self._checkpoint_to_resume(resume_from_checkpoint)
        self._clear_staging(self._run_dir)  # what a killed run was writing
        output = super().train(resume_from_checkpoint, *args, **kwargs)
        observe("tunery_run_end", run=self.run, result=output.metrics)
        return output

    def _checkpoint_to_resume(self, asked: str | bool | None) -> str | None:
        if asked is None or asked is False:
            return None
        run_dir = self._run_dir
        folder = last_checkpoint(run_dir) if asked is True else Path(asked)
        if folder is None:
            raise ArtifactError(f"no whole checkpoint in {run_dir}", remedy="train without --resume_from_checkpoint")
        content = read_manifest(folder)
        recorded, strategies = content["base_model"], [p["name"] for p in content["plugins"] if p["kind"] == "strategy"]
        if strategies != [chosen.entry.name for chosen in self.recipe.chosen if chosen.entry.kind == "strategy"]:
            raise ArtifactError(
                f"{folder} was trained with strategy {', '.join(strategies) or 'none'}",
                remedy="resume with the same one",
            )
        if self.model_init is None and recorded["fingerprint"] != self._base["fingerprint"]:
            raise ArtifactError(
                f"{folder} was trained on another base model: {recorded['name_or_path'] or recorded['class']}",
                remedy="resume with the model it began with",
            )
        if self.model_init is None:
            self._check_adopted(folder)
        return str(folder)

    def probe(self, moment: str) -> None:
        """Measure with every probe now; ``moment`` is ``begin``, ``evaluate`` or ``end``."""
        if self._reference is None:
            return
        self._settle()
        subject = Subject(
            model=self._equipped,
            run=self.run,
            reference=self._reference,
            evaluate=self._evaluate_quietly if self.eval_dataset is not None else None,
            step=self.state.global_step,
        )
        moments: Sequence[str] = getattr(self.args, "probe_moments", PROBE_MOMENTS)
        probing = Probing(self.recipe.probes, moments, self._run_dir)
        if moment == "begin" and subject.run.sharding.rank == 0:
            probing.log.rewind(subject.step or -1)
        if moment != "begin" or subject.step == 0:
            probing.at(moment, subject, self.log, lambda m: observe("tunery_measured", run=self.run, measurement=m))

    def _evaluate_quietly(self) -> Mapping[str, float]:
        loader = self.get_eval_dataloader()
        output = self.evaluation_loop(loader, description="Probe", metric_key_prefix="eval")
        return dict(output.metrics or {})


class _Moments(transformers.TrainerCallback):
    """Tells observers that a run begins, and has probes measure at their moments."""

    def __init__(self, trainer: PluginTrainerMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        observe("tunery_run_begin", run=self.trainer.run)
        self.trainer.probe("begin")

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.probe("evaluate")

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.probe("end")


class Trainer(PluginTrainerMixin, transformers.Trainer):
    """``transformers.Trainer`` with plugins chosen by name in its arguments."""
