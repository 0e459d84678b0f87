"""Every federation in recipes/ can be read, and names plugins that are there; the paper's has the paper's settings."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tunery.core.data import load_tasks
from tunery.core.federated.arguments import read_federated_options
from tunery.core.federated.flare.provision import read_project
from tunery.core.recipe import choose
from tunery.registry.errors import DataError

FOLDER = Path(__file__).parents[3] / "recipes"
RECIPES = sorted(FOLDER.glob("federated*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_read(path: Path):
    """Keys, types and plugins are right; nothing is loaded for it."""
    options = read_federated_options(path, ["--use_cpu"])
    choose(options.run.training.strategy)
    assert options.run.data.dataset_name or options.run.data.data_files == "FOLDER/sst2"
    assert options.run.training.output_dir == f"runs/{path.stem}"


def test_the_local_recipe_runs_on_a_folder(tiny: Any, tmp_path: Path):
    """With the folder named, a task is read from it; without, one line says that there is none."""
    (tmp_path / "sst2").mkdir()
    for split in ("train", "validation"):
        shutil.copy(tiny.rows, tmp_path / "sst2" / f"{split}.jsonl")
    path, where = FOLDER / "federated_local.yaml", str(tmp_path / "sst2")
    (data,) = load_tasks(read_federated_options(path, ["--use_cpu", "--data_files", where]).run.data, seed=0)
    assert (data.task.name, len(data.splits["train"])) == ("sst2", 48)
    with pytest.raises(DataError, match="FOLDER/sst2"):
        load_tasks(read_federated_options(path, ["--use_cpu"]).run.data, seed=0)


@pytest.mark.parametrize("name", ["glue", "cifar"])
def test_the_papers_settings(name: str):
    """100 clients, 10 a round, 500 rounds, one local epoch, r=8, t=10, p=0.5, three quarters of the neurons removed."""
    options = read_federated_options(FOLDER / f"federated_{name}.yaml", ["--use_cpu"])
    federated, training = options.federated, options.run.training
    assert (federated.num_clients, federated.clients_per_round, federated.num_rounds) == (100, 10, 500)
    assert (training.num_train_epochs, training.lr_scheduler_type) == (1, "constant")
    assert federated.learning_rate_decay == "linear"
    strategy = choose(training.strategy).strategy
    assert strategy is not None
    config = strategy.config
    assert (config.r, config.realign_every, config.share, config.ratio, config.retained) == (8, 10, 0.5, 0.75, (0, -1))


def test_the_parties_recipes_of_the_readme(tmp_path: Path):
    """They can be read, and have alike what must be; the server names rows to score and to align on, a site its own."""
    text = (FOLDER.parent / "core" / "federated" / "README.md").read_text(encoding="utf-8")
    written = dict(re.findall(r"^cat > (\w+\.yaml) <<'END'.*?\n(.*?)^END$", text, flags=re.MULTILINE | re.DOTALL))
    assert set(written) == {"project.yaml", "server.yaml", "north.yaml"}
    for name, content in written.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert read_project(tmp_path / "project.yaml").sites == ["north", "south"]
    server, north = (read_federated_options(tmp_path / f"{name}.yaml", ["--use_cpu"]) for name in ("server", "north"))
    for key in ("model_name_or_path", "strategy", "seed"):
        assert server.given[key] == north.given[key]
    assert server.run.data.validation_file and server.federated.server_data and north.run.data.train_file
    assert choose(server.run.training.strategy).strategy.realign_every
