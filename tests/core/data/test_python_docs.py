"""python_docs: nothing leaks between the splits, every row is what the running interpreter documents."""

from __future__ import annotations

import importlib
import inspect
import math
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from datasets import DatasetDict

from tunery.core.data import DataArguments, load_task_data, python_docs
from tunery.registry.errors import DataError


@pytest.fixture(scope="module")
def docs() -> DatasetDict:
    return python_docs.load()


def test_no_module_and_no_passage_is_in_both_splits(docs: DatasetDict) -> None:
    """Not a module, not a docstring, not eight words in a row."""

    def passages(split: str) -> set[str]:
        found = set()
        for text in docs[split]["text"]:
            words = "".join(letter if letter.isalnum() or letter == "_" else " " for letter in text.lower()).split()
            found |= {" ".join(words[i : i + 8]) for i in range(len(words) - 7)} | {" ".join(words)}
        return found

    assert set(docs["train"]["module"]).isdisjoint(docs["validation"]["module"])
    assert passages("train").isdisjoint(passages("validation"))


def test_no_text_is_repeated(docs: DatasetDict) -> None:
    """A docstring counts once."""
    for split in docs.values():
        assert max(Counter(split["text"]).values()) == 1


@pytest.mark.parametrize("label", ["label", "kind", "returns"])
def test_every_class_is_in_both_splits(docs: DatasetDict, label: str) -> None:
    """A class can be learnt and evaluated, and none is so large that guessing it is good."""
    for split in docs.values():
        counts = Counter(split[label])
        assert set(counts) == set(range(split.features[label].num_classes))
        if label == "label":
            assert max(counts.values()) < 0.2 * split.num_rows


def test_it_is_as_large_as_documented(docs: DatasetDict) -> None:
    """About 1,500 and 350 rows of more than 40 characters."""
    assert 1300 < docs["train"].num_rows < 1900
    assert 300 < docs["validation"].num_rows < 500
    assert all(len(text) > 40 and "\n" not in text and ">>>" not in text for text in docs["train"]["text"])


def test_rows_are_what_the_interpreter_documents(docs: DatasetDict) -> None:
    """Text, kind and package of importable objects agree with what ``import`` and ``inspect`` say."""
    kinds, packages = (docs["validation"].features[column].names for column in ("kind", "label"))
    texts = defaultdict(set)  # a name may be defined twice, once for each platform
    for row in docs["validation"]:
        texts[row["module"], row["name"]].add(row["text"])
    checked = Counter()
    for row in docs["validation"]:
        module = importlib.import_module(row["module"])
        found, owner = module, None
        try:
            for part in filter(None, row["name"].split(".")):
                owner, found = found, inspect.getattr_static(found, part)
        except AttributeError:
            continue  # defined inside a function, or only on another platform
        assert row["module"].split(".")[0] == packages[row["label"]]
        found = getattr(found, "fget", None) or getattr(found, "__func__", found)
        if ">>>" in (found.__doc__ or "") or getattr(found, "__module__", row["module"]) != row["module"]:
            continue
        assert " ".join((found.__doc__ or "").split()) in texts[row["module"], row["name"]]
        kind = "module" if owner is None else "class" if inspect.isclass(found) else ""
        assert kinds[row["kind"]] == (kind or ("method" if inspect.isclass(owner) else "function"))
        checked[kinds[row["kind"]]] += 1
    assert set(checked) == set(kinds)
    assert checked.total() > 0.8 * docs["validation"].num_rows


def test_twice_the_same(docs: DatasetDict) -> None:
    """No set order, no clock and no machine gets in."""
    again = python_docs.load()
    assert {name: split.to_list() for name, split in docs.items()} == {
        name: split.to_list() for name, split in again.items()
    }


@pytest.mark.parametrize("column", ["label", "kind", "returns", "log_num_lines"])
def test_every_label_column_makes_a_task(column: str) -> None:
    """One text, several tasks."""
    args = DataArguments(dataset_name="python_docs", label_column=None if column == "label" else column)
    data = load_task_data(args, seed=0)
    assert data.columns.text == ("text",)
    assert data.task.kind == ("regression" if column == "log_num_lines" else "classification")
    assert data.task.name == ("python_docs" if column == "label" else f"python_docs-{column}")


SOURCE = '''\
"""Module docstring that is long enough to be taken up, said once."""


class Outer:
    """Class docstring that is long enough to be taken up, said once."""

    if True:

        def returns_none(self):
            """Method docstring that is long enough to be taken up.

            >>> Outer().returns_none()
            1

            Said after the example.
            """
            def inner():
                """Nested docstring that is long enough to be taken up, said once."""
                return 1
            inner()
            return None

    def short(self):
        """Too short to be taken up."""


async def produces():
    """Function docstring that is long enough to be taken up, said once."""
    yield 1
'''


def test_derived_columns_follow_the_source(tmp_path: Path) -> None:
    """Kind, name, what is returned and the number of lines of a file one can read."""
    for package in python_docs.HELD_OUT:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "email" / "thing.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "email" / "parser.py").write_text('"""This module is held out for validation, as its name says."""')
    (tmp_path / "email" / "test").mkdir()
    (tmp_path / "email" / "test" / "test_thing.py").write_text('"""Tests are not documentation, however long."""')
    rows = python_docs.load(tmp_path)["train"]
    assert set(rows["module"]) == {"email.thing"}
    names = {column: rows.features[column].names for column in ("kind", "returns")}
    described = [
        (row["name"], names["kind"][row["kind"]], names["returns"][row["returns"]], round(10 ** row["log_num_lines"]))
        for row in rows
    ]
    assert described == [
        ("", "module", "nothing", 28),
        ("Outer", "class", "nothing", 20),
        ("Outer.returns_none", "method", "nothing", 6),
        ("Outer.returns_none.inner", "function", "value", 2),
        ("produces", "function", "value", 2),
    ]
    assert rows[2]["text"] == "Method docstring that is long enough to be taken up. Said after the example."
    assert rows[3]["log_num_lines"] == pytest.approx(math.log10(2))


def test_a_python_without_sources_is_one_line(tmp_path: Path) -> None:
    """The line names the folder and what is missing there."""
    with pytest.raises(DataError, match=r"^python_docs needs .*asyncio, concurrent.*; in .*; use a Python .*sources$"):
        python_docs.load(tmp_path)
