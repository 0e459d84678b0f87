"""Tasks: what is inferred from columns, what overrides it, how labels are numbered, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value

from tunery.core.data import DataArguments, TaskData, load_task_data
from tunery.core.data.tasks import build
from tunery.registry.context import TaskKind
from tunery.registry.errors import DataError

Write = Callable[..., str]


def _rows(columns: Mapping[str, Any], count: int = 20) -> list[dict[str, Any]]:
    """Repeat the columns; a list gives its values in turn."""
    return [
        {name: value[row % len(value)] if isinstance(value, list) else value for name, value in columns.items()}
        for row in range(count)
    ]


def _of(write: Write, columns: Mapping[str, Any], **args: Any) -> TaskData:
    return load_task_data(DataArguments(train_file=write("thing/train.jsonl", _rows(columns)), **args), seed=0)


@pytest.mark.parametrize(
    ("columns", "kind", "text", "label"),
    [
        ({"sentence": "x", "label": [0, 1], "idx": 3, "source": "s"}, "classification", ("sentence",), "label"),
        ({"sentence2": "x", "sentence1": "y", "label": [0, 1]}, "classification", ("sentence1", "sentence2"), "label"),
        (
            {"premise": "x", "hypothesis": "y", "label": ["no", "yes"]},
            "classification",
            ("premise", "hypothesis"),
            "label",
        ),
        ({"question": "x", "sentence": "y", "labels": [0, 1]}, "classification", ("question", "sentence"), "labels"),
        ({"question": "x", "label": [True, False]}, "classification", ("question",), "label"),
        (
            {"paragraph": "x", "question": "y", "answer": "z", "label": [0, 1]},
            "classification",
            ("paragraph", "question", "answer"),
            "label",
        ),
        ({"review": "x", "label_text": ["bad", "good"]}, "classification", ("review",), "label_text"),
        ({"left": "x", "right": "y", "score": [0.5, 1.0], "pair_id": "p"}, "regression", ("left", "right"), "score"),
        ({"text": "x", "idx": 1}, "causal_lm", ("text",), None),
        ({"mr": "x", "ref": "y"}, "causal_lm", ("mr", "ref"), None),
    ],
)
def test_columns_are_inferred(
    write: Write, columns: dict[str, Any], kind: str, text: tuple[str, ...], label: str | None
) -> None:
    """Well-known layouts need no arguments."""
    data = _of(write, columns)
    assert (data.task.kind, data.columns.text, data.columns.label) == (kind, text, label)


def test_arguments_win_over_inference(write: Write) -> None:
    """Every inferred thing has an override."""
    columns = {"text": "x", "other": "y", "label": [0, 1], "stars": [1, 3, 5]}
    data = _of(write, columns, text_columns=["other", "text"], label_column="stars", metrics=["macro_f1"], max_length=9)
    assert data.columns.text == ("other", "text")
    assert data.task.label_names == ("1", "3", "5")
    assert (data.task.metrics, data.max_length) == (("macro_f1",), 9)
    assert _of(write, columns, label_column="stars", task_kind="regression").task.kind is TaskKind.REGRESSION
    assert _of(write, columns, task_kind="causal_lm", text_columns=["text"]).columns.label is None
    assert _of(write, {"text": "x", "label": [0.0, 1.0]}, task_kind="classification").task.label_names == ("0", "1")


def test_the_task_is_named_after_its_data(write: Write) -> None:
    """File, folder or dataset, and the label column where it has a name of its own."""
    columns = {"text": "x", "label": [0, 1], "tone": ["calm", "loud"]}
    assert _of(write, columns).task.name == "thing"
    assert _of(write, columns, label_column="tone").task.name == "thing-tone"
    path = write("mood.jsonl", _rows(columns))
    assert load_task_data(DataArguments(train_file=path), seed=0).task.name == "mood"
    raw = DatasetDict(train=Dataset.from_list(_rows(columns)))
    hub = DataArguments(dataset_name="nyu-mll/glue", dataset_config_name="mrpc")
    assert build(hub, raw, seed=0).task.name == "glue-mrpc"


@pytest.mark.parametrize(
    ("columns", "names", "numbers"),
    [
        ({"label": ["b", "a", "c"]}, ("a", "b", "c"), [1, 0, 2]),
        ({"label": [3, 1, 2], "label_text": ["three", "one", "two"]}, ("one", "two", "three"), [2, 0, 1]),
        ({"label": [3, 1, 2], "label_text": ["same", "same", "two"]}, ("1", "2", "3"), [2, 0, 1]),
        ({"label": [-1, 1, -1]}, ("-1", "1"), [0, 1, 0]),
        ({"label": [True, False, True]}, ("False", "True"), [1, 0, 1]),
    ],
)
def test_labels_are_numbered(write: Write, columns: dict[str, Any], names: tuple[str, ...], numbers: list[int]) -> None:
    """Sorted classes are numbered from 0; ``label_text`` names integers where each has one name."""
    path = write("train.jsonl", _rows({"text": "x", **columns}, count=3))
    data = load_task_data(DataArguments(train_file=path, validation_file=path), seed=0)
    assert data.task.label_names == names
    assert data.splits["train"]["labels"][:] == data.splits["validation"]["labels"][:] == numbers


def test_a_class_label_feature_keeps_its_names_and_order() -> None:
    """Names and numbers of a published dataset are its own; GLUE's unlabelled test split is left out."""
    features = Features({"sentence": Value("string"), "label": ClassLabel(names=["z", "y", "x"])})

    def split(labels: list[int]) -> Dataset:
        return Dataset.from_dict({"sentence": ["s"] * len(labels), "label": labels}, features=features)

    raw = DatasetDict(train=split([0, 1]), validation=split([2, 1]), test=split([-1, -1]))
    data = build(DataArguments(dataset_name="d"), raw, seed=0)
    assert data.task.label_names == ("z", "y", "x")
    assert data.splits["validation"]["labels"][:] == [2, 1]
    assert set(data.splits) == {"train", "validation"}


def test_float_labels_are_kept_as_they_are(write: Write) -> None:
    """Regression labels are float32 and have no names."""
    data = _of(write, {"text": "x", "label": [0.5, 4.25]})
    assert data.splits["train"].features["labels"] == Value("float32")
    assert set(data.splits["train"]["labels"]) == {0.5, 4.25}
    assert (data.task.label_names, data.task.num_labels) == ((), 1)
    assert data.task.metrics == ("pearson", "spearman", "mse")


def test_images_are_inferred(tmp_path: Path) -> None:
    """An image feature needs no arguments; raw bytes are found by name."""
    from PIL import Image as PILImage

    pictures = [PILImage.new("RGB", (2, 2), color) for color in ("red", "blue")] * 10
    features = Features({"picture": Image(), "caption": Value("string"), "label": ClassLabel(names=["r", "b"])})
    rows = {"picture": pictures, "caption": ["c"] * 20, "label": [0, 1] * 10}
    raw = DatasetDict(train=Dataset.from_dict(rows, features=features))
    data = build(DataArguments(dataset_name="d"), raw, seed=0)
    assert (data.task.kind, data.columns.image) == (TaskKind.IMAGE_CLASSIFICATION, "picture")
    assert build(DataArguments(dataset_name="d", text_columns=["caption"]), raw, seed=0).columns.image is None
    pixels = DatasetDict(train=Dataset.from_dict({"pixels": [bytes(4)] * 20, "label": [0, 1] * 10}))
    data = build(DataArguments(dataset_name="d", image_shape=[2, 2]), pixels, seed=0)
    assert (data.columns.image, data.columns.image_shape) == ("pixels", (2, 2))


def test_validation_is_held_out_and_samples_are_drawn(write: Write) -> None:
    """Without a validation split a stratified share of train is one; sizes count per split."""
    data = _of(write, {"text": "x", "label": [0, 0, 0, 1]}, validation_fraction=0.2)
    assert data.splits.num_rows == {"train": 16, "validation": 4}
    assert sum(data.splits["validation"]["labels"]) == 1
    data = _of(write, {"text": "x", "label": [0, 0, 0, 1]}, max_train_samples=5, max_eval_samples=1)
    assert data.splits.num_rows == {"train": 5, "validation": 1}


@pytest.mark.parametrize(
    ("columns", "args", "message"),
    [
        (
            {"text": "x", "gold": [0, 1]},
            {},
            "no label column is found; known: text (string), gold (int64); give label_column, or task_kind=causal_lm",
        ),
        ({"text": "x", "gold": "y"}, {}, "no label column is found; known: text (string), gold (string)"),
        (
            {"text": "x"},
            {"task_kind": "classification"},
            "no label column is found; known: text (string); give label_column",
        ),
        (
            {"text": "x", "label": [0, 1]},
            {"label_column": "lable"},
            "label_column: there is no column 'lable'; known: text",
        ),
        ({"text": "x", "label": [0, 1]}, {"label_column": "lable"}, "did you mean 'label'?"),
        ({"text": "x", "label": [0, 1]}, {"text_columns": ["body"]}, "text_columns: there is no column 'body'"),
        ({"text": "x", "label": [0, 1]}, {"text_columns": ["label"]}, "text column 'label' holds int64, not text"),
        ({"a": "x", "b": "x", "c": "x", "label": [0, 1]}, {}, "the text columns cannot be told; known: a (string)"),
        ({"text": "x", "label": [0, 1]}, {"task_kind": "clasification"}, "did you mean 'classification'?"),
        ({"text": "x", "label": [0, 1]}, {"task_kind": "masked_lm"}, "task_kind='masked_lm'; known: classification"),
        ({"text": "x", "label": [0, 1]}, {"task_kind": "image_classification"}, "no image column is found"),
        ({"text": "x", "label": [0, 1]}, {"image_column": "text"}, "'text' holds string, neither images nor bytes"),
        ({"text": "x", "label": ["a", "b"]}, {"task_kind": "regression"}, "holds 'a', not a number"),
        (
            {"text": "x", "label": [0.5, 1]},
            {"task_kind": "classification"},
            "holds 0.5, not a class; give task_kind=regr",
        ),
        ({"text": "x", "label": [[1], [2]]}, {}, "label column 'label' holds List, not classes"),
        ({"text": "x", "label": 1}, {}, "label column 'label' has a single class, '1'"),
        ({"text": "x", "label": [0, None, 1, 1]}, {}, "5 of 20 rows of 'train' have no label in column 'label'"),
        ({"text": ["x", None], "label": [0, 1, 1, 0]}, {}, "10 of 20 rows of 'train' have nothing in column 'text'"),
        ({"text": "x", "label": [0, 1]}, {"metrics": ["acuracy"]}, "metric 'acuracy' is unknown; known: accuracy"),
    ],
)
def test_what_does_not_make_a_task_is_one_line(
    write: Write, columns: dict[str, Any], args: dict[str, Any], message: str
) -> None:
    """The line lists the columns, or what was found where something else is needed."""
    with pytest.raises(DataError, match=r"^[^\n]*$") as caught:
        _of(write, columns, **args)
    assert message in str(caught.value)


@pytest.mark.parametrize("split", ["validation", "test"])
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": "x", "label": [0, 2]}, "labels of '{split}' do not occur in 'train': 2; known: 0, 1"),
        ({"text": "x", "label": ["0", "1"]}, "labels of '{split}' do not occur in 'train': '0', '1'; known: 0, 1"),
        ({"text": "x", "label": [0, None]}, "10 of 20 rows of '{split}' have no label"),
        ({"body": "x", "label": [0, 1]}, "column 'text' is missing from '{split}'; known: body (string)"),
        ({"text": 3, "label": [0, 1]}, "text column 'text' of '{split}' holds int64, not text"),
    ],
)
def test_a_split_that_does_not_match_train_is_one_line(
    write: Write, split: str, columns: dict[str, Any], message: str
) -> None:
    """Labels, columns and types are those of train, or the split is refused by name."""
    with pytest.raises(DataError) as caught:
        _of(write, {"text": "x", "label": [0, 1]}, **{f"{split}_file": write(f"{split}.jsonl", _rows(columns))})
    assert message.format(split=split) in str(caught.value)


def test_labels_may_be_missing_from_the_whole_test_split_only(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    """An unlabelled test split is left out and said so; an unlabelled validation split is refused."""
    unlabelled = write("unlabelled.jsonl", _rows({"text": "x"}))
    data = _of(write, {"text": "x", "label": [0, 1]}, test_file=unlabelled)
    assert set(data.splits) == {"train", "validation"}
    assert "the test split has no labels in column 'label' and is left out" in caplog.text
    with pytest.raises(DataError, match=r"label column 'label' is missing from 'validation'; known: text \(string\)"):
        _of(write, {"text": "x", "label": [0, 1]}, validation_file=unlabelled)
