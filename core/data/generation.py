"""``bleu`` and ``chrf``: a trained model completes the prompts of validation and test, and its answers are scored.

Every prompt is asked once, however many completions it has; all of them are its references. The search is transformers'
``generate`` with the task's decoding; defaults are those of LoRA's published E2E command (Hu et al. 2021: 10 beams,
length penalty 0.8, no repeated 4-gram, 64 tokens). As there, an n-gram counts as repeated where the completion itself has
it already: what the prompt says, a name for instance, may be said again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, NoRepeatNGramLogitsProcessor

from ...registry.context import Task
from ...registry.errors import DataError
from .encoding import encode_prompts
from .metrics import GENERATED, text_scores
from .pairs import references
from .tasks import TaskData

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PREDICTIONS = "predictions.jsonl"


@dataclass(frozen=True, kw_only=True)
class Questions:
    """The prompts of one split of a task, each once.

    Attributes:
        task: whose prompts they are.
        number: the task's position in the run.
        split: ``validation`` or ``test``.
        prompts: as they are in the data.
        input_ids: the same, as training encodes them, cut from the left where completion and prompt would not fit.
        references: of each prompt one or more texts.
        decoding: how completions are generated, by the names of ``GenerationConfig``.
    """

    task: Task
    number: int
    split: str
    prompts: Sequence[str]
    input_ids: Sequence[Sequence[int]]
    references: Sequence[Sequence[str]]
    decoding: Mapping[str, Any]


def questions(
    data: Sequence[TaskData], tokenizer: PreTrainedTokenizerBase, config: Any, best_metric: str | None = None
) -> list[Questions]:
    """Return what has to be answered after training: nothing unless a task has a metric of generated text.

    Args:
        data: the tasks of a run.
        tokenizer: the model's.
        config: the model's.
        best_metric: the metric that chooses a checkpoint during training, which none of these can.

    Raises:
        DataError: such a metric is to choose a checkpoint, ``max_new_tokens`` leaves no room for a prompt, or a prompt has no tokens.
    """
    if best_metric is not None and best_metric.rsplit("_", 1)[-1] in GENERATED:
        raise DataError(
            f"metric_for_best_model={best_metric!r} is only measured after training", remedy="choose by loss"
        )
    found = []
    for number, item in enumerate(data):
        if not set(item.task.metrics) & set(GENERATED):
            continue
        positions = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        room = min(item.max_length, positions - item.decoding["max_new_tokens"])
        if room < 1:
            raise DataError(
                f"max_new_tokens={item.decoding['max_new_tokens']} leaves no room for a prompt",
                owner=item.task.name,
                remedy=f"give less than the model's {positions} positions",
            )
        for split in ("validation", "test"):
            if split in item.splits:
                asked = references(item.splits[split], item.columns)
                encoded = [ids[-room:] for ids in encode_prompts(list(asked), tokenizer)]
                if [] in encoded:
                    raise DataError(f"a prompt of {split!r} is empty", owner=item.task.name)
                found.append(
                    Questions(
                        task=item.task,
                        number=number,
                        split=split,
                        prompts=list(asked),
                        input_ids=encoded,
                        references=list(asked.values()),
                        decoding=item.decoding,
                    )
                )
    return found


@dataclass(frozen=True, kw_only=True)
class Writer:
    """Completes prompts on all ranks: each takes its share, and every rank returns all answers.

    Ranks make equally many calls and transformers keeps them in step inside each one, so that ZeRO-3 works too, where every
    forward pass is the work of all.

    Attributes:
        model: a causal language model, not wrapped by DDP or DeepSpeed.
        tokenizer: its tokenizer.
        accelerator: the Trainer's ``accelerate.Accelerator``.
        batch_size: prompts a rank completes at once; each takes ``num_beams`` rows.
        several_tasks: whether the model has to be told the task of its rows, in ``task_ids``.
        show_progress: whether rank 0 shows a bar.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    accelerator: Any
    batch_size: int
    several_tasks: bool = False
    show_progress: bool = False

    def answers(self, asked: Questions) -> list[str]:
        """Return a completion for each prompt, without special tokens and surrounding white space."""
        from rich.console import Console
        from rich.progress import track

        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        # Prompts of like length share a batch; ranks take turns, and who has none left answers the last one again.
        order = sorted(range(len(asked.prompts)), key=lambda index: -len(asked.input_ids[index]))
        padded = order + order[-1:] * (-len(order) % ranks)
        share = padded[rank::ranks]
        steps = range(0, len(share), self.batch_size)
        title = f"{asked.task.name} {asked.split}: generating"
        shown = self.show_progress and self.accelerator.is_main_process
        pieces = []
        self.model.eval()
        with torch.no_grad(), self._routed(asked.number), self.accelerator.autocast():
            for start in track(steps, title, console=Console(stderr=True), disable=not shown):
                rows = [asked.input_ids[index] for index in share[start : start + self.batch_size]]
                pieces.append(self._completed(rows, asked.decoding))
        tokens = self.accelerator.gather(torch.cat(pieces)).cpu()
        texts = [text.strip() for text in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]
        answers = [""] * len(order)
        for turn, index in enumerate(padded):
            answers[index] = texts[turn % ranks * len(share) + turn // ranks]
        return answers

    def _completed(self, rows: Sequence[Sequence[int]], decoding: Mapping[str, Any]) -> torch.Tensor:
        """Return the tokens behind each prompt, shape (rows, max_new_tokens), filled up with pads."""
        width, device, pad = max(map(len, rows)), self.accelerator.device, self.tokenizer.pad_token_id
        input_ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        settings = dict(decoding)
        size = settings.pop("no_repeat_ngram_size")
        if settings["num_beams"] == 1:
            del settings["length_penalty"]  # it compares beams, and transformers warns where there is one
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False,
            use_cache=True,  # the Trainer switches it off in the model's own config
            pad_token_id=pad,
            eos_token_id=self.tokenizer.eos_token_id,
            bos_token_id=self.tokenizer.bos_token_id,
            **settings,
        )
        processors = LogitsProcessorList([_NoRepeat(size, width)] if size else [])
        output = self.model.generate(
            input_ids=input_ids, attention_mask=mask, generation_config=config, logits_processor=processors
        )
        made = output[:, width:]
        return torch.nn.functional.pad(made, (0, settings["max_new_tokens"] - made.shape[1]), value=pad)

    @contextmanager
    def _routed(self, number: int) -> Iterator[None]:
        """Give every call that ``generate`` makes the ``task_ids`` that a batch of this task would have.

        A model of several tasks takes them in each call, by the contract of its strategy; ``generate`` itself refuses
        arguments that the base model's forward does not name.
        """
        if not self.several_tasks:
            yield
            return
        from peft import PeftModel

        called = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

        def add_task(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            rows = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            return args, {**kwargs, "task_ids": torch.full((len(rows),), number, device=rows.device)}

        handle = called.register_forward_pre_hook(add_task, with_kwargs=True, prepend=True)
        try:
            yield
        finally:
            handle.remove()


class _NoRepeat(LogitsProcessor):
    """Bans the token that would make the completion repeat an n-gram of its own.

    Args:
        size: n.
        width: how many tokens the prompts have, pads included.
    """

    def __init__(self, size: int, width: int) -> None:
        self.plain = NoRepeatNGramLogitsProcessor(size)
        self.width = width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, shape (rows, vocabulary), for input_ids of shape (rows, positions)."""
        allowed: torch.Tensor = self.plain(input_ids[:, self.width :], scores)
        return allowed


def score(asked: Sequence[Questions], writer: Writer, output_dir: Path) -> dict[str, float]:
    """Answer the questions, write answers and references to ``predictions.jsonl``, and return the metrics.

    Returns:
        ``<metric>`` on validation and ``test_<metric>`` on test; with several tasks ``<task>_`` stands before them.
    """
    found: dict[str, float] = {}
    lines: list[str] = []
    for one in asked:
        answers = writer.answers(one)
        scores = text_scores([name for name in one.task.metrics if name in GENERATED], answers, one.references)
        start = f"{one.task.name}_" if writer.several_tasks else ""
        start += "" if one.split == "validation" else f"{one.split}_"
        found |= {f"{start}{name}": value for name, value in scores.items()}
        for prompt, answer, texts in zip(one.prompts, answers, one.references, strict=True):
            row = {"task": one.task.name, "split": one.split, "prompt": prompt, "prediction": answer}
            lines.append(json.dumps(row | {"references": list(texts)}, ensure_ascii=False) + "\n")
    if writer.accelerator.is_main_process:
        temporary = output_dir / f".{PREDICTIONS}"
        temporary.write_text("".join(lines), encoding="utf-8")
        temporary.replace(output_dir / PREDICTIONS)
    return found


__all__ = ("PREDICTIONS", "Questions", "Writer", "questions", "score")
