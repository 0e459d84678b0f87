"""Which models a probe goes over, and where each stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tunery.core.points import Point, axis_of, find_points, read_count
from tunery.registry.errors import RecipeError


@pytest.mark.parametrize(
    ("revision", "tokens", "step"),
    [
        ("step738000-tokens3094B", 3.094e12, 738000),
        ("stage1-step19000-tokens80B", 8e10, 19000),
        ("ckpt_358", None, 358),
        ("main", None, None),
        ("tokens1.5B", 1.5e9, None),
        ("tokens5x", None, None),
        ("tokens5.x", None, None),
        ("tokens.", None, None),
        ("tokens1.2.3", None, None),
    ],
)
def test_names_tell_tokens_and_steps(revision: str, tokens: float | None, step: float | None):
    """As OLMo, OLMo-2 and LLM360 name their revisions."""
    (point,) = find_points(["org/model"], [revision])
    assert (point.label, point.tokens, point.step) == (f"org/model@{revision}", tokens, step)


def test_runs_are_patterns_of_folders_in_natural_order(tmp_path: Path):
    """checkpoint-9 comes before checkpoint-10, a file is no model, and the Trainer's own count of tokens is read."""
    for step in (10, 9):
        (tmp_path / f"run/checkpoint-{step}").mkdir(parents=True)
    state = {"num_input_tokens_seen": 640, "global_step": 10}
    (tmp_path / "run/checkpoint-10/trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    (tmp_path / "run/checkpoint-11").write_text("", encoding="utf-8")
    points = find_points(runs=[str(tmp_path / "*/checkpoint-*")])
    assert [(point.step, point.tokens) for point in points] == [(9, None), (10, 640)]
    assert axis_of(points) == "step"


def test_runs_of_some_length_are_no_axis(tmp_path: Path):
    """How long each of several runs was says nothing about an order among them."""
    for name, steps in (("lora", 100), ("head", 500)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text(json.dumps({"global_step": steps}), encoding="utf-8")
    points = find_points([str(tmp_path / "lora"), str(tmp_path / "head")])
    assert axis_of(points) is None
    assert [Path(point.reference).name for point in points] == ["lora", "head"]


def test_given_tokens_win_and_order_the_points():
    """In the order the models are named; then ascending."""
    points = find_points(["a-tokens9B", "b"], tokens=["2B", "1e9"])
    assert [(point.reference, point.tokens) for point in points] == [("b", 1e9), ("a-tokens9B", 2e9)]
    assert [point.step for point in find_points(["a", "b"], steps=["3", "20"])] == [3, 20]


def test_every_weight_file_tells_weights_apart(tmp_path: Path):
    """Of torch's own format too; what the Trainer was told is none."""
    for name in ("model.safetensors", "pytorch_model-00001-of-00002.bin", "training_args.bin", "config.json"):
        (tmp_path / name).write_bytes(name.encode())
    before = Point(reference=str(tmp_path)).weights()
    assert list(before) == ["model.safetensors", "pytorch_model-00001-of-00002.bin"]
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"other")
    assert Point(reference=str(tmp_path)).weights() != before


def test_an_adapter_on_other_weights_is_another_model(tmp_path: Path):
    """The manifest of a run has the fingerprint of its base model; a damaged one has none."""
    (tmp_path / "adapter_model.safetensors").write_bytes(b"adapter")
    found = []
    for content in ('{"base_model": {"fingerprint": "a"}}', '{"base_model": {"fingerprint": "b"}}', "{"):
        (tmp_path / "tunery.json").write_text(content, encoding="utf-8")
        found.append(Point(reference=str(tmp_path)).weights())
    assert [one.pop("base model", None) for one in found] == ["a", "b", None]
    assert found[0] == found[1] == found[2] != {}


def test_one_model_twice_is_one_point():
    """A pattern may well meet a folder that is named."""
    assert len(find_points(["a", "a"])) == 1


def test_files_of_points_differ():
    """Also where readable names do not."""
    assert Point(reference="a/b").file_name != Point(reference="a-b").file_name
    assert "/" not in Point(reference="../x/y", revision="r").file_name


@pytest.mark.parametrize(
    ("text", "count"), [("41B", 4.1e10), ("2.4T", 2.4e12), ("1e9", 1e9), ("300", 300), ("5k", 5000)]
)
def test_counts(text: str, count: float):
    """As the field writes them."""
    assert read_count(text) == count


def test_a_count_that_is_none():
    """One line says what would be."""
    with pytest.raises(RecipeError, match="is no count"):
        read_count("1.2.3")
