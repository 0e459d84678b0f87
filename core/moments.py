"""When the probes of a training run measure, and what of the trainer they are handed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import transformers

from ..registry.context import RunContext, Subject
from .alignment import whole_of
from .arguments import PROBE_MOMENTS
from .checkpointing import WholeCheckpoints
from .probing import Probing, Snapshot, own_batches
from .recipe import Recipe, observe
from .sharding import ModelSharding


class ProbedTrainer(WholeCheckpoints):
    """Has the run's probes measure the model as it is, and leaves no trace of them."""

    recipe: Recipe
    run: RunContext
    _reference: Snapshot | None

    def probe(self, moment: str) -> None:
        """Measure with every probe now; ``moment`` is ``begin``, ``evaluate`` or ``end``."""
        if self._reference is None:
            return
        self._settle()
        subject = self.subject()
        moments: Sequence[str] = getattr(self.args, "probe_moments", PROBE_MOMENTS)
        probing = Probing(self.recipe.probes, moments, self._run_dir)
        if moment == "begin":
            self.recipe.check_stand_in(subject.whole is not None)
            if subject.run.sharding.rank == 0:
                probing.log.rewind(subject.step or -1)
        if moment != "begin" or subject.step == 0:
            try:
                probing.at(moment, subject, self.log, lambda m: observe("tunery_measured", run=self.run, measurement=m))
            finally:
                cast(ModelSharding, self.run.sharding).rest()

    def subject(self) -> Subject:
        """Return what the run's probes measure, as it is now."""
        assert self._reference is not None, "only a run with probes keeps its pre-trained values"
        evaluated = self.eval_dataset is not None
        return Subject(
            model=self._equipped,
            run=self.run,
            reference=self._reference,
            evaluate=self._evaluate_quietly if evaluated else None,
            batches=self._eval_batches if evaluated else None,
            step=self.state.global_step,
            whole=whole_of(self.recipe.strategy, self._equipped, self.run),
        )

    def _eval_batches(self) -> Iterator[Mapping[str, Any]]:
        size = self.args.per_device_eval_batch_size
        for batch in own_batches(self.get_eval_dataloader(), size, self.run.sharding):
            yield self._prepare_inputs(batch)

    def _evaluate_quietly(self) -> Mapping[str, float]:
        loader = self.get_eval_dataloader()
        output = self.evaluation_loop(loader, description="Probe", metric_key_prefix="eval")
        return dict(output.metrics or {})


class Moments(transformers.TrainerCallback):
    """Tells observers that a run begins, and has probes measure at their moments."""

    def __init__(self, trainer: ProbedTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Tell observers, and measure."""
        observe("tunery_run_begin", run=self.trainer.run)
        self.trainer.probe("begin")

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Measure."""
        self.trainer.probe("evaluate")

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Measure."""
        self.trainer.probe("end")
