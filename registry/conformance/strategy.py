"""The laws of a strategy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from ..contracts import Strategy
from ..errors import CompatibilityError
from ..proxy import ProxyStrategy
from .laws import PluginLaws
from .models import MODELS, base_model
from .traces import anatomy_of, assert_no_trace, bits_of, changed
from .trials import Trial, tiny_process

if TYPE_CHECKING:
    from .trials import Outcome

KILLED_AFTER = (1, 4, 5)  # steps; an epoch has 5
STEPS = 6
LONG = 20


class StrategyLaws(PluginLaws):
    """Subclass it, name the plugin, and pytest checks every law of a strategy.

    class TestMine(StrategyLaws):
        plugin = "mine:r=4"
    """

    kind: ClassVar[str] = "strategy"

    @classmethod
    def trial(cls, model: str, **changes: Any) -> Trial:
        """Return a short training run with the strategy; a checkpoint every step."""
        return Trial(model=model, strategy=cls.plugin, steps=STEPS, save=True, tokenizer=True).but(**changes)

    def trained(self, model: str) -> Outcome:
        """Return the run that the laws about files look at."""
        return self.trial(model, dropout=True).run()

    def test_starts_as_the_base_model(self, model: str, tmp_path: Path) -> None:
        """Prepared and not trained, it answers as the base model does, where ``identity_start`` promises it."""
        import torch

        strategy = self.entry().cls
        assert issubclass(strategy, Strategy)
        if not strategy.identity_start:
            pytest.skip(f"{strategy.name!r} does not promise to start as the base model")
        tiny = MODELS[model]
        expected = tiny.logits(tiny.load(base_model(model, dropout=True)))
        trainer = self.trial(model, dropout=True).trainer(tmp_path)
        torch.testing.assert_close(tiny.logits(trainer.model), expected, rtol=0, atol=1e-6)

    def test_changes_what_requires_a_gradient_and_nothing_else(self, model: str, tmp_path: Path) -> None:
        """After some steps all that requires a gradient in any stage, or is stored, has changed, and no other bit."""
        with tiny_process():
            trainer = self.trial(model, dropout=True, save=False).trainer(tmp_path)
            promised = _training(trainer)
            before = bits_of(trainer.model)
            trainer.train()
        assert promised
        assert changed(before, bits_of(trainer.model)) == promised

    def test_other_seed_gives_other_weights(self, model: str) -> None:
        """The seed reaches what is random."""
        assert self.trained(model).bits != self.trial(model, dropout=True, seed=8).run().bits

    def test_loads_back_to_the_bit(self, model: str) -> None:
        """Saved and loaded, it gives the same answers to the bit."""
        import torch

        import tunery

        outcome = self.trained(model)
        loaded = tunery.load_run(outcome.folder)
        torch.testing.assert_close(MODELS[model].logits(loaded.model), outcome.logits, rtol=0, atol=0)

    @pytest.mark.parametrize("merge", [False, True], ids=["apart", "merged"])
    def test_exports_what_others_load(self, model: str, merge: bool, tmp_path: Path) -> None:
        """What it exports loads with transformers and PEFT alone and gives the same logits; no hook or class stays.

        Of a stand-in those are the logits of the model that it is plugged into.
        """
        import torch

        import tunery

        outcome, tiny = self.trained(model), MODELS[model]
        try:
            folder = tunery.export_run(outcome.folder, tmp_path / "exported", merge=merge)
        except CompatibilityError as error:
            assert merge and "\n" not in str(error)
            return
        loaded = tunery.load_run(outcome.folder)
        strategy, expected = loaded.recipe.strategy, outcome.logits
        assert strategy is not None
        if isinstance(strategy, ProxyStrategy):
            base = tiny.load(base_model(model, dropout=True))
            expected = tiny.logits(strategy.plug_in(base, loaded.model, loaded.run))
        torch.testing.assert_close(tiny.logits(tiny.load_exported(folder)), expected, rtol=0, atol=1e-5)
        assert_no_trace(strategy.export(loaded.model, loaded.run, merge=merge), self.entry().cls)

    @pytest.mark.parametrize("step", KILLED_AFTER)
    def test_resumes_as_if_never_killed(self, model: str, step: int) -> None:
        """Killed after a step and resumed, it ends with the same bits, dropout on."""
        trial = self.trial(model, dropout=True)
        assert trial.run(resume=step).bits == trial.run().bits

    def test_resumes_on_every_stage(self, stage: str) -> None:
        """The same on two processes."""
        trial = self.trial(self.first_model(), dropout=True, steps=2)
        assert trial.run(stage, resume=1).bits == trial.run(stage).bits

    def test_resumes_in_every_earlier_stage(self, model: str) -> None:
        """The same where it was killed amid a stage before the last, at its end, or before the first step of the last."""
        trial = self.trial(model, dropout=True)
        for left in _left_by_stages(trial.run()):
            assert trial.run(resume=left).bits == trial.run().bits, left

    def test_resumes_in_every_earlier_stage_on_every_stage(self, stage: str) -> None:
        """The same on two processes."""
        trial = self.trial(self.first_model(), dropout=True, steps=2)
        for left in _left_by_stages(trial.run(stage)):
            assert trial.run(stage, resume=left).bits == trial.run(stage).bits, left

    def test_leaves_the_model_as_prepared_after_a_stage(self, model: str, tmp_path: Path) -> None:
        """Begun and ended without training, a stage before the last leaves classes, flags, hooks and bits as they were."""
        trainer = self.trial(model).trainer(tmp_path)
        strategy, before = trainer.recipe.strategy, (anatomy_of(trainer.model), bits_of(trainer.model))
        for earlier in trainer.stages[:-1]:
            with strategy.staged(trainer.model, trainer.run, earlier):
                pass
        assert (anatomy_of(trainer.model), bits_of(trainer.model)) == before

    def test_same_losses_on_every_stage(self, model: str, stage: str) -> None:
        """The loss of every one of 20 steps is that of one process, at equal global batch."""
        trial = self.trial(model, steps=LONG, save=False)
        losses = trial.run(stage).logged("loss")
        assert len(losses) == LONG
        assert losses == pytest.approx(trial.run().logged("loss"), rel=1e-5)

    def test_same_files_on_every_stage(self, model: str, stage: str) -> None:
        """What a stage saves has the keys and shapes that one process saves, and answers as it does when loaded."""
        import torch

        import tunery

        trial = self.trial(model, steps=LONG, save=False)
        found, expected = trial.run(stage), trial.run()
        assert shapes(found) == shapes(expected)
        answers = MODELS[model].logits(tunery.load_run(found.folder).model)
        torch.testing.assert_close(answers, expected.logits, rtol=1e-4, atol=1e-4)


def shapes(outcome: Outcome) -> dict[str, tuple[int, ...]]:
    """Return the shape of every saved weight."""
    return {name: tuple(value.shape) for name, value in outcome.weights.items()}


def _training(trainer: Any) -> set[str]:
    """Return the names of the parameters that require a gradient in any stage, or that the strategy says it stores."""
    model = trainer.model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found |= set(trainer.recipe.strategy.stored(model, trainer.run))
    for earlier in trainer.stages[:-1]:
        with trainer.recipe.strategy.staged(model, trainer.run, earlier) as module:
            found |= {names[id(p)] for p in module.parameters() if p.requires_grad and id(p) in names}
    return found


def _left_by_stages(outcome: Outcome) -> list[str]:
    """Return what a run with earlier stages can be resumed from before its last one: nothing where there is one stage."""
    stages = outcome.folder / "stages"
    if not stages.is_dir():
        return []
    left = ["stages"]
    for folder in sorted(stages.iterdir()):
        steps = sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))
        left += [f"stages/{folder.name}/checkpoint-{step}" for step in (steps[0], steps[-1])]
    return left
