"""What models are evaluated on by a probe: the data that were named, or those a run records of itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..registry.errors import DataError
from .artifacts import RESULT
from .data import DataArguments, TaskData, load_task_data
from .data.arguments import SOURCES
from .points import Point

_SOURCES = (*SOURCES, "validation_file", "test_file")
_SEED = "data_seed"
_ROWS_TO_ENCODE = 64  # of the training split, which no probe looks at


@dataclass(frozen=True)
class Evaluated:
    """Evaluation data, and a hash of the rows a probe sees.

    Attributes:
        content: the task and its rows.
        digest: changes with the task, the rows or their length.
    """

    content: TaskData
    digest: str


class Source:
    """Evaluation data: those that were asked for, or each run's own, read once.

    Args:
        keys: data keys that were given; without a source they change what runs record.
        seed: of the rows that are held out or sampled; a run's own rows are those that it held out.
    """

    def __init__(self, keys: Mapping[str, Any], seed: int) -> None:
        self.keys = keys
        self.seed = seed
        self._read: dict[str, Evaluated | None] = {}

    def of(self, point: Point | None) -> Evaluated | None:
        """Return the data of a point; ``None`` where none are named and none recorded, or those are gone.

        Raises:
            DataError: keys that were given cannot be followed.
        """
        keys = {_SEED: self.seed, **self.keys}
        if point is not None and not _names_source(keys):
            keys = {**keys, **_recorded(point), **self.keys}
        if not _names_source(keys) and not keys.get("tasks"):
            return None
        key = json.dumps(keys, sort_keys=True)
        if key not in self._read:
            self._read[key] = self._load(keys)
        return self._read[key]

    def _load(self, keys: Mapping[str, Any]) -> Evaluated | None:
        try:
            others = {name: value for name, value in keys.items() if name != _SEED}
            data = load_task_data(evaluation_arguments(others), seed=keys[_SEED])
        except DataError:
            if self.keys:
                raise
            return None  # a run's own may be gone; a probe that needs them says so
        return Evaluated(data, digest_of(data, ["validation"]))


def digest_of(data: TaskData, splits: Iterable[str]) -> str:
    """Return a hash of a task, the rows of some of its splits and their length in tokens."""
    digest = hashlib.sha256(repr((data.task, data.max_length)).encode())
    for name in splits:
        for batch in data.splits[name].with_format("arrow").iter(1000):
            digest.update(repr((name, batch.to_pydict())).encode())
    return digest.hexdigest()


def _names_source(keys: Mapping[str, Any]) -> bool:
    return any(keys.get(name) for name in _SOURCES)


def evaluation_arguments(keys: Mapping[str, Any]) -> DataArguments:
    """Return data arguments for evaluating only: a validation or test file alone will do.

    Raises:
        DataError: several tasks, no source, or a value of the wrong type or out of range.
    """
    keys = dict(keys)
    if not any(keys.get(name) for name in SOURCES):
        alone = keys.get("validation_file") or keys.get("test_file")
        keys |= {"train_file": alone, "validation_file": alone}
    if keys.get("tasks"):
        raise DataError(
            "a probe evaluates on one task", remedy="name its data, for example --dataset_name or --data_files"
        )
    return DataArguments(**{"max_train_samples": _ROWS_TO_ENCODE, **keys})


def _recorded(point: Point) -> dict[str, Any]:
    """Return the data keys that the result of a run records, of the run itself or of the one a checkpoint is in."""
    folder = point.folder
    for path in () if folder is None or not point.is_run() else (folder / RESULT, folder.parent / RESULT):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            data = {_SEED: content["seed"], **content["data"]}
            return {} if data.get("tasks") else data  # whose rows are of one of them only
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return {}
