"""Reading gradients off the weights, which every stage saves: plain SGD moves each weight by the sum of its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

from .models import MODELS, base_model
from .trials import ONE, Trial

if TYPE_CHECKING:
    import torch

RATE = 0.5
_FLOOR = 0.01  # of the whole move: a gradient that is zero in theory (BERT's key bias) is rounding error in practice


def gradients(trial: Trial) -> Trial:
    """Return ``trial`` as a run whose weights tell its gradients."""
    return trial.but(
        options={"optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    )


def moves(trial: Trial, where: str = ONE) -> dict[str, torch.Tensor]:
    """Return how far a run moved every saved weight from the base model's."""
    start = MODELS[trial.model].load(base_model(trial.model, trial.dropout)).state_dict()
    return {name: value - start[name] for name, value in trial.run(where).weights.items()}


def assert_same_gradients(trial: Trial, where: str, reference: Trial, reference_where: str = ONE) -> None:
    """Fail unless two runs of :func:`gradients` had the same losses and moved every weight by the same."""
    expected = reference.run(reference_where).logged("loss")
    assert trial.run(where).logged("loss") == pytest.approx(expected, rel=1e-5)
    assert_same_moves(moves(trial, where), moves(reference, reference_where))


def assert_same_moves(found: Mapping[str, Any], expected: Mapping[str, Any], rtol: float = 1e-5) -> None:
    """Fail unless every weight moved by the same, relative to the length of its own move."""
    assert found.keys() == expected.keys()
    whole = sum(move.double().square().sum().item() for move in expected.values()) ** 0.5
    for name, move in expected.items():
        length = move.double().norm().item() + _FLOOR * whole
        apart = (found[name].double() - move.double()).norm().item()
        assert apart <= rtol * length, f"{name}: gradients are {apart / length:.1e} apart, relative to {length:.1e}"
