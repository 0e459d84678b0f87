"""The laws of a strategy that trains several tasks in one batch: those of any strategy, and what a mixed batch adds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .models import MODELS
from .strategy import KILLED_AFTER, LONG, StrategyLaws, shapes
from .trials import Trial

TASKS = 3


class JointStrategyLaws(StrategyLaws):
    """Subclass it for a strategy whose ``supports.several_tasks`` is true.

    class TestMine(JointStrategyLaws):
        plugin = "mine:r=4"
    """

    def test_takes_several_tasks(self) -> None:
        """It says so."""
        assert self.entry().cls.supports.several_tasks

    @classmethod
    def joint(cls, model: str, **changes: Any) -> Trial:
        """Return a short training run on three tasks; DeepSpeed would clip them all as one, so nothing is clipped."""
        return cls.trial(model, tasks=TASKS, batch=TASKS * 4, rows=TASKS * 12, options={"max_grad_norm": 0.0}).but(
            **changes
        )

    def test_several_tasks_load_back_to_the_bit(self, model: str) -> None:
        """Each row of a mixed batch gets the same answer after saving and loading."""
        import torch

        import tunery

        outcome = self.joint(model, dropout=True).run()
        answers = MODELS[model].logits(tunery.load_run(outcome.folder).model, TASKS)
        torch.testing.assert_close(answers, outcome.logits, rtol=0, atol=0)

    @pytest.mark.parametrize("merge", [False, True], ids=["apart", "merged"])
    def test_several_tasks_leave_one_by_one(self, model: str, merge: bool, tmp_path: Path) -> None:
        """Each exported task answers its rows as the mixed batch did, with transformers and PEFT alone."""
        import torch

        import tunery

        outcome, tiny = self.joint(model, dropout=True).run(), MODELS[model]
        expected = outcome.logits
        for number, task in enumerate(tiny.tasks(TASKS)):
            folder = tunery.export_run(outcome.folder, tmp_path / task.name, task=task.name, merge=merge)
            answers = tiny.logits(tiny.load_exported(folder, task.num_labels))[number::TASKS]
            own = expected[number::TASKS][..., : answers.shape[-1]]
            own = own if own.dim() == answers.dim() else own[:, 0]
            torch.testing.assert_close(answers, own, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("step", KILLED_AFTER)
    def test_several_tasks_resume_as_if_never_killed(self, model: str, step: int) -> None:
        """Killed after a step and resumed, a joint run ends with the same bits, dropout on."""
        trial = self.joint(model, dropout=True)
        assert trial.run(resume=step).bits == trial.run().bits

    def test_several_tasks_have_the_same_losses_on_every_stage(self, model: str, stage: str) -> None:
        """Every task's loss of every one of 20 steps is that of one process."""
        trial = self.joint(model, steps=LONG, save=False)
        found, expected = trial.run(stage), trial.run()
        for key in ("loss", *(f"loss/{task.name}" for task in MODELS[model].tasks(TASKS))):
            assert len(found.logged(key)) == LONG
            assert found.logged(key) == pytest.approx(expected.logged(key), rel=1e-5), key
        assert shapes(found) == shapes(expected)
