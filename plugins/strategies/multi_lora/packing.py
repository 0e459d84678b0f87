"""A batch without its padding: an encoder's layers see every token as a row of its own, attention alone sees whole rows.

What such a layer does besides attention it does to each position by itself, so that a batch of short and long rows costs no
more than its tokens: one large matrix product a module, whatever the rows' lengths. Attention takes one row after the other.

Shape suffixes: B rows, T positions, N tokens of all rows, H heads, D numbers a head, L tokens of one row, I hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface

from .routing import Router

# Their layers know positions from the embeddings alone, and their heads read the first one.
MODEL_TYPES = ("bert", "camembert", "electra", "roberta", "xlm-roberta")
ATTENTION = "tunery_rows"
# What attention costs more, row by row, in padded tokens: a guess, for a CPU. On a GPU so many small operations would wait
# for each other.
ROW_OVERHEAD = 2


def can_pack(model: Any, mask: torch.Tensor) -> bool:
    """Return whether an encoder's batch is faster without padding, and comes to the same.

    Args:
        model: a transformers model.
        mask: attention mask, shape (B, T).
    """
    config = model.config
    if mask.device.type != "cpu" or config.model_type not in MODEL_TYPES or config.is_decoder:
        return False
    if config._attn_implementation not in ("sdpa", "eager") or config.chunk_size_feed_forward:
        return False
    used = mask.ne(0)
    lengths = used.sum(dim=1)
    # Padding on the left or between tokens is read by whoever reads the first position.
    if not torch.equal(used, torch.arange(mask.shape[1]) < lengths[:, None]):
        return False
    return int(lengths.min()) > 0 and mask.numel() - int(lengths.sum()) > ROW_OVERHEAD * len(mask)


@contextmanager
def packed(model: Any, router: Router, mask: torch.Tensor) -> Iterator[None]:
    """Inside, the model's encoder computes no padding; what it returns is 0 there.

    Args:
        model: one that :func:`can_pack`.
        router: knows the tasks of the batch's rows, and inside the encoder those of its tokens.
        mask: attention mask, shape (B, T), ones then zeros.
    """
    config, encoder = model.config, model.base_model.encoder
    groups, attention = router.groups, config._attn_implementation
    assert groups is not None
    rows, positions = mask.shape
    order = torch.arange(rows) if groups.order is None else groups.order
    used_BT = mask.ne(0).index_select(0, order)
    tokens_N = (order[:, None] * positions + torch.arange(positions))[used_BT]
    lengths = used_BT.sum(dim=1).tolist()

    def pack(_encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x_BTI, *others = args
        router.groups, config._attn_implementation = groups.of_tokens(lengths), ATTENTION
        return (x_BTI.reshape(rows * positions, 1, -1).index_select(0, tokens_N), *others), {
            **kwargs,
            "lengths": lengths,
        }

    def unpack(_encoder: nn.Module, _args: Any, output: Any) -> Any:
        router.groups, config._attn_implementation = groups, attention
        x_N1I = output.last_hidden_state
        empty = x_N1I.new_zeros(rows * positions, *x_N1I.shape[1:])
        output.last_hidden_state = empty.index_copy(0, tokens_N, x_N1I).reshape(rows, positions, -1)
        return output

    hooks = encoder.register_forward_pre_hook(pack, with_kwargs=True), encoder.register_forward_hook(unpack)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        router.groups, config._attn_implementation = groups, attention


def attend_by_row(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    lengths: list[int],
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each row of packed tokens, as transformers' attention functions do within a batch's.

    Args:
        module: not used, and likewise ``attention_mask``: there is no padding.
        query: shape (N, H, 1, D), and likewise ``key`` and ``value``.
        attention_mask: see ``module``.
        scaling: of the products of queries and keys.
        dropout: probability of dropping an attention weight.
        lengths: tokens of every row.
        kwargs: what other attention functions need.

    Returns:
        Shape (N, 1, H, D), and no attention weights.
    """
    found = []
    parts = (torch.split(x.squeeze(2).transpose(0, 1), lengths, dim=1) for x in (query * scaling, key, value))
    for q_HLD, k_HLD, v_HLD in zip(*parts, strict=True):
        weights_HLL = functional.dropout(torch.softmax(q_HLD @ k_HLD.transpose(1, 2), dim=-1), dropout)
        found.append((weights_HLL @ v_HLD).transpose(0, 1))
    return torch.cat(found).unsqueeze(1), None


AttentionInterface.register(ATTENTION, attend_by_row)
