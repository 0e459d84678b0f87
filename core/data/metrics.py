"""Metrics by task, from scikit-learn, scipy and sacrebleu, and the majority baseline they are read against.

What is left open where a formula has no answer is settled here, and no metric ever warns:

* a logit that is not a number, a regression prediction that is not finite: every metric is ``nan``, the model diverged;
* ``pearson``, ``spearman`` and ``matthews_correlation`` of constant predictions, constant labels or fewer than two rows:
  0, no relation is shown;
* ``f1`` without a positive prediction or label: 0; ``macro_f1`` averages over the classes that are labelled or predicted;
* ``perplexity`` beyond the largest float: ``inf``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...registry.context import Task, TaskKind
from ...registry.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import EvalPrediction

Metric = Callable[["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"], float]


def _is_constant(labels: np.ndarray[Any, Any], predictions: np.ndarray[Any, Any]) -> bool:
    return len(labels) < 2 or labels.min() == labels.max() or predictions.min() == predictions.max()


def _accuracy(labels: np.ndarray[Any, Any], predictions: np.ndarray[Any, Any]) -> float:
    return float((labels == predictions).mean())


def _f1(labels: np.ndarray[Any, Any], predictions: np.ndarray[Any, Any]) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, zero_division=0))


def _macro_f1(labels: np.ndarray[Any, Any], predictions: np.ndarray[Any, Any]) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, average="macro", zero_division=0))


def _matthews_correlation(labels: np.ndarray[Any, Any], predictions: np.ndarray[Any, Any]) -> float:
    from sklearn.metrics import matthews_corrcoef

    # scikit-learn gives the same 0 and warns.
    return 0.0 if _is_constant(labels, predictions) else float(matthews_corrcoef(labels, predictions))


def _pearson(labels: np.ndarray[Any, Any], predictions: np.ndarray[Any, Any]) -> float:
    import numpy as np

    # numpy's, because scipy warns about predictions that are nearly constant.
    return 0.0 if _is_constant(labels, predictions) else float(np.corrcoef(labels, predictions)[0, 1])


def _spearman(labels: np.ndarray[Any, Any], predictions: np.ndarray[Any, Any]) -> float:
    from scipy.stats import spearmanr

    return 0.0 if _is_constant(labels, predictions) else float(spearmanr(labels, predictions).statistic)


def _mse(labels: np.ndarray[Any, Any], predictions: np.ndarray[Any, Any]) -> float:
    return float(((labels - predictions) ** 2).mean())


_CLASSIFICATION: dict[str, Metric] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "macro_f1": _macro_f1,
    "matthews_correlation": _matthews_correlation,
}
_REGRESSION: dict[str, Metric] = {"pearson": _pearson, "spearman": _spearman, "mse": _mse}
_BY_KIND: dict[TaskKind, dict[str, Metric]] = {
    TaskKind.CLASSIFICATION: _CLASSIFICATION,
    TaskKind.IMAGE_CLASSIFICATION: _CLASSIFICATION,
    TaskKind.REGRESSION: _REGRESSION,
}
# The Trainer's own evaluation loss gives these two; gathering every logit of a vocabulary for them would fill the memory.
_FROM_LOSS = ("perplexity", "loss")
# Of what a trained model writes; measured once, after training: see ``generation``.
GENERATED = ("bleu", "chrf")


def metric_names(kind: TaskKind, num_labels: int = 0) -> tuple[str, ...]:
    """Return every metric that fits such a task; ``f1`` is the positive class's and needs exactly two classes."""
    if kind.is_language_modelling:
        return (*_FROM_LOSS, *GENERATED) if kind is TaskKind.CAUSAL_LM else _FROM_LOSS
    return tuple(name for name in _BY_KIND[kind] if name != "f1" or num_labels == 2)


def default_metrics(kind: TaskKind, num_labels: int = 0) -> tuple[str, ...]:
    """Return the metrics of a task that names none, the main one first."""
    if kind.is_language_modelling:
        return ("perplexity",)
    if kind is TaskKind.REGRESSION:
        return ("pearson", "spearman", "mse")
    return ("accuracy", "f1") if num_labels == 2 else ("accuracy", "macro_f1")


def check_metrics(names: Sequence[str], kind: TaskKind, num_labels: int = 0) -> tuple[str, ...]:
    """Return ``names``, each of which fits the task.

    Raises:
        DataError: a name is unknown, or its metric says nothing about such a task.
    """
    fitting = metric_names(kind, num_labels)
    for name in names:
        if name not in fitting:
            every = (*_CLASSIFICATION, *_REGRESSION, *_FROM_LOSS, *GENERATED)
            what = f"does not fit {kind} with {num_labels} classes" if num_labels else f"does not fit {kind}"
            raise DataError(
                f"metric {name!r} {what if name in every else 'is unknown'}",
                known=fitting,
                remedy=did_you_mean(name, fitting),
            )
    return tuple(names)


def compute_metrics(task: Task) -> Callable[[EvalPrediction], dict[str, float]] | None:
    """Return the ``compute_metrics`` of a ``transformers.Trainer`` for ``task``.

    It takes logits of shape (rows, classes), or predictions of shape (rows,) or (rows, 1) for regression; where a model
    returns further outputs, the first one counts. ``None`` for language modelling: see :func:`add_perplexity`.
    """
    if task.kind.is_language_modelling:
        return None

    def compute(evaluation: EvalPrediction) -> dict[str, float]:
        import numpy as np

        outputs = evaluation.predictions
        logits = np.asarray(outputs[0] if isinstance(outputs, tuple) else outputs)
        labels = np.asarray(evaluation.label_ids)
        diverged = ~np.isfinite(logits) if task.kind is TaskKind.REGRESSION else np.isnan(logits)
        if diverged.any():
            return dict.fromkeys(task.metrics, math.nan)
        predictions = logits.reshape(len(labels)) if task.kind is TaskKind.REGRESSION else logits.argmax(axis=-1)
        return _scores(task, labels, predictions)

    return compute


MEAN = "mean"


def compute_joint_metrics(tasks: Sequence[Task]) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return the ``compute_metrics`` of a Trainer whose rows belong to several tasks.

    It takes labels and ``task_ids``, and logits of shape (rows, widest label space), or what :func:`row_scores` makes of
    a language model's. Metrics are named ``<task>_<metric>``; ``mean`` is the mean of the tasks' main ones, and is left
    out where one of them is only known after training, or more of one is better and less of another.
    """
    singly = [compute_metrics(task) for task in tasks]

    def compute(evaluation: EvalPrediction) -> dict[str, float]:
        import numpy as np
        from transformers import EvalPrediction

        outputs = evaluation.predictions
        given: Any = evaluation.label_ids
        labels, task_ids = given
        logits, labels = np.asarray(outputs[0] if isinstance(outputs, tuple) else outputs), np.asarray(labels)
        single = labels if labels.ndim == 1 else labels[:, 0]
        found: dict[str, float] = {}
        for number, (task, score) in enumerate(zip(tasks, singly, strict=True)):
            rows = np.asarray(task_ids) == number
            if score is None:
                nats, tokens = logits[rows, :2].sum(axis=0)
                scores = _from_loss(task, float(nats) / max(float(tokens), 1.0))
            else:
                own = logits[rows][:, : task.num_labels]
                scores = score(EvalPrediction(predictions=own, label_ids=single[rows]))
            found |= {f"{task.name}_{name}": value for name, value in scores.items()}
        return found | mean_of_main(tasks, found)

    return compute


def main_metrics(tasks: Sequence[Task]) -> list[str]:
    """Return the names of the metrics to look at: the task's main one, or that of each task, and their mean if it says much."""
    from ..inflection import lower_is_better

    if len(tasks) == 1:
        return [tasks[0].metrics[0]]
    one_way = len({lower_is_better(task.metrics[0]) for task in tasks}) == 1
    return [*(f"{task.name}_{task.metrics[0]}" for task in tasks), *([MEAN] if one_way else [])]


def mean_of_main(tasks: Sequence[Task], found: Mapping[str, float], prefix: str = "") -> dict[str, float]:
    """Return ``<prefix>mean``, the mean over the tasks' main metrics, if all are there.

    They are called ``<prefix><task>_<metric>``, and where they are of generated text ``<task>_<prefix><metric>``. A mean of
    what should grow and what should shrink is no measure of either: then there is none.
    """
    names = [(task.name, task.metrics[0]) for task in tasks]
    main = [found.get(f"{prefix}{task}_{name}", found.get(f"{task}_{prefix}{name}")) for task, name in names]
    known = [value for value in main if value is not None]
    complete = len(known) == len(main) and MEAN in main_metrics(tasks)
    return {f"{prefix}{MEAN}": sum(known) / len(known)} if complete else {}


def row_scores(logits: torch.Tensor, labels: Any, tasks: Sequence[Task]) -> torch.Tensor:
    """Return what is kept of each row of language models: nats and counted tokens, or a classifier's logits.

    Args:
        logits: shape (rows, positions, vocabulary), a classifier's in the first position; (rows, labels) without a row of
            language modelling.
        labels: token ids of shape (rows, positions), -100 not counted, and ``task_ids``.
        tasks: the tasks, in the order of their numbers.

    Returns:
        Shape (rows, widest label space, at least 2), filled up with zeros.
    """
    import torch
    from torch.nn import functional

    targets, task_ids = labels
    words = torch.tensor([task.kind.is_language_modelling for task in tasks], device=task_ids.device)[task_ids]
    width = max(2, *(task.num_labels for task in tasks))
    first = (logits if logits.dim() == 2 else logits[:, 0]).float()[:, :width]
    kept = functional.pad(first, (0, width - first.shape[1]))
    if words.any():
        own = targets[words, 1:].long()
        losses = functional.cross_entropy(logits[words, :-1].float().transpose(1, 2), own, reduction="none")
        kept[words] = 0.0
        kept[words, :2] = torch.stack([losses.sum(dim=1), own.ne(-100).sum(dim=1).to(losses.dtype)], dim=1)
    return kept


def _from_loss(task: Task, loss: float) -> dict[str, float]:
    known = {"loss": loss, "perplexity": _exp(loss)}
    return {name: known[name] for name in task.metrics if name in known}


def _scores(task: Task, labels: np.ndarray[Any, Any], predictions: np.ndarray[Any, Any]) -> dict[str, float]:
    metrics = _BY_KIND[task.kind]
    if task.kind is TaskKind.REGRESSION:
        labels, predictions = labels.astype("float64").reshape(-1), predictions.astype("float64")
    return {name: metrics[name](labels, predictions) for name in task.metrics}


def add_perplexity(metrics: Mapping[str, float], prefix: str = "eval") -> dict[str, float]:
    """Return ``metrics`` with ``<prefix>_perplexity`` = exp(``<prefix>_loss``), the loss in nats a token, beside the loss.

    The Trainer's loss is a mean over rows: exact for blocks, which have equally many tokens each.
    """
    return {**metrics, f"{prefix}_perplexity": _exp(metrics[f"{prefix}_loss"])}


def _exp(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def text_scores(names: Sequence[str], answers: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Score generated texts: corpus ``bleu`` and ``chrf`` of sacrebleu with its default settings, 0 to 100.

    Args:
        names: which of :data:`GENERATED`.
        answers: one text a prompt.
        references: of each prompt one or more texts.
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    streams = [
        [texts[number] if number < len(texts) else None for texts in references]
        for number in range(max(map(len, references)))
    ]
    # force: no advice on stderr about text that looks tokenized
    scorers: dict[str, Any] = {"bleu": BLEU(force=True), "chrf": CHRF()}
    return {name: float(scorers[name].corpus_score(list(answers), streams).score) for name in names}


def majority_baseline(task: Task, train_labels: Sequence[float], eval_labels: Sequence[float]) -> dict[str, float]:
    """Score who never looks at the input: the most frequent training class, or the mean training label.

    Args:
        task: classification or regression.
        train_labels: labels to learn from, class numbers or floats.
        eval_labels: labels to score on.

    Returns:
        The task's metrics by name; empty for language modelling, which has no labels.
    """
    if task.kind.is_language_modelling:
        return {}
    import numpy as np
    from sklearn.dummy import DummyClassifier, DummyRegressor

    model = DummyRegressor() if task.kind is TaskKind.REGRESSION else DummyClassifier(strategy="most_frequent")
    labels = np.asarray(eval_labels)
    model.fit(np.zeros((len(train_labels), 1)), np.asarray(train_labels))
    return _scores(task, labels, model.predict(np.zeros((len(labels), 1))))
