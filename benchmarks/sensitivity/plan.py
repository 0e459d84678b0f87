"""A sensitivity recipe: which checkpoints, learning rates and seeds, and the data they are fine-tuned and scored on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import yaml
from annotated_types import Ge, Gt, Len
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...core.points import Point, find_points
from ...registry.errors import RecipeError, did_you_mean
from ...registry.selection import read_yaml

SHIPPED = Path(__file__).parent / "recipes"
Keys = dict[str, Any]
BASE = 0.0  # the learning rate of the cell that only scores the checkpoint as it is
PERPLEXITY = "perplexity"
_SET_BY_CELLS = {  # and the key of the plan that says what to
    "model_name_or_path": "models",
    "model_revision": "revisions",
    "learning_rate": "learning_rates",
    "seed": "seeds",
    "probes": "",
    "probe_moments": "",
    "do_predict": "",
    "output_dir": "",
}


class Plan(BaseModel):
    """What a sensitivity recipe says.

    Attributes:
        name: of the study.
        description: what it is for, and which table of the paper it follows.
        models: checkpoints: references; with ``revisions`` exactly one.
        revisions: of that model.
        runs: patterns of local folders.
        tokens: tokens of each checkpoint, where names do not tell.
        steps: steps of each checkpoint, likewise.
        learning_rates: peak learning rates.
        seeds: of the fine-tuning runs.
        in_domain: data keys of the fine-tuning task. Learning rates are tuned on its validation split; its test split is
            reported where there is one.
        out_of_domain: data keys of held-out text like that of pre-training; its validation split is scored.
        metric: what is scored in domain: ``perplexity`` of the text, or for a classification ``class_perplexity``, the probe of that
            name, with or without its options: perplexity over the classes by their length-normalised likelihood
            (appendix C.1). Its data are ``task_kind: causal_lm`` with ``text_columns: [prompt, completion]``; the classes are
            the completions that a split has.
        training: every other key of a run, those apart that each cell sets itself.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
    description: str = ""
    models: list[str] = []
    revisions: list[str] = []
    runs: list[str] = []
    tokens: list[str] = []
    steps: list[str] = []
    learning_rates: Annotated[list[Annotated[float, Gt(0)]], Len(1)]
    seeds: Annotated[list[Annotated[int, Ge(0)]], Len(1)] = [0, 1, 2]
    in_domain: Keys
    out_of_domain: Keys
    metric: Annotated[str, Field(pattern=rf"^({PERPLEXITY}|class_perplexity(:.+)?)$")] = PERPLEXITY
    training: Keys = {}

    @property
    def probe(self) -> str:
        """The probe that scores in domain, as it is selected; none for the perplexity of the text."""
        return "" if self.metric == PERPLEXITY else self.metric

    @property
    def scored(self) -> str:
        """The name of what is scored in domain."""
        return self.metric.partition(":")[0]

    def points(self) -> list[Point]:
        """Return the checkpoints, in ascending order of tokens or steps.

        Raises:
            RecipeError: there are none, or not as many tokens or steps as checkpoints.
        """
        return find_points(self.models, self.revisions, self.runs, self.tokens, self.steps)

    def cells(self, points: Sequence[Point]) -> list[Cell]:
        """Return every cell, checkpoint by checkpoint, the one that only scores it first, which is the same for all seeds."""
        rates = sorted(set(self.learning_rates))
        return [
            Cell(point, rate, seed)
            for point in points
            for rate, seed in [(BASE, 0), *((rate, seed) for rate in rates for seed in self.seeds)]
        ]


@dataclass(frozen=True)
class Cell:
    """One checkpoint, fine-tuned with one learning rate and seed; with :data:`BASE`, as it is.

    Attributes:
        point: the checkpoint.
        learning_rate: peak learning rate.
        seed: of the run.
    """

    point: Point
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        """How its result file is called."""
        label = self.point.file_name.removesuffix(".json")
        return f"{label}--base" if self.learning_rate == BASE else f"{label}--lr{self.learning_rate:g}--seed{self.seed}"


def read_plan(name: str, changes: Mapping[str, Any] | None = None) -> Plan:
    """Read a recipe by name, or from a file.

    Args:
        name: of a recipe that tunery brings, or of a YAML file.
        changes: keys that take the place of the recipe's.

    Raises:
        RecipeError: no such recipe, or a file that is none.
    """
    path = SHIPPED / f"{name}.yaml"
    if not path.is_file():
        path = Path(name)
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        known = sorted(found.stem for found in SHIPPED.glob("*.yaml"))
        remedy = did_you_mean(name, known) or "or give a YAML file"
        raise RecipeError(f"no sensitivity recipe {name!r}", known=known, remedy=remedy) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise RecipeError(f"cannot read recipe {path}: {error}") from None
    if not isinstance(content, dict):
        raise RecipeError(f"recipe {path} is not a mapping of keys to values", known=Plan.model_fields)
    return make_plan({**content, **(changes or {})}, path.name)


def make_plan(content: Mapping[str, Any], owner: str = "the plan") -> Plan:
    """Check what a recipe says.

    Raises:
        RecipeError: a key that is missing, unknown or of a wrong kind, in the plan or among the data and training keys; a
            training key that belongs to the data or is set by each cell.
    """
    try:
        plan = Plan.model_validate(dict(content))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise RecipeError(f"recipe {owner}: {place}: {first['msg']}", known=Plan.model_fields) from None
    _check_keys(plan, owner)
    return plan


def _check_keys(plan: Plan, owner: str) -> None:
    from ...core.data.arguments import JOINT, DataArguments
    from ...core.options import check_keys

    data = [item.name for item in fields(DataArguments) if item.name not in JOINT]
    for name, keys in (("in_domain", plan.in_domain), ("out_of_domain", plan.out_of_domain)):
        for key in keys:
            if key not in data:
                many = key in JOINT
                remedy = "a study tunes on one task" if many else did_you_mean(key, data) or "see tunery probe --keys"
                raise RecipeError(f"{name}: no key {key!r}", owner=owner, remedy=remedy)
    check_keys(plan.training, owner)
    for key in plan.training:
        if key in JOINT:
            remedy = "a study tunes on one task"
        elif key in data:
            remedy = "give it under in_domain or out_of_domain"
        elif key in _SET_BY_CELLS:
            instead = _SET_BY_CELLS[key]
            remedy = f"give {instead}" if instead else "every cell sets it itself"
        else:
            continue
        raise RecipeError(f"training: no key {key!r}", owner=owner, remedy=remedy)
