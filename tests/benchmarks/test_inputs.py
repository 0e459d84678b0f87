"""What a cell's result depends on: changed, it makes the cell stale and is named."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from tunery.benchmarks.cells import state_of
from tunery.benchmarks.inputs import differences, inputs_of
from tunery.registry.errors import DataError, TuneryError
from tunery.registry.loading import load_plugins

Run = Callable[..., Any]


def test_stale_and_why(place: Any, run: Run):
    """A changed key, a changed row and a changed model are each named."""
    cell = place.cells()[0]
    run(cell)
    folder, catalog = place.folder / "results", load_plugins().catalog
    changed = dataclasses.replace(cell, recipe={**cell.recipe, "learning_rate": 0.5, "max_grad_norm": 2.0})
    state = state_of(folder, changed, inputs_of(changed, catalog))
    assert (state.status, state.why) == (
        "stale",
        "recipe.learning_rate: 0.01 -> 0.5, recipe.max_grad_norm: nothing -> 2.0",
    )
    data = place.folder / "data" / "first"
    data.mkdir(parents=True)
    for split in ("train", "validation"):
        (data / f"{split}.jsonl").write_bytes((place.data / "first" / f"{split}.jsonl").read_bytes())
    moved = dataclasses.replace(cell, data_dir=str(data.parent))
    assert state_of(folder, moved, inputs_of(moved, catalog)).status == "done"
    with (data / "train.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": "a b", "label": "yes"}\n')
    state = state_of(folder, moved, inputs_of(moved, catalog))
    assert state.status == "stale"
    assert state.why.startswith("data.train.jsonl: ")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tasks": "first"}, "tasks='first': Input should be a valid list"),
        ({"tasks": ["first"]}, r"tasks=\['first'\]: Input should be a valid dictionary"),
        ({"dataset_name": 5}, "dataset_name=5: Input should be a valid string"),
        ({"tasks": [{"name": "t", "train_file": 5}]}, "train_file=5: Input should be a valid string"),
        ({"tasks": [{"train_fil": "t.jsonl"}]}, "no key 'train_fil'"),
    ],
)
def test_data_that_are_none(place: Any, keys: dict[str, Any], message: str):
    """Where a suite names no file or dataset, it is told before the first cell begins."""
    cell = place.cells(tasks={"t": keys})[0]
    with pytest.raises(DataError, match=message):
        inputs_of(cell, load_plugins().catalog)


def test_every_file_of_a_model_counts(place: Any):
    """A tokenizer's own format, and weights that are no safetensors, make a cell stale like the others."""
    folder, catalog = place.folder / "model", load_plugins().catalog
    shutil.copytree(place.base, folder)
    cell = place.cells(defaults={**place.content()["defaults"], "model_name_or_path": str(folder)})[0]
    seen = {inputs_of(cell, catalog)["model"]}
    for name in ("spiece.model", "pytorch_model.bin", "merges.txt", "tokenizer.json", "model.safetensors"):
        (folder / name).write_bytes(b"other")
        seen.add(inputs_of(cell, catalog)["model"])
    assert len(seen) == 6


def test_the_servers_own_rows_count(place: Any):
    """A federated cell is stale when a file of the server's data changes, be it named itself or by its folder."""
    catalog = load_plugins().catalog
    data = place.folder / "server"
    (data / "inner").mkdir(parents=True)
    rows = data / "inner" / "train.jsonl"
    for source in (data, rows):
        rows.write_text('{"text": "a"}\n', encoding="utf-8")
        cell = place.cells(command="federate", defaults={"model_name_or_path": "m", "server_data": str(source)})[0]
        before = inputs_of(cell, catalog)
        rows.write_text('{"text": "b"}\n', encoding="utf-8")
        changed = differences(before, inputs_of(cell, catalog))
        assert [text.split(": ")[0] for text in changed] == ["data.server_data"]
    cell = place.cells(command="federate", defaults={"model_name_or_path": "m", "server_data": "wikimedia/wiki"})[0]
    assert inputs_of(cell, catalog)["data"]["server_data"] == "wikimedia/wiki"


def test_files_that_plugins_and_deepspeed_read_count(place: Any):
    """A text or a folder that an option names, and a DeepSpeed configuration; not the folder of a cache, nor other text."""
    catalog = load_plugins().catalog
    text, earlier, zero = (place.folder / name for name in ("t.txt", "earlier", "zero.json"))
    (earlier / "inner").mkdir(parents=True)
    for file in (text, zero, earlier / "inner" / "weights"):
        file.write_text("{}", encoding="utf-8")
    keys = {
        "strategy": {"name": "multi_lora", "add_to": str(earlier), "init": "gaussian"},
        "regularizers": [f"replay:data={text},tokenizer={earlier},column="],
        "deepspeed": str(zero),
    }
    (cell,) = place.cells(tasks={"t": {"train_file": "t.jsonl"}}, methods={"m": keys}, seeds=1)
    before = inputs_of(cell, catalog)
    assert set(before["files"]) == {
        "strategy multi_lora:add_to",
        "regularizer replay:data",
        "regularizer replay:tokenizer",
        "deepspeed",
    }
    for file, changed in (
        (text, ["files.regularizer replay:data"]),
        (zero, ["files.deepspeed"]),
        (earlier / "inner" / "weights", ["files.regularizer replay:tokenizer", "files.strategy multi_lora:add_to"]),
    ):
        file.write_text("[1]", encoding="utf-8")
        after = inputs_of(cell, catalog)
        assert [change.split(": ")[0] for change in differences(before, after)] == changed
        before = after
    for keys in ({"strategy": f"head:cache_dir={earlier}"}, {"deepspeed": "zero2"}, {"deepspeed": {"stage": 1}}, {}):
        (cell,) = place.cells(tasks={"t": {"train_file": "t.jsonl"}}, methods={"m": keys}, seeds=1)
        assert "files" not in inputs_of(cell, catalog)


def test_missing_data_folder_stops_early(place: Any):
    cell = dataclasses.replace(place.cells()[0], data_dir=None)
    with pytest.raises(TuneryError, match="--data_dir"):
        inputs_of(cell, load_plugins().catalog)
