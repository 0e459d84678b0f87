"""What regularizers of the head share: the one feature of each row that a head's final linear layer classifies by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def pooled(values: torch.Tensor, inputs: Mapping[str, Any], pad_token_id: int | None) -> torch.Tensor:
    """Return one entry a row, (B, D), of what enters or leaves the final linear layer of a head.

    Args:
        values: (B, D), or (B, T, D) from decoders, whose heads see every token; transformers takes the last one that is
            no pad.
        inputs: what the model was called with.
        pad_token_id: of the model's config.
    """
    import torch

    if values.dim() == 2:
        return values
    input_ids = inputs.get("input_ids")
    if input_ids is None or pad_token_id is None:
        return values[:, -1]
    positions = torch.arange(input_ids.shape[-1], device=input_ids.device)
    last = (positions * (input_ids != pad_token_id)).argmax(-1)
    return values[torch.arange(len(values), device=last.device), last]
