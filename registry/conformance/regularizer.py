"""The laws of a regularizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from ..contracts import Regularizer
from ..errors import CompatibilityError
from .gradients import assert_same_gradients, gradients
from .laws import PluginLaws, refused
from .models import MODELS
from .traces import anatomy_of
from .trials import ONE, Trial, tiny_process

KILLED_AFTER = (1, 4, 5)  # steps; an epoch has 5
STEPS = 6
GRADIENT_STEPS = 3  # at the first, a pull towards where the weights started is still zero


class RegularizerLaws(PluginLaws):
    """Subclass it, name the plugin, and pytest checks every law of a regularizer.

    class TestMine(RegularizerLaws):
        plugin = "mine:weight=0.5"

    Attributes:
        stochastic: whether the method draws random numbers in training. How a batch is split then decides what is drawn,
            so that gradients are compared between stages alone.
        strategies: what it is combined with; a combination may be refused with a ``CompatibilityError``.
    """

    kind: ClassVar[str] = "regularizer"
    stochastic: ClassVar[bool] = False
    strategies: ClassVar[tuple[str, ...]] = ("full", "lora", "head")

    @classmethod
    def trial(cls, model: str, **changes: Any) -> Trial:
        """Return a short training run of every parameter with the regularizer."""
        return Trial(model=model, strategy="full", regularizers=(cls.plugin,), steps=STEPS).but(**changes)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Add ``checkpointing``, and ``where``: one process or a stage, to what a law can ask for."""
        super().pytest_generate_tests(metafunc)
        if "where" in metafunc.fixturenames:
            metafunc.parametrize("where", [ONE, *(stage for stage in self.stages if self.runs_on(stage))])
        if "checkpointing" in metafunc.fixturenames:
            values = [False, True] if self.entry().cls.supports.activation_checkpointing else [False]
            metafunc.parametrize("checkpointing", values, ids=["plain", "checkpointing"][: len(values)])

    def gradients(self, model: str, **changes: Any) -> Trial:
        """Return a run whose weights tell its gradients."""
        return gradients(self.trial(model, steps=GRADIENT_STEPS, **changes))

    def test_leaves_the_model_plain(self, model: str, tmp_path: Path) -> None:
        """Attached and detached, the model has the same modules, names, hooks and answers; after training too."""
        import torch

        tiny = MODELS[model]
        with tiny_process():
            trainer = self.trial(model, steps=2).trainer(tmp_path / "with")
            plain = self.trial(model, steps=2, regularizers=()).trainer(tmp_path / "without")
            expected = anatomy_of(plain.model)
            trainer.detach()
            assert anatomy_of(trainer.model) == expected
            torch.testing.assert_close(tiny.logits(trainer.model), tiny.logits(plain.model), rtol=0, atol=0)

            trainer = self.trial(model, steps=2).trainer(tmp_path / "trained")
            trainer.train()
            plain.train()
            trainer.detach()
            assert anatomy_of(trainer.model) == anatomy_of(plain.model)

    def test_adds_no_key(self, model: str, tmp_path: Path) -> None:
        """Attached, neither the model's state_dict nor a saved file has a key more or less."""
        plain = self.trial(model, regularizers=())
        attached = self.trial(model).trainer(tmp_path / "with").model.state_dict()
        assert list(attached) == list(plain.trainer(tmp_path / "without").model.state_dict())
        assert self.trial(model).run().weights.keys() == plain.run().weights.keys()

    def test_does_something(self, model: str) -> None:
        """With it, other weights come out than without."""
        assert self.trial(model).run().bits != self.trial(model, regularizers=()).run().bits

    def test_off_is_not_there(self, model: str) -> None:
        """Switched off, it ends with the bits of a run without it, dropout on."""
        assert self.off(model).run().bits == self.trial(model, dropout=True, regularizers=()).run().bits

    def test_off_is_not_there_on_every_stage(self, stage: str) -> None:
        """The same on two processes."""
        model = self.first_model()
        assert self.off(model).run(stage).bits == self.trial(model, dropout=True, regularizers=()).run(stage).bits

    def off(self, model: str) -> Trial:
        """Return a run with the regularizer switched off."""
        regularizer = self.entry().cls
        assert issubclass(regularizer, Regularizer)
        return self.trial(model, dropout=True, **self.selecting(**regularizer.off))

    def test_terms_add_up(self, model: str) -> None:
        """Each logged loss is the sum of its named terms."""
        outcome, name = self.trial(model).run(), self.entry().name
        terms = zip(outcome.logged("loss/task"), outcome.logged(f"loss/{name}"), strict=True)
        assert [sum(pair) for pair in terms] == pytest.approx(outcome.logged("loss"), rel=1e-5)

    @pytest.mark.parametrize("accumulation", [2, 4])
    def test_same_gradients_however_split(self, model: str, accumulation: int) -> None:
        """Two micro-batches of 4, and four of 2, give the gradients of one batch of 8."""
        self._skip_what_the_split_decides()
        trial = self.gradients(model)
        assert_same_gradients(trial.but(accumulation=accumulation), ONE, trial)

    def test_same_gradients_with_a_short_micro_batch(self, model: str) -> None:
        """Micro-batches of 4, 4 and 2 give the gradients of one batch of 10: every row counts the same."""
        self._skip_what_the_split_decides()
        trial = self.gradients(model, rows=10, batch=10)
        assert_same_gradients(trial.but(batch=12, accumulation=3), ONE, trial)

    def test_same_gradients_with_a_short_rank(self, model: str) -> None:
        """Two ranks with 4 and 3 rows give the gradients of one process with 7."""
        if self.stochastic:
            pytest.skip("what it draws depends on the split")
        trial = self.gradients(model, rows=7)
        uneven = trial.but(options={"accelerator_config": {"even_batches": False}})
        assert_same_gradients(uneven, self.stages[0], trial)

    def _skip_what_the_split_decides(self) -> None:
        regularizer = self.entry().cls
        assert issubclass(regularizer, Regularizer)
        if regularizer.batch_wise or self.stochastic:
            pytest.skip("what it looks at or draws depends on the split")

    def test_same_gradients_with_checkpointing(self, model: str, checkpointing: bool) -> None:
        """Layers that are run again in the backward pass give the same gradients."""
        trial = self.gradients(model)
        assert_same_gradients(trial.but(options={"activation_checkpointing": checkpointing}), ONE, trial)

    def test_same_gradients_on_every_stage(self, model: str, stage: str, checkpointing: bool) -> None:
        """Two ranks with 4 rows each give the gradients of one process with 8; drawing at random, those of DDP."""
        trial = self.gradients(model, options={"activation_checkpointing": checkpointing})
        assert_same_gradients(trial, stage, self.gradients(model), "ddp" if self.stochastic else ONE)

    def test_same_gradients_accumulated_everywhere(self, where: str, checkpointing: bool) -> None:
        """The same with four micro-batches on each rank, and on one process.

        What looks at whole micro-batches is compared with one process that has as many, of the same rows over all ranks;
        what draws at random, with itself where nothing is sharded or run again.
        """
        regularizer = self.entry().cls
        assert issubclass(regularizer, Regularizer)
        trial = self.gradients(self.first_model(), batch=16, rows=48, accumulation=4)
        again = trial.but(options={"activation_checkpointing": checkpointing})
        if self.stochastic:
            assert_same_gradients(again, where, trial, ONE if where == ONE else "ddp")
        else:
            assert_same_gradients(again, where, trial if regularizer.batch_wise else trial.but(accumulation=1))

    @pytest.mark.parametrize("step", KILLED_AFTER)
    def test_resumes_as_if_never_killed(self, model: str, step: int) -> None:
        """Killed after a step and resumed, it ends with the same bits, dropout on."""
        trial = self.trial(model, dropout=True, save=True)
        assert trial.run(resume=step).bits == trial.run().bits

    def test_resumes_on_every_stage(self, stage: str) -> None:
        """The same on two processes."""
        trial = self.trial(self.first_model(), dropout=True, save=True, steps=2)
        assert trial.run(stage, resume=1).bits == trial.run(stage).bits

    def test_composes(self, model: str) -> None:
        """It works with each strategy, or says in one line that it cannot."""
        for strategy in self.strategies:
            trial = self.trial(model, strategy=strategy)
            try:
                trial.but(regularizers=()).run()
            except CompatibilityError:
                continue  # the strategy alone does not go with the model
            try:
                outcome = trial.run()
            except CompatibilityError as error:
                assert refused(self.entry().cls, error)
                continue
            assert outcome.weights.keys() == trial.but(regularizers=()).run().weights.keys()
            assert outcome.bits != trial.but(regularizers=()).run().bits, f"{self.plugin} does nothing with {strategy}"
