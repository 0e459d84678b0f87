"""Replay: language-modelling loss on pre-training-like text beside the task's rows (named in the overtraining paper, section 6).

With q = share / (1 - share), every row of the task brings one block of the text along with probability q, so that ``share`` of
all rows are replayed ones. For a batch of B rows, of which those in S bring a block,

    penalty = (1 / (q B)) sum_{i in S} l(block_i),        l = mean over predicted tokens of -log p(token)

whose mean is the loss on the text. ``l`` predicts every next token where the model is causal, and randomly masked tokens (Devlin
et al. 2019, BERT, section 3.1) where it is a masked language model.

Which block a row brings, and what is masked in it, depends on the seed, the optimizer step and the row's own tokens: not on how
rows are split over micro-batches and ranks, nor on what ran before. There is no state to save.

Shapes: B rows of the task, R replayed rows, N blocks, T tokens, V words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

from ...registry.context import Support, TaskKind
from ...registry.contracts import Regularizer
from ...registry.hookspecs import hookimpl
from ..texts import TextOptions, Tokenizer, read_blocks

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ...registry.context import Batch, RunContext

_IGNORED = -100
_OWNER = "regularizer 'replay'"


class Replay(Regularizer):
    """Keep learning what the model was pre-trained for.

    The model has to have its language-modelling head: a classifier or a regression has lost it, and is refused. Recipes train
    causal language models; a masked one is trained from Python, with a Trainer.
    """

    name = "replay"
    summary = "language-modelling loss on a share of pre-training-like text"
    reference = (
        "Springer et al., Overtrained Language Models Are Harder to Fine-Tune, which names data replay as a mitigation"
    )
    supports = Support(tasks=frozenset({TaskKind.CAUSAL_LM, TaskKind.MASKED_LM}))

    @dataclass(frozen=True, kw_only=True)
    class Config(TextOptions, Regularizer.Config):
        """Options of replay; the defaults are tunery's own.

        Attributes:
            data: the text: a ``.txt`` file with a document a line, a ``.jsonl`` file with ``text`` or ``input_ids`` in each
                line, or the name or folder of a dataset as ``datasets.load_dataset`` takes it.
            share: of all rows a step trains on, the part that is replayed, on average.
            mlm_probability: of a token to be predicted, where the model is a masked language model (BERT's 0.15).
            mask_token_id: what hides it; default: the tokenizer's.
        """

        data: str
        share: Annotated[float, Gt(0), Le(0.5)] = 0.1
        mlm_probability: Annotated[float, Gt(0), Lt(1)] = 0.15
        mask_token_id: Annotated[int, Ge(0)] | None = None

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._model: Any = None

    def attach(self, model: Any, run: RunContext) -> None:
        """Read the text and cut it into blocks.

        Raises:
            DataError: no such text, not readable, too short, or nothing to tokenize it with.
            CompatibilityError: ``length`` is more than the model takes.
        """
        self._seed, self._words = run.seed, model.config.vocab_size
        tokenizer = Tokenizer(self.config.tokenizer or model.config._name_or_path, _OWNER)
        self._blocks_NT = read_blocks(self.config, self.config.data, tokenizer, model, _OWNER)
        self._mask = None
        if run.task.kind is TaskKind.MASKED_LM:
            chosen = self.config.mask_token_id
            self._mask = tokenizer.required("mask_token_id") if chosen is None else chosen
        self._model = model

    def penalty(self, batch: Batch) -> torch.Tensor | None:
        """Run the model on the blocks that the rows bring along."""
        import torch
        from torch.nn import functional

        rate = self.config.share / (1 - self.config.share)
        rows = [hashlib.blake2b(row, digest_size=24).digest() for row in _rows(batch, self._seed, self._model)]
        brought = [row for row in rows if int.from_bytes(row[:8], "big") < rate * 2**64]
        device = next(iter(batch.inputs.values())).device
        # Where none does, one block runs for nothing: under ZeRO-3 every rank has to run the model as often.
        pairs = [self._example(row) for row in brought or rows[:1]]
        inputs_RT, labels_RT = (torch.stack(part).to(device) for part in zip(*pairs, strict=True))
        logits_RTV = self._model(input_ids=inputs_RT, attention_mask=torch.ones_like(inputs_RT)).logits
        if self._mask is None:
            logits_RTV, labels_RT = logits_RTV[:, :-1], labels_RT[:, 1:]
        exact = torch.promote_types(logits_RTV.dtype, torch.float32)
        losses_RT = functional.cross_entropy(
            logits_RTV.to(exact).transpose(1, 2), labels_RT, ignore_index=_IGNORED, reduction="none"
        )
        losses_R = losses_RT.sum(1) / (labels_RT != _IGNORED).sum(1).clamp(min=1)
        penalty: torch.Tensor = losses_R.sum() * (len(brought) > 0) / (rate * len(rows))
        return penalty

    def _example(self, row: bytes) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and labels (T,) of the block that a row brings along."""
        import torch

        block_T = self._blocks_NT[int.from_bytes(row[8:16], "big") % len(self._blocks_NT)]
        if self._mask is None:
            return block_T, block_T
        generator = torch.Generator().manual_seed(int.from_bytes(row[16:], "big") % 2**63)
        chance_T, kind_T = torch.rand(2, len(block_T), generator=generator)
        chosen_T = chance_T <= chance_T.min().clamp(min=self.config.mlm_probability)  # at least one
        other_T = torch.randint(self._words, block_T.shape, generator=generator)
        hidden_T = torch.where(kind_T < 0.8, torch.full_like(block_T, self._mask), block_T)
        hidden_T = torch.where(kind_T >= 0.9, other_T, hidden_T)
        return torch.where(chosen_T, hidden_T, block_T), block_T.masked_fill(~chosen_T, _IGNORED)

    def detach(self, model: nn.Module) -> None:
        """Let go of the model and the text."""
        self._model = None
        del self._blocks_NT


def _rows(batch: Batch, seed: int, model: Any) -> Iterator[bytes]:
    """Yield what a row's draw depends on: seed, step, and its tokens without pads."""
    name = getattr(model, "main_input_name", "input_ids")
    content, mask = batch.inputs[name].cpu(), batch.inputs.get("attention_mask")
    valid = None if mask is None or mask.shape != content.shape else mask.cpu().bool()
    for index, row in enumerate(content):
        kept = row if valid is None else row[valid[index]]
        yield f"{seed} {batch.step} ".encode() + kept.contiguous().numpy().tobytes()


@hookimpl
def tunery_regularizers() -> list[type[Regularizer]]:
    """Offer :class:`Replay`."""
    return [Replay]
