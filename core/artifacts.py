"""What a run leaves: folders that are whole or not there, and the manifest ``tunery.json`` that says what is in them.

A folder with weights is either what transformers writes (``config.json`` + ``model.safetensors``) or what PEFT writes
(``adapter_config.json`` + ``adapter_model.safetensors``); the manifest beside it says which plugins made it, on which
base model, and what each weight file must hash to. Folders are written under a temporary name and renamed. How weights are
loaded back is in :mod:`.weights`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..registry.context import RunContext, Task, TaskKind
from ..registry.errors import ArtifactError, UnknownPluginError, did_you_mean
from ..registry.selection import Selection
from .anatomy import outside_backbone

MANIFEST = "tunery.json"
RESULT = "result.json"
FORMAT = 1
_RECORDED = ("tunery", "torch", "transformers", "peft", "accelerate", "deepspeed", "safetensors")
_SAMPLES = 64


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON under a temporary name and rename it: readers see the old file or the new one, never half of it."""
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextmanager
def folder_in_place(target: Path) -> Iterator[Path]:
    """Yield a temporary folder beside ``target`` that takes its place when the block ends well, and vanishes otherwise.

    Raises:
        ArtifactError: ``target`` exists and holds something, or it cannot be made.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ArtifactError(f"{target} exists already", remedy="choose another --output_dir or remove it")
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise ArtifactError(f"cannot write {target}: {error.strerror}", remedy="choose another --output_dir") from None
    try:
        yield temporary
        if target.exists():
            target.rmdir()
        temporary.replace(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def fingerprint(model: nn.Module, run: RunContext) -> str:
    """Return a hash that tells base models apart: names, shapes and a sample of the pre-trained values.

    The values are rounded to bfloat16 first, so that one model loaded in float32 and in bfloat16 has one fingerprint;
    float16 rounds before, and may give another. A fresh head does not count.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if not run.is_pretrained(name):
            continue
        with run.sharding.gathered([parameter]):
            flat = parameter.detach().reshape(-1)
            digest.update(f"{name}{tuple(parameter.shape)}".encode())
            stride = max(1, flat.numel() // _SAMPLES)
            sample = flat[::stride][:_SAMPLES].to(torch.bfloat16).float().cpu()
            digest.update(sample.numpy().tobytes())
    return digest.hexdigest()


def backbone_fingerprint(model: nn.Module, run: RunContext) -> str:
    """Return the fingerprint of what a model has without any head: that of a classifier on the same backbone."""
    headless = dataclasses.replace(run, pretrained_parameters=run.pretrained_parameters - outside_backbone(model))
    return fingerprint(model, headless)


@cache
def versions() -> Mapping[str, str]:
    """Return the installed versions that a result depends on."""
    found = {"python": platform.python_version()}
    for name in _RECORDED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@cache
def git_state(folder: str) -> Mapping[str, Any] | None:
    """Return commit and cleanliness of a folder's repository when it was first asked for, ``None`` outside one.

    A process runs the code that it began with, whatever is committed later.
    """

    def git(*words: str) -> str:
        answer = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
        return answer.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "clean": not git("status", "--porcelain")}
    except (OSError, subprocess.SubprocessError):
        return None


def describe_base(model: nn.Module, run: RunContext, reference: str | None) -> dict[str, Any]:
    """Return what a manifest records of the base model, before a strategy touches it.

    Args:
        model: the base model.
        run: the run.
        reference: the name, path or ``package:`` reference it was loaded from; default: what its config remembers.
    """
    config, dtype = getattr(model, "config", None), getattr(model, "dtype", None)
    return {
        "name_or_path": reference or getattr(config, "_name_or_path", "") or "",
        "revision": run.revision,
        "class": type(model).__name__,
        **({} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")}),
        "fingerprint": fingerprint(model, run),
    }


def manifest(run: RunContext, base: Mapping[str, Any], plugins: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the manifest of a run, without its files."""
    return {
        "format": FORMAT,
        "plugins": list(plugins),
        "base_model": dict(base),
        "tasks": describe_tasks(run.tasks),
        "seed": run.seed,
        "versions": versions(),
        "git": git_state(str(Path.cwd())),
        **({} if run.stage is None else {"stage": dataclasses.asdict(run.stage)}),
    }


def describe_tasks(tasks: Iterable[Task]) -> list[dict[str, Any]]:
    """Return what a manifest records of tasks."""
    return [
        {"name": t.name, "kind": t.kind.value, "label_names": list(t.label_names), "metrics": list(t.metrics)}
        for t in tasks
    ]


def seal(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest of a folder, last: with it the folder is whole. Every weight file is recorded with its hash."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.glob("*.safetensors"))
    }
    write_json(folder / MANIFEST, {**content, "files": files})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a run or checkpoint and check its weight files against it.

    Raises:
        ArtifactError: no manifest, not readable, from a newer tunery, or a weight file that is missing or damaged.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise ArtifactError(f"no folder {folder}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        remedy = "name a run or checkpoint folder that tunery finished writing"
        raise ArtifactError(f"{folder} has no {MANIFEST}", remedy=remedy) from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ArtifactError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise ArtifactError(f"{path} is not a manifest of tunery")
    if content["format"] > FORMAT:
        raise ArtifactError(
            f"{path} has format {content['format']}", known=[f"up to {FORMAT}"], remedy="pip install --upgrade tunery"
        )
    for key in ("plugins", "base_model", "tasks", "seed", "files"):
        if key not in content:
            raise ArtifactError(f"{path} lacks {key!r}")
    for name, expected in content["files"].items():
        _check_file(folder / name, expected)
    return content


def read_counts(folder: Path) -> Mapping[str, int]:
    """Return how many parameters a run's result counts, by name; none where it has no result that can be read."""
    try:
        counts: Mapping[str, int] = json.loads((folder / RESULT).read_text(encoding="utf-8"))["parameters"]
        return {name: int(count) for name, count in counts.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _check_file(path: Path, expected: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise ArtifactError(f"{path} is missing", owner=str(path.parent / MANIFEST))
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise ArtifactError(
            f"{path} has {size} bytes instead of {expected['bytes']}", remedy="it is damaged: copy it again"
        )
    if sha256(path) != expected["sha256"]:
        raise ArtifactError(f"{path} does not match its hash in {MANIFEST}", remedy="it is damaged: copy it again")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tasks_of(content: Mapping[str, Any]) -> tuple[Task, ...]:
    """Return the tasks a manifest records."""
    return tuple(
        Task(
            name=item["name"],
            kind=TaskKind(item["kind"]),
            label_names=tuple(item["label_names"]),
            metrics=tuple(item["metrics"]),
        )
        for item in content["tasks"]
    )


def find_task(tasks: Iterable[Task], name: str, owner: str) -> Task:
    """Return the task of that name.

    Raises:
        ArtifactError: there is none.
    """
    known = {task.name: task for task in tasks}
    if name not in known:
        raise ArtifactError(f"no task {name!r}", known=known, owner=owner, remedy=did_you_mean(name, known))
    return known[name]


def strategy_of(content: Mapping[str, Any]) -> Selection | None:
    """Return the strategy a manifest records, checked to be installed.

    Raises:
        ArtifactError: it is not installed; says what to ``pip install``.
    """
    from ..registry.loading import load_plugins

    for item in content["plugins"]:
        if item["kind"] == "strategy":
            try:
                load_plugins().catalog.find("strategy", item["name"])
            except UnknownPluginError:
                raise ArtifactError(
                    f"this artefact was made by strategy {item['name']!r}, which is not installed",
                    owner=f"{item['distribution']} {item['version']}",
                    remedy=f"pip install {item['distribution']}=={item['version']}",
                ) from None
            return Selection(item["name"], item["config"])
    return None


def last_checkpoint(run_dir: Path) -> Path | None:
    """Return the newest whole checkpoint of a run folder; one without a manifest was not finished and does not count."""
    from transformers.trainer_utils import sort_checkpoints

    if not run_dir.is_dir():
        return None
    whole = [Path(path) for path in sort_checkpoints(str(run_dir)) if (Path(path) / MANIFEST).is_file()]
    return whole[-1] if whole else None
