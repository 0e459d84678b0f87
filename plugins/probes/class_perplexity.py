"""Classification by a causal language model: how surprised it is by the class (overtraining paper, appendix C.1).

A class is the text a row is completed with; its score is its likelihood a token, and the scores are made to add up to one:

    s_c(x) = 1 / |c| sum_t log p(c_t | x, c_<t),     p(c | x) = exp s_c(x) / sum_k exp s_k(x)

Class perplexity is exp(-mean log p(gold | x)): 1 for a model that is always right and sure, the number of classes for one that
knows nothing. Shapes: B rows, T positions, V tokens of the vocabulary, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from ...registry.context import Measurement, Subject, Support, TaskKind
from ...registry.contracts import Probe
from ...registry.errors import CompatibilityError
from ...registry.hookspecs import hookimpl
from ..readings import batches_of, labels_of, over_ranks

if TYPE_CHECKING:
    import torch

Row = tuple[tuple[int, ...], tuple[int, ...]]  # prompt and completion


class ClassPerplexity(Probe):
    """Score every class as the completion of every evaluation row.

    The classes are the completions that the evaluation rows have, token for token, so that no tokenizer is needed.
    """

    name = "class_perplexity"
    summary = "perplexity over the classes of a causal language model that classifies, by length-normalised likelihood"
    reference = "Springer et al., overtrained language models are harder to fine-tune, appendix C.1 (evaluation)"
    supports = Support(tasks=frozenset({TaskKind.CAUSAL_LM}))

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of the classes.

        Attributes:
            max_classes: more different completions than this are no classes, and are refused.
        """

        max_classes: Annotated[int, Ge(2)] = 100

    config: Config

    def measure(self, subject: Subject) -> Iterable[Measurement]:
        """Yield ``class_perplexity``, ``class_accuracy`` and ``classes``, their number.

        Raises:
            CompatibilityError: no evaluation set, or rows whose completions are no classes.
        """
        import torch

        own = [_rows_of(batch) for batch in batches_of(subject, self.name)]
        classes = self._classes(subject, {completion for rows in own for _, completion in rows})
        device = next(subject.model.parameters()).device
        totals = torch.zeros(3, dtype=torch.float64, device=device)  # nats, hits, rows
        for rows in own:
            scores_BC = torch.stack([_scores(subject, [prompt for prompt, _ in rows], one) for one in classes], dim=1)
            gold_B = torch.tensor([classes.index(completion) for _, completion in rows], device=device)
            nats_B = -scores_BC.log_softmax(1).gather(1, gold_B[:, None]).squeeze(1)
            hits_B = scores_BC.argmax(1) == gold_B
            totals += torch.stack([nats_B.sum(), hits_B.double().sum(), torch.tensor(float(len(rows)), device=device)])
        nats, hits, count = over_ranks(subject, totals).tolist()
        yield Measurement(name="class_perplexity", value=math.exp(nats / count))
        yield Measurement(name="class_accuracy", value=hits / count)
        yield Measurement(name="classes", value=float(len(classes)))

    def _classes(self, subject: Subject, own: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
        from torch import distributed

        found = [own]
        if subject.run.sharding.world_size > 1:
            found = [set() for _ in range(subject.run.sharding.world_size)]
            distributed.all_gather_object(found, own)
        classes = sorted(set().union(*found))
        if not 2 <= len(classes) <= self.config.max_classes or () in classes:
            raise CompatibilityError(
                f"probe 'class_perplexity' finds {len(classes)} different completions, which are no classes",
                remedy="evaluate rows of a prompt and one of a few completions, or raise max_classes",
            )
        return classes


def _rows_of(batch: Mapping[str, Any]) -> list[Row]:
    """Return prompt and completion of every row: the tokens before the first that is predicted, and those that are."""
    rows = []
    valid = batch.get("attention_mask")
    for number, (ids, labels) in enumerate(
        zip(batch["input_ids"], labels_of(batch, ClassPerplexity.name), strict=True)
    ):
        kept = slice(None) if valid is None else valid[number].bool()
        tokens, targets = ids[kept].tolist(), labels[kept].tolist()
        predicted = [place for place, target in enumerate(targets) if place and target != -100]
        start = predicted[0] if predicted else len(tokens)
        rows.append((tuple(tokens[:start]), tuple(targets[place] for place in predicted)))
    return rows


def _scores(subject: Subject, prompts: Sequence[tuple[int, ...]], completion: tuple[int, ...]) -> torch.Tensor:
    """Return the mean log-likelihood of the completion's tokens after each prompt, (B,), float64."""
    import torch

    device = next(subject.model.parameters()).device
    whole = [torch.tensor(prompt + completion) for prompt in prompts]
    ids_BT = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True).to(device)
    length_B = torch.tensor([len(one) for one in whole], device=device)
    mask_BT = (torch.arange(ids_BT.shape[1], device=device) < length_B[:, None]).long()
    with torch.no_grad():
        logits_BTV = subject.model(input_ids=ids_BT, attention_mask=mask_BT).logits
    first_B = length_B - len(completion) - 1  # the position that predicts the completion's first token
    place_Bt = first_B[:, None] + torch.arange(len(completion), device=device)
    rows_B1 = torch.arange(len(whole), device=device)[:, None]
    targets_Bt1 = ids_BT[rows_B1, place_Bt + 1].unsqueeze(-1)
    log_p_BtV = logits_BTV[rows_B1, place_Bt].double().log_softmax(-1)
    scores_B: torch.Tensor = log_p_BtV.gather(-1, targets_Bt1).squeeze(-1).mean(1)
    return scores_B


@hookimpl
def tunery_probes() -> list[type[Probe]]:
    """Offer :class:`ClassPerplexity`."""
    return [ClassPerplexity]
