"""From raw splits to a task with its training, validation and test rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...registry.context import Task
from ...registry.errors import DataError
from .columns import LABEL_NAMES, Columns, described, dtype, infer, is_text
from .labels import add_labels
from .loading import hold_out, load_splits, quiet, sample
from .metrics import check_metrics, default_metrics

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

    from .arguments import DataArguments


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """A task and its rows, not yet encoded.

    Attributes:
        task: what is predicted.
        splits: ``train``, ``validation`` and perhaps ``test``, with their own columns and, unless the task is language
            modelling, a column ``labels``: class numbers, or float32 for regression.
        columns: the columns that count.
        max_length: longest input, in tokens.
    """

    task: Task
    splits: DatasetDict
    columns: Columns
    max_length: int


def load_tasks(args: DataArguments, seed: int) -> list[TaskData]:
    """Load every task that ``args`` name: one, or those of ``args.tasks``.

    Raises:
        DataError: the data of one cannot be read or does not make a task.
    """
    found = []
    for name, one in args.each():
        data = load_task_data(one, seed)
        found.append(data if name is None else replace(data, task=replace(data.task, name=name)))
    return found


def load_task_data(args: DataArguments, seed: int) -> TaskData:
    """Load what ``args`` name and make a task of it.

    Args:
        args: source, columns and sizes.
        seed: what the held-out rows and the samples depend on, and nothing else does. Runs to be compared share it.

    Raises:
        DataError: the data cannot be read or does not make a task.
    """
    with quiet():
        return build(args, load_splits(args), seed)


def build(args: DataArguments, raw: DatasetDict, seed: int) -> TaskData:
    """Infer the task, number its labels, hold out a validation split where there is none, draw the samples asked for.

    Args:
        args: where everything given wins over what is inferred.
        raw: the splits as loaded, ``train`` among them.
        seed: what the held-out rows and the samples depend on.

    Raises:
        DataError: a column is missing, holds what the task cannot use, or cannot be inferred; labels are missing or
            unknown to train; a metric does not fit.
    """
    from datasets import DatasetDict

    kind, columns = infer(args, raw["train"].features)
    for name, split in raw.items():
        _check_inputs(split, name, columns)
    splits, label_names = (raw, ()) if columns.label is None else add_labels(raw, columns.label, kind)
    if "validation" not in splits:
        train, held = hold_out(splits["train"], args.validation_fraction, seed, by_class=bool(label_names))
        splits = DatasetDict({**splits, "train": train, "validation": held})
    sizes = {"train": args.max_train_samples}
    drawn = {name: sample(split, sizes.get(name, args.max_eval_samples), seed) for name, split in splits.items()}
    metrics = args.metrics or default_metrics(kind, len(label_names))
    task = Task(
        name=_name(args, columns.label),
        kind=kind,
        label_names=label_names,
        metrics=check_metrics(metrics, kind, len(label_names)),
    )
    return TaskData(task=task, splits=DatasetDict(drawn), columns=columns, max_length=args.max_length)


def _check_inputs(split: Dataset, name: str, columns: Columns) -> None:
    """Refuse a split that lacks an input column, or has an empty cell in one."""
    for column in (columns.image,) if columns.image else columns.text:
        if column not in split.features:
            raise DataError(f"column {column!r} is missing from {name!r}", known=described(split.features))
        if columns.text and not is_text(split.features[column]):
            raise DataError(f"text column {column!r} of {name!r} holds {dtype(split.features[column])}, not text")
        empty = split.data.column(column).null_count
        if empty:
            raise DataError(f"{empty} of {split.num_rows} rows of {name!r} have nothing in column {column!r}")


def _name(args: DataArguments, label: str | None) -> str:
    """Name the task after its dataset: "glue-mrpc", "cola" for cola/train.jsonl, with a label column of an own name."""
    if args.dataset_name:
        parts = [Path(args.dataset_name).name, args.dataset_config_name]
    else:
        path = Path(str(args.train_file)).expanduser().resolve()
        parts = [path.parent.name if path.stem == "train" else path.stem]
    parts.append(None if label in LABEL_NAMES else label)
    return "-".join(part for part in parts if part)
