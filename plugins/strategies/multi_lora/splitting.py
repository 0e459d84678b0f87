"""A batch of several tasks in pieces of rows of similar length: short tasks need not be padded to the longest one's rows.

The joint batch of a two-line and a two-word task would otherwise cost as if all its rows had two lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# What another piece costs, in padded tokens: on a CPU the start of some hundred small operations, on a GPU the same where
# each could have run on many more rows at once. The CPU's is measured, the GPU's a guess.
OVERHEAD = {"cpu": 12, "cuda": 4096}
STEP = 2  # rows; pieces begin at multiples of it


@dataclass(frozen=True)
class Piece:
    """Some rows of a batch.

    Attributes:
        rows: their numbers, shape (rows of the piece,).
        length: positions that the longest of them needs.
    """

    rows: torch.Tensor
    length: int

    def of(self, inputs: Mapping[str, Any], rows: int, positions: int) -> dict[str, Any]:
        """Cut every input of a batch of ``rows`` and ``positions`` down to the piece."""
        cut = {}
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor) and value.dim() and len(value) == rows:
                value = value.index_select(0, self.rows)
                if value.dim() > 1 and value.shape[1] == positions:
                    value = value[:, : self.length]
            cut[name] = value
        return cut


def pieces(mask: torch.Tensor) -> list[Piece]:
    """Return the pieces a batch is fastest in: none where it is fastest as a whole.

    Args:
        mask: attention mask, shape (rows, positions); padding on the right is left out, other padding is kept.
    """
    rows, positions = mask.shape
    overhead = OVERHEAD.get(mask.device.type, OVERHEAD["cuda"])
    if rows * positions <= 2 * overhead:
        return []
    used = mask.ne(0) * torch.arange(1, positions + 1, device=mask.device)
    lengths, order = used.amax(dim=1).sort(stable=True)
    cuts = cheapest_cuts(lengths.tolist(), overhead)
    if len(cuts) == 1 and cuts[0][2] == positions:
        return []
    return [Piece(order[start:end], length) for start, end, length in cuts]


def cheapest_cuts(lengths: Sequence[int], overhead: int) -> list[tuple[int, int, int]]:
    """Cut rows, sorted by length, into runs of least cost: ``overhead`` plus rows times longest, of each run.

    Returns:
        Start, end and longest of every run.
    """
    ends = [*range(STEP, len(lengths), STEP), len(lengths)]
    best: list[tuple[int, list[tuple[int, int, int]]]] = []
    for index, end in enumerate(ends):
        longest = max(lengths[end - 1], 1)
        options = [(overhead + end * longest, [(0, end, longest)])]
        for earlier in range(index):
            cost, cuts = best[earlier]
            start = ends[earlier]
            options.append((cost + overhead + (end - start) * longest, [*cuts, (start, end, longest)]))
        best.append(min(options, key=lambda option: option[0]))
    return best[-1][1]
