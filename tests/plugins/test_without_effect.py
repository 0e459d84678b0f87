"""Combinations in which a regularizer would do nothing stop before training, in one line that says why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tunery.registry.conformance.trials import Trial
from tunery.registry.errors import CompatibilityError


@pytest.mark.parametrize(
    ("strategy", "regularizer", "says"),
    [
        ("head", "mmr", "'mmr' would do nothing: every parameter before the head's last layer 'classifier' is frozen"),
        ("head", "mixout", "'mixout' finds no linear layer with a pre-trained weight that trains"),
        ("head", "lnsr", "'lnsr' finds no layer that trains"),
        ("head", "l2_sp:beta=0", "'l2_sp' would do nothing: 2 parameters train, 0 of them pre-trained"),
        ("lora:r=2", "l2_sp:beta=0", "'l2_sp' would do nothing: 10 parameters train, 0 of them pre-trained"),
        ("lp_ft", "mhloss", "'lp_ft' does not go with 'mhloss': it starts from heads of its own"),
        ("lora:r=2", "mixout", "'mixout' finds no linear layer with a pre-trained weight that trains"),
    ],
)
def test_is_refused(strategy: str, regularizer: str, says: str, tmp_path: Path) -> None:
    """Under a frozen encoder, and under LoRA whose B has no pre-trained value to mix in."""
    with pytest.raises(CompatibilityError) as caught:
        Trial(strategy=strategy, regularizers=(regularizer,)).trainer(tmp_path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_row_makes_no_pair(tmp_path: Path) -> None:
    """MMR compares the rows of a micro-batch: one with a single row, over all ranks, has no two class means."""
    alone = Trial(strategy="full", regularizers=("mmr",), batch=4, accumulation=4)
    with pytest.raises(CompatibilityError, match="'mmr' would do nothing: it compares the rows") as caught:
        alone.trainer(tmp_path)
    assert "\n" not in str(caught.value)
    alone.but(accumulation=2).trainer(tmp_path)


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor", "rmsprop", "sgd"])
def test_scaled_gradients_need_an_optimizer_that_sees_them(optim: str, tmp_path: Path) -> None:
    """Adam and its kin divide a gradient's scale out again, MHLoss's faster heads included."""
    trial = Trial(strategy="full", regularizers=("mhloss:scale_learning_rate=true",), options={"optim": optim})
    if optim == "sgd":
        trial.trainer(tmp_path)
        return
    with pytest.raises(
        CompatibilityError, match=f"'mhloss': scale_learning_rate would do nothing under optimizer '{optim}"
    ):
        trial.trainer(tmp_path)


def test_the_optimizer_that_counts_is_the_one_that_steps(tmp_path: Path) -> None:
    """One handed to the Trainer comes before ``optim``."""
    trial = Trial(strategy="full", regularizers=("mhloss:scale_learning_rate=true",))
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    trial.trainer(tmp_path, optimizers=(sgd, None))
    adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(CompatibilityError, match="under optimizer 'adam'"):
        trial.but(options={"optim": "sgd"}).trainer(tmp_path, optimizers=(adam, None))
