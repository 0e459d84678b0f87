"""Metrics against closed forms, where they are undefined, and the majority baseline."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from transformers import EvalPrediction

from tunery.core.data import metrics
from tunery.registry.context import Task, TaskKind
from tunery.registry.errors import DataError

BINARY = ("accuracy", "f1", "macro_f1", "matthews_correlation")
CONTINUOUS = ("pearson", "spearman", "mse")


def _task(kind: TaskKind, names: tuple[str, ...], num_labels: int = 0) -> Task:
    return Task(name="t", kind=kind, label_names=tuple("abcdef"[:num_labels]), metrics=names)


def _score(task: Task, predictions: Any, labels: Any) -> dict[str, float]:
    compute = metrics.compute_metrics(task)
    assert compute is not None
    return compute(EvalPrediction(predictions=predictions, label_ids=np.asarray(labels)))


def _logits(classes: list[int], num_labels: int) -> np.ndarray[Any, Any]:
    return np.eye(num_labels, dtype=np.float32)[classes]


def test_binary_metrics_follow_their_formulas() -> None:
    """Accuracy, F1 and Matthews correlation from the four counts of the confusion table."""
    predictions, labels = [1, 1, 1, 0, 0, 0, 0, 1], [1, 1, 0, 0, 0, 1, 0, 1]
    tp, fp, fn, tn = 3, 1, 1, 3
    scores = _score(_task(TaskKind.CLASSIFICATION, BINARY, 2), _logits(predictions, 2), labels)
    f1_positive, f1_negative = 2 * tp / (2 * tp + fp + fn), 2 * tn / (2 * tn + fp + fn)
    assert scores == pytest.approx(
        {
            "accuracy": (tp + tn) / 8,
            "f1": f1_positive,
            "macro_f1": (f1_positive + f1_negative) / 2,
            "matthews_correlation": (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)),
        }
    )


def test_macro_f1_is_the_mean_over_classes_seen() -> None:
    """Classes neither labelled nor predicted do not count; a class never predicted counts 0."""
    task = _task(TaskKind.IMAGE_CLASSIFICATION, ("macro_f1",), 4)
    # class 0: tp 2, fp 1; class 1: tp 1; class 2: fn 1; class 3: absent
    assert _score(task, _logits([0, 0, 1, 0], 4), [0, 0, 1, 2])["macro_f1"] == pytest.approx((4 / 5 + 1 + 0) / 3)


def test_regression_metrics_follow_their_formulas() -> None:
    """Pearson, Spearman and mean squared error, for predictions of shape (rows, 1)."""
    rng = np.random.default_rng(0)
    labels = rng.normal(size=40).astype(np.float32)
    predictions = (labels + rng.normal(size=40)).astype(np.float32)
    x, y = labels - labels.mean(), predictions - predictions.mean()
    scores = _score(_task(TaskKind.REGRESSION, CONTINUOUS), predictions[:, None], labels)
    distance = scipy.stats.rankdata(labels) - scipy.stats.rankdata(predictions)
    assert scores == pytest.approx(
        {
            "pearson": (x @ y) / math.sqrt((x @ x) * (y @ y)),
            "spearman": 1 - 6 * (distance @ distance) / (40 * (40**2 - 1)),
            "mse": np.mean((labels - predictions) ** 2),
        },
        rel=1e-5,
    )


def test_constant_predictions_show_no_relation() -> None:
    """Where a correlation is undefined it is 0, without a warning."""
    classes = _score(_task(TaskKind.CLASSIFICATION, BINARY, 2), _logits([0, 0, 0], 2), [0, 1, 0])
    assert classes == pytest.approx({"accuracy": 2 / 3, "f1": 0, "macro_f1": 0.4, "matthews_correlation": 0})
    single = _score(_task(TaskKind.CLASSIFICATION, BINARY, 2), _logits([0, 0], 2), [0, 0])
    assert single == {"accuracy": 1, "f1": 0, "macro_f1": 1, "matthews_correlation": 0}
    numbers = _score(_task(TaskKind.REGRESSION, CONTINUOUS), np.ones((3, 1)), [1.0, 2.0, 3.0])
    assert numbers == pytest.approx({"pearson": 0, "spearman": 0, "mse": 5 / 3})
    one_row = _score(_task(TaskKind.REGRESSION, CONTINUOUS), np.ones((1, 1)), [3.0])
    assert one_row == {"pearson": 0, "spearman": 0, "mse": 4}


def test_nearly_constant_predictions_do_not_warn() -> None:
    """A collapsed model's last bits are numbers like any other."""
    predictions = np.float32(2.5) + np.array([0, 1, 2], np.float32) * np.float32(2.4e-7)
    assert _score(_task(TaskKind.REGRESSION, ("pearson",)), predictions, [1.0, 2.0, 3.0])["pearson"] > 0.99


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_model_that_diverged_has_no_score(value: float) -> None:
    """One prediction that is no number makes every metric nan; an infinite logit still has an argmax."""
    numbers = _score(_task(TaskKind.REGRESSION, CONTINUOUS), np.array([1.0, value, 2.0]), [1.0, 2.0, 3.0])
    assert all(math.isnan(score) for score in numbers.values())
    classes = _score(_task(TaskKind.CLASSIFICATION, ("accuracy",), 2), np.array([[0, value], [1, 0]]), [1, 0])
    assert classes["accuracy"] == 1 or math.isnan(classes["accuracy"])
    assert math.isnan(classes["accuracy"]) == math.isnan(value)


def test_further_outputs_of_a_model_do_not_count() -> None:
    """Models that return hidden states beside logits are scored by the logits."""
    outputs = (_logits([1, 0], 2), np.zeros((2, 7)))
    assert _score(_task(TaskKind.CLASSIFICATION, ("accuracy",), 2), outputs, [1, 0]) == {"accuracy": 1}


def test_perplexity_comes_from_the_loss() -> None:
    """The Trainer gathers no logits for language modelling; perplexity is exp(loss), inf at most."""
    task = _task(TaskKind.CAUSAL_LM, ("perplexity",))
    assert metrics.compute_metrics(task) is None
    assert metrics.add_perplexity({"eval_loss": math.log(7.0), "epoch": 1.0}) == pytest.approx(
        {"eval_loss": math.log(7.0), "epoch": 1.0, "eval_perplexity": 7.0}
    )
    assert metrics.add_perplexity({"test_loss": 1e4}, prefix="test")["test_perplexity"] == math.inf
    assert math.isnan(metrics.add_perplexity({"eval_loss": math.nan})["eval_perplexity"])


@pytest.mark.parametrize("kind", [TaskKind.CLASSIFICATION, TaskKind.REGRESSION, TaskKind.CAUSAL_LM])
@pytest.mark.parametrize("num_labels", [2, 3])
def test_default_metrics_fit_their_task(kind: TaskKind, num_labels: int) -> None:
    """Nothing chosen for the user is refused afterwards."""
    chosen = metrics.default_metrics(kind, num_labels)
    assert metrics.check_metrics(chosen, kind, num_labels) == chosen


@pytest.mark.parametrize(
    ("name", "kind", "num_labels", "message"),
    [
        (
            "acuracy",
            TaskKind.CLASSIFICATION,
            2,
            "metric 'acuracy' is unknown; known: accuracy, f1, .*; did you mean 'accuracy'",
        ),
        (
            "f1",
            TaskKind.CLASSIFICATION,
            3,
            "metric 'f1' does not fit classification with 3 classes; known: accuracy, macro_f1",
        ),
        ("pearson", TaskKind.CLASSIFICATION, 2, "metric 'pearson' does not fit classification with 2 classes"),
        (
            "accuracy",
            TaskKind.REGRESSION,
            0,
            "metric 'accuracy' does not fit regression; known: pearson, spearman, mse",
        ),
        ("accuracy", TaskKind.CAUSAL_LM, 0, "metric 'accuracy' does not fit causal_lm; known: perplexity, loss"),
    ],
)
def test_a_metric_that_does_not_fit_is_one_line(name: str, kind: TaskKind, num_labels: int, message: str) -> None:
    """The line says which metrics do."""
    with pytest.raises(DataError, match=message):
        metrics.check_metrics(
            ["loss" if kind is TaskKind.CAUSAL_LM else metrics.metric_names(kind)[0], name], kind, num_labels
        )


def test_majority_baseline_never_looks_at_the_input() -> None:
    """The most frequent training class, the mean training label, and nothing for language modelling."""
    classes = _task(TaskKind.CLASSIFICATION, ("accuracy", "macro_f1"), 3)
    assert metrics.majority_baseline(classes, [2, 2, 0, 1], [2, 0, 0, 2, 1]) == pytest.approx(
        {"accuracy": 2 / 5, "macro_f1": (4 / 7) / 3}
    )
    numbers = _task(TaskKind.REGRESSION, CONTINUOUS)
    assert metrics.majority_baseline(numbers, [1.0, 3.0], [2.0, 4.0]) == {"pearson": 0, "spearman": 0, "mse": 2}
    assert metrics.majority_baseline(_task(TaskKind.CAUSAL_LM, ("perplexity",)), [], []) == {}


@pytest.mark.parametrize(
    ("main", "mean"),
    [(("pearson", "mse"), {metrics.MEAN: 0.75}), (("mse", "pearson"), {})],
    ids=["one way", "opposite"],
)
def test_joint_metrics_are_those_of_each_task_alone(main: tuple[str, ...], mean: dict[str, float]) -> None:
    """A mixed evaluation, logits filled up with -inf; a mean of what should grow and what should shrink there is not."""
    three = Task(name="three", kind=TaskKind.CLASSIFICATION, label_names=("a", "b", "c"), metrics=("accuracy",))
    score = Task(name="score", kind=TaskKind.REGRESSION, metrics=main)
    logits = np.array([[0, 2, 1], [0.5, -np.inf, -np.inf], [3, 2, 1], [1.5, -100, -100]])
    labels, task_ids = np.array([1, 0.0, 1, 1.0]), np.array([0, 1, 0, 1])
    found = metrics.compute_joint_metrics([three, score])(
        EvalPrediction(predictions=logits, label_ids=(labels, task_ids))
    )
    assert found == pytest.approx({"three_accuracy": 0.5, "score_mse": 0.25, "score_pearson": 1.0, **mean})


def test_joint_perplexity_is_by_token() -> None:
    """Of a language model's logits only each row's nats and tokens are kept, and a task's perplexity is by its tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, 11, generator=generator)
    labels = torch.randint(11, (4, 6), generator=generator)
    labels[0, 3:] = labels[2, :2] = -100
    task_ids = np.array([0, 1, 0, 1])
    tasks = [Task(name=name, kind=TaskKind.CAUSAL_LM, metrics=("perplexity",)) for name in ("a", "b")]
    kept = metrics.row_scores(logits, (labels, torch.tensor(task_ids)), tasks)
    assert kept.shape == (4, 2)
    found = metrics.compute_joint_metrics(tasks)(
        EvalPrediction(predictions=kept.numpy(), label_ids=(labels.numpy(), task_ids))
    )
    for number, task in enumerate(tasks):
        rows = torch.tensor(task_ids == number)
        own = torch.nn.functional.cross_entropy(logits[rows, :-1].flatten(0, 1), labels[rows, 1:].flatten())
        assert found[f"{task.name}_perplexity"] == pytest.approx(math.exp(own), rel=1e-6)


@pytest.mark.parametrize("alone", [False, True], ids=["mixed", "alone"])
def test_classifier_beside_language_modelling_has_its_own_metrics(alone: bool) -> None:
    """Its logits and labels are those of the first position, in batches with and without rows of language modelling."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.full((4, 6, 11), -torch.inf)
    logits[1] = torch.randn(6, 11, generator=generator)
    for row, label in ((0, 2), (2, 1), (3, 0)):
        logits[row, 0, :3] = torch.eye(3)[label]
    labels = torch.full((4, 6), -100)
    labels[1], labels[[0, 2, 3], 0] = torch.randint(11, (6,), generator=generator), torch.tensor([2, 1, 1])
    tasks = [
        Task(name="c", kind=TaskKind.CLASSIFICATION, label_names=("x", "y", "z"), metrics=("accuracy",)),
        Task(name="w", kind=TaskKind.CAUSAL_LM, metrics=("perplexity",)),
    ]
    task_ids = torch.tensor([0, 1, 0, 0])
    kept = metrics.row_scores(logits, (labels, task_ids), tasks)
    if alone:
        rows = task_ids == 0
        parts = metrics.row_scores(logits[rows, 0, :3], (labels[rows, :2], task_ids[rows]), tasks)
        assert torch.equal(parts, kept[rows])
    found = metrics.compute_joint_metrics(tasks)(
        EvalPrediction(predictions=kept.numpy(), label_ids=(labels.numpy(), task_ids.numpy()))
    )
    own = torch.nn.functional.cross_entropy(logits[1, :-1], labels[1, 1:])
    assert found["c_accuracy"] == pytest.approx(2 / 3)
    assert found["w_perplexity"] == pytest.approx(math.exp(own), rel=1e-6)
