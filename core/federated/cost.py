"""What a round costs a client: operations and bytes, predicted before it and measured after it.

The Federated Proxy Fine-Tuning paper, section 3.6. Of a model whose L layers have width d and feed-forward width d_ff, one pass
over S tokens takes

    d (V + S) + L (4 S d^2 + S^2 d) + 2 L S d d_ff + L S d          multiplications (V words)

Here the layers' weights are counted as they are, which is the same where every layer is alike and also right where a stand-in's
are not. A training step is counted as two passes, forward and backward. Per round a client gets and sends the adapter; every t
rounds it tells statistics and gets the slices of the stand-in that changed. With LoRA of rank r on the four attention projections
that is 8 L r d and (2 / t) q L d^2 numbers one way, q being the share of the neurons that change and d_ff = d in the stand-in: at
the paper's t = 10, q = 0.5, d = 768, r = 8 the second is 1.2 times the first, not smaller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peft import PeftModel

from ...registry.context import RunContext
from ...registry.errors import AnatomyError
from ..arguments import TrainingArguments
from .arguments import FederatedOptions
from .resident import Resident

_PASSES = 2
_LOOKED_AT = 256  # rows


@dataclass(frozen=True)
class Cost:
    """What one client's round costs, on average over rounds.

    Attributes:
        multiplications: of its training; 0 where clients have rows of their own, or the architecture is not known.
        adapter_bytes: of the adapter, sent one way.
        stand_in_bytes: of the stand-in and of what its regularizers start from, sent to a client once.
        alignment_bytes: of what alignments change of it, spread over all rounds, as the paper counts.
        alignment_bytes_asked: of that, at least, in a round that the client takes part in: it gets then what it has missed.
        statistics_bytes: of what it tells for alignments, spread over the rounds it takes part in.
        every: rounds between alignments; 0 for none.
    """

    multiplications: float
    adapter_bytes: int
    stand_in_bytes: int
    alignment_bytes: float = 0.0
    alignment_bytes_asked: float = 0.0
    statistics_bytes: float = 0.0
    every: int = 0

    def verdict(self) -> str:
        """Return one line on the paper's claim that aligning costs little beside the adapter; empty without alignment."""
        if not self.every or not self.alignment_bytes:
            return ""
        ratio = self.alignment_bytes / self.adapter_bytes
        told = f"what alignments change takes {ratio:.2f} x the adapter's bytes per round, one way"
        return told if ratio <= 1 else f'{told}: more, where the paper (section 3.6.2) has it "usually smaller"'

    def beside(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the prediction beside what the rounds came to, per client and round.

        Bytes are those of every client that was asked, seconds those of every client that answered as it should.
        """
        asked, answered = (sum(row[key] for row in rows) for key in ("asked", "answered"))
        totals = {
            kind: sum(row["bytes"].get(kind, 0) for row in rows)
            for kind in ("down_adapter", "up_adapter", "down_stand_in", "up_statistics")
        }
        seconds = sum(row["client_seconds"] for row in rows)
        return {
            "predicted": {
                "multiplications": self.multiplications,
                "adapter_bytes": 2 * self.adapter_bytes,
                "stand_in_bytes_once": self.stand_in_bytes,
                "alignment_bytes": self.alignment_bytes,
                "alignment_bytes_asked": self.alignment_bytes_asked,
                "statistics_bytes": self.statistics_bytes,
            },
            "measured": {
                "adapter_bytes": (totals["down_adapter"] + totals["up_adapter"]) / asked,
                "stand_in_bytes": totals["down_stand_in"] / asked,
                "statistics_bytes": totals["up_statistics"] / asked,
                "seconds": seconds / answered,
                "multiplications_per_second": self.multiplications * answered / seconds if seconds else 0.0,
            },
        }


def predict(resident: Resident, client_rows: Sequence[Any], options: FederatedOptions, server_rows: Any = None) -> Cost:
    """Return what a round is going to cost a client with the mean number of rows.

    Args:
        resident: the model that clients train.
        client_rows: the rows of each client.
        options: epochs and lengths.
        server_rows: the server's own, if it has any.
    """
    rows = sum(len(part) for part in client_rows) / max(1, len(client_rows))
    rows_trained = rows * _epochs(rows, options.run.training)
    proxy, model = resident.proxy, resident.model
    adapter = sum(value.nbytes for value in resident.state().values())
    stand_in = sum(value.nbytes for value in resident.frozen().values()) if proxy is not None else 0
    if stand_in and resident.is_regularized:
        stand_in += adapter  # as it was before the first round
    every = proxy.realign_every if proxy is not None else 0
    changed = statistics = 0.0
    if proxy is not None and every:
        size = next(iter(resident.frozen().values())).element_size()
        changed = proxy.realigned(model, resident.trainer.run) * size
        looked_at = [some[0] for some in (server_rows, *client_rows[:1]) if some is not None][:1]
        statistics = sum(value.nbytes for value in resident.statistics(looked_at).values())
    share = options.federated.clients_per_round / options.federated.num_clients
    length = mean_length(client_rows, model)
    per_row = multiplications(model, resident.trainer.run, length)
    return Cost(
        multiplications=_PASSES * per_row * rows_trained,
        adapter_bytes=adapter,
        stand_in_bytes=stand_in,
        alignment_bytes=changed / max(1, every),
        alignment_bytes_asked=changed * missed(share, every),
        statistics_bytes=statistics / max(1, every),
        every=every,
    )


def missed(share: float, every: int) -> float:
    """Return how probably a client, asked in any round with probability ``share``, has missed an alignment since.

    After G rounds it has with probability min(1, G / every); G is geometric, so that the mean is
    (1 - (1 - share)^every) / (share every). Of several alignments that it missed only one counts: it gets their union.
    """
    return (1 - (1 - share) ** every) / (share * every) if every else 0.0


def _epochs(rows: float, args: TrainingArguments) -> float:
    """Return how often a client goes through its rows in a round: ``max_steps`` wins over ``num_train_epochs``."""
    if args.max_steps <= 0:
        return args.num_train_epochs
    steps = math.ceil(math.ceil(rows / args.train_batch_size) / args.gradient_accumulation_steps)
    return args.max_steps / max(1, steps)


def multiplications(model: Any, run: RunContext, length: float) -> float:
    """Return those of one pass over a row of ``length`` tokens, as the paper counts them; 0 for unknown architectures."""
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    try:
        layers = run.anatomy(base).layers
    except AnatomyError:
        return 0.0
    modules = dict(base.named_modules())
    width, words = int(base.config.hidden_size), int(getattr(base.config, "vocab_size", 0))
    weights = sum(
        value.numel()
        for layer in layers
        for module in modules[layer.name].modules()
        for value in module.parameters(recurse=False)
        if value.dim() == 2
    )
    per_layer = length**2 * width + length * width
    return float(width * (words + length) + length * weights + len(layers) * per_layer)


def mean_length(client_rows: Sequence[Any], model: Any) -> float:
    """Return how many tokens, or for images patches, a row has on average, from a few rows of each client."""
    lengths = []
    for rows in client_rows:
        for index in range(min(len(rows), max(1, _LOOKED_AT // len(client_rows)))):
            row = rows[index]
            if "input_ids" not in row:
                return float((model.config.image_size // model.config.patch_size) ** 2 + 1)
            lengths.append(len(row["input_ids"]))
    return sum(lengths) / max(1, len(lengths))
