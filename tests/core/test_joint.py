"""One task of several alone."""

from __future__ import annotations

from tunery.core.joint import best_alone
from tunery.registry.context import Task, TaskKind


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
