"""A recipe file and the flags behind it -> the arguments of one run. YAML holds the same keys as the flags; a flag wins."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_type_hints

import torch
import yaml
from annotated_types import Ge, Interval
from transformers import HfArgumentParser
from transformers.integrations.integration_utils import get_available_reporting_integrations

from ..registry.errors import RecipeError, TuneryError, did_you_mean
from ..registry.selection import read_yaml
from .arguments import PLUGIN_FIELDS, TrainingArguments
from .data import DataArguments, Mixing
from .data.arguments import choose_tasks

KEYS = "tunery train --keys"
_ARGUMENTS_DOC = f"a recipe's keys are those of `{KEYS}`"
# What transformers takes as it comes, and stops at only when the run has begun.
_RANGES = {
    "per_device_train_batch_size": Ge(1),
    "per_device_eval_batch_size": Ge(1),
    "gradient_accumulation_steps": Ge(1),
    "dataloader_num_workers": Ge(0),
    "learning_rate": Ge(0),
    "weight_decay": Ge(0),
    "adam_beta1": Interval(ge=0, lt=1),
    "adam_beta2": Interval(ge=0, lt=1),
    "adam_epsilon": Ge(0),
    "seed": Interval(ge=0, lt=2**32),
}


@dataclass(kw_only=True)
class RunArguments:
    """The model of a run, and what it is compared with.

    Args:
        model_name_or_path: the model to fine-tune.
        model_revision: branch, tag or commit on the hub.
        dtype: precision the weights are loaded in: ``float32``, ``bfloat16``, ``float16`` or ``auto``.
        baselines: what to print beside the result: ``majority``, or strategies, each trained with the same arguments.
        early_stopping_patience: evaluations without a better ``metric_for_best_model`` after which training stops; goes with
            ``load_best_model_at_end``.
        overwrite_output_dir: remove an earlier run's files from ``output_dir`` first.
    """

    model_name_or_path: str = field(
        metadata={"help": "The model to fine-tune: a hub name, a local folder, or package:NAME/path."}
    )
    model_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit on the hub."})
    dtype: str = field(default="float32", metadata={"help": "Precision of the weights: float32, bfloat16, auto."})
    baselines: list[str] | None = field(
        default=None,
        metadata={"help": "Printed beside the result: majority, or strategies trained with the same arguments."},
    )
    early_stopping_patience: Annotated[int, Ge(1)] | None = field(
        default=None,
        metadata={
            "help": "Stop after this many evaluations without a better metric_for_best_model; goes with "
            "load_best_model_at_end. Default: never."
        },
    )
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Remove an earlier run's files from output_dir first."}
    )


CLASSES = (RunArguments, DataArguments, TrainingArguments)


@dataclass(frozen=True)
class Options:
    """The arguments of one run.

    Attributes:
        run: model and baselines.
        data: data set, columns, lengths.
        training: everything the Trainer takes.
        given: the keys that were given, recipe and flags merged.
    """

    run: RunArguments
    data: DataArguments
    training: TrainingArguments
    given: Mapping[str, Any]

    @property
    def mixing(self) -> Mixing:
        """How several tasks' rows are mixed."""
        data = self.data
        return Mixing(name=data.mixing, temperature=data.mixing_temperature, cap=data.mixing_cap)

    @property
    def output_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.training.output_dir or "tmp_trainer")

    def replace(self, **changes: Any) -> Options:
        """Return the options with some keys changed; ``None`` goes back to the default."""
        merged = {key: value for key, value in {**self.given, **changes}.items() if value is not None}
        return build_options(merged)


class Parser(HfArgumentParser):
    """Argparse that raises our error instead of printing usage and exiting; ``owner`` is the command that lists its keys."""

    def __init__(self, *args: Any, owner: str = KEYS, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.owner = owner

    def error(self, message: str) -> NoReturn:
        """Raise it in one line."""
        raise RecipeError(message.removeprefix("argument "), owner="the flags", remedy=f"see {self.owner}")


def read_options(recipe: Path | None, flags: Sequence[str]) -> Options:
    """Read a recipe and the flags that override it.

    Raises:
        RecipeError: an unreadable file, an unknown key or flag (with the nearest known one), or a wrong value.
        TuneryError: what the arguments themselves refuse.
    """
    return build_options(read_given(recipe, flags))


def read_given(recipe: Path | None, flags: Sequence[str], more: Sequence[type] = ()) -> dict[str, Any]:
    """Return the keys that a recipe and the flags that override it give.

    Args:
        recipe: the file, if there is one.
        flags: the command line's.
        more: argument classes whose keys are known beside those of a run; ``listed_by`` is the command that lists them.

    Raises:
        RecipeError: an unreadable file, or an unknown key or flag (with the nearest known one).
    """
    given = {} if recipe is None else read_recipe(recipe)
    check_keys(given, str(recipe), more)
    flagged = read_flags(flags, "the recipe comes before the flags" if recipe is None else "", more)
    if "tasks" in flagged:
        flagged["tasks"] = choose_tasks(given.get("tasks") or (), flagged["tasks"])
    return {**given, **flagged}


def read_flags(flags: Sequence[str], stray: str = "", more: Sequence[type] = ()) -> dict[str, Any]:
    """Read flags alone: the keys they give, as values of their types.

    Args:
        flags: as on the command line.
        stray: what to say of a word that is no flag.
        more: argument classes whose keys are known beside those of a run; ``listed_by`` is the command that lists them.

    Raises:
        RecipeError: an unknown flag (with the nearest known one), or a wrong value.
    """
    parser = _parser(more)
    known = {action.dest for action in parser._actions}
    for action in parser._actions:
        action.default = argparse.SUPPRESS
        action.required = False
    explicit, unknown = parser.parse_known_args(list(flags))
    if unknown:
        flag = unknown[0].lstrip("-").split("=")[0]
        remedy = stray if stray and not unknown[0].startswith("-") else _nearest(flag, known, more)
        raise RecipeError(f"cannot read {unknown[0]!r}", owner="the flags", remedy=remedy)
    return vars(explicit)


def check_keys(keys: Iterable[str], owner: str, more: Sequence[type] = ()) -> None:
    """Refuse keys that no recipe has.

    Args:
        keys: those of the recipe.
        owner: whose they are.
        more: argument classes whose keys are known beside those of a run; ``listed_by`` is the command that lists them.

    Raises:
        RecipeError: naming the first, and the known key nearest to it.
    """
    known = {item.name for cls in (*more, *CLASSES) for item in dataclasses.fields(cls)}
    for key in keys:
        if key not in known:
            raise RecipeError(f"no key {key!r}", owner=owner, remedy=_nearest(key, known, more))


def _nearest(key: str, known: Iterable[str], more: Sequence[type]) -> str:
    """Return what to do about a key that is not known."""
    from .federated.arguments import FederatedArguments

    if key in (item.name for item in dataclasses.fields(FederatedArguments)):
        return "it is one of tunery federate RECIPE"
    return did_you_mean(key, known) or f"see {_listed_by(more)}"


def _listed_by(more: Sequence[Any]) -> str:
    return next((cls.listed_by for cls in more), KEYS)


def read_recipe(path: Path) -> dict[str, Any]:
    """Read a recipe file.

    Raises:
        RecipeError: not there, not YAML, or not a mapping.
    """
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"no recipe {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read recipe {path}: {error}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise RecipeError(f"recipe {path} is not YAML: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise RecipeError(f"recipe {path} is not a mapping of keys to values", remedy=_ARGUMENTS_DOC)
    return content


def build_options(given: Mapping[str, Any], keys: str = KEYS) -> Options:
    """Make the three argument objects of one flat mapping.

    Args:
        given: keys and values.
        keys: the command that lists them.

    Raises:
        RecipeError: a key that is none, a required one that is missing, or a value that is refused.
    """
    check_keys(given, "the arguments")
    parts = []
    settled = {**_quiet_defaults(), **given}
    for cls in CLASSES:
        fields = [item for item in dataclasses.fields(cls) if item.init]
        for name in (item.name for item in fields if _is_required(item)):
            if name not in settled:
                raise RecipeError(f"{name} is missing", remedy=f"give it in the recipe or as --{name}")
        values = {item.name: settled[item.name] for item in fields if item.name in settled}
        try:
            parts.append(cls(**(values if cls is DataArguments else typed_arguments(cls, values, keys))))
        except TuneryError:
            raise
        except (TypeError, ValueError, ImportError, OSError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RecipeError(f"cannot use these arguments: {first}", remedy=f"see {keys}") from None
    run, data, training = parts
    if given.get("early_stopping_patience") and not given.get("load_best_model_at_end"):
        raise RecipeError(
            "early_stopping_patience without load_best_model_at_end",
            remedy="add load_best_model_at_end: true, and an eval_strategy and save_strategy",
        )
    _check_reporting(training)  # type: ignore[arg-type]
    return Options(run=run, data=data, training=training, given=dict(given))  # type: ignore[arg-type]


def _quiet_defaults() -> dict[str, Any]:
    """Return transformers' defaults where they only make noise: bars without a terminal, pinning without a GPU."""
    return {"disable_tqdm": not sys.stderr.isatty(), "dataloader_pin_memory": torch.cuda.is_available()}


def _check_reporting(training: TrainingArguments) -> None:
    known = ["none", "all", *get_available_reporting_integrations()]  # type: ignore[no-untyped-call]
    for name in training.report_to or ():
        if name not in known:
            raise RecipeError(f"report_to={name!r} is not installed or not known", known=known)


def typed_arguments(cls: type, values: Mapping[str, Any], keys: str = KEYS) -> dict[str, Any]:
    """Return the values as the types of ``cls`` ask: YAML comes without types, and transformers checks few of them.

    Args:
        cls: the argument class.
        values: of its fields.
        keys: the command that lists them.

    Raises:
        RecipeError: a value that none of its type can be made of, or out of range.
    """
    from pydantic import TypeAdapter, ValidationError

    hints = {**get_type_hints(cls, include_extras=True), "resume_from_checkpoint": str | bool | None}
    hints |= {name: Annotated[hints[name], limit] for name, limit in _RANGES.items() if name in hints}
    typed = dict(values)
    for name in (name for name in values if name not in PLUGIN_FIELDS):
        try:
            typed[name] = TypeAdapter(hints[name]).validate_python(values[name])
        except ValidationError as error:
            message = error.errors(include_url=False)[0]["msg"]
            raise RecipeError(f"{name}={values[name]!r}: {message}", remedy=f"see {keys}") from None
    return typed


def _is_required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _parser(more: Sequence[type] = ()) -> Parser:
    parser = Parser((*more, *CLASSES), add_help=False, allow_abbrev=False, owner=_listed_by(more))
    for action in parser._actions:
        if action.dest == "resume_from_checkpoint":
            action.nargs, action.const = "?", "last"  # the bare flag: from where the run stopped
        if action.dest == "tasks":
            action.type = str
    return parser
