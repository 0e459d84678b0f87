"""``tunery sensitivity`` on the command line: flags are checked as the recipe's own keys are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from tunery.benchmarks.sensitivity import commands
from tunery.benchmarks.sensitivity.plan import Plan
from tunery.core.commands import main
from tunery.registry.errors import RecipeError

PLAN = {
    "name": "x",
    "models": ["a"],
    "learning_rates": [1e-3],
    "in_domain": {},
    "out_of_domain": {},
    "training": {"max_steps": 1, "weight_decay": 0.1},
}


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the command on a recipe, without its study; return the exit code and the plans it would have done."""
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(PLAN), encoding="utf-8")
    plans: list[Plan] = []
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(commands, "study", lambda plan, _: plans.append(plan) or (None, {}))

    def run(*flags: str) -> tuple[object, list[Plan]]:
        monkeypatch.setattr(sys, "argv", ["tunery", "sensitivity", str(tmp_path / "plan.yaml"), *flags])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, plans

    return run


def test_flags_are_training_keys(call):
    """They win over the recipe's and leave the others."""
    code, (plan,) = call("--max_steps", "3", "--seeds", "4,5")
    assert code == 0
    assert (plan.training, plan.seeds) == ({"max_steps": 3, "weight_decay": 0.1}, [4, 5])


@pytest.mark.parametrize("flag", ["--train_file", "--learning_rate", "--seed", "--model_revision"])
def test_flags_that_a_run_has_already(flag: str, call, capsys: pytest.CaptureFixture[str]):
    """Refused in one line, before anything is done."""
    code, plans = call(flag, "1")
    assert (code, plans) == (2, [])
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert f"training: no key '{flag.removeprefix('--')}'; in plan.yaml" in err


def test_a_file_where_results_should_go(tmp_path: Path):
    """Is said in one line, before any checkpoint is looked for."""
    (tmp_path / "taken").touch()
    with pytest.raises(RecipeError, match=f"cannot write to {tmp_path}/taken/x"):
        commands.study(Plan(**PLAN), tmp_path / "taken" / "x")
