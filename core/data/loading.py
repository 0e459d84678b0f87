"""From a hub dataset, local files or a built-in to a ``DatasetDict`` with train, validation and perhaps test."""

from __future__ import annotations

import glob
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...registry.errors import DataError, did_you_mean
from . import python_docs

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

    from .arguments import DataArguments

FILE_TYPES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
BUILT_IN: dict[str, Callable[[], DatasetDict]] = {"python_docs": python_docs.load}
# How published datasets call the split that transformers calls validation, best first.
VALIDATION_NAMES = ("validation", "validation_matched", "dev", "valid", "val")
# Where the hub keeps the rows of datasets whose own files are a script, one folder for each configuration.
PARQUET_REVISION = "refs/convert/parquet"

_REMEDY = "check name, configuration, network and HF_HUB_OFFLINE, or give train_file, or a built-in: " + ", ".join(
    BUILT_IN
)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep ``datasets`` from writing, since its errors reach the user as ours; progress and retries show on a terminal."""
    import datasets
    from huggingface_hub.utils import logging as hub_logging

    verbosity, hub_verbosity = datasets.logging.get_verbosity(), hub_logging.get_verbosity()
    bars_off = datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
        hub_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if not bars_off:
            datasets.enable_progress_bars()


def load_splits(args: DataArguments) -> DatasetDict:
    """Load what ``args`` name, as it is: nothing renamed but the splits, nothing encoded.

    Returns:
        The splits ``train``, and ``validation`` and ``test`` where the source has them.

    Raises:
        DataError: no source or two, a file that is missing, unreadable, empty or of an unknown type, a hub dataset
            that is unknown or out of reach, or a source without a training split.
    """
    files = {"train": args.train_file, "validation": args.validation_file, "test": args.test_file}
    given = {split: path for split, path in files.items() if path is not None}
    sources = [f"dataset_name={args.dataset_name!r}"] if args.dataset_name else []
    sources += [f"data_files={args.data_files!r}"] if args.data_files else []
    sources += [", ".join(f"{split}_file" for split in given)] if given else []
    if len(sources) != 1:
        raise DataError(
            f"{' and '.join(sources)} {'both' if len(sources) == 2 else 'all'} name the data"
            if sources
            else "no data is named",
            remedy="give one of dataset_name, data_files and train_file",
        )
    if args.data_files:
        given = _files_in(Path(args.data_files).expanduser())
    if args.dataset_name:
        splits = _load_named(args.dataset_name, args.dataset_config_name, args.dataset_revision)
    elif "train" not in given and not args.data_files:
        raise DataError(f"{' and '.join(f'{split}_file' for split in given)} without train_file")
    else:
        splits = {split: _load_file(Path(path).expanduser()) for split, path in given.items()}
    return _checked(splits, owner=args.dataset_name or args.data_files or str(args.train_file))


def _files_in(folder: Path) -> dict[str, str]:
    """Return the files of a folder that are named after a split."""
    if not folder.is_dir():
        raise DataError(
            f"data_files={str(folder)!r} is no folder", remedy="give a folder with train.jsonl, or train_file"
        )
    found: dict[str, str] = {}
    for split, names in {"train": ("train",), "validation": VALIDATION_NAMES, "test": ("test",)}.items():
        for name in names:
            paths = [path for path in sorted(folder.glob(f"{name}.*")) if path.suffix.lower() in FILE_TYPES]
            if len(paths) > 1:
                raise DataError(f"{' and '.join(path.name for path in paths)} are both {split}", owner=str(folder))
            if paths:
                found[split] = str(paths[0])
                break
    return found


def _load_named(name: str, config: str | None, revision: str | None) -> dict[str, Dataset]:
    if name in BUILT_IN:
        if config or revision:
            raise DataError(f"{name!r} has no configurations and no revisions", owner="the built-in datasets")
        return dict(BUILT_IN[name]())
    with _as_data_error(f"dataset {name!r} cannot be loaded", remedy=did_you_mean(name, BUILT_IN) or _REMEDY):
        from datasets import load_dataset

        where = {"data_dir": config} if revision == PARQUET_REVISION else {"name": config}
        loaded = load_dataset(name, revision=revision, **where)
    validation = next((split for split in VALIDATION_NAMES if split in loaded), None)
    sources = {"train": "train", "validation": validation, "test": "test"}
    return {split: loaded[source] for split, source in sources.items() if source in loaded}


def _load_file(path: Path) -> Dataset:
    file_type = FILE_TYPES.get(path.suffix.lower())
    if file_type is None:
        raise DataError(f"file type {path.suffix!r} is not known", known=FILE_TYPES, owner=str(path))
    if not path.is_file():
        raise DataError(f"file {str(path)!r} does not exist" if not path.exists() else f"{str(path)!r} is not a file")
    if path.stat().st_size == 0:
        raise DataError("the file is empty", owner=str(path))
    with _as_data_error("the file cannot be read", owner=str(path), remedy=f"is it valid {file_type}?"):
        from datasets import load_dataset

        return load_dataset(file_type, data_files=glob.escape(str(path)), split="train")


@contextmanager
def _as_data_error(asked: str, **details: Any) -> Iterator[None]:
    """Turn the many exceptions of datasets, pyarrow, pandas and the hub client into one line."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (DatasetsError, OSError, ValueError, KeyError) as error:
        reason = str(error.__cause__ or error)
        if "corresponds to no data" in reason:
            raise DataError("there are no rows", owner=details.get("owner", "")) from error
        raise DataError(f"{asked}: {' '.join(reason.split())[:300]}", **details) from error


def _checked(splits: dict[str, Dataset], owner: str) -> DatasetDict:
    from datasets import DatasetDict

    if "train" not in splits:
        raise DataError("there is no 'train' split", known=splits, owner=owner)
    for name, split in splits.items():
        if not split.num_rows:
            raise DataError(f"split {name!r} has no rows", owner=owner)
    return DatasetDict(splits)


def hold_out(train: Dataset, fraction: float, seed: int, *, by_class: bool) -> tuple[Dataset, Dataset]:
    """Split ``train`` in two at random, rows kept in order.

    Args:
        train: the rows; with ``by_class`` they have a column ``labels`` of class numbers.
        fraction: share held out, of every class with ``by_class``: at least one row of it, and never the last one.
        seed: the same seed gives the same rows.
        by_class: whether to split class by class.

    Returns:
        What is left for training, and what was held out.

    Raises:
        DataError: there are no two rows of a kind to hold one out of.
    """
    import numpy as np

    groups = np.asarray(train["labels"][:]) if by_class else np.zeros(train.num_rows, dtype=int)
    random = np.random.default_rng(seed)
    held = []
    for group in np.unique(groups):
        members = random.permutation(np.flatnonzero(groups == group))
        held.append(members[: min(max(1, round(fraction * len(members))), len(members) - 1)])
    chosen = np.sort(np.concatenate(held))
    if not len(chosen):
        raise DataError(
            f"{train.num_rows} training rows are too few to hold some out for validation",
            remedy="give validation_file, or a dataset with a validation split",
        )
    return train.select(np.setdiff1d(np.arange(train.num_rows), chosen)), train.select(chosen)


def sample(split: Dataset, size: int | None, seed: int) -> Dataset:
    """Draw ``size`` rows at random, in their order; all of them where ``size`` is ``None`` or larger than the split.

    Drawn, not cut off the front as transformers' example scripts do: files sorted by label are common.
    """
    import numpy as np

    if size is None or size >= split.num_rows:
        return split
    return split.select(np.sort(np.random.default_rng(seed).permutation(split.num_rows)[:size]))
