"""The training inputs of a task without their labels, as rows of masked or causal language modelling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase, TrainerCallback

from ...registry.context import TaskKind
from ...registry.errors import DataError
from .encoding import IGNORE_INDEX

if TYPE_CHECKING:
    from ...registry.context import Stage


class UnlabelledRows(torch.utils.data.Dataset[dict[str, Any]]):
    """A map-style dataset that shows of every row what the tokenizer made, and the tokens to predict.

    Masks are drawn anew in every epoch, from the seed, the epoch and the row alone: they are the same on any number of
    ranks, however the batch is split, and after resuming. A row whose draw masks nothing is drawn again, so that no
    micro-batch is without a loss.

    Args:
        rows: encoded rows with ``input_ids``, and ``attention_mask`` where they are padded.
        tokenizer: names the model's inputs; knows special tokens and the mask token.
        stage: its objective, ``MASKED_LM`` or ``CAUSAL_LM``, and the masking probability.
        seed: the run's seed.

    Raises:
        DataError: a row has no ``input_ids``.
    """

    def __init__(self, rows: Any, tokenizer: PreTrainedTokenizerBase, stage: Stage, seed: int) -> None:
        if "input_ids" not in rows[0]:
            raise DataError(
                f"stage {stage.name!r} learns from input_ids, and the training rows hold {', '.join(map(str, rows[0]))}",
                remedy="encode the rows before training",
            )
        self.rows = rows
        self.tokenizer = tokenizer
        self.seed = seed
        self.epoch = 0
        self._masking = (
            DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=stage.mlm_probability)
            if stage.objective is TaskKind.MASKED_LM
            else None
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the row's inputs and ``labels``, integers of shape (length,); -100 where there is nothing to predict."""
        row = self.rows[index]
        inputs = {name: torch.as_tensor(row[name]) for name in self.tokenizer.model_input_names if name in row}
        tokens = inputs["input_ids"].long()
        real = inputs.get("attention_mask", torch.ones_like(tokens)).bool()
        if self._masking is None:
            labels = tokens.masked_fill(~real, IGNORE_INDEX)
        else:
            tokens, labels = self._masked(tokens, real, self._masking, index)
        return {**inputs, "input_ids": tokens, "labels": labels}

    def _masked(
        self, tokens: torch.Tensor, real: torch.Tensor, masking: DataCollatorForLanguageModeling, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = ((self.seed * 1_000_003 + self.epoch) * 1_000_003 + index) % 2**63
        masking.generator = torch.Generator().manual_seed(drawn)
        special = self.tokenizer.get_special_tokens_mask(tokens.tolist(), already_has_special_tokens=True)
        fixed = torch.tensor(special, dtype=torch.bool) | ~real
        if fixed.all():  # nothing but special tokens: they are predicted as they stand
            return tokens, tokens.masked_fill(~real, IGNORE_INDEX)
        while True:
            masked, labels = masking.torch_mask_tokens(tokens.clone()[None], fixed[None])
            if labels.ne(IGNORE_INDEX).any():
                return masked[0], labels[0]


class EpochOf(TrainerCallback):
    """Tells rows which epoch begins; accelerate does so only for some samplers."""

    def __init__(self, rows: UnlabelledRows) -> None:
        self.rows = rows

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the epoch: whole ones done, also amid one that is resumed."""
        self.rows.epoch = int(state.epoch or 0)


def pad_rows(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the collator of :class:`UnlabelledRows`, which pads labels with -100."""
    from transformers import DataCollatorForTokenClassification

    return DataCollatorForTokenClassification(tokenizer, label_pad_token_id=IGNORE_INDEX)
