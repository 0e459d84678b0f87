"""Which columns count, and what is predicted from them.

What is given in the arguments wins. The rest is inferred from the names and types of the columns, and where that would
be a guess it is refused in one line that lists them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ...registry.context import TaskKind
from ...registry.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from .arguments import DataArguments

Features: TypeAlias = Mapping[str, Any]

SUPPORTED_KINDS = (TaskKind.CLASSIFICATION, TaskKind.REGRESSION, TaskKind.CAUSAL_LM, TaskKind.IMAGE_CLASSIFICATION)
LABEL_NAMES = ("label", "labels", "target", "score", "label_text")
IMAGE_NAMES = ("image", "img", "pixels")
# Layouts of well-known datasets; the first one whose columns are all there counts.
TEXT_LAYOUTS = (
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("premise", "hypothesis"),
    ("paragraph", "question", "answer"),
    ("question", "passage"),
    ("question", "sentence"),
    ("question", "answer"),
    ("prompt", "completion"),
    ("sentence",),
    ("text",),
    ("question",),
)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns that count.

    Attributes:
        text: none for images, one for single texts, two or more for pairs.
        label: ``None`` for language modelling.
        references: column with lists of texts that the answer to a prompt is compared with, if there is one.
        image: ``None`` for text.
        image_shape: height, width and perhaps channels of raw uint8 bytes; empty for images in a file format.
    """

    text: tuple[str, ...] = ()
    label: str | None = None
    references: str | None = None
    image: str | None = None
    image_shape: tuple[int, ...] = ()


def infer(args: DataArguments, features: Features) -> tuple[TaskKind, Columns]:
    """Return what is predicted, and from which columns.

    Raises:
        DataError: an argument names a column that is missing or of the wrong type, or a column cannot be inferred.
    """
    asked = _given_kind(args.task_kind)
    image = _image_column(args, features, asked)
    label = None if asked is TaskKind.CAUSAL_LM else _label_column(args, features, may_be_text=not (asked or image))
    kind = asked or _inferred_kind(features, label, image)
    if image:
        return kind, Columns(label=label, image=image, image_shape=tuple(args.image_shape or ()))
    text = _text_columns(args, features, label, lists=asked is TaskKind.CAUSAL_LM)
    return kind, Columns(text=text, label=label, references=_references_column(args, features, kind, text))


def dtype(feature: Any) -> str:
    """Return a plain value's type ("string", "int64"), or the name of any other feature ("ClassLabel", "Image")."""
    from datasets import Value

    return str(feature.dtype) if isinstance(feature, Value) else type(feature).__name__


def described(features: Features) -> list[str]:
    """Return every column with its type, for error messages."""
    return [f"{name} ({dtype(feature)})" for name, feature in features.items()]


def is_text(feature: Any) -> bool:
    """Whether a column holds strings."""
    return dtype(feature) in ("string", "large_string")


def is_list(feature: Any, depth: int = 2) -> bool:
    """Whether a column holds lists of strings, or up to ``depth`` lists within each other."""
    from datasets import LargeList, List

    if not isinstance(feature, List | LargeList):
        return False
    return is_text(feature.feature) or (depth > 1 and is_list(feature.feature, depth - 1))


def _given_kind(asked: str | None) -> TaskKind | None:
    known = [kind.value for kind in SUPPORTED_KINDS]
    if asked is not None and asked not in known:
        raise DataError(f"task_kind={asked!r}", known=known, remedy=did_you_mean(asked, known))
    return None if asked is None else TaskKind(asked)


def _inferred_kind(features: Features, label: str | None, image: str | None) -> TaskKind:
    if image:
        return TaskKind.IMAGE_CLASSIFICATION
    if label is None:
        return TaskKind.CAUSAL_LM
    return TaskKind.REGRESSION if dtype(features[label]).startswith("float") else TaskKind.CLASSIFICATION


def _image_column(args: DataArguments, features: Features, asked: TaskKind | None) -> str | None:
    if asked not in (None, TaskKind.IMAGE_CLASSIFICATION) or args.text_columns:
        return None
    if args.image_column:
        column = _existing("image_column", args.image_column, features)
        if dtype(features[column]) not in ("Image", "binary"):
            raise DataError(f"image_column {column!r} holds {dtype(features[column])}, neither images nor bytes")
        return column
    for name, feature in features.items():
        if dtype(feature) == "Image" or (name in IMAGE_NAMES and dtype(feature) == "binary"):
            return name
    if asked:
        raise DataError("no image column is found", known=described(features), remedy="give image_column")
    return None


def _label_column(args: DataArguments, features: Features, *, may_be_text: bool) -> str | None:
    if args.label_column:
        return _existing("label_column", args.label_column, features)
    label = next((name for name in LABEL_NAMES if name in features), None)
    if label is None and not (may_be_text and _is_all_text(args, features)):
        remedy = "give label_column" + (", or task_kind=causal_lm" if may_be_text else "")
        raise DataError("no label column is found", known=described(features), remedy=remedy)
    return label


def _is_all_text(args: DataArguments, features: Features) -> bool:
    """Whether every column is one of the texts or an identifier, so that none could be an overlooked label."""
    texts = set(_text_columns(args, features, label=None))
    return all(name in texts or _is_identifier(name) for name in features)


def _references_column(args: DataArguments, features: Features, kind: TaskKind, text: tuple[str, ...]) -> str | None:
    if args.references_column is None:
        return None
    column = _existing("references_column", args.references_column, features)
    if kind is not TaskKind.CAUSAL_LM or len(text) < 2:
        raise DataError(
            f"references_column {column!r} without a prompt", remedy="give text_columns: prompt, completion"
        )
    if not is_list(features[column], depth=1):
        raise DataError(f"references_column {column!r} holds {dtype(features[column])}, not lists of texts")
    return column


def _text_columns(
    args: DataArguments, features: Features, label: str | None, *, lists: bool = False
) -> tuple[str, ...]:
    if args.text_columns:
        for position, name in enumerate(args.text_columns):
            feature = features[_existing("text_columns", name, features)]
            # A prompt may be a list, even of lists; completions may be a list of them.
            listed = lists and len(args.text_columns) > 1 and is_list(feature, depth=1 if position else 2)
            if not (is_text(feature) or listed):
                raise DataError(f"text column {name!r} holds {dtype(features[name])}, not text")
        return tuple(args.text_columns)
    texts = tuple(
        name
        for name, feature in features.items()
        if is_text(feature) and name != label and not name.endswith("label_text") and not _is_identifier(name)
    )
    known = (layout for layout in TEXT_LAYOUTS if set(layout) <= set(texts))
    chosen = next(known, texts if len(texts) in (1, 2) else None)
    if chosen is None:
        remedy = "give text_columns: one, or two for pairs"
        raise DataError("the text columns cannot be told", known=described(features), remedy=remedy)
    return chosen


def _is_identifier(name: str) -> bool:
    return re.fullmatch(r"(.*_)?(e?id|idx|index|guid)(_.*)?", name.lower()) is not None


def _existing(argument: str, name: str, features: Features) -> str:
    if name not in features:
        remedy = did_you_mean(name, features)
        raise DataError(f"{argument}: there is no column {name!r}", known=described(features), remedy=remedy)
    return name
