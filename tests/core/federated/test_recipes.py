"""Every federation in recipes/ can be read, and names plugins that are there; the paper's has the paper's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunery.core.federated.arguments import read_federated_options
from tunery.core.recipe import choose

FOLDER = Path(__file__).parents[3] / "recipes"
RECIPES = sorted(FOLDER.glob("federated*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_read(path: Path):
    """Keys, types and plugins are right; nothing is loaded for it."""
    options = read_federated_options(path, ["--use_cpu"])
    choose(options.run.training.strategy)
    assert options.run.data.dataset_name
    assert options.run.training.output_dir == f"runs/{path.stem}"


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
