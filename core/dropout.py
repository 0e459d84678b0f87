"""Every dropout of a model at one probability: some methods are meant to replace dropout, not to join it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from ..registry.errors import CompatibilityError

_NAME = re.compile(r"dropout|_pdrop$")  # of a number; layerdrop and drop_path leave out whole layers instead


def asked_dropout(model: nn.Module, args: Any) -> Mapping[str, Any]:
    """Set a model's dropouts as the training arguments ask, if they do; return what a manifest records of it.

    Raises:
        CompatibilityError: there are no dropouts to set.
    """
    probability = getattr(args, "dropout", None)
    if probability is None:
        return {}
    count = set_dropout(model, probability)
    if not count:
        raise CompatibilityError(
            f"dropout={probability:g} finds no dropout in {type(model).__name__}", remedy="leave it out"
        )
    logging.getLogger("tunery").info("%d dropouts of %s are %g", count, type(model).__name__, probability)
    return {"dropout": probability, "dropouts": count}


def set_dropout(model: nn.Module, probability: float) -> int:
    """Set every dropout's probability, in the model and in its config, so that what is saved says so too.

    Dropouts are torch's modules, and the numbers named after dropout that transformers' modules hand to torch's attention.

    Args:
        model: changed in place; evaluation is not affected.
        probability: in [0, 1).

    Returns:
        How many there are in the model, without those of its config.
    """
    count = 0
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = probability
            count += 1
        else:
            count += _set_numbers(module, probability)
        if isinstance(module, PreTrainedModel):
            _set_numbers(module.config, probability)
    return count


def _set_numbers(owner: Any, probability: float) -> int:
    names = [name for name, value in vars(owner).items() if _NAME.search(name) and type(value) in (int, float)]
    for name in names:
        setattr(owner, name, probability)
    return len(names)
