"""Sensitivity recipes: those tunery brings, and what is wrong with others in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunery.benchmarks.sensitivity.plan import BASE, SHIPPED, make_plan, read_plan
from tunery.registry.errors import RecipeError

PLAN = {"name": "x", "models": ["a"], "learning_rates": [1e-3], "in_domain": {}, "out_of_domain": {}}


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_read(path: Path):
    """Every one of them, with known keys only."""
    plan = read_plan(path.stem)
    assert plan.name == path.stem
    assert plan.seeds == [0, 1, 2]


def test_table_4():
    """27 learning rates, batch 64, cosine with 10 % warmup, four epochs, no weight decay."""
    plan = read_plan("olmo_30m")
    assert (len(plan.learning_rates), min(plan.learning_rates), max(plan.learning_rates)) == (27, 4e-6, 6e-3)
    training = plan.training
    assert (training["per_device_train_batch_size"], training["num_train_epochs"]) == (64, 4)
    assert (training["lr_scheduler_type"], training["warmup_steps"], training["weight_decay"]) == ("cosine", 0.1, 0.0)


@pytest.mark.parametrize(
    ("recipe", "tokens"),
    [
        ("olmo_1b", [4.1e10, 4.94e11, 1.501e12, 1.874e12, 2.353e12, 3.094e12]),
        ("olmo2_7b", [8e10, 5.04e11, 1.85e12, 2.45e12, 3.05e12, 3.896e12]),
        ("amber_7b", [1.2e11, 3.1e11, 7.5e11, 9.4e11, 1.1e12, 1.3e12]),
    ],
)
def test_table_1(recipe: str, tokens: list[float]):
    """Six revisions each, whose token budgets are known."""
    points = read_plan(recipe).points()
    assert [point.tokens for point in points] == pytest.approx(tokens)
    assert all(point.revision for point in points)


@pytest.mark.parametrize(("key", "attribute"), [("tokens", "tokens"), ("steps", "step")])
def test_where_checkpoints_stand_can_be_said(key: str, attribute: str):
    """As words or numbers, in the order of the models; points are in ascending order."""
    points = make_plan({**PLAN, "models": ["a", "b"], key: ["2K", 1000]}).points()
    assert [(point.reference, getattr(point, attribute)) for point in points] == [("b", 1000), ("a", 2000)]


def test_cells_are_points_times_rates_times_seeds_and_one_base_each():
    """Named apart, so that no file is of two cells."""
    plan = make_plan({**PLAN, "models": ["a", "b"], "learning_rates": [1e-3, 1e-4], "seeds": [0, 5]})
    cells = plan.cells(plan.points())
    assert len(cells) == len({cell.name for cell in cells}) == 2 * (1 + 2 * 2)
    assert [cell.learning_rate for cell in cells[:3]] == [BASE, 1e-4, 1e-4]


def test_other_seeds_do_not_score_the_checkpoint_anew():
    """Without fine-tuning nothing is drawn, so the same cell stands for all of them."""
    first, other = (make_plan({**PLAN, "seeds": seeds}) for seeds in ([0, 1], [5, 6]))
    assert first.cells(first.points())[0] == other.cells(other.points())[0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"learning_rates": []}, "learning_rates"),
        ({"learning_rates": [-1]}, "learning_rates.0"),
        ({"in_domian": {}}, "in_domian"),
        ({"in_domain": {"dataset_nme": "x"}}, "did you mean 'dataset_name'"),
        ({"training": {"num_train_epoch": 1}}, "did you mean 'num_train_epochs'"),
        ({"name": "../x"}, "name"),
        ({"metric": "accuracy"}, "metric"),
        ({"training": {"train_file": "x"}}, "train_file.*give it under in_domain or out_of_domain"),
        ({"training": {"split_seed": 1}}, "split_seed"),
        ({"training": {"learning_rate": 1e-3}}, "learning_rate.*give learning_rates"),
        ({"training": {"seed": 1}}, "seed.*give seeds"),
        ({"training": {"model_name_or_path": "x"}}, "model_name_or_path.*give models"),
        ({"training": {"model_revision": "x"}}, "model_revision.*give revisions"),
        ({"training": {"probes": ["apoz"]}}, "every cell sets it itself"),
        ({"training": {"probe_moments": ["end"]}}, "every cell sets it itself"),
        ({"training": {"do_predict": False}}, "every cell sets it itself"),
        ({"training": {"output_dir": "x"}}, "every cell sets it itself"),
        ({"in_domain": {"tasks": [{"name": "rte"}]}}, "in_domain: no key 'tasks'.*a study tunes on one task"),
        ({"training": {"mixing": "round_robin"}}, "training: no key 'mixing'.*a study tunes on one task"),
        ({"in_domain": {"learning_rate": 1e-3}}, "in_domain: no key 'learning_rate'"),
        ({"out_of_domain": {"max_lenght": 1}}, "out_of_domain: no key 'max_lenght'.*did you mean 'max_length'"),
    ],
)
def test_wrong_plans(changes: dict, says: str):
    """The key and what is wrong with it."""
    with pytest.raises(RecipeError, match=says) as caught:
        make_plan({**PLAN, **changes})
    assert len(str(caught.value).splitlines()) == 1


def test_unknown_recipe():
    """The nearest one is named."""
    with pytest.raises(RecipeError, match="did you mean 'olmo_30m'"):
        read_plan("olmo_30")
