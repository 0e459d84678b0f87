"""Lists of completions, structured prompts, references: what data-to-text sets hold becomes rows of prompt and completion."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from tunery.core.data import DataArguments, TaskData, encode, load_task_data
from tunery.core.data.pairs import references
from tunery.core.data.tasks import build
from tunery.registry.errors import DataError

Write = Callable[..., str]
WEBNLG = [
    {"triples": ["a | b | c", "d | e | f"], "texts": ["g h", "i"], "category": "x"},
    {"triples": ["a | b | d"], "texts": ["j"], "category": "x"},
]


def _of(write: Write, rows: list[dict[str, Any]], **args: Any) -> TaskData:
    path = write("thing/train.jsonl", rows)
    files = {"train_file": path, "validation_file": path}
    return load_task_data(DataArguments(**{**files, "task_kind": "causal_lm", **args}), seed=0)


def test_a_list_of_completions_is_as_many_rows(write: Write, make_tokenizer: Callable[..., Any]) -> None:
    """Training sees every target once, behind the prompt in lines; other columns go along."""
    data = _of(write, WEBNLG, text_columns=["triples", "texts"])
    prompt = "a | b | c\nd | e | f"
    rows = [(row["triples"], row["texts"], row["category"]) for row in data.splits["train"]]
    assert rows == [(prompt, "g h", "x"), (prompt, "i", "x"), ("a | b | d", "j", "x")]
    assert references(data.splits["validation"], data.columns) == {prompt: ["g h", "i"], "a | b | d": ["j"]}
    encoded = encode(data, make_tokenizer(frame=False, eos=True)).train
    learnt = [[label for label in row["labels"] if label != -100] for row in encoded]
    assert learnt == [[11, 12, 4], [13, 4], [14, 4]]  # g h <eos>, i <eos>, j <eos>


def test_the_parts_of_a_listed_item_are_joined(write: Write) -> None:
    """DART's triples are lists themselves: they read as WebNLG's."""
    rows = [{"triples": [["a", "b", "c"], ["d", "e", "f"]], "text": "g"}, {"triples": [["a", "b", "d"]], "text": "h"}]
    data = _of(write, rows, text_columns=["triples", "text"])
    assert data.splits["train"]["triples"][:] == ["a | b | c\nd | e | f", "a | b | d"]


def test_references_of_their_own_column_count(write: Write) -> None:
    """Where a row lists references they are what an answer is compared with; else its completion is."""
    rows = [
        {"input": "a", "target": "b", "references": ["b", "c"]},
        {"input": "d", "target": "e", "references": []},
        {"input": "f", "target": "g", "references": None},
    ]
    data = _of(write, rows, text_columns=["input", "target"], references_column="references", metrics=["bleu"])
    assert references(data.splits["validation"], data.columns) == {"a": ["b", "c"], "d": ["e"], "f": ["g"]}
    assert data.splits["train"]["target"][:] == ["b", "e", "g"]


def test_columns_after_the_second_are_part_of_a_completion(write: Write) -> None:
    """References are joined as training joins them."""
    data = _of(write, [{"a": "x", "b": "y", "c": "z"}] * 2, text_columns=["a", "b", "c"])
    assert references(data.splits["validation"], data.columns) == {"x": ["y z"]}


def test_a_prompt_keeps_all_its_rows() -> None:
    """For bleu, what is held out and drawn is prompts: none is in two splits, none loses a reference."""
    rows = Dataset.from_dict({"mr": [f"p{n % 10}" for n in range(40)], "ref": [f"r{n}" for n in range(40)]})
    args = {"dataset_name": "d", "validation_fraction": 0.3, "max_eval_samples": 2, "metrics": ["bleu"]}
    data = build(DataArguments(**args), DatasetDict(train=rows), seed=0)
    train, held = data.splits["train"], data.splits["validation"]
    assert len(set(train["mr"])) == 7
    assert not set(train["mr"]) & set(held["mr"])
    found = references(held, data.columns)
    assert len(found) == 2
    assert all(texts == [f"r{n}" for n in range(40) if f"p{n % 10}" == prompt] for prompt, texts in found.items())
    loss_alone = build(DataArguments(**{**args, "metrics": ["loss"]}), DatasetDict(train=rows), seed=0)
    assert loss_alone.splits["validation"].num_rows == 2


@pytest.mark.parametrize(
    ("rows", "args", "message"),
    [
        (
            [{"p": "a", "c": ["b"]}, {"p": "d", "c": []}, {"p": "e", "c": None}],
            {"text_columns": ["p", "c"]},
            "2 of 3 rows of 'train' have nothing in column 'c'",
        ),
        ([{"p": "a", "c": [["b"]]}], {"text_columns": ["p", "c"]}, "text column 'c' holds List, not text"),
        ([{"p": "a", "c": [1, 2]}], {"text_columns": ["p", "c"]}, "text column 'c' holds List, not text"),
        ([{"p": ["a"]}], {"text_columns": ["p"]}, "text column 'p' holds List, not text"),
        (
            [{"p": "a", "c": ["b"], "d": "e"}],
            {"text_columns": ["p", "c", "d"]},
            "column 'c' of 'train' holds lists and is joined to others; give two text_columns",
        ),
        (
            [{"p": "a", "c": "b", "d": ["e"]}],
            {"text_columns": ["p", "c", "d"]},
            "column 'd' of 'train' holds lists; only prompt and completion may",
        ),
        (
            [{"p": "a", "c": "b"}],
            {"text_columns": ["p", "c"], "references_column": "refs"},
            "references_column: there is no column 'refs'",
        ),
        (
            [{"p": "a", "c": "b"}],
            {"text_columns": ["p", "c"], "references_column": "c"},
            "references_column 'c' holds string, not lists of texts",
        ),
        (
            [{"p": "a", "r": ["b"]}],
            {"text_columns": ["p"], "references_column": "r"},
            "references_column 'r' without a prompt",
        ),
        (
            [{"p": "a", "label": 0, "r": ["b"]}],
            {"task_kind": None, "text_columns": ["r"]},
            "text column 'r' holds List, not text",
        ),
        (
            [{"p": "a", "c": "b"}] * 9,
            {"text_columns": ["p", "c"], "metrics": ["bleu"], "validation_file": None},
            "column 'p' holds one prompt, and none can be held out for validation; give a validation split",
        ),
    ],
)
def test_what_cannot_be_read_is_one_line(
    write: Write, rows: list[dict[str, Any]], args: dict[str, Any], message: str
) -> None:
    """The line names the column."""
    with pytest.raises(DataError, match=r"^[^\n]*$") as caught:
        _of(write, rows, **args)
    assert message in str(caught.value)


def test_data_files_are_found_in_a_folder(write: Write, tmp_path: Path) -> None:
    """A folder's files are named after splits; the task is named after the folder."""
    for name in ("thing/train.jsonl", "thing/dev.jsonl", "thing/test.jsonl", "thing/other.jsonl"):
        write(name, [{"mr": name, "ref": "b"}])
    (tmp_path / "thing" / "train.txt").write_text("no data", encoding="utf-8")
    data = load_task_data(DataArguments(data_files=str(tmp_path / "thing")), seed=0)
    assert data.task.name == "thing"
    found = {name: split["mr"][:] for name, split in data.splits.items()}
    assert found == {name: [f"thing/{file}.jsonl"] for name, file in _FILES.items()}


_FILES = {"train": "train", "validation": "dev", "test": "test"}


@pytest.mark.parametrize(
    ("made", "args", "message"),
    [
        ([], {}, "/thing' is no folder; give a folder with train.jsonl, or train_file"),
        (["test.csv"], {}, "there is no 'train' split"),
        (["train.csv", "train.jsonl"], {}, "train.csv and train.jsonl are both train"),
        (["train.csv"], {"dataset_name": "d"}, "dataset_name='d' and data_files="),
    ],
)
def test_a_folder_without_data_is_one_line(tmp_path: Path, made: list[str], args: dict[str, str], message: str) -> None:
    """What is missing, ambiguous or given twice is said."""
    for name in made:
        (tmp_path / "thing").mkdir(exist_ok=True)
        text = "mr,ref\na,b\n" if name.endswith("csv") else json.dumps({"mr": "a", "ref": "b"})
        (tmp_path / "thing" / name).write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"^[^\n]*$") as caught:
        load_task_data(DataArguments(data_files=str(tmp_path / "thing"), **args), seed=0)
    assert message in str(caught.value)


def test_a_configuration_of_converted_data_is_a_folder(tmp_path: Path) -> None:
    """On the hub's parquet branch a dataset has one folder for each configuration, and no script that would say so."""
    for config in ("en", "ru"):
        (tmp_path / "set" / config / "train").mkdir(parents=True)
        rows = Dataset.from_dict({"input": [["a"], ["b"]], "target": [config, "c"]})
        rows.to_parquet(tmp_path / "set" / config / "train" / "0000.parquet")
    args = {"dataset_name": str(tmp_path / "set"), "dataset_config_name": "ru", "task_kind": "causal_lm"}
    data = load_task_data(
        DataArguments(**args, dataset_revision="refs/convert/parquet", text_columns=["input", "target"]), seed=0
    )
    targets = [*data.splits["train"]["target"], *data.splits["validation"]["target"]]
    assert sorted(targets) == ["c", "ru"]
