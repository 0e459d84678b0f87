"""Several tasks in one batch, and one of them alone."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from tunery.core.joint import best_alone, check_joint, head_task
from tunery.core.objective import Objective
from tunery.registry.conformance.trials import Trial
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


def test_labels_keep_their_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's bfloat16 would make 50,176 of token 50,257, which is a float where another task is a regression."""

    def rounded(_self: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        return {key: value.bfloat16() if value.is_floating_point() else value for key, value in inputs.items()}

    monkeypatch.setattr(transformers.Trainer, "_prepare_inputs", rounded)
    trainer = Trial(strategy="multi_lora:r=4", tasks=2).trainer(tmp_path / "run")
    prepared = trainer._prepare_inputs({"labels": torch.tensor([50257.0, 0.3]), "x": torch.tensor([0.3])})
    assert (
        prepared["labels"].tolist() == torch.tensor([50257.0, 0.3]).tolist() and prepared["x"].dtype == torch.bfloat16
    )


def test_the_head_is_the_one_that_models_language() -> None:
    """Wherever that task stands; else the first task's."""
    kinds = (TaskKind.CLASSIFICATION, TaskKind.CAUSAL_LM, TaskKind.REGRESSION)
    tasks = [Task(name=kind.value, kind=kind) for kind in kinds]
    assert head_task(tasks) is tasks[1] and head_task(tasks[::2]) is tasks[0]


def test_share_of_a_micro_batch_is_by_each_tasks_own_labels() -> None:
    """Nothing predicts a row's first token, and a classifier's label stands there: 4 and 1 tokens, 1 and 2 labels."""
    tasks = [Task(name=kind.value, kind=kind) for kind in (TaskKind.CAUSAL_LM, TaskKind.CLASSIFICATION)]
    objective = Objective([], tasks)
    none = [-100] * 4
    batches = [
        {"labels": torch.tensor([[1, 2, 3, 4, 5], [1, *none]]), "task_ids": torch.tensor([0, 1])},
        {"labels": torch.tensor([[0, *none], [6, 7, *none[1:]], [1, *none]]), "task_ids": torch.tensor([1, 0, 1])},
    ]
    objective.plan(batches, shifts_labels=True, accelerator=None, across_ranks=False)
    shares = [objective.next_share() for _ in batches]
    found = [share.items.tolist() for share in shares if share is not None]
    assert found == [pytest.approx([2 * 4 / 5, 2 * 1 / 3]), pytest.approx([2 * 1 / 5, 2 * 2 / 3])]
