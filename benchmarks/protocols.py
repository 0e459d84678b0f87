"""Protocols: named pieces of how a benchmark splits its data, when it stops training and which split it scores.

A suite, a task or a method lists them as ``name`` or ``name(value, ...)``: ``[dev_as_test, early_stopping(20)]``. The keys a
piece stands for are those of a recipe, and a recipe's own keys win; but where ``learning_rate_search`` is asked for, what it
chooses is the ``learning_rate``, whatever the recipe has. The seed of a cell applies before adapters and heads are drawn, since
the Trainer seeds itself before it builds them; all cells split their data by ``split_seed`` 0.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from ..registry.errors import RecipeError, did_you_mean

Split = Literal["validation", "test"]
_PIECE = re.compile(r"\s*([a-z_]+)\s*(?:\((.*)\))?\s*")


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What one piece, or several together, ask for.

    Attributes:
        keys: recipe keys.
        scored_on: the split whose metrics are a cell's result; ``None`` leaves it to the other pieces.
        learning_rates: grid that a cell chooses its learning rate from, by the validation split; empty for none.
    """

    keys: Mapping[str, Any] = field(default_factory=dict)
    scored_on: Split | None = None
    learning_rates: tuple[float, ...] = ()


def official_split(scored_on: Split = "validation") -> Protocol:
    """Take the splits as they were published, and score one of them.

    Args:
        scored_on: ``validation``, which then must choose nothing; or ``test``, where that has labels.

    Raises:
        RecipeError: there is no such split.
    """
    if scored_on not in ("validation", "test"):
        raise RecipeError(f"official_split({scored_on})", known=("validation", "test"))
    return Protocol(keys={"do_predict": scored_on == "test"}, scored_on=scored_on)


def dev_as_test(fraction: float = 0.1) -> Protocol:
    """Score the published validation split, and hold a share of train out to choose by (stability paper, section 4.1: 10 %).

    Args:
        fraction: the share.
    """
    keys = {"test_split": "validation", "validation_fraction": fraction, "do_predict": True}
    return Protocol(keys=keys, scored_on="test")


def leave_out(fraction: float = 0.1) -> Protocol:
    """Train without a share of the training rows, other ones with every seed (stability paper, section 4.2.7).

    Args:
        fraction: the share.
    """
    return Protocol(keys={"leave_out": fraction})


def early_stopping(patience: int, metric: str = "loss") -> Protocol:
    """Evaluate every epoch, stop after ``patience`` evaluations without a better one, and score the best checkpoint.

    Args:
        patience: evaluations without improvement (the stability paper: 20).
        metric: of the validation split, what is better.
    """
    return Protocol(
        keys={
            "early_stopping_patience": patience,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "save_only_model": True,
            "save_total_limit": 1,
            "load_best_model_at_end": True,
            "metric_for_best_model": metric,
        }
    )


def learning_rate_search(*grid: float) -> Protocol:
    """Run every learning rate of a grid, choose by the main metric of the validation split, then run with the chosen one.

    Rates whose score is not finite, because the model diverged, are not chosen. Cells that run in rounds (``command: federate``)
    have no such search.

    Args:
        grid: the learning rates.

    Raises:
        RecipeError: fewer than two of them.
    """
    if len(grid) < 2:
        raise RecipeError("learning_rate_search without a choice", remedy="learning_rate_search(1e-5, 2e-5, ...)")
    return Protocol(learning_rates=tuple(float(rate) for rate in grid))


PIECES: Mapping[str, Callable[..., Protocol]] = {
    piece.__name__: piece for piece in (official_split, dev_as_test, leave_out, early_stopping, learning_rate_search)
}


def read_protocol(pieces: Iterable[str]) -> Protocol:
    """Put pieces together; where two say the same thing, the later one wins.

    Raises:
        RecipeError: a piece that is not known, or does not take these values.
    """
    keys: dict[str, Any] = {}
    scored_on: Split | None = None
    rates: tuple[float, ...] = ()
    for piece in map(_read, pieces):
        keys |= piece.keys
        scored_on, rates = piece.scored_on or scored_on, piece.learning_rates or rates
    return Protocol(keys=keys, scored_on=scored_on, learning_rates=rates)


def _read(text: str) -> Protocol:
    found = _PIECE.fullmatch(str(text))  # YAML may have made a number of it
    name = found[1] if found else text
    if found is None or name not in PIECES:
        raise RecipeError(f"no protocol {name!r}", known=PIECES, remedy=did_you_mean(str(name), PIECES))
    try:
        values = yaml.safe_load(f"[{found[2] or ''}]")
        values = [float(value) if isinstance(value, str) and _is_number(value) else value for value in values]
        inspect.signature(PIECES[name]).bind(*values)
        return PIECES[name](*values)
    except (yaml.YAMLError, TypeError, ValueError) as error:
        signature = inspect.signature(PIECES[name])
        raise RecipeError(f"cannot read protocol {text!r}: {error}", known=[f"{name}{signature}"]) from None


def _is_number(text: str) -> bool:
    """Whether YAML took a number for text, as it does with 1e-5."""
    try:
        float(text)
    except ValueError:
        return False
    return True
