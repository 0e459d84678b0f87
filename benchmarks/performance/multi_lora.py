"""Multi-LoRA against k separate LoRAs of PEFT: k tasks of one encoder, in one process, on real text from files.

* ``k=.., batch=.., step``: one optimizer step on ``batch`` rows of each of k tasks: one joint step of ``tunery.Trainer``
  against one step of each of k ``transformers.Trainer`` with a PEFT LoRA of their own. MiniLM (22.7 million parameters),
  rank 8 on query and value, docstrings of up to 128 tokens padded batch by batch. The base model is frozen in both, so
  either needs 4P of the 6P operations of full training (P parameters: 2P forward, 2P for the gradient of activations, and
  none for the base weights'); what there is to gain is the small batches' cost and their padding: the
  joint batch runs without any. Beside them stands one plain PEFT LoRA that takes as many rows of one
  task: what a batch of that size costs where no row has a matrix or head of its own. The floor is the 4P operations alone,
  those matrix products of the encoder on as many tokens as a joint batch has on average, without padding.
* ``k=.., batch=4, memory``: of three such steps, each side in a process of its own; ours holds one base model, the peer k.
* ``k=.., bytes on disk``: A once and k B against k PEFT adapter files, heads aside; here A and B are of one size.
* ``mixed inference``: eight tasks' rows in one batch, against PEFT's ``adapter_names``.

The tasks are the labels of ``python_docs``, each with one half of its modules, written to and read from jsonl files. Time
is wall time with all of torch's threads, since how well small batches use them is half of the question: leave the machine
alone meanwhile.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

from ...core.console import calm
from ...core.data import DataArguments, Mixing, TaskData, encode, encode_jointly, load_tasks, python_docs
from ...core.models import load_model, load_processor
from ...core.trainer import Trainer
from ...registry.context import Task
from . import workloads
from .claims import Claim, Run, main, ratio_claim
from .paired import peak_memory
from .stepping import stepping

LABELS = ("label", "kind", "returns", "log_num_lines")
LENGTH = 128
RANK = 8
GOALS = {(2, 4): 1.0, (4, 4): 1.0, (8, 4): 0.5, (2, 16): 1.0, (4, 16): 1.0, (8, 16): 1.0}
MEMORY_GOAL, INFERENCE_GOAL = 1.0, 1 / 1.5
BYTES_GOALS = {2: 0.77, 4: 0.64, 8: 0.58}  # (k + 1) / 2k and some room
OURS, PEER, ONE, FLOOR = "joint", "separate", "one task", "floor"


def claims(run: Run) -> Iterator[Claim]:
    """Measure every claim of this script."""
    calm()
    with tempfile.TemporaryDirectory() as folder:
        for (tasks, batch), goal in GOALS.items():
            yield step(run, tasks, batch, goal, folder)
        for tasks, goal in BYTES_GOALS.items():
            yield memory(tasks, folder)
            yield stored(tasks, goal, folder)
        yield inference(run, folder)


@cache
def data(tasks: int) -> list[TaskData]:
    """Write the tasks to files and load them as any user's."""
    docs = python_docs.load()["train"]
    modules = sorted(set(docs["module"]))
    half = {module: number % 2 for number, module in enumerate(modules)}
    with tempfile.TemporaryDirectory() as folder:
        described = []
        for number in range(tasks):
            label, part = LABELS[number % len(LABELS)], number // len(LABELS)
            rows = [
                {"text": text, "label": value}
                for text, value, module in zip(docs["text"], _named(docs, label), docs["module"], strict=True)
                if half[module] == part
            ]
            path = Path(folder) / f"{label}{part}.jsonl"
            path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
            described.append({"name": f"{label}{part}", "train_file": str(path)})
        return load_tasks(DataArguments(tasks=described, max_length=LENGTH), seed=workloads.SEED)


def _named(docs: Any, label: str) -> list[Any]:
    feature = docs.features[label]
    return [feature.int2str(value) for value in docs[label]] if hasattr(feature, "int2str") else list(docs[label])


def _base(task: Task) -> Any:
    transformers.set_seed(workloads.SEED)
    return load_model(workloads.MINILM, task)


def _processor() -> Any:
    return load_processor(workloads.MINILM, data(1)[0].task)


def joint_trainer(tasks: int, batch: int, folder: str, **options: Any) -> transformers.Trainer:
    """Build our trainer: k tasks' rows in equal shares in every batch."""
    found = data(tasks)
    encoded = encode_jointly(found, _processor(), Mixing(name="round_robin"))
    return workloads.trainer(
        Trainer,
        _base(found[0].task),
        encoded.train,
        folder,
        per_device_train_batch_size=tasks * batch,
        strategy=f"multi_lora:r={RANK}",
        task=[item.task for item in found],
        data_collator=encoded.data_collator,
        **options,
    )


def lora_trainers(tasks: int, batch: int, folder: str, **options: Any) -> list[transformers.Trainer]:
    """Build the peer's: a base model, a PEFT LoRA and a trainer a task."""
    built = []
    for item in data(tasks):
        encoded = encode(item, _processor())
        built.append(
            workloads.trainer(
                transformers.Trainer,
                _lora(_base(item.task)),
                encoded.train,
                folder,
                per_device_train_batch_size=batch,
                data_collator=encoded.data_collator,
                **options,
            )
        )
    return built


def _lora(base: Any) -> Any:
    base.accepts_loss_kwargs = False
    config = LoraConfig(r=RANK, lora_alpha=16, target_modules=["query", "value"], modules_to_save=["classifier"])
    return get_peft_model(base, config)


def step(run: Run, tasks: int, batch: int, goal: float, folder: str) -> Claim:
    """Compare one joint step with one step of each separate LoRA."""
    trainers = {str(number): one for number, one in enumerate(lora_trainers(tasks, batch, folder))}
    with ExitStack() as stack:
        pair = {OURS: joint_trainer(tasks, batch, folder), ONE: lora_trainers(1, tasks * batch, folder)[0]}
        whole = stack.enter_context(stepping(pair))
        theirs = stack.enter_context(stepping(trainers))

        def peer() -> None:
            for one in theirs.values():
                one()

        variants: dict[str, Callable[[], object]] = {**whole, PEER: peer, FLOOR: products(tasks, batch)}
        times = run.interleave(variants, rounds=24, quick_rounds=8, warm_up=2, clock=time.perf_counter)
    rows = tasks * batch
    rates = ", ".join(f"{name} {rows / times.median(name):.1f} samples/s" for name in (OURS, PEER, ONE))
    alone = f"{times.ratio(OURS, ONE).value:.3g}x of one LoRA on as many rows"
    floor = f"{OURS} {times.ratio(OURS, FLOOR).value:.3g}x, {PEER} {times.ratio(PEER, FLOOR).value:.3g}x of the floor"
    detail = f"{rates}; {alone}; {floor}; {times}"
    return ratio_claim(f"k={tasks}, batch={batch}, step", times.ratio(OURS, PEER), goal, detail)


def products(tasks: int, batch: int) -> Callable[[], None]:
    """Return the encoder's matrix products on a mean joint batch's tokens: forward, and for the gradient of activations."""
    found = data(tasks)
    weights = [
        module.weight.detach()
        for module in _base(found[0].task).base_model.encoder.modules()
        if isinstance(module, nn.Linear)
    ]
    rows: list[Any] = [encode(item, _processor()).train for item in found]
    mean = sum(sum(len(row["input_ids"]) for row in part) / len(part) for part in rows) / tasks
    tokens = round(mean * tasks * batch)
    inputs, outputs = ({size: torch.randn(tokens, size) for size in {w.shape[i] for w in weights}} for i in (1, 0))

    def work() -> None:
        for weight in weights:
            torch.mm(inputs[weight.shape[1]], weight.T)
            torch.mm(outputs[weight.shape[0]], weight)

    return work


def memory(tasks: int, folder: str) -> Claim:
    """Compare the peak memory of a short training on some tasks."""
    ours, peer = (peak_memory(partial(train, tasks, folder)) for train in (_train_joint, _train_separate))
    return Claim(
        name=f"k={tasks}, batch=4, memory",
        value=ours.total / peer.total,
        goal=MEMORY_GOAL,
        detail=f"{OURS} {ours}, {PEER} {peer}",
    )


def _train_joint(tasks: int, folder: str) -> None:
    calm()
    joint_trainer(tasks, 4, folder, max_steps=3).train()


def _train_separate(tasks: int, folder: str) -> None:
    calm()
    for one in lora_trainers(tasks, 4, folder, max_steps=3):
        one.train()


def stored(tasks: int, goal: float, folder: str) -> Claim:
    """Compare what some tasks take on disk, heads aside."""
    ours, theirs = Path(folder) / "ours", [Path(folder) / f"peer{number}" for number in range(tasks)]
    joint_trainer(tasks, 4, folder).save_model(str(ours))
    for one, path in zip(lora_trainers(tasks, 4, folder), theirs, strict=True):
        one.save_model(str(path))
    ratio = _bytes(ours) / sum(_bytes(path) for path in theirs)
    files = sum((path / "adapter_model.safetensors").stat().st_size for path in theirs)
    whole = (ours / "adapter_model.safetensors").stat().st_size
    return Claim(
        name=f"k={tasks}, bytes on disk",
        value=ratio,
        goal=goal,
        detail=f"whole files: {whole:,} against {files:,} bytes",
    )


def _bytes(folder: Path) -> int:
    state = load_file(folder / "adapter_model.safetensors")
    return sum(value.numel() * value.element_size() for name, value in state.items() if "lora_" in name)


def inference(run: Run, folder: str) -> Claim:
    """Compare a mixed batch of eight tasks, four rows each."""
    found = data(8)
    encoded = encode_jointly(found, _processor(), Mixing())
    train: Any = encoded.train
    rows = [train[sum(train.sizes[:task]) + row] for task in range(8) for row in range(4)]
    batch = dict(encoded.data_collator(rows))
    batch.pop("labels")
    task_ids = batch.pop("task_ids")
    trainer: Any = joint_trainer(8, 4, folder)
    ours = trainer.model.eval()
    peer = get_peft_model(_base(found[0].task), LoraConfig(r=RANK, target_modules=["query", "value"]), adapter_name="0")
    for number in range(1, 8):
        peer.add_adapter(str(number), LoraConfig(r=RANK, target_modules=["query", "value"]))
    names = [str(number) for number in task_ids.tolist()]
    peer.eval()
    with torch.inference_mode():
        times = run.interleave(
            {OURS: lambda: ours(**batch, task_ids=task_ids), PEER: lambda: peer(**batch, adapter_names=names)},
            rounds=60,
            quick_rounds=12,
            clock=time.perf_counter,
        )
    return ratio_claim("k=8, mixed inference", times.ratio(OURS, PEER), INFERENCE_GOAL, times)


if __name__ == "__main__":
    sys.exit(main(claims, __doc__ or ""))
