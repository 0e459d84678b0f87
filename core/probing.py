"""When probes run, the guard that leaves no trace of them, and the measurement log."""

from __future__ import annotations

import json
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from ..registry.context import Measurement, Subject, Task
from ..registry.contracts import Probe
from ..registry.errors import DataError
from ..registry.selection import parse_selection
from ..registry.sharding import Sharding

MEASUREMENTS = "measurements.jsonl"


class Snapshot:
    """The pre-trained values of the parameters that train: this rank's pieces, in host memory (a ``Reference``)."""

    def __init__(self, model: nn.Module, sharding: Sharding) -> None:
        self._model = model
        self._sharding = sharding
        # Whole here if the model is not sharded yet; cut to this rank's piece when asked for.
        self._kept = {
            name: sharding.local(parameter).to("cpu", copy=True)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    def pieces(self) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
        """Yield name, live parameter and this rank's piece of its pre-trained value."""
        for name, parameter in self._model.named_parameters():
            if name in self._kept:
                kept, local = self._kept[name], self._sharding.local(parameter)
                same = kept.numel() == local.numel()
                yield name, parameter, kept if same else self._sharding.local_of(parameter, kept)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Give back RNG states, train/eval modes, buffers and gradients as they were, also after an error.

    Parameters are the probe's duty: it changes them only inside ``Sharding.perturbed``.
    """
    rng = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in grads:
        parameter.grad = None
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)
        for parameter, grad in grads:
            parameter.grad = grad
        random.setstate(rng[0])
        np.random.set_state(rng[1])
        torch.set_rng_state(rng[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


@contextmanager
def _unequipped(model: nn.Module) -> Iterator[None]:
    """Take back what a Trainer and accelerate note on a model and its config, with which another would go astray."""
    owners = {id(owner): owner for module in model.modules() for owner in (module, getattr(module, "config", None))}
    kept = [(vars(owner), dict(vars(owner))) for owner in owners.values() if hasattr(owner, "__dict__")]
    try:
        yield
    finally:
        for attributes, before in kept:
            attributes.clear()
            attributes.update(before)


def measure(probe: Probe, subject: Subject) -> list[Measurement]:
    """Run one probe on ``subject``, in eval mode, and leave everything as it was."""
    with untouched(subject.model):
        subject.model.eval()
        torch.manual_seed(subject.run.seed)
        return list(probe.measure(subject))


def probe_model(
    model: nn.Module,
    probe: str | Mapping[str, Any],
    rows: Any = None,
    *,
    task: Task | None = None,
    data_collator: Any = None,
    batch_size: int = 8,
    seed: int = 42,
) -> list[Measurement]:
    """Measure a bare model with one probe, no training; its weights stand for the pre-trained ones too.

    Args:
        model: a ``PreTrainedModel`` or a ``PeftModel``, which is moved where a Trainer would train it, and left as it was.
        probe: its selection, ``"gaussian:draws=3"`` or a dict.
        rows: the evaluation set, as a Trainer takes it, or a ``DataLoader`` of it, whose order and sampler are not looked
            at; ``None`` for probes that need none.
        task: what the rows are; default: told from the model's class and config.
        data_collator: makes a batch of rows; default: the loader's, else transformers' own.
        batch_size: rows of a batch; a loader's own goes first.
        seed: the run's seed.

    Raises:
        TuneryError: the probe or the model cannot be used.
    """
    from .arguments import TrainingArguments
    from .data.metrics import compute_metrics
    from .trainer import Trainer  # which imports this module

    if isinstance(rows, DataLoader):
        batch_size = rows.batch_size or batch_size
        data_collator, rows = data_collator or rows.collate_fn, rows.dataset
    with _unequipped(model), untouched(model), tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                probes=[str(parse_selection(probe, "probe"))],
                seed=seed,
                per_device_eval_batch_size=batch_size,
                report_to="none",
                disable_tqdm=True,
            ),
            task=task,
            eval_dataset=rows,
            data_collator=data_collator,
        )
        if len(trainer.run.tasks) == 1:
            trainer.compute_metrics = compute_metrics(trainer.run.task)
        return measure(trainer.recipe.probes[0], trainer.subject())


def shares(rows: int, batch_size: int, ranks: int, rank: int) -> list[range]:
    """Return which rows each batch of one rank has: every row is in one batch, and all ranks have equally many batches.

    Batches differ by at most one row and none is empty.

    Raises:
        DataError: there are fewer rows than ranks.
    """
    if rows < ranks:
        raise DataError(
            f"an evaluation set of {rows} rows for {ranks} processes", remedy="evaluate at least one row each"
        )
    batches = max(1, min(math.ceil(rows / (batch_size * ranks)), rows // ranks))
    bounds = [rows * number // (batches * ranks) for number in range(batches * ranks + 1)]
    return [range(bounds[number], bounds[number + 1]) for number in range(rank, batches * ranks, ranks)]


def own_batches(loader: DataLoader[Any], batch_size: int, sharding: Sharding) -> Iterable[Any]:
    """Return this rank's batches of a loader's rows, each row on one rank; a stream's as the loader has them.

    accelerate fills its last batches up with rows from the beginning, which would count twice.
    """
    rows: Any = loader.dataset
    if not hasattr(rows, "__len__"):
        return loader
    own: Any = shares(len(rows), batch_size, sharding.world_size, sharding.rank)
    return DataLoader(rows, batch_sampler=own, collate_fn=loader.collate_fn)


class MeasurementLog:
    """``measurements.jsonl``: one measurement a line, appended as it is made, cut back when a run resumes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / MEASUREMENTS

    def append(self, probe: str, moment: str, step: int, measurements: Sequence[Measurement]) -> None:
        """Append measurements of one probe at one moment."""
        rows = [
            {
                "probe": probe,
                "moment": moment,
                "step": step,
                "name": m.name,
                "value": m.value,
                "unit": m.unit,
                **m.where,
            }
            for m in measurements
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())

    def rewind(self, step: int) -> None:
        """Drop what was measured after the checkpoint of ``step`` was written; -1 drops everything.

        That is everything from the first row of a later step or of a run's end, or the first line that was not finished.
        """
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines()
        kept = takewhile(lambda line: _step_of(line) <= step, lines)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        temporary.replace(self.path)


def _step_of(line: str) -> float:
    try:
        row = json.loads(line)
        return math.inf if row["moment"] == "end" else float(row["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


class Probing:
    """The probes of a run: what they measure, and when."""

    def __init__(self, probes: Sequence[Probe], moments: Sequence[str], folder: Path) -> None:
        self.probes = probes
        self.moments = moments
        self.log = MeasurementLog(folder)

    def at(
        self,
        moment: str,
        subject: Subject,
        report: Callable[[dict[str, float]], None],
        observe: Callable[[Measurement], None],
    ) -> None:
        """Run every probe at ``moment``; rank 0 writes the log, reports overall values and tells observers.

        A measurement without ``where`` is an overall value and is reported as ``probe/<probe>/<name>``.
        """
        if moment not in self.moments:
            return
        for probe in self.probes:
            measurements = measure(probe, subject)
            if subject.run.sharding.rank == 0:
                self.log.append(probe.name, moment, subject.step, measurements)
                for measurement in measurements:
                    observe(measurement)
            report({f"probe/{probe.name}/{m.name}": m.value for m in measurements if not m.where})
