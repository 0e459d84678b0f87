"""What a federation's client saves by training a stand-in, and what making one takes.

* ``client step``: a step of LoRA on the sub-model of ``proxy_sub_fm`` over the same step on the whole model (the same strategy
  with nothing removed): ``tunery.Trainer`` on a BERT of base size, 8 rows of 128 tokens. Both take turns step by step.
* ``client operations``: floating-point operations of the same two steps, forward and backward, counted by torch.
* ``construction``: seconds to rank the neurons of a BERT of base size and to make its sub-model, the longest of three times.

Weights are random and rows are random tokens: neither changes what a step costs. ``--quick`` takes 2 rows of 32 tokens. On the
CPU torch gets one thread and time is this process's processor time; see :mod:`.overhead`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ...core.arguments import TrainingArguments
from ...core.console import calm
from ...core.context import make_context
from ...core.recipe import choose
from ...core.trainer import Trainer
from . import workloads
from .claims import Claim, Run, main, ratio_claim
from .paired import Times, clock_of_device
from .stepping import stepping

SUB_MODEL, WHOLE = "proxy_sub_fm", "proxy_sub_fm:ratio=0"
STEP_GOAL, CONSTRUCTION_GOAL = 0.65, 5.0
SIZE, QUICK_SIZE = (8, 128), (2, 32)  # rows, tokens
RATIO_WIDTH = 0.02
TIMES = 3


def claims(run: Run) -> Iterator[Claim]:
    """Measure every claim of this script."""
    calm()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    size = QUICK_SIZE if run.quick else SIZE
    with tempfile.TemporaryDirectory() as folder:
        yield client_step(run, folder, *size)
        yield client_operations(folder, *size)
        yield construction()


def bert_base() -> nn.Module:
    """Build a BERT of base size, 109 million parameters, with random weights and a classifier."""
    transformers.set_seed(workloads.SEED)
    return transformers.BertForSequenceClassification(transformers.BertConfig())


def random_rows(rows: int, length: int) -> workloads.Rows:
    """Return rows of random tokens, no pads."""
    generator = torch.Generator().manual_seed(workloads.SEED)
    tokens = torch.randint(1000, 30000, (rows, length), generator=generator)
    return [{"input_ids": row, "labels": torch.tensor(number % 2)} for number, row in enumerate(tokens)]


def _trainer(strategy: str, folder: str, rows: int, length: int) -> Any:
    return workloads.trainer(
        Trainer,
        bert_base(),
        random_rows(8 * rows, length),
        folder,
        per_device_train_batch_size=rows,
        strategy=strategy,
    )


def client_step(run: Run, folder: str, rows: int, length: int) -> Claim:
    """Compare a step on the sub-model to one on the whole model."""
    trainers = {name: _trainer(name, folder, rows, length) for name in (SUB_MODEL, WHOLE)}
    with stepping(trainers) as variants:
        times = run.interleave(variants, rounds=60, quick_rounds=8, warm_up=1, until=_narrow)
    return ratio_claim(f"client step, {rows} x {length}", times.ratio(SUB_MODEL, WHOLE), STEP_GOAL, times)


def _narrow(times: Times) -> bool:
    return times.ratio(SUB_MODEL, WHOLE).width <= RATIO_WIDTH


def client_operations(folder: str, rows: int, length: int) -> Claim:
    """Compare the operations of the two steps."""
    counts = {}
    for name in (SUB_MODEL, WHOLE):
        model = _trainer(name, folder, rows, length).model.train()
        batch = transformers.default_data_collator(random_rows(rows, length))
        device = next(model.parameters()).device
        with FlopCounterMode(display=False) as counter:
            model(**{key: value.to(device) for key, value in batch.items()}).loss.backward()
        counts[name] = counter.get_total_flops()
    return Claim(
        name=f"client operations, {rows} x {length}",
        value=counts[SUB_MODEL] / counts[WHOLE],
        goal=STEP_GOAL,
        detail=", ".join(f"{name} {count / 1e9:.4g} GFLOP" for name, count in counts.items()),
    )


def construction() -> Claim:
    """Time the preparation of the sub-model, adapter included; loading the model is no part of it."""
    clock, seconds = clock_of_device(), []
    for _ in range(TIMES):
        model = bert_base()
        run = make_context(model, TrainingArguments(seed=workloads.SEED), [workloads.TASK])
        strategy = choose(strategy=SUB_MODEL).strategy
        assert strategy is not None
        start = clock()
        strategy.prepare(model, run)
        seconds.append(clock() - start)
    return Claim(
        name="construction",
        value=max(seconds),
        goal=CONSTRUCTION_GOAL,
        unit="s",
        detail=", ".join(f"{value:.3g} s" for value in seconds),
    )


if __name__ == "__main__":
    sys.exit(main(claims, __doc__))
