"""The checkpoint of a federation after a round: written under a temporary name and renamed, the one before removed then.

``rounds/round-00012/`` holds ``adapter.safetensors``, ``state.json`` and, with a ``ProxyStrategy``, the stand-in's frozen part and
what changed of it at each version. Everything random follows from the seed and the round's number, so there is no more to keep.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ...registry.errors import ArtifactError, RecipeError
from ..artifacts import folder_in_place, write_json
from .server import Server
from .stand_in import Change

ROUNDS = "rounds"
LOG = "rounds.jsonl"
_ADAPTER, _STAND_IN, _CHANGES, _STATE = (
    "adapter.safetensors",
    "stand_in.safetensors",
    "changes.safetensors",
    "state.json",
)
_STATE_KEYS = {"done", "resting", "distilled", "run_id", "versions", "given"}
# Keys that change nothing a round computes.
_FREE = (
    "output_dir",
    "resume_from_checkpoint",
    "overwrite_output_dir",
    "disable_tqdm",
    "eval_every",
    "round_timeout",
    "probes",
    "probe_every",
)


@dataclass
class Progress:
    """Where a federation is.

    Attributes:
        done: rounds done.
        resting: nodes that failed, and the number of the first round that may ask them again.
        distilled: what the alignment before the first round measured.
        probed: what the probes measured after it, see :mod:`.probes`.
    """

    done: int = 0
    resting: dict[str, int] = field(default_factory=dict)
    distilled: dict[str, float] = field(default_factory=dict)
    probed: list[dict[str, Any]] = field(default_factory=list)


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
        folder: the run's folder.
        given: the keys the run was given; it resumes with the same ones only.
    """

    def __init__(self, folder: Path, given: Mapping[str, Any]) -> None:
        self.folder = folder
        self._given = json.loads(json.dumps({k: v for k, v in given.items() if k not in _FREE}, default=str))

    def _last(self) -> Path | None:
        return max((self.folder / ROUNDS).glob("round-[0-9]*"), default=None)

    def save(self, progress: Progress, server: Server) -> None:
        """Write the state after ``progress.done`` rounds."""
        before, target = self._last(), self.folder / ROUNDS / f"round-{progress.done:05d}"
        with folder_in_place(target) as folder:
            save_file({name: value.contiguous() for name, value in server.adapter.items()}, folder / _ADAPTER)
            if server.resident.proxy is not None:
                self._save_stand_in(server, before, folder)
            state = {
                "done": progress.done,
                "resting": progress.resting,
                "distilled": progress.distilled,
                "probed": progress.probed,
                "run_id": server.run_id,
                "versions": len(server.changes),
                "given": self._given,
            }
            write_json(folder / _STATE, state)
            _sync(folder)
        self._keep_only(target)

    def _keep_only(self, last: Path) -> None:
        """Remove the checkpoint before, and what a killed run was writing or removing."""
        for other in (self.folder / ROUNDS).iterdir():
            if other != last:
                shutil.rmtree(other)

    def _save_stand_in(self, server: Server, before: Path | None, folder: Path) -> None:
        """Write the stand-in, or link it where it has not changed since the last checkpoint."""
        same = before is not None and _read_state(before)["versions"] == len(server.changes)
        if before is not None and same:
            os.link(before / _STAND_IN, folder / _STAND_IN)
        else:
            frozen = server.resident.frozen()
            save_file({name: value.detach().cpu().clone() for name, value in frozen.items()}, folder / _STAND_IN)
        changes = {
            f"{version}/{change.dim}/{name}": change.indices
            for version, found in enumerate(server.changes)
            for name, change in found.items()
        }
        save_file(changes, folder / _CHANGES)

    def load(self, server: Server) -> Progress | None:
        """Bring ``server`` to the last finished round; return where that is, ``None`` for the beginning.

        Raises:
            RecipeError: the run was begun with other keys.
            ArtifactError: a file is missing or damaged.
        """
        last = self._last()
        if last is None:
            return None
        state = _read_state(last)
        for key in sorted(state["given"].keys() | self._given.keys()):
            was, now = state["given"].get(key), self._given.get(key)
            if was != now:
                raise RecipeError(
                    f"{key} was {was!r} when this federation began, now it is {now!r}",
                    owner=str(last),
                    remedy="resume with the same keys, or give --overwrite_output_dir true",
                )
        try:
            server.adapter = load_file(last / _ADAPTER)
            server.resident.load(server.adapter)
            server.run_id = state["run_id"]
            if server.resident.proxy is not None:
                self._load_stand_in(server, last, state["versions"])
        except (OSError, SafetensorError, LookupError, RuntimeError, ValueError) as error:
            raise ArtifactError(f"cannot read {last}: {type(error).__name__}", remedy="it is damaged") from None
        self._keep_only(last)
        probed = list(state.get("probed", ()))  # a federation may have begun before there were probes in it
        return Progress(state["done"], dict(state["resting"]), dict(state["distilled"]), probed)

    def _load_stand_in(self, server: Server, folder: Path, versions: int) -> None:
        kept = load_file(folder / _STAND_IN)
        with torch.no_grad():
            for name, value in server.resident.frozen().items():
                value.copy_(kept[name])
        found: list[dict[str, Change]] = [{} for _ in range(versions)]
        for key, indices in load_file(folder / _CHANGES).items():
            version, dim, name = key.split("/", 2)
            found[int(version)][name] = Change(int(dim), indices)
        server.changes = list(found)


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        state = dict(json.loads((folder / _STATE).read_text(encoding="utf-8")))
        if not state.keys() >= _STATE_KEYS:
            raise ValueError
    except (OSError, ValueError, TypeError) as error:
        raise ArtifactError(f"cannot read {folder / _STATE}: {type(error).__name__}", remedy="it is damaged") from None
    return state


def _sync(folder: Path) -> None:
    """Have the disk keep the files before the folder gets the name under which it counts."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


class RoundLog:
    """``rounds.jsonl``: one row a round. A row is written before its round's checkpoint, and cut off again without one.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def rewind(self, done: int) -> list[dict[str, Any]]:
        """Keep the rows of the first ``done`` rounds, and return them.

        Raises:
            ArtifactError: the file does not hold them.
        """
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()[:done] if done else []
            rows = [dict(json.loads(line)) for line in lines]
        except (OSError, ValueError, TypeError) as error:
            raise ArtifactError(f"cannot read {self.path}: {type(error).__name__}", remedy="it is damaged") from None
        if [row.get("round") for row in rows] != list(range(1, done + 1)):
            raise ArtifactError(f"{self.path} lacks rows of the {done} rounds done", remedy="it is damaged")
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        temporary.replace(self.path)
        return rows

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(row)}\n")
            file.flush()
            os.fsync(file.fileno())
