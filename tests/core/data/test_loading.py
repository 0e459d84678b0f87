"""Loading: every file type, split names, and one line for whatever cannot be read."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_dataset

from tunery.core.data import DataArguments, load_task_data
from tunery.core.data.loading import hold_out, load_splits, quiet, sample
from tunery.registry.errors import DataError

ROWS = [{"text": "a b", "label": 0}, {"text": "c, d", "label": 1}]


def _load(**args: Any) -> dict[str, list[dict[str, Any]]]:
    with quiet():
        return {name: split.to_list() for name, split in load_splits(DataArguments(**args)).items()}


@pytest.mark.parametrize("extension", ["json", "jsonl", "csv", "parquet"])
def test_every_file_type_gives_the_same_rows(tmp_path: Path, extension: str) -> None:
    """The rows of a file do not depend on its type."""
    path = tmp_path / f"rows.{extension}"
    rows = Dataset.from_list(ROWS)
    with quiet():
        {"csv": rows.to_csv, "parquet": rows.to_parquet}.get(extension, rows.to_json)(path)
    assert _load(train_file=str(path), test_file=str(path)) == {"train": ROWS, "test": ROWS}


def test_a_rewritten_file_is_read_anew(write: Callable[..., str]) -> None:
    """No cache serves the rows of yesterday's file."""
    assert _load(train_file=write("rows.jsonl", ROWS)) == {"train": ROWS}
    assert _load(train_file=write("rows.jsonl", ROWS[::-1])) == {"train": ROWS[::-1]}


def test_a_file_name_is_no_pattern(write: Callable[..., str]) -> None:
    """Brackets in a file name are themselves."""
    assert _load(train_file=write("rows[1].jsonl", ROWS)) == {"train": ROWS}


def test_a_local_folder_loads_by_name_with_its_own_split_names(tmp_path: Path, write: Callable[..., str]) -> None:
    """A published 'dev' is our validation."""
    for split in ("train", "dev", "test"):
        write(f"named/{split}.jsonl", [{"text": split}])
    with quiet():
        names = set(load_dataset(str(tmp_path / "named")))
    assert names == {"train", "validation", "test"}
    assert _load(dataset_name=str(tmp_path / "named")) == {
        "train": [{"text": "train"}],
        "validation": [{"text": "dev"}],
        "test": [{"text": "test"}],
    }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.txt", b"x", "file type '.txt' is not known; known: .json, .jsonl, .csv, .parquet"),
        ("rows.jsonl", b"", "the file is empty"),
        ("rows.jsonl", b"\n\n", "there are no rows"),
        ("rows.json", b"[]", "there are no rows"),
        ("rows.csv", b"text,label\n", "there are no rows"),
        ("rows.jsonl", b'{"text": "a"}\n{"text": ', "cannot be read: JSON parse error"),
        ("rows.csv", b"text,label\na,1,2,3\nb\n\xff", "cannot be read"),
        ("rows.csv", b"text,label\na,1\nb,1,2\n", "cannot be read: Error tokenizing data"),
        ("rows.parquet", b"PAR1 no more PAR1", "cannot be read"),
    ],
)
def test_an_unreadable_file_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, content: bytes, message: str
) -> None:
    """The line says what is wrong and in which file, and the libraries below say nothing."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_task_data(DataArguments(train_file=str(path)), seed=0)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "no data is named; give one of dataset_name, data_files and train_file"),
        ({"dataset_name": "x", "train_file": "y.csv"}, "dataset_name='x' and train_file both name the data"),
        ({"validation_file": "y.csv"}, "validation_file without train_file"),
        ({"train_file": "no/such.csv"}, "file 'no/such.csv' does not exist"),
        ({"dataset_name": "python_doc"}, "did you mean 'python_docs'?"),
        ({"dataset_name": "python_docs", "dataset_revision": "v1"}, "no configurations and no revisions"),
    ],
)
def test_a_source_that_is_none_is_one_line(args: dict[str, str], message: str) -> None:
    """Exactly one source, and one that is there."""
    with pytest.raises(DataError, match=r"^[^\n]*$") as caught:
        _load(**args)
    assert message in str(caught.value)


def test_a_hub_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, a hub dataset is refused with what can be done about it."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"^dataset 'nyu-mll/glue' cannot be loaded: .*HF_HUB_OFFLINE.*python_docs$"):
        _load(dataset_name="nyu-mll/glue", dataset_config_name="mrpc")


def test_a_named_dataset_without_train_is_refused(tmp_path: Path, write: Callable[..., str]) -> None:
    """A source must have something to train on."""
    write("named/test.jsonl", ROWS)
    with pytest.raises(DataError, match="there is no 'train' split; known: test"):
        _load(dataset_name=str(tmp_path / "named"))


def test_hold_out_takes_its_share_of_every_class() -> None:
    """Held-out rows are a seeded, stratified, order-keeping partition."""
    rows = Dataset.from_dict({"labels": [0] * 50 + [1] * 20 + [2] * 2 + [3], "row": range(73)})
    train, held = hold_out(rows, 0.1, seed=1, by_class=True)
    assert sorted(train["row"][:] + held["row"][:]) == list(range(73))
    assert [held["labels"][:].count(label) for label in range(4)] == [5, 2, 1, 0]
    assert train["row"][:] == sorted(train["row"])
    again, other = (hold_out(rows, 0.1, seed=seed, by_class=True)[1]["row"][:] for seed in (1, 2))
    assert held["row"][:] == again != other


def test_hold_out_refuses_what_cannot_be_split() -> None:
    """Where every class has one row, nothing can be held out."""
    with pytest.raises(DataError, match="2 training rows are too few to hold some out"):
        hold_out(Dataset.from_dict({"labels": [0, 1]}), 0.1, seed=0, by_class=True)


def test_sample_is_drawn_from_everywhere_and_by_the_seed() -> None:
    """A file sorted by label still gives every label."""
    rows = Dataset.from_dict({"labels": [0] * 500 + [1] * 500, "row": range(1000)})
    drawn = sample(rows, 100, seed=3)["row"][:]
    assert len(set(drawn)) == 100
    assert drawn == sorted(drawn)
    assert 30 < sum(row < 500 for row in drawn) < 70
    assert drawn == sample(rows, 100, seed=3)["row"][:] != sample(rows, 100, seed=4)["row"][:]
    assert sample(rows, 2000, seed=3).num_rows == sample(rows, None, seed=3).num_rows == 1000


def test_quiet_leaves_the_libraries_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verbosity and progress bars are the user's again afterwards, also after an error."""
    import datasets

    monkeypatch.setattr("sys.stderr", io.StringIO())  # no terminal
    datasets.enable_progress_bars()
    verbosity = datasets.logging.get_verbosity()
    with pytest.raises(KeyError), quiet():
        assert datasets.are_progress_bars_disabled()
        raise KeyError
    assert datasets.logging.get_verbosity() == verbosity
    assert not datasets.are_progress_bars_disabled()
