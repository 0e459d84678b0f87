"""What the regularizers cost a step, what MixOut costs in memory, and what cached features save head tuning.

* ``mhloss``, ``mmr``, ``l2_sp``, ``mixout``, each against the plain step of full fine-tuning: ``tunery.Trainer`` on MiniLM (22.7
  million parameters), 8 and 32 rows of 64 and 128 tokens. All variants take turns step by step; each has its own model and
  optimizer, since some change how a model computes. MixOut at p = 0.9 has to be quicker than plain: of a weight's gradient it
  computes the kept columns alone. What it takes at p = 0.5 is printed and has no goal.
* ``lnsr``: what it adds to the plain step, over the cost of the layers that it must run once more: half of the model's six,
  forward and backward, run alone in the same rounds, called as the model calls them for one of the batches.
* ``mixout, peak memory``: what a short training's tensors need beyond plain, in copies of the mixed weights, each in a process
  of its own.
* ``head, cached features``: the training of 10 epochs with 5 seeds, without what comes before ``train()``: rows, model, trainer.
  Over the same with the encoder running every time. The first seed has to run it once for each row.

``--quick`` takes 8 rows of 64 tokens only, and measures one seed of re-encoding for all five. On the CPU torch gets one thread
and time is this process's processor time; see :mod:`.overhead`.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.anatomy import find_anatomy
from ...core.console import calm
from ...core.trainer import Trainer
from . import workloads
from .claims import Claim, Run, main, ratio_claim
from .paired import Estimate, Times, clock_of_device, peak_memory
from .stepping import stepping

PLAIN = "plain"
SIZES = tuple(itertools.product((8, 32), (64, 128)))  # rows, tokens
VARIANTS = {
    "mhloss": "mhloss:heads=50",
    "mmr": "mmr",
    "l2_sp": "l2_sp",
    "l2_sp decoupled": "l2_sp:form=decoupled",
    "mixout p=0.9": "mixout:p=0.9",
    "mixout p=0.5": "mixout:p=0.5",
    "lnsr": "lnsr",
}
GOALS = {
    "mhloss": 1.02,
    "mmr": 1.02,
    "l2_sp": 1.05,
    "l2_sp decoupled": 1.05,
    "mixout p=0.9": 1.0,
    "mixout p=0.5": float("inf"),
}
MIXOUT_GOAL_AT_MOST_WORK = 0.90  # at the largest of SIZES
LNSR_GOAL, MEMORY_GOAL, CACHE_GOAL = 1.10, 1.0, 1 / 20
LAYERS = "layers above the noise"
RATIO_WIDTH = 0.02
EPOCHS, SEEDS = 10, 5


def claims(run: Run) -> Iterator[Claim]:
    """Measure every claim of this script."""
    calm()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for rows, length in SIZES[:1] if run.quick else SIZES:
            yield from steps(run, folder, rows, length)
        yield mixout_memory(folder)
        yield cached_features(run, folder)


def steps(run: Run, folder: str, rows: int, length: int) -> Iterator[Claim]:
    """Compare a step with each regularizer to the plain one."""
    data = workloads.minilm_rows(length)
    trainers = {
        name: workloads.trainer(
            Trainer,
            workloads.minilm(),
            data,
            folder,
            per_device_train_batch_size=rows,
            regularizers=[selection] if selection else None,
            strategy="full",
        )
        for name, selection in {PLAIN: None, **VARIANTS}.items()
    }
    upper = upper_layers(workloads.minilm(), data[:rows])
    with stepping(trainers) as variants:
        times = run.interleave({**variants, LAYERS: upper}, rounds=60, quick_rounds=8, warm_up=1, until=_narrow)
    size = f"{rows} x {length}"
    for name, goal in GOALS.items():
        largest = name == "mixout p=0.9" and (rows, length) == SIZES[-1]
        own = Times({key: times.seconds[key] for key in (name, PLAIN)})
        yield ratio_claim(
            f"{name}, step, {size}", times.ratio(name, PLAIN), MIXOUT_GOAL_AT_MOST_WORK if largest else goal, own
        )
    seconds = times.seconds
    extra = [
        (with_it - plain) / layers
        for with_it, plain, layers in zip(seconds["lnsr"], seconds[PLAIN], seconds[LAYERS], strict=True)
    ]
    own = Times({key: seconds[key] for key in ("lnsr", PLAIN, LAYERS)})
    yield ratio_claim(f"lnsr, what it adds over its layers, {size}", Estimate.of(extra), LNSR_GOAL, own)


def _narrow(times: Times) -> bool:
    return all(times.ratio(name, PLAIN).width <= RATIO_WIDTH for name in GOALS)


def upper_layers(model: nn.Module, rows: workloads.Rows) -> Callable[[], None]:
    """Return a function that runs the upper half of the layers forward and backward on ``rows``, as LNSR's default has to."""
    layers = [model.get_submodule(layer.name) for layer in find_anatomy(model).layers]
    upper = layers[len(layers) // 2 :]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.train().to(device)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = upper[0].register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad(), hook:
        model(**{key: torch.stack([row[key] for row in rows]).to(device) for key in rows[0]})
    ((hidden, *args), kwargs) = calls[0]
    hidden.requires_grad_()

    def work() -> None:
        output: Any = hidden
        for layer in upper:
            output = layer(output, *args, **kwargs)
            output = output[0] if isinstance(output, tuple) else output
        output.square().mean().backward()
        hidden.grad = None
        model.zero_grad()

    return work


def mixout_memory(folder: str) -> Claim:
    """Compare the peak memory of a short training's tensors with and without MixOut."""
    with_it, plain = (
        peak_memory(partial(_train_minilm, selection, folder), gaps=False) for selection in ("mixout:p=0.9", None)
    )
    model = workloads.minilm()
    mixed = [m.weight for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "classifier"]
    copy = sum(weight.numel() * weight.element_size() for weight in mixed)
    return Claim(
        name="mixout, peak memory",
        value=(with_it.total - plain.total) / copy,
        goal=MEMORY_GOAL,
        unit="copies of the mixed weights more",
        detail=f"mixout {with_it}, plain {plain}, a copy {copy / 2**20:.0f} MiB",
    )


def _train_minilm(selection: str | None, folder: str) -> None:
    calm()
    rows = workloads.minilm_rows(length=64)
    regularizers = [selection] if selection else None
    workloads.trainer(
        Trainer, workloads.minilm(), rows, folder, max_steps=3, strategy="full", regularizers=regularizers
    ).train()


def cached_features(run: Run, folder: str) -> Claim:
    """Compare head tuning with cached features to head tuning that runs the encoder every time."""
    rows = workloads.minilm_rows(length=128)[: 128 if run.quick else 512]
    measured = 1 if run.quick else SEEDS
    again = sum(_tune_head("head:cache=false", rows, folder, seed) for seed in range(measured)) * SEEDS / measured
    cached = [_tune_head("head", rows, folder, seed) for seed in range(SEEDS)]
    return Claim(
        name="head, cached features",
        value=sum(cached) / again,
        goal=CACHE_GOAL,
        detail=f"{EPOCHS} epochs x {SEEDS} seeds of {len(rows)} rows: {sum(cached):.3g} s, the first seed {cached[0]:.3g} s; "
        f"running the encoder every time {again:.3g} s: {again / sum(cached):.3g} times as long",
    )


def _tune_head(strategy: str, rows: workloads.Rows, folder: str, seed: int) -> float:
    options: dict[str, Any] = {
        "max_steps": -1,
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": 32,
        "seed": seed,
    }
    trainer = workloads.trainer(
        Trainer, workloads.minilm(), rows, str(Path(folder) / "head"), strategy=strategy, **options
    )
    clock = clock_of_device()
    start = clock()
    trainer.train()
    return clock() - start


if __name__ == "__main__":
    sys.exit(main(claims, __doc__))
