"""A recipe file and the flags behind it -> the arguments of one run. YAML holds the same keys as the flags; a flag wins."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser

from ..registry.errors import RecipeError, TuneryError, did_you_mean
from ..registry.selection import read_yaml
from .arguments import TrainingArguments
from .data import DataArguments

_ARGUMENTS_DOC = "a recipe's keys are those of `tunery train --help`"


@dataclass(kw_only=True)
class RunArguments:
    """The model of a run, and what it is compared with.

    Args:
        model_name_or_path: the model to fine-tune.
        model_revision: branch, tag or commit on the hub.
        dtype: precision the weights are loaded in: ``float32``, ``bfloat16``, ``float16`` or ``auto``.
        baselines: what to print beside the result: ``majority``, or strategies, each trained with the same arguments.
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
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Remove an earlier run's files from output_dir first."}
    )


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
    def output_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.training.output_dir or "tmp_trainer")

    def replace(self, **changes: Any) -> Options:
        """Return the options with some keys changed; ``None`` goes back to the default."""
        merged = {key: value for key, value in {**self.given, **changes}.items() if value is not None}
        return build_options(merged)


class _Parser(HfArgumentParser):
    """Argparse that raises our error instead of printing usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise RecipeError(message.removeprefix("argument "), owner="the flags", remedy="see tunery train --help")


def read_options(recipe: Path | None, flags: Sequence[str]) -> Options:
    """Read a recipe and the flags that override it.

    Raises:
        RecipeError: an unreadable file, an unknown key or flag (with the nearest known one), or a wrong value.
        TuneryError: what the arguments themselves refuse.
    """
    given = {} if recipe is None else read_recipe(recipe)
    parser = _parser()
    known = {action.dest for action in parser._actions}
    for key in given:
        if key not in known:
            raise RecipeError(
                f"no key {key!r}", owner=str(recipe), remedy=did_you_mean(key, known) or "see tunery train --help"
            )
    for action in parser._actions:
        action.default = argparse.SUPPRESS
        action.required = False
    explicit, unknown = parser.parse_known_args(list(flags))
    if unknown:
        flag = unknown[0].lstrip("-").split("=")[0]
        remedy = did_you_mean(flag, known)
        raise RecipeError(f"cannot read {unknown[0]!r}", owner="the flags", remedy=remedy or "see tunery train --help")
    return build_options({**given, **vars(explicit)})


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


def build_options(given: Mapping[str, Any]) -> Options:
    """Make the three argument objects of one flat mapping.

    Raises:
        RecipeError: a required key is missing or a value is refused.
    """
    parts = []
    for cls in (RunArguments, DataArguments, TrainingArguments):
        names = {item.name for item in dataclasses.fields(cls) if item.init}
        required = [item.name for item in dataclasses.fields(cls) if item.init and _is_required(item)]
        for name in required:
            if name not in given:
                raise RecipeError(f"{name} is missing", remedy=f"give it in the recipe or as --{name}")
        try:
            parts.append(cls(**{key: value for key, value in given.items() if key in names}))
        except TuneryError:
            raise
        except (TypeError, ValueError, ImportError, OSError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RecipeError(f"cannot use these arguments: {first}", remedy="see tunery train --help") from None
    run, data, training = parts
    return Options(run=run, data=data, training=training, given=dict(given))  # type: ignore[arg-type]


def _is_required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _parser() -> _Parser:
    parser = _Parser((RunArguments, DataArguments, TrainingArguments), add_help=False, allow_abbrev=False)  # type: ignore[arg-type]
    for action in parser._actions:
        if action.dest == "resume_from_checkpoint":
            action.nargs, action.const = "?", "last"  # the bare flag: from where the run stopped
    return parser


def help_text() -> str:
    """Return every key with its type's default and its help, grouped by argument class."""
    lines = []
    for cls in (RunArguments, DataArguments, TrainingArguments):
        lines.append(f"\n{cls.__name__}")
        for item in dataclasses.fields(cls):
            if item.init and not item.name.startswith("_"):
                text = " ".join(str(item.metadata.get("help", "")).split())
                lines.append(f"  --{item.name}  {text}")
    return "\n".join(lines)
