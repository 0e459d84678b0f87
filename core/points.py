"""Which models a probe goes over: runs, checkpoints, plain folders, hub revisions; and where each stands on the axis."""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..registry.errors import RecipeError
from .artifacts import MANIFEST, sha256
from .models import latest_commit, resolve

_SIZES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_COUNT = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)([kmbgt]?)", re.IGNORECASE)
_TOKENS = re.compile(r"tokens?[-_]?([0-9]+(?:\.[0-9]+)?[kmbt]?)(?![a-z0-9.])", re.IGNORECASE)
_WEIGHTS = ("*.safetensors", "*model*.bin")  # training_args.bin is none
_STEP = re.compile(r"(?:checkpoint-|step[-_]?|ckpt[-_]?)([0-9]+)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One model of several, and where it stands.

    Attributes:
        reference: a run, checkpoint or plain transformers folder, a hub name or a ``package:`` reference.
        revision: branch, tag or commit on the hub.
        tokens: tokens it was trained on, if known.
        step: optimizer steps it was trained for, if known.
    """

    reference: str
    revision: str | None = None
    tokens: float | None = None
    step: float | None = None

    @property
    def label(self) -> str:
        """How results name it."""
        return f"{self.reference}@{self.revision}" if self.revision else self.reference

    @property
    def file_name(self) -> str:
        """Name of the file with its measurements: readable, and another for every other point."""
        readable = re.sub(r"[^\w.-]+", "-", self.label).strip("-.")[-80:]
        return f"{readable}-{hashlib.sha256(self.label.encode()).hexdigest()[:8]}.json"

    @property
    def folder(self) -> Path | None:
        """Its local folder, if it has one."""
        path = Path(resolve(self.reference)).expanduser()
        return path if path.is_dir() else None

    def is_run(self) -> bool:
        """Whether tunery wrote it: a folder with a manifest, or one that should have had one."""
        folder = self.folder
        return folder is not None and ((folder / MANIFEST).is_file() or not (folder / "config.json").is_file())

    def weights(self) -> dict[str, str]:
        """Return what tells its weights from others.

        Of a local folder the hash of every weight file, and of a run what its base model's weights are known by, which may be
        all but an adapter; of a hub model the commit that its branch stands for now.
        """
        folder = self.folder
        if folder is None:
            commit = latest_commit(self.reference, self.revision)
            return {"commit": commit} if commit else {}
        files = [path for pattern in _WEIGHTS for path in folder.glob(pattern)]
        return {path.name: sha256(path) for path in sorted(files)} | _base_of(folder)


def find_points(
    models: Sequence[str] = (),
    revisions: Sequence[str] = (),
    runs: Sequence[str] = (),
    tokens: Sequence[str] = (),
    steps: Sequence[str] = (),
) -> list[Point]:
    """Return the points that are asked for, in ascending order where all of them stand on one axis.

    Args:
        models: references; with ``revisions`` exactly one.
        revisions: of that model.
        runs: patterns of local folders, ``out/*/checkpoint-*``.
        tokens: tokens of each point as given, ``41B`` or ``4.1e10``; default: from its name or its ``trainer_state.json``.
        steps: steps of each point; default: from its name. How long a run was that is not named so says nothing about
            where it stands among other runs.

    Raises:
        RecipeError: nothing is asked for, a pattern that fits no folder, revisions of several models, or not as many
            tokens or steps as points.
    """
    if revisions and len(models) != 1:
        raise RecipeError(f"revisions of {len(models)} models", remedy="give one --model with --revisions")
    points = [Point(reference=model) for model in models]
    if revisions:
        points = [Point(reference=models[0], revision=revision) for revision in revisions]
    for pattern in runs:
        folders = [path for path in glob.glob(str(Path(pattern).expanduser())) if Path(path).is_dir()]
        if not folders:
            raise RecipeError(f"--runs {pattern!r} fits no folder")
        points += [Point(reference=folder) for folder in sorted(folders, key=_natural)]
    if not points:
        raise RecipeError("no model to measure", remedy="give --model, --models or --runs")
    points = [_placed(point) for point in dict.fromkeys(points)]
    for flag, values in (("--tokens", tokens), ("--steps", steps)):
        if values and len(values) != len(points):
            raise RecipeError(f"{len(values)} {flag} for {len(points)} models", remedy="give one for each, in order")
    if tokens:
        points = [replace(point, tokens=read_count(text)) for point, text in zip(points, tokens, strict=True)]
    if steps:
        points = [replace(point, step=read_count(text)) for point, text in zip(points, steps, strict=True)]
    axis = axis_of(points)
    return sorted(points, key=lambda point: getattr(point, axis)) if axis else points


def axis_of(points: Sequence[Point]) -> str | None:
    """Return what all points are known to have: ``tokens``, else ``step``, else ``None``."""
    return next((name for name in ("tokens", "step") if all(getattr(p, name) is not None for p in points)), None)


def read_count(text: str) -> float:
    """Read ``1e9``, ``1000000000`` or ``1B``.

    Raises:
        RecipeError: it is no count.
    """
    found = _COUNT.fullmatch(text.strip())
    try:
        return float(found.group(1)) * _SIZES[found.group(2).upper()] if found else float(text)
    except ValueError:
        raise RecipeError(f"{text!r} is no count", known=["1e9", "41B", "2.4T"]) from None


def _placed(point: Point) -> Point:
    """Read tokens and steps from the last part of its name, and tokens from what the Trainer saved beside it."""
    name = point.revision or Path(point.reference).name
    tokens, step = _TOKENS.search(name), _STEP.search(name)
    found = replace(
        point, tokens=read_count(tokens.group(1)) if tokens else None, step=float(step.group(1)) if step else None
    )
    state = None if point.folder is None else point.folder / "trainer_state.json"
    if state is None or not state.is_file():
        return found
    try:
        content = json.loads(state.read_text(encoding="utf-8"))
        seen = content.get("num_input_tokens_seen")
    except (OSError, ValueError, AttributeError):
        return found
    return replace(found, tokens=float(seen)) if found.tokens is None and seen else found


def _base_of(folder: Path) -> dict[str, str]:
    """Return the fingerprint of a run's base model; loading refuses a run on any other."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return {"base model": str(manifest["base_model"]["fingerprint"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # a plain model; what is wrong with a manifest, loading says


def _natural(path: str) -> list[tuple[int, int | str]]:
    """Sort checkpoint-9 before checkpoint-10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", path)]
