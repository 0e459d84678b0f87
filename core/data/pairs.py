"""Prompt and completion rows: lists in their cells, prompts that occur several times, and what belongs to one prompt.

Data-to-text sets hold several completions of one prompt, as rows (E2E) or as a list in one row (WebNLG). Here they all
become rows of plain text, one for each completion: what a model is trained on. Where generated answers are scored, what is
held out or drawn for evaluation is drawn by prompt, so that a prompt keeps all its completions: its answer's references.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...registry.errors import DataError
from .columns import Columns, is_list
from .loading import hold_out, sample

if TYPE_CHECKING:
    from datasets import Dataset

_LINE, _PART = "\n", " | "


def spell_out(split: Dataset, name: str, columns: Columns) -> Dataset:
    """Return a split whose prompts and completions are plain text.

    A prompt that is a list is written item by item, a line each; the parts of an item that is a list itself are joined by
    " | ". A row with a list of completions becomes as many rows.

    Raises:
        DataError: a row without a completion, or a list where one cannot be read.
    """
    prompt, *others = columns.text
    (completion, *further) = others or [prompt]
    for column in further:
        if is_list(split.features.get(column)):
            raise DataError(f"column {column!r} of {name!r} holds lists", remedy="only prompt and completion may")
    if others and is_list(split.features.get(completion)):
        if further:
            raise DataError(
                f"column {completion!r} of {name!r} holds lists and is joined to others", remedy="give two text_columns"
            )
        texts: list[list[Any]] = [cell or [] for cell in split[completion]]
        empty = sum(not [text for text in cell if text] for cell in texts)
        if empty:
            raise DataError(f"{empty} of {split.num_rows} rows of {name!r} have nothing in column {completion!r}")
        rows = [(row, text) for row, cell in enumerate(texts) for text in cell if text]
        repeated = split.select([row for row, _ in rows], keep_in_memory=True).flatten_indices(keep_in_memory=True)
        split = _replaced(repeated, completion, [text for _, text in rows])
    if is_list(split.features.get(prompt)):
        split = _replaced(split, prompt, [_written(cell or []) for cell in split[prompt]])
    return split


def _replaced(split: Dataset, column: str, texts: list[str]) -> Dataset:
    from datasets import Value

    return split.remove_columns(column).add_column(column, texts, feature=Value("string"))


def _written(cell: Iterable[Any]) -> str:
    return _LINE.join(item if isinstance(item, str) else _PART.join(map(str, item)) for item in cell)


def hold_out_prompts(train: Dataset, prompt: str, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split ``train`` in two by prompt, so that none is in both; see :func:`.loading.hold_out`.

    Raises:
        DataError: there is one prompt only.
    """
    prompts = _distinct(train, prompt)
    if prompts.num_rows < 2:
        raise DataError(
            f"column {prompt!r} holds one prompt, and none can be held out for validation",
            remedy="give a validation split",
        )
    kept, held = hold_out(prompts, fraction, seed, by_class=False)
    return _rows_with(train, prompt, kept), _rows_with(train, prompt, held)


def sample_prompts(split: Dataset, prompt: str, size: int | None, seed: int) -> Dataset:
    """Draw ``size`` prompts with all their rows; see :func:`.loading.sample`."""
    if size is None:
        return split
    return _rows_with(split, prompt, sample(_distinct(split, prompt), size, seed))


def _distinct(split: Dataset, prompt: str) -> Dataset:
    from datasets import Dataset

    return Dataset.from_dict({prompt: list(dict.fromkeys(split[prompt]))})


def _rows_with(split: Dataset, prompt: str, chosen: Dataset) -> Dataset:
    wanted = set(chosen[prompt])
    return split.select([row for row, text in enumerate(split[prompt]) if text in wanted])


def references(split: Dataset, columns: Columns) -> dict[str, list[str]]:
    """Return every prompt of a split, in order, with what its answer is compared with, each text once.

    That is the references column of its rows where they have anything there, else their completions.
    """
    prompt, *others = columns.text
    found: dict[str, dict[str, None]] = {}
    listed = split[columns.references] if columns.references else [None] * split.num_rows
    for row, given in zip(split.select_columns([prompt, *others]), listed, strict=True):
        texts = given or [" ".join(row[column] for column in others)]
        found.setdefault(row[prompt], {}).update(dict.fromkeys(texts))
    return {text: list(completions) for text, completions in found.items()}
