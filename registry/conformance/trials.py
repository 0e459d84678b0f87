"""One short training run, described by plain data, so that one process and every rank of a worker group run the same."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .models import EVALUATED, MODELS, base_model, workspace
from .workers import RANKS, STAGES, on_stage

if TYPE_CHECKING:
    import torch

ONE = "one"
EVERYWHERE = (ONE, *STAGES)
WEIGHT_FILES = ("adapter_model.safetensors", "model.safetensors")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What to train, how, and for how long.

    Attributes:
        model: a key of ``MODELS``.
        dropout: whether the base model has dropout.
        strategy: its selection, or ``None``.
        regularizers: their selections.
        probes: their selections; they measure after every second step.
        steps: optimizer steps.
        batch: rows of one optimizer step, over all ranks and micro-batches.
        accumulation: micro-batches of one optimizer step on one rank.
        rows: size of the dataset.
        seed: the run's seed.
        save: whether every step leaves a checkpoint.
        tokenizer: whether the Trainer is given the model's tokenizer, which stages without labels learn with.
        arguments_first: whether the training arguments are made before the model is loaded, as most scripts do it; ZeRO-3
            then shards the model while it is loaded, otherwise when training begins.
        options: further training arguments.
        tasks: how many tasks its rows belong to, in turn.
        only: keep the rows of this one of them.
        again: tells apart two runs that are the same otherwise; equal trials are run once.
    """

    model: str = "bert_classifier"
    dropout: bool = False
    strategy: str | Mapping[str, Any] | None = None
    regularizers: tuple[str, ...] = ()
    probes: tuple[str, ...] = ()
    steps: int = 4
    batch: int = 8
    accumulation: int = 1
    rows: int = 40
    seed: int = 7
    save: bool = False
    tokenizer: bool = False
    arguments_first: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    tasks: int = 1
    only: int | None = None
    again: int = 0

    def but(self, **changes: Any) -> Trial:
        """Return this trial with something changed; ``options`` are added to those there are."""
        changes["options"] = {**self.options, **changes.get("options", {})}
        return dataclasses.replace(self, **changes)

    def run(self, where: str = ONE, resume: int | str | None = None) -> Outcome:
        """Run it on one process or on two of a stage; the same one is run once a session.

        Args:
            where: ``"one"``, or one of ``STAGES``.
            resume: the step after which the run was killed, or what to start from by its path in the run folder: start
                from the checkpoint it left.

        Raises:
            TuneryError: what tunery refuses, on whatever process.
            WorkerError: a worker that failed otherwise, with what it wrote to stderr.
        """
        return _run(json.dumps(dataclasses.asdict(self), sort_keys=True), where, resume)

    def job(self, where: str, folder: Path, resume: Path | None = None) -> Job:
        """Return this trial as something one process, or every rank of a worker group, can do."""
        return Job(trial=self, where=where, folder=folder, base=base_model(self.model, self.dropout), resume=resume)

    def trainer(self, folder: Path, **arguments: Any) -> Any:
        """Return its ``tunery.Trainer`` on one process, nothing trained yet; ``arguments`` go to the Trainer."""
        return self.job(ONE, folder).trainer(**arguments)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a trial left.

    Attributes:
        folder: its run folder.
        logs: the Trainer's log history.
        answers: logits of the trained model, where it ran on one process.
    """

    folder: Path
    logs: list[dict[str, Any]]
    answers: list[Any] | None

    @property
    def logits(self) -> torch.Tensor:
        """What the trained model answers to the first rows, before it was saved."""
        import torch

        return torch.tensor(self.answers)

    def logged(self, key: str) -> list[float]:
        """Return every logged value of ``key``, in order: ``loss`` and ``grad_norm`` once a step."""
        return [row[key] for row in self.logs if key in row]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The saved weights."""
        from safetensors.torch import load_file

        return load_file(self._file)

    @property
    def bits(self) -> str:
        """Hash of the saved weights."""
        return hashlib.sha256(self._file.read_bytes()).hexdigest()

    @property
    def measurements(self) -> list[dict[str, Any]]:
        """What the probes measured."""
        return [json.loads(line) for line in (self.folder / "measurements.jsonl").read_text("utf-8").splitlines()]

    @property
    def _file(self) -> Path:
        return next(path for path in (self.folder / name for name in WEIGHT_FILES) if path.is_file())


@cache
def _run(described: str, where: str, resume: int | str | None) -> Outcome:
    trial = Trial(**json.loads(described))
    name = hashlib.sha256(f"{described}{where}{resume}".encode()).hexdigest()[:16]
    left = f"checkpoint-{resume}" if isinstance(resume, int) else resume
    checkpoint = None if left is None else _run(described, where, None).folder / left
    job = trial.job(where, workspace() / "runs" / name, checkpoint)
    logs, answers = perform(job) if where == ONE else on_stage(where, perform, job)
    return Outcome(folder=job.folder, logs=logs, answers=answers)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A trial at a place.

    Attributes:
        trial: what to run.
        where: ``"one"``, or a stage.
        folder: the run folder.
        base: the base model's folder.
        resume: the checkpoint to start from, if any.
    """

    trial: Trial
    where: str
    folder: Path
    base: Path
    resume: Path | None = None

    def trainer(self, **arguments: Any) -> Any:
        """Return the ``tunery.Trainer``; ``arguments`` go to it."""
        import tunery

        tiny = MODELS[self.trial.model]
        rows = tiny.rows(self.trial.rows, self.trial.tasks)
        if self.trial.tasks > 1:
            arguments["task"] = tiny.tasks(self.trial.tasks)
            rows = [row for row in rows if self.trial.only in (None, row["task_ids"])]
        model = None if self.trial.arguments_first else tiny.load(self.base)
        args = tunery.TrainingArguments(**self.arguments())
        if self.where == "zero3":
            # The preset's "auto" is the square of the width: less than one matrix of a tiny model.
            args.hf_deepspeed_config.config["zero_optimization"]["reduce_bucket_size"] = 10_000
        model = model or tiny.load(self.base)
        if self.trial.tokenizer:
            from transformers import default_data_collator

            arguments = {"processing_class": tiny.tokenizer(), "data_collator": default_data_collator, **arguments}
        return tunery.Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:EVALUATED], **arguments)

    def arguments(self) -> dict[str, Any]:
        """Return the training arguments."""
        trial, ranks = self.trial, 1 if self.where == ONE else RANKS
        return {
            "output_dir": str(self.folder),
            "use_cpu": True,
            "ddp_backend": None if self.where == ONE else "gloo",
            "deepspeed": self.where if self.where.startswith("zero") else None,
            "strategy": trial.strategy,
            "regularizers": list(trial.regularizers),
            "probes": list(trial.probes),
            "max_steps": trial.steps,
            "per_device_train_batch_size": trial.batch // (ranks * trial.accumulation),
            "gradient_accumulation_steps": trial.accumulation,
            "learning_rate": 1e-3,
            "seed": trial.seed,
            "logging_steps": 1,
            "save_strategy": "steps" if trial.save else "no",
            "save_steps": 1,
            "eval_strategy": "steps" if trial.probes else "no",
            "eval_steps": 2,
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **trial.options,
        }


def perform(job: Job) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Train and save; return the log history and, where one process knows them, the trained model's answers."""
    with tiny_process():
        trainer = job.trainer()
        trainer.train(resume_from_checkpoint=None if job.resume is None else str(job.resume))
        trainer.save_model()
        tiny = MODELS[job.trial.model]
        answers = tiny.logits(trainer.model, job.trial.tasks).tolist() if job.where == ONE else None
        return trainer.state.log_history, answers


def held(job: Job, name: str) -> list[tuple[int, int]]:
    """Train; return of every module's tensor ``name`` how many numbers this rank keeps, and how many it has."""
    with tiny_process():
        trainer = job.trainer()
        trainer.train()
        found = [getattr(module, name) for module in trainer.model.modules() if hasattr(module, name)]
        whole = [getattr(tensor, "ds_numel", tensor.numel()) for tensor in found]
        return [(getattr(tensor, "ds_tensor", tensor).numel(), n) for tensor, n in zip(found, whole, strict=True)]


@contextmanager
def tiny_process() -> Iterator[None]:
    """Inside, a tiny training is quick: one thread, and no garbage collection of what lived before."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)
