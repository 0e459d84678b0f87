"""Rows for what looks at no labels, a stand-in's alignment on the server and a client's statistics; and which those are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...registry.errors import RecipeError
from ..data import DataArguments, TaskData, encode
from ..data.loading import FILE_TYPES, load_splits, quiet, sample
from .arguments import FederatedArguments
from .partition import Indices

_SERVER_ROWS = 5  # stream of the seed; partition and rounds use others


class Inputs(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows without their labels.

    Args:
        rows: a map-style dataset of mappings.
    """

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one row; of what language models learn, the inputs are all there is."""
        return {name: value for name, value in self.rows[index].items() if name != "labels"}


class Batches:
    """Batches of unlabelled rows on a device; each iteration is one pass, shuffled anew where there is a seed.

    Args:
        rows: a map-style dataset.
        collate: makes a batch of rows.
        batch_size: rows of a batch.
        device: where batches go.
        seed: of the order; ``None`` for the rows' own.
    """

    def __init__(
        self,
        rows: Any,
        collate: Callable[[list[Any]], Mapping[str, Any]],
        batch_size: int,
        device: torch.device,
        seed: int | None = None,
    ) -> None:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._device = device
        self._loader = torch.utils.data.DataLoader(
            Inputs(rows),
            batch_size=batch_size,
            shuffle=seed is not None,
            generator=generator,
            collate_fn=collate,
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._loader:
            yield {name: value.to(self._device) for name, value in batch.items()}


class NoRows:
    """The rows of a server that has none: who asks for them is told what to give."""

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        raise no_rows()


def no_rows() -> RecipeError:
    """Return what to say to a server that aligns and has no rows of its own."""
    return RecipeError(
        "the strategy aligns its stand-in on the server's own rows, and there are none",
        remedy="give server_data or server_fraction, or switch the alignment off in the strategy's options",
    )


def with_its_one_file(arguments: DataArguments) -> DataArguments:
    """Return a party's data arguments, its one file given twice: a site only trains, a server only evaluates.

    So no row is held out of it for what the party does not do.
    """
    files = {arguments.train_file, arguments.validation_file} - {None}
    if len(files) != 1:
        return arguments
    (alone,) = files
    return dataclasses.replace(arguments, train_file=alone, validation_file=alone)


def select(rows: Any, indices: Indices) -> Any:
    """Return the rows of these numbers."""
    if hasattr(rows, "select"):
        return rows.select(indices)
    return torch.utils.data.Subset(rows, indices.tolist())


def server_share(size: int, federated: FederatedArguments, seed: int) -> tuple[Indices, Indices]:
    """Return the numbers of the rows that clients get, and of those the server has instead."""
    order = np.random.default_rng([seed, _SERVER_ROWS]).permutation(size)
    count = round(federated.server_fraction * size)
    own = order[:count][: federated.max_server_samples]
    return np.sort(order[count:]), np.sort(own)


def server_data(federated: FederatedArguments, data: TaskData, processor: Any, seed: int) -> Any:
    """Return the server's own rows, encoded as the task's; of another data set the column ``text`` counts."""
    source = federated.server_data
    if source is None:
        return None
    is_file = Path(source).suffix.lower() in FILE_TYPES
    arguments = (
        DataArguments(train_file=source)
        if is_file
        else DataArguments(dataset_name=source, dataset_config_name=federated.server_data_config_name)
    )
    with quiet():
        rows = sample(load_splits(arguments)["train"], federated.max_server_samples, seed)
    columns = dataclasses.replace(data.columns, label=None)
    wanted = (columns.image,) if columns.image else columns.text
    if not columns.image and not set(wanted) <= set(rows.column_names) and "text" in rows.column_names:
        columns = dataclasses.replace(columns, text=("text",))
        wanted = columns.text
    missing = [name for name in wanted if name not in rows.column_names]
    if missing:
        raise RecipeError(
            f"server_data={source!r} has no column {missing[0]!r}", known=rows.column_names, remedy="or a column text"
        )
    rows = rows.select_columns(list(wanted))
    splits = type(data.splits)({"train": rows, "validation": rows.select(range(1))})
    return encode(dataclasses.replace(data, splits=splits, columns=columns), processor).train
