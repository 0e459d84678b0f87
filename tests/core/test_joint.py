"""Several tasks in one batch, and one of them alone."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from tunery.core.joint import best_alone, check_joint
from tunery.registry.context import RunContext, Task, TaskKind
from tunery.registry.errors import CompatibilityError


@pytest.mark.parametrize(("stage", "tasks"), [(0, 2), (2, 2), (2, 1)])
def test_what_deepspeed_does_to_several_tasks(stage: int, tasks: int, caplog: pytest.LogCaptureFixture) -> None:
    """Its clipping of all tasks as one is refused, and that it moves tasks without rows is said once; elsewhere neither."""
    run = RunContext(
        tasks=tuple(Task(name=f"t{number}", kind=TaskKind.CAUSAL_LM) for number in range(tasks)),
        seed=0,
        sharding=SimpleNamespace(zero_stage=stage),
        pretrained_parameters=frozenset(),
        logger=logging.getLogger("tunery"),
        find_anatomy=lambda model: None,
    )
    told = stage > 0 and tasks > 1
    clipping = SimpleNamespace(max_grad_norm=1.0, label_smoothing_factor=0)
    if told:
        with pytest.raises(CompatibilityError, match=r"max_grad_norm=1.0 with 2 tasks .* clips all tasks as one; set"):
            check_joint(run, clipping)
    else:
        check_joint(run, clipping)
    assert not caplog.messages
    check_joint(run, SimpleNamespace(max_grad_norm=0, label_smoothing_factor=0))
    assert ["a task without rows in a step still takes the optimizer's momentum" in m for m in caplog.messages] == (
        [True] if told else []
    )


def test_best_metric_of_a_task_alone() -> None:
    """The task's part of the joint name, the loss where text is modelled, and mean squared errors are to be small."""
    yes = Task(name="a", kind=TaskKind.CLASSIFICATION, label_names=("n", "y"), metrics=("accuracy", "f1"))
    score = Task(name="b", kind=TaskKind.REGRESSION, metrics=("mse",))
    text = Task(name="c", kind=TaskKind.CAUSAL_LM, metrics=("perplexity",))
    assert best_alone(yes, "eval_a_f1") == {"metric_for_best_model": "f1"}
    assert best_alone(yes, "loss") == {"metric_for_best_model": "loss"}
    assert best_alone(yes, "mean") == {"metric_for_best_model": "accuracy", "greater_is_better": True}
    assert best_alone(score, "mean") == {"metric_for_best_model": "mse", "greater_is_better": False}
    assert best_alone(text, "mean") == {"metric_for_best_model": "loss", "greater_is_better": False}
