"""Suites as data: which keys a cell has, which cells are chosen, strangers' methods, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunery.benchmarks.choosing import select, with_methods
from tunery.benchmarks.suite import read_suite, shipped_suites
from tunery.benchmarks.suite_file import write_suite
from tunery.core.federated.arguments import build_federated_options
from tunery.core.options import build_options
from tunery.core.recipe import choose
from tunery.registry.errors import RecipeError, TuneryError
from tunery.registry.loading import load_plugins


def test_a_cell_for_each_task_method_and_seed(place: Any):
    names = [cell.name for cell in place.cells()]
    assert len(set(names)) == len(names) == 8
    assert names[:3] == ["first--full--seed0", "first--head--seed0", "first--full--seed1"]


def test_later_keys_win(place: Any):
    """Protocol, defaults, task, method, overrides, flags: each over the ones before it; the seed over all."""
    path = place.suite(
        defaults={"model_name_or_path": "m", "max_length": 1, "learning_rate": 1, "validation_fraction": 0.3},
        tasks={"t": {"train_file": "{data_dir}/t.jsonl", "max_length": 2, "learning_rate": 2, "max_steps": 2}},
        methods={"m": {"learning_rate": 3, "max_steps": 3, "warmup_steps": 3}, "n": {}},
        overrides=[{"tasks": "t*", "methods": "m", "keys": {"max_steps": 4, "warmup_steps": 4}}],
    )
    cell, other = read_suite(str(path)).cells({"warmup_steps": 5, "seed": 9}, "/data")[:2]
    wanted = {"max_length": 2, "learning_rate": 3, "max_steps": 4, "warmup_steps": 5, "validation_fraction": 0.3}
    assert {key: cell.recipe[key] for key in wanted} == wanted
    assert (cell.recipe["seed"], cell.recipe["split_seed"], cell.recipe["test_split"]) == (0, 0, "validation")
    assert other.recipe["max_steps"] == 2
    assert (cell.recipe["train_file"], cell.keys["train_file"]) == ("{data_dir}/t.jsonl", "/data/t.jsonl")


def test_a_task_may_have_its_own_protocol(place: Any):
    tasks = {"t": {"train_file": "t.jsonl", "protocol": ["official_split(validation)"]}}
    cell = place.cells(tasks=tasks)[0]
    assert cell.pieces == ("official_split(validation)",)
    assert "test_split" not in cell.recipe


def test_data_folder_is_asked_for(place: Any):
    cell = read_suite(str(place.suite())).cells({}, None)[0]
    with pytest.raises(RecipeError, match="--data_dir FOLDER"):
        _ = cell.keys


@pytest.mark.parametrize("name", shipped_suites())
def test_shipped_suites_can_be_run(name: str, tmp_path: Path):
    """Every cell's keys make options, its plugins and their options exist, and only placeholders name files."""
    for cell in read_suite(name).model_copy(update={"seeds": [0]}).cells({}, str(tmp_path)):
        keys = {**cell.keys, "output_dir": str(tmp_path), "use_cpu": True}
        options = build_federated_options(keys).run if cell.command == "federate" else build_options(keys)
        choose(options.training.strategy, options.training.regularizers, options.training.probes)
        assert cell.suite == name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": []}, "seeds"),
        ({"seed": 1}, "seed: Extra inputs"),
        ({"methods": {"a--b": {}}}, "method 'a--b' is no name"),
        ({"tasks": {"a/b": {}}}, "task 'a/b' is no name"),
        ({"tasks": {"average": {}}}, "task 'average' is what the report calls the mean over tasks"),
        (
            {"tasks": {"both": {"tasks": [{"name": "a"}, {"name": "average"}]}}},
            "task 'average' is what the report calls",
        ),
        ({"defaults": {"learning_rat": 1}}, "no key 'learning_rat'.*did you mean 'learning_rate'"),
        ({"overrides": [{"keys": {"nothing": 1}}]}, "no key 'nothing'"),
        ({"tasks": {"t": {"protocol": 5}}}, "protocol 5 is no list of pieces"),
        (
            {"axis": {"name": "rate", "field": "learning_rat"}},
            "no key 'learning_rat'; in axis of suite tiny.yaml.*rate'",
        ),
        ({"axis": {"name": "rate", "field": "a b"}}, "axis.field: Value error, a key of recipes, or PLUGIN:OPTION"),
        ({"axis": {"field": "learning_rate", "scale": "ln"}}, "axis.name: Field required"),
    ],
)
def test_refused(place: Any, changes: dict[str, Any], message: str):
    with pytest.raises(RecipeError, match=message):
        read_suite(str(place.suite(**changes)))


RATES = {name: {"strategy": "full", "learning_rate": rate} for name, rate in (("low", 1e-4), ("high", 1e-2))}


@pytest.mark.parametrize(
    ("axis", "changes", "message"),
    [
        ({"field": "mhloss:heads"}, {}, "no method says mhloss:heads; in axis of suite tiny;"),
        ({"field": "learning_rate"}, {"learning_rate": 0.1}, "'low' and 'high' both have learning_rate at 0.1"),
        ({"field": "leave_out", "scale": "log"}, {"leave_out": 0}, "method 'low' is at 0, no logarithm"),
    ],
)
def test_axis_that_is_none(axis: dict[str, Any], changes: dict[str, Any], message: str, place: Any):
    """Told in one line before anything runs, flags of the command line included."""
    suite = read_suite(str(place.suite(methods=RATES, axis={"name": "x", **axis})))
    with pytest.raises(RecipeError, match=message) as caught:
        suite.cells(changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("figure", "places"),
    [
        (1, [1, 5, 50, 100, 200]),
        (2, [1, 2, 3, 5, 10, 20]),
        (3, [5e-6, 1e-5, 2e-5, 3e-5, 5e-5, 1e-4]),
        (4, [0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]),
    ],
)
def test_axes_of_the_stability_papers_figures(figure: int, places: list[float]):
    """Every method of Figures 1 to 4 stands on one line, at its own value."""
    suite = read_suite(f"stability_figure{figure}")
    cells = [cell for cell in suite.cells({}) if (cell.task, cell.seed) == ("rte", 0)]
    assert suite.axis is not None
    assert [suite.axis.value(cell.recipe) for cell in cells] == places
    assert len({suite.axis.line(cell.recipe) for cell in cells}) == 1


def test_rounds_search_no_learning_rate(place: Any):
    """A search that would not take place is refused, of the suite or of one method."""
    search = ["learning_rate_search(1e-3, 1e-2)"]
    for changes in ({"protocol": search}, {"methods": {"m": {"protocol": search}}}):
        with pytest.raises(RecipeError, match="learning_rate_search is of command: train; in suite tiny"):
            place.cells(command="federate", **changes)


def test_unknown_suite():
    with pytest.raises(RecipeError, match=r"no suite 'smok'.*did you mean 'smoke'"):
        read_suite("smok")
    with pytest.raises(RecipeError, match=r"no suite 'overtraining_figure2'.* recipes of tunery sensitivity"):
        read_suite("overtraining_figure2")


def test_selecting_cells(place: Any):
    cells = place.cells()
    assert [cell.name for cell in select(cells, ["second--*--seed1"], None)] == [
        "second--full--seed1",
        "second--head--seed1",
    ]
    shards = [select(cells, [], f"{number}/3") for number in (1, 2, 3)]
    assert sorted(cell.name for shard in shards for cell in shard) == sorted(cell.name for cell in cells)
    with pytest.raises(RecipeError, match="no cell matches"):
        select(cells, ["third--*"], None)
    with pytest.raises(RecipeError, match="i/n"):
        select(cells, [], "0/3")


def test_any_plugin_is_a_method(place: Any):
    """A strategy or a regularizer by name or selection; ``+`` keeps the suite's own."""
    suite, catalog = read_suite(str(place.suite())), load_plugins().catalog
    added, names = with_methods(suite, ["+lora:r=2", "mixout"], catalog)
    assert names == ["full", "head", "lora-r-2", "mixout"]
    assert added.methods["lora-r-2"] == {"strategy": "lora:r=2"}
    assert added.methods["mixout"] == {"strategy": "full", "regularizers": ["mixout"]}
    assert with_methods(suite, ["head"], catalog)[1] == ["head"]
    with pytest.raises(TuneryError, match=r"no method 'mixuot'; known: full, head, lora, .*did you mean 'mixout'"):
        with_methods(suite, ["mixuot"], catalog)
    with pytest.raises(TuneryError, match="strategy 'lora' has no option 'zz'; known: r, "):
        with_methods(suite, ["lora:zz=3"], catalog)


def test_suite_file_of_the_results(place: Any):
    """``suite.json`` keeps the order of the suite, and what earlier calls had on top."""
    suite, catalog = read_suite(str(place.suite(reference={"source": "a paper"}))), load_plugins().catalog
    write_suite(with_methods(suite, ["+mixout"], catalog)[0], place.folder)
    write_suite(suite.model_copy(update={"seeds": [5]}), place.folder)
    content = json.loads((place.folder / "suite.json").read_text(encoding="utf-8"))
    assert [item["name"] for item in content["methods"]] == ["full", "head", "mixout"]
    assert [item["name"] for item in content["tasks"]] == ["first", "second"]
    assert content["seeds"] == [0, 1, 5]
    assert content["reference"] == {"source": "a paper"}


@pytest.mark.parametrize("text", ["{", "[]", '{"tasks": 5}', "[" * 10**5])
def test_damaged_suite_file_is_replaced(text: str, place: Any):
    """What cannot be read of an earlier call is not kept, and stops nobody."""
    (place.folder / "suite.json").write_text(text, encoding="utf-8")
    write_suite(read_suite(str(place.suite())), place.folder)
    assert json.loads((place.folder / "suite.json").read_text(encoding="utf-8"))["name"] == "tiny"


def test_quoted_tables_are_whole():
    """Every quoted row has a cell a column; a method that is run has a row, so that the two stand side by side."""
    quoting = [suite for name in shipped_suites() if (suite := read_suite(name)).reference]
    assert len(quoting) == 17
    for suite in quoting:
        columns, rows = suite.reference["columns"], suite.reference["rows"]
        assert {len(row) for row in rows.values()} == {len(columns)}
        assert suite.methods.keys() <= rows.keys()


def test_nothing_is_left(place: Any):
    """A suite that skips all it lists is told so, with and without a selection."""
    cells = place.cells(overrides=[{"skip": True}])
    assert cells == []
    for only in ([], ["first--*"]):
        with pytest.raises(RecipeError, match="no cell is left: the suite's overrides skip them all"):
            select(cells, only, None)


def test_cells_can_be_skipped():
    """Several tasks in one run are Multi-LoRA's, one task a run the others'."""
    names = {cell.name.rpartition("--")[0] for cell in read_suite("multi_lora_table1").cells({})}
    assert "glue--multi_lora" in names
    assert "rte--lora" in names
    assert not names & {"glue--lora", "glue--fine_tune", "rte--multi_lora"}


def test_the_local_suite_of_several_tasks():
    """Multi-LoRA on eight tasks at once; each of them alone is the same data, metric and share of a batch, by two methods."""
    cells = {cell.name.rpartition("--")[0]: cell.keys for cell in read_suite("multi_lora_local").cells({}, "/data")}
    joint = cells.pop("eight--multi_lora")
    names = [task["name"] for task in joint["tasks"]]
    assert names == ["cola", "sst2", "mrpc", "rte", "qnli", "stsb", "wnli", "trec"]
    assert cells.keys() == {f"{name}--{method}" for name in names for method in ("lora", "fine_tune")}
    for task in joint["tasks"]:
        data = {key: value for key, value in task.items() if key != "name"}
        alone = cells[f"{task['name']}--lora"]
        assert data.items() <= alone.items()
        assert all("{data_dir}" not in str(value) for value in data.values())
        assert joint["per_device_train_batch_size"] == 8 * alone["per_device_train_batch_size"]
        assert joint["learning_rate"] > alone["learning_rate"] > cells[f"{task['name']}--fine_tune"]["learning_rate"]
