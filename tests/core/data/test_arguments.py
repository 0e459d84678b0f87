"""DataArguments: flags spelled as transformers spells them, and values checked whoever gives them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from transformers import HfArgumentParser

from tunery.core.data import DataArguments
from tunery.core.data.arguments import choose_tasks
from tunery.registry.errors import DataError


def test_every_field_is_a_documented_flag() -> None:
    """HfArgumentParser makes one flag of every field, with help."""
    arguments = HfArgumentParser(DataArguments)._actions  # type: ignore[arg-type]
    by_name = {action.dest: action for action in arguments if action.dest != "help"}
    assert list(by_name) == [field.name for field in fields(DataArguments)]
    assert all(action.help for action in by_name.values())


def test_flags_are_parsed_to_their_types() -> None:
    """Lists, numbers and strings arrive as such."""
    line = (
        "--dataset_name python_docs --text_columns a b --image_shape 32 32 3 --max_length 64 --validation_fraction 0.2"
    )
    (args,) = HfArgumentParser(DataArguments).parse_args_into_dataclasses(line.split())  # type: ignore[arg-type]
    assert args == DataArguments(
        dataset_name="python_docs",
        text_columns=["a", "b"],
        image_shape=[32, 32, 3],
        max_length=64,
        validation_fraction=0.2,
    )


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("max_length", "long", "valid integer"),
        ("max_length", 1, "greater than or equal to 2"),
        ("text_columns", "sentence", "valid list"),
        ("text_columns", [], "at least 1"),
        ("validation_fraction", 1.0, "less than 1"),
        ("validation_fraction", 0, "greater than 0"),
        ("image_shape", [32], "at least 2"),
        ("image_shape", [32, 0], "greater than or equal to 1"),
        ("max_train_samples", -5, "greater than or equal to 1"),
        ("dataset_name", 3, "valid string"),
    ],
)
def test_a_wrong_value_is_one_line(field: str, value: Any, reason: str) -> None:
    """A recipe's wrong type or range names field, value and what is allowed."""
    with pytest.raises(DataError) as caught:
        DataArguments(**{field: value})
    assert str(caught.value).startswith(f"{field}={value!r}: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_misspelt_task_is_no_new_one() -> None:
    """A name that is none of the recipe's, and brings no data or columns of its own, is refused with the nearest."""
    tasks = [{"name": "kind", "label_column": "kind"}, {"name": "lines", "label_column": "lines"}]
    for flag in ("knd", "knd:max_train_samples=5"):
        with pytest.raises(DataError, match=r"no task 'knd'; known: kind, lines; .*; did you mean 'kind'\?"):
            choose_tasks(tasks, ["lines", flag])
    chosen = choose_tasks(tasks, ["kind:max_train_samples=5", "new:label_column=indent"])
    assert chosen == [{**tasks[0], "max_train_samples": 5}, {"name": "new", "label_column": "indent"}]
