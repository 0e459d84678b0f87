"""From raw splits to a task with its training, validation and test rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...registry.context import Task, TaskKind
from ...registry.errors import DataError
from .columns import LABEL_NAMES, Columns, described, dtype, infer, is_text
from .labels import add_labels
from .loading import hold_out, load_splits, quiet, sample
from .metrics import GENERATED, check_metrics, default_metrics
from .pairs import hold_out_prompts, sample_prompts, spell_out

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
        decoding: how completions are generated, by the names of transformers' ``GenerationConfig``.
    """

    task: Task
    splits: DatasetDict
    columns: Columns
    max_length: int
    decoding: Mapping[str, Any]


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
        seed: what the rows left out depend on; and the held-out rows and the samples, unless ``args.split_seed`` is given.
            Nothing else does. Runs to be compared share the seed of their splits.

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
        seed: as of :func:`load_task_data`.

    Raises:
        DataError: a column is missing, holds what the task cannot use, or cannot be inferred; labels are missing or
            unknown to train; a metric does not fit.
    """
    from datasets import DatasetDict

    if args.test_split == "validation":
        raw = _validation_as_test(raw, args)
    split_seed = seed if args.split_seed is None else args.split_seed
    kind, columns = infer(args, raw["train"].features)
    is_pairs = kind is TaskKind.CAUSAL_LM and len(columns.text) > 1
    if is_pairs:
        raw = DatasetDict({name: spell_out(split, name, columns) for name, split in raw.items()})
    for name, split in raw.items():
        _check_inputs(split, name, columns)
    splits, label_names = (raw, ()) if columns.label is None else add_labels(raw, columns.label, kind)
    metrics = check_metrics(args.metrics or default_metrics(kind, len(label_names)), kind, len(label_names))
    generated = next((name for name in metrics if name in GENERATED), None)
    if generated and not is_pairs:
        raise DataError(f"metric {generated!r} needs a prompt", remedy="give text_columns: prompt and completion")
    prompt = columns.text[0] if generated else None
    if "validation" not in splits:
        train, held = (
            hold_out_prompts(splits["train"], prompt, args.validation_fraction, split_seed)
            if prompt
            else hold_out(splits["train"], args.validation_fraction, split_seed, by_class=bool(label_names))
        )
        splits = DatasetDict({**splits, "train": train, "validation": held})
    drawn = {name: _drawn(split, name, args, prompt, split_seed) for name, split in splits.items()}
    if args.leave_out:
        drawn["train"], _ = hold_out(drawn["train"], args.leave_out, seed, by_class=False)
    task = Task(
        name=_name(args, columns.label),
        kind=kind,
        label_names=label_names,
        metrics=metrics,
    )
    return TaskData(
        task=task, splits=DatasetDict(drawn), columns=columns, max_length=args.max_length, decoding=args.decoding
    )


def _validation_as_test(raw: DatasetDict, args: DataArguments) -> DatasetDict:
    from datasets import DatasetDict

    if "validation" not in raw:
        owner = str(args.dataset_name or args.data_files or args.train_file)
        raise DataError("test_split='validation' without a validation split", known=raw, owner=owner)
    return DatasetDict({"train": raw["train"], "test": raw["validation"]})


def _drawn(split: Dataset, name: str, args: DataArguments, prompt: str | None, seed: int) -> Dataset:
    if name == "train":
        return sample(split, args.max_train_samples, seed)
    if prompt:
        return sample_prompts(split, prompt, args.max_eval_samples, seed)
    return sample(split, args.max_eval_samples, seed)


def _check_inputs(split: Dataset, name: str, columns: Columns) -> None:
    """Refuse a split that lacks an input column, or has an empty cell in one."""
    if columns.references and columns.references not in split.features:
        raise DataError(f"column {columns.references!r} is missing from {name!r}", known=described(split.features))
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
        path = Path(str(args.data_files or args.train_file)).expanduser().resolve()
        parts = [path.parent.name if path.stem == "train" and not args.data_files else path.stem]
    parts.append(None if label in LABEL_NAMES else label)
    return "-".join(part for part in parts if part)
