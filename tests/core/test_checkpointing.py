"""What a checkpoint is gone on with: the strategy, options and labels it was trained with."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tunery.core.artifacts import read_manifest, tasks_of, write_json
from tunery.core.checkpointing import check_belongs
from tunery.core.options import build_options
from tunery.core.recipe import choose
from tunery.core.run import train
from tunery.registry.context import Task, TaskKind
from tunery.registry.errors import ArtifactError

Finished = Callable[[str], Path]
LORA = "lora:r=2"


def check(folder: Path, strategy: object, tasks: Sequence[Task] | None = None, regularizers: Any = None) -> None:
    """Check that a run of these plugins and tasks may go on with the folder."""
    content = read_manifest(folder)
    recipe = choose(strategy=strategy, regularizers=regularizers)
    check_belongs(content, folder, recipe, tasks_of(content) if tasks is None else tasks, None, None)


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        ("lora:r=4", "with strategy lora:r=2, not r=4; resume with the same options"),
        ("lora:r=2,alpha=640,dropout=0.1", "with strategy lora:alpha=16.0,dropout=0.0, not alpha=640.0,dropout=0.1;"),
        ("full", "with strategy lora; resume with the same one"),
        (None, "with strategy lora; resume with the same one"),
    ],
)
def test_another_strategy_is_refused(strategy: str | None, says: str, finished: Finished):
    """The line names the options in which both differ."""
    with pytest.raises(ArtifactError) as error:
        check(finished(LORA) / "checkpoint-5", strategy)
    assert says in str(error.value)


@pytest.mark.parametrize("strategy", ["lora:r=2,alpha=16.0", {"name": "lora", "r": 2, "target_modules": None}])
def test_the_same_options_written_otherwise_are_the_same(strategy: object, finished: Finished):
    """Defaults may be named, and other regularizers chosen."""
    check(finished(LORA) / "checkpoint-5", strategy, regularizers=["l2_sp"])


def test_where_features_are_kept_is_no_part_of_a_run(finished: Finished, tmp_path: Path):
    """A run may go on with another folder for them, and no file of it names one."""
    run = finished("head")
    check(run / "checkpoint-5", {"name": "head", "cache_dir": str(tmp_path)})
    assert "cache_dir" not in (run / "tunery.json").read_text(encoding="utf-8")


def test_lists_of_options_are_the_same_from_python(finished: Finished, tmp_path: Path):
    """Also those of PEFT that tunery passes on: a tuple there is a list in the manifest."""
    run = Path(shutil.copytree(finished("peft:peft_type=IA3"), tmp_path / "run"))
    content = json.loads((run / "tunery.json").read_text(encoding="utf-8"))
    modules = {"target_modules": ["query", "dense"], "feedforward_modules": ["dense"]}
    content["plugins"][0]["config"] |= modules
    write_json(run / "tunery.json", content)
    same = {"name": "peft", "peft_type": "IA3"} | {name: tuple(value) for name, value in modules.items()}
    check(run, same)
    with pytest.raises(ArtifactError, match=r"peft:feedforward_modules=\['dense'\], not feedforward_modules=None"):
        check(run, {key: value for key, value in same.items() if key != "feedforward_modules"})


def test_an_option_that_came_later_had_its_default(finished: Finished, tmp_path: Path):
    """A checkpoint of a version that did not know it goes on."""
    run = Path(shutil.copytree(finished(LORA), tmp_path / "run"))
    content = json.loads((run / "tunery.json").read_text(encoding="utf-8"))
    del content["plugins"][0]["config"]["use_rslora"]
    write_json(run / "tunery.json", content)
    check(run, LORA)
    with pytest.raises(ArtifactError, match="use_rslora=False, not use_rslora=True"):
        check(run, "lora:r=2,use_rslora=true")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"label_names": ("yes", "no")}, "for classification rows of no, yes, not classification rows of yes, no;"),
        ({"label_names": ("no", "yes", "maybe")}, "for classification rows, not classification rows of maybe;"),
        ({"kind": TaskKind.REGRESSION, "label_names": ()}, "for classification rows of no, yes, not regression rows;"),
    ],
)
def test_other_labels_are_refused(changes: dict[str, Any], says: str, finished: Finished):
    """The line names those that are others."""
    folder = finished(LORA) / "checkpoint-5"
    (task,) = tasks_of(read_manifest(folder))
    with pytest.raises(ArtifactError) as error:
        check(folder, LORA, [dataclasses.replace(task, **changes)])
    assert says in str(error.value)
    check(folder, LORA, [dataclasses.replace(task, name="other", metrics=("mcc",))])


def test_other_tasks_are_refused(finished: Finished):
    """By their names where there are several; and a thousand labels stay one line."""
    folder = finished(LORA) / "checkpoint-5"
    (task,) = tasks_of(read_manifest(folder))
    with pytest.raises(ArtifactError, match="for rows, not rows, second;"):
        check(folder, LORA, [task, dataclasses.replace(task, name="second")])
    with pytest.raises(ArtifactError, match=r"not classification rows of label 0, .* \.\.\.;") as error:
        check(folder, LORA, [dataclasses.replace(task, label_names=tuple(f"label {n}" for n in range(1000)))])
    assert len(error.value.asked) < 400


def test_a_run_does_not_go_on_with_other_options(finished: Finished, tiny: Any, tmp_path: Path):
    """They would be trained on from weights of others; with the same it does, also for more steps."""
    run = Path(shutil.copytree(finished(LORA), tmp_path / "run"))
    keys = tiny.given(output_dir=str(run), resume_from_checkpoint="last")
    with pytest.raises(ArtifactError, match=r"with strategy lora:alpha=16\.0, not alpha=640\.0;"):
        train(build_options(keys | {"strategy": "lora:r=2,alpha=640"}))
    swapped = tmp_path / "rows.jsonl"
    swapped.write_text(tiny.rows.read_text(encoding="utf-8").replace('"no"', '"never"'), encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"for classification .* of no, not classification .* of never;"):
        train(build_options(keys | {"strategy": LORA, "train_file": str(swapped)}))
    train(build_options(keys | {"strategy": LORA, "max_steps": 12}))
