"""Rows for what looks at no labels: a stand-in's alignment on the server, and a client's statistics; and a party's one file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ...registry.errors import RecipeError
from ..data import DataArguments


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
