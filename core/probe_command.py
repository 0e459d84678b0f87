"""``tunery probe``: its flags, and what it prints and writes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from ..registry.errors import RecipeError, did_you_mean
from ..registry.loading import load_plugins
from .artifacts import write_json
from .console import show_measurements
from .curves import RESULTS, draw, sentences, summary, table
from .data import DataArguments
from .keys import describe_keys
from .options import Parser, typed_arguments
from .points import find_points
from .probe_points import Measured, Settings, measure_points

KEYS = "tunery probe --keys"


@dataclass(kw_only=True)
class ProbeArguments:
    """Which models a probe measures, and how.

    Args:
        models: references of models, one after the other.
        revisions: of the one model that is named.
        runs: patterns of folders.
        tokens: tokens each model was trained on, in the order they are named.
        steps: steps each model was trained for.
        output_dir: keeps one file a model, the table and the picture.
        per_device_eval_batch_size: rows of a batch.
        seed: of the draws.
        dtype: precision of models that tunery has not trained.
    """

    models: list[str] | None = field(
        default=None,
        metadata={"help": "Several models: runs, checkpoints, transformers folders, hub names, package: references."},
    )
    revisions: list[str] | None = field(default=None, metadata={"help": "Branches, tags or commits of one --model."})
    runs: list[str] | None = field(default=None, metadata={"help": "Patterns of folders: 'out/*/checkpoint-*'."})
    tokens: list[str] | None = field(
        default=None,
        metadata={"help": "Tokens of each model: 41B,494B,1.5T. Default: from its name or trainer_state.json."},
    )
    steps: list[str] | None = field(default=None, metadata={"help": "Steps of each model. Default: from its name."})
    output_dir: str | None = field(
        default=None,
        metadata={"help": "Keep what is measured here, a file a model, with table and picture; what is there stays."},
    )
    per_device_eval_batch_size: int = field(default=8, metadata={"help": "Rows of an evaluation batch."})
    seed: int = field(default=42, metadata={"help": "Of the draws, which are the same for every model."})
    dtype: str = field(default="float32", metadata={"help": "Precision of models that tunery has not trained."})


@dataclass(frozen=True)
class Asked:
    """The flags of a call: which models, how, and the data keys that were given."""

    probe: ProbeArguments
    data: dict[str, Any]


def read_flags(name: str, flags: Sequence[str], models: Sequence[str]) -> Asked:
    """Read the flags of ``tunery probe NAME``.

    Raises:
        RecipeError: no name, an unknown flag, with the nearest known one, or a value that cannot be read.
    """
    if not name:
        known = load_plugins().catalog.names("probe")
        raise RecipeError("no probe is named", known=known, remedy="tunery probe NAME --model MODEL")
    if name.startswith("-"):
        raise RecipeError(f"cannot read {name!r} as a probe", remedy="the probe's name comes first")
    parser = Parser((ProbeArguments, DataArguments), add_help=False, allow_abbrev=False, owner=KEYS)
    known = [action.dest for action in parser._actions]
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    explicit, unknown = parser.parse_known_args(list(flags))
    if unknown:
        flag = unknown[0].lstrip("-").split("=")[0]
        remedy = did_you_mean(flag, [*known, "model", "json"]) or f"see {KEYS}"
        raise RecipeError(f"cannot read {unknown[0]!r}", known=["--model", "--models", "--runs"], remedy=remedy)
    given = vars(explicit)
    own = {item.name: given.pop(item.name) for item in fields(ProbeArguments) if item.name in given}
    for key in ("models", "revisions", "runs", "tokens", "steps"):
        own[key] = [part for text in own.get(key) or () for part in text.split(",") if part]
    own["models"] = [*models, *own["models"]]
    return Asked(ProbeArguments(**typed_arguments(ProbeArguments, own, KEYS)), given)


def help_text() -> str:
    """Return every flag of ``tunery probe`` with its help."""
    return describe_keys((ProbeArguments, DataArguments))


def probe_points(probe: str, asked: Asked, *, as_json: bool) -> int:
    """Measure, print and write; return how many models could not be measured.

    Raises:
        TuneryError: nothing can be measured as asked.
    """
    args = asked.probe
    points = find_points(*(getattr(args, key) or () for key in ("models", "revisions", "runs", "tokens", "steps")))
    folder = Path(args.output_dir) if args.output_dir else None
    settings = Settings(
        probe=probe,
        data=asked.data,
        output_dir=folder,
        seed=args.seed,
        batch_size=args.per_device_eval_batch_size,
        dtype=args.dtype,
    )
    measured: list[Measured] = []
    console = Console(stderr=True, highlight=False)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(escape(probe), total=len(points))
        for one in measure_points(
            points, settings, lambda point, number: bar.update(task, completed=number, description=escape(point.label))
        ):
            measured.append(one)
            if one.error or one.note:
                words = f"tunery: {one.point.label}: {one.error or one.note}"
                print(words, file=sys.stderr if one.error else sys.stdout if not as_json else sys.stderr)
    failed = sum(bool(one.error) for one in measured)
    _print(measured, as_json=as_json)
    if folder is not None:
        write_json(folder / RESULTS, {"probe": probe, **summary(measured)})
        drawn = draw(measured, folder / f"{probe.partition(':')[0]}.png", probe)
        if not as_json:
            print(f"{folder}/ holds {RESULTS}, a file a model{' and a picture' if drawn else ''}")
    return failed


def _print(measured: Sequence[Measured], *, as_json: bool) -> None:
    if as_json:
        for one in measured:
            for row in one.rows:
                print(json.dumps(row))
        return
    done = [one for one in measured if not one.error]
    if len(measured) == 1:
        show_measurements(measured[0].rows)
    elif done:
        show_measurements(table(done))
    for sentence in sentences(measured):
        print(sentence)
