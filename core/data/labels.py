"""Labels as the Trainer wants them: a column ``labels`` of class numbers or floats, and the classes' names."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...registry.context import TaskKind
from ...registry.errors import DataError
from .columns import described, dtype, is_text

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

logger = logging.getLogger(__name__)


def add_labels(splits: DatasetDict, column: str, kind: TaskKind) -> tuple[DatasetDict, tuple[str, ...]]:
    """Number the labels of every split by what occurs in train.

    Class names are those of a ``ClassLabel`` feature; else the strings themselves; else, for integer labels, the column
    ``<column>_text`` where it names every label in one way; else the numbers. Without a ``ClassLabel``, classes are in
    sorted order. A test split without any label (as GLUE's) is left out.

    Args:
        splits: with ``train``.
        column: the column with the labels.
        kind: regression, or a kind of classification.

    Returns:
        The splits with a column ``labels`` (class number, or float32 for regression), and the class names in order;
        no names for regression.

    Raises:
        DataError: labels are missing, of the wrong type, fewer than two classes, or unknown to train.
    """
    from datasets import ClassLabel, DatasetDict, Value

    values = {
        name: _values(split, name, column)
        for name, split in splits.items()
        if name != "test" or _has_labels(split, column)
    }
    names: tuple[str, ...] = ()
    numbers: Mapping[str, Sequence[float]]
    if kind is TaskKind.REGRESSION:
        numbers, feature = _as_floats(values, column), Value("float32")
    else:
        names, numbers = _as_classes(splits, values, column)
        feature = ClassLabel(names=list(names))
    labelled = {}
    for name, found in numbers.items():
        others = splits[name].remove_columns([other for other in splits[name].column_names if other == "labels"])
        labelled[name] = others.add_column("labels", found, feature=feature)
    return DatasetDict(labelled), names


def _has_labels(test: Dataset, column: str) -> bool:
    if column in test.features and not all(_missing(test, column)):
        return True
    logger.warning("the test split has no labels in column %r and is left out", column)
    return False


def _missing(split: Dataset, column: str) -> list[bool]:
    unlabelled = -1 if dtype(split.features[column]) == "ClassLabel" else None
    return [value in (None, unlabelled) or (isinstance(value, float) and math.isnan(value)) for value in split[column]]


def _values(split: Dataset, name: str, column: str) -> list[Any]:
    if column not in split.features:
        raise DataError(f"label column {column!r} is missing from {name!r}", known=described(split.features))
    missing = sum(_missing(split, column))
    if missing:
        lacking = f"{missing} of {split.num_rows} rows of {name!r} have no label in column {column!r}"
        raise DataError(lacking, remedy="remove these rows")
    return list(split[column])


def _as_floats(values: dict[str, list[Any]], column: str) -> dict[str, list[float]]:
    for name, found in values.items():
        wrong = next((value for value in found if isinstance(value, bool) or not isinstance(value, int | float)), None)
        if wrong is not None:
            raise DataError(
                f"label column {column!r} of {name!r} holds {wrong!r}, not a number",
                remedy="give another label_column, or task_kind=classification",
            )
    return {name: [float(value) for value in found] for name, found in values.items()}


def _as_classes(
    splits: DatasetDict, values: dict[str, list[Any]], column: str
) -> tuple[tuple[str, ...], dict[str, list[int]]]:
    feature = splits["train"].features[column]
    if dtype(feature) == "ClassLabel":
        names, classes = tuple(feature.names), list(range(len(feature.names)))
        differing = next((name for name in values if splits[name].features[column] != feature), None)
        if differing:
            raise DataError(f"the classes of column {column!r} in {differing!r} are not those of 'train'", known=names)
    else:
        held = next(
            (dtype(splits[name].features[column]) for name in values if not _is_plain(splits[name], column)), None
        )
        if held:
            raise DataError(f"label column {column!r} holds {held}, not classes", remedy="give another label_column")
        values = {name: [_as_class(value, column) for value in found] for name, found in values.items()}
        classes = sorted(set(values["train"]))
        names = _names(splits["train"], values["train"], classes, column)
    if len(classes) < 2:
        raise DataError(f"label column {column!r} has a single class, {names[0]!r}; two are needed")
    order = {label: number for number, label in enumerate(classes)}
    for name, found in values.items():
        unknown = sorted(set(found) - set(order), key=repr)
        if unknown:
            raise DataError(
                f"labels of {name!r} do not occur in 'train': {_listed(unknown)}",
                known=[_listed(classes)],
                remedy=f"mend column {column!r}, or leave out the {name} split",
            )
    return names, {name: [order[label] for label in found] for name, found in values.items()}


def _is_plain(split: Dataset, column: str) -> bool:
    return is_text(split.features[column]) or dtype(split.features[column]).startswith(("int", "uint", "float", "bool"))


def _as_class(value: Any, column: str) -> Any:
    if isinstance(value, float):
        if not value.is_integer():
            raise DataError(f"label column {column!r} holds {value!r}, not a class", remedy="give task_kind=regression")
        return int(value)
    return value


def _names(train: Dataset, labels: Sequence[Any], classes: Sequence[Any], column: str) -> tuple[str, ...]:
    text = f"{column}_text"
    if isinstance(classes[0], int) and text in train.features and is_text(train.features[text]):
        pairs = set(zip(labels, train[text][:], strict=True))
        names = dict(pairs)
        if len(pairs) == len(classes) == len(set(names.values())) and None not in names.values():
            return tuple(names[label] for label in classes)
    return tuple(str(label) for label in classes)


def _listed(labels: Sequence[Any], most: int = 10) -> str:
    shown = ", ".join(f"{label!r:.40}" for label in labels[:most])
    return shown if len(labels) <= most else f"{shown} and {len(labels) - most} more"
