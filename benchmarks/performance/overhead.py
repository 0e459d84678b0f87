"""What tunery costs where it should cost nothing, and what its first regularizer costs.

* ``no plugin, step``: one optimizer step of ``tunery.Trainer`` with no plugin selected, against ``transformers.Trainer``:
  MiniLM (22.7 million parameters), 8 rows of 32 tokens, so little work that overhead has nowhere to hide. The two trainers
  share the model and the optimizer and take turns step by step, so that they differ in nothing but their own code.
* ``no plugin, step of a tiny model``: the microseconds a step takes longer when the model is next to nothing: what
  tunery's code itself needs, whatever the model.
* ``no plugin, peak memory``: of three such MiniLM steps, each trainer in a process of its own.
* ``l2_sp, step``: ``tunery.Trainer`` with ``l2_sp`` on all parameters against ``transformers.Trainer``: MiniLM, 32 rows of
  128 tokens, the usual batch for an encoder. These two share model and optimizer too; the regularizer's hooks, which then
  also run in the peer's steps, return at once there. The least the penalty can do is to read all weights and their
  starting values twice and to write a gradient, which on the CPU weighs as much as the optimizer, whatever the batch.

On the CPU torch gets one thread and time is this process's processor time, which on an idle machine is wall time and on
a busy one is not counted while others run. On a GPU it is wall time to the end of the step's kernels.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import transformers

from ...core.console import calm
from ...core.trainer import Trainer
from . import workloads
from .claims import Claim, Run, main, ratio_claim
from .paired import Times, peak_memory
from .stepping import stepping

STEP_GOAL = 1.01
TINY_GOAL_US = 400.0  # 1 % of a step of 40 ms
MEMORY_GOAL = 1.02
L2_SP_GOAL = 1.05
RATIO_WIDTH = 0.01
PEER, OURS = "transformers.Trainer", "tunery.Trainer"
CLASSES: dict[str, type[transformers.Trainer]] = {PEER: transformers.Trainer, OURS: Trainer}


def claims(run: Run) -> Iterator[Claim]:
    """Measure every claim of this script."""
    calm()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        yield no_plugin_step(run, folder)
        yield no_plugin_tiny(run, folder)
        yield no_plugin_memory(folder)
        yield l2_sp_step(run, folder)


def no_plugin_step(run: Run, folder: str) -> Claim:
    """Compare steps of the two trainers over one model and one optimizer."""
    with stepping(_twins(workloads.minilm(), workloads.minilm_rows(length=32), folder)) as variants:
        times = run.interleave(variants, rounds=600, quick_rounds=100, until=_narrow)
    return ratio_claim("no plugin, step", times.ratio(OURS, PEER), STEP_GOAL, times)


def no_plugin_tiny(run: Run, folder: str) -> Claim:
    """Compare the same where the model is next to nothing."""
    with stepping(_twins(workloads.tiny(), workloads.byte_rows(length=32), folder)) as variants:
        times = run.interleave(variants, rounds=2000, quick_rounds=400, warm_up=20)
    extra = times.extra(OURS, PEER)
    return Claim(
        name="no plugin, step of a tiny model",
        value=extra.value * 1e6,
        low=extra.low * 1e6,
        high=extra.high * 1e6,
        goal=TINY_GOAL_US,
        unit="us more",
        detail=str(times),
    )


def _twins(
    model: torch.nn.Module, rows: workloads.Rows, folder: str, regularizers: list[str] | None = None, **options: Any
) -> dict[str, transformers.Trainer]:
    """Build both trainers over one model and one optimizer, so that not even memory is laid out differently."""
    peer = workloads.trainer(CLASSES[PEER], model, rows, folder, **options)
    optimizer = peer.create_optimizer()
    ours = workloads.trainer(CLASSES[OURS], model, rows, folder, optimizer, regularizers=regularizers, **options)
    return {PEER: peer, OURS: ours}


def _narrow(times: Times) -> bool:
    return times.ratio(OURS, PEER).width <= RATIO_WIDTH


def no_plugin_memory(folder: str) -> Claim:
    """Compare the peak memory of a short training."""
    ours, peer = (peak_memory(partial(_train_minilm, name, folder)) for name in (OURS, PEER))
    detail = f"{OURS} {ours}, {PEER} {peer}"
    return Claim(name="no plugin, peak memory", value=ours.total / peer.total, goal=MEMORY_GOAL, detail=detail)


def _train_minilm(name: str, folder: str) -> None:
    calm()
    rows = workloads.minilm_rows(length=32)
    workloads.trainer(CLASSES[name], workloads.minilm(), rows, folder, max_steps=3).train()


def l2_sp_step(run: Run, folder: str) -> Claim:
    """Compare a step with the penalty on every parameter to a step without."""
    rows = workloads.minilm_rows(length=128)
    twins = _twins(workloads.minilm(), rows, folder, ["l2_sp"], per_device_train_batch_size=32)
    with stepping(twins) as variants:
        times = run.interleave(variants, rounds=60, quick_rounds=12, warm_up=1, until=_narrow)
    return ratio_claim("l2_sp, step", times.ratio(OURS, PEER), L2_SP_GOAL, times)


if __name__ == "__main__":
    sys.exit(main(claims, __doc__))
