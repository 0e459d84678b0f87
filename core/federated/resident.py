"""The one prepared model of a process and its Trainer, which trains for any number of clients one after the other."""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PrinterCallback, set_seed

from ...registry.context import Task
from ...registry.errors import CompatibilityError
from ...registry.proxy import ProxyStrategy
from ..data.metrics import compute_metrics
from ..models import commit_of
from ..options import Options
from ..trainer import Trainer
from .rows import Batches


class Resident:
    """A model as its strategy prepared it, with its regularizers attached, and what moves weights in and out of it.

    Args:
        model: the model as loaded, which becomes what its strategy makes of it.
        task: what it is trained for.
        processor: its tokenizer or image processor.
        collate: makes batches of encoded rows.
        options: model and training arguments.

    Raises:
        CompatibilityError: what cannot be federated.
        TuneryError: plugins that do not fit.
    """

    def __init__(self, model: Any, task: Task, processor: Any, collate: Any, options: Options) -> None:
        set_seed(options.training.seed)
        args = copy.copy(options.training)
        args.disable_tqdm = True  # a bar for each client of each round would be all there is to see
        args.probes = None  # they measure the server's model: see :mod:`.probes`
        self.trainer = Trainer(
            model=model,
            args=args,
            task=task,
            base_model=options.run.model_name_or_path,
            base_revision=commit_of(options.run.model_name_or_path, options.run.model_revision),
            data_collator=collate,
            processing_class=processor,
            compute_metrics=compute_metrics(task),
        )
        self.trainer.remove_callback(PrinterCallback)
        strategy = self.trainer.recipe.strategy
        if len(self.trainer.stages) > 1:
            stages = ", ".join(stage.name for stage in self.trainer.stages)
            raise CompatibilityError(
                f"strategy {strategy.name if strategy else ''!r} trains in stages ({stages})",
                remedy="a federation has one",
            )
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.model.modules()):
            raise CompatibilityError("a model with batch norm cannot be federated: its statistics are no parameters")
        self.is_regularized = bool(self.trainer.recipe.regularizers)
        self.proxy = strategy if isinstance(strategy, ProxyStrategy) else None
        self.setup = self._setup()

    @property
    def model(self) -> nn.Module:
        """What trains: of a ``ProxyStrategy`` the stand-in."""
        return self.trainer._equipped

    @property
    def aligns(self) -> bool:
        """Whether a stand-in is aligned during tuning, on statistics that clients tell."""
        return self.proxy is not None and self.proxy.realign_every > 0

    @property
    def fingerprint(self) -> str:
        """What tells base models apart."""
        return str(self.trainer._base["fingerprint"])

    def _setup(self) -> str:
        """Return a hash of what server and clients must have alike, beside the base model: the strategy with its version and
        options, which regularizers, and, unless the server sends it, what neither trains nor is pre-trained.
        """
        recipe = self.trainer.recipe
        strategy = [one for one in recipe.describe() if one["kind"] == "strategy"]
        alike = [strategy, [regularizer.name for regularizer in recipe.regularizers]]
        digest = hashlib.sha256(json.dumps(alike, sort_keys=True, default=str).encode())
        drawn = {} if self.proxy is not None else self.frozen()
        for name, value in sorted(drawn.items()):
            if not self.trainer.run.is_pretrained(name):
                digest.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
                digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of everything that trains, also beside the model, by name, on the CPU."""
        return {name: value.detach().to("cpu", copy=True) for name, value in self._trained().items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Write everything that trains; ``state`` has all of it and nothing else."""
        with torch.no_grad():
            for name, value in self._trained().items():
                value.copy_(state[name])

    def attach_anew(self, initial: Mapping[str, torch.Tensor]) -> None:
        """Have regularizers take for pre-trained what is in the model now that all of it has come, ``initial`` included.

        Args:
            initial: everything that trains, as it was before the first round.
        """
        self.load(initial)
        self.trainer.detach()
        set_seed(self.trainer.run.seed)
        for regularizer in self.trainer.recipe.regularizers:
            regularizer.attach(self.model, self.trainer.run)

    def frozen(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers that belong to the model and do not train, by name; not copies."""
        trained = self._trained()
        return {name: value for name, value in self.model.state_dict().items() if name not in trained}

    def fit(self, rows: Any, learning_rate: float, seed: int) -> tuple[float, float]:
        """Train on ``rows`` with a fresh optimizer and a constant learning rate; return mean loss and seconds."""
        trainer = self.trainer
        set_seed(seed)
        trainer.train_dataset = rows
        trainer.args.learning_rate = learning_rate
        trainer.args.seed = seed
        trainer.optimizer = trainer.lr_scheduler = None
        started = time.monotonic()
        outcome = trainer.train()
        trainer.optimizer = trainer.lr_scheduler = None
        return float(outcome.training_loss), time.monotonic() - started

    def batches(self, rows: Any, batch_size: int, seed: int | None = None) -> Batches:
        """Return ``rows`` without labels, in batches on the model's device."""
        return Batches(rows, self.trainer.data_collator, batch_size, self.trainer.args.device, seed)

    def statistics(self, rows: Any) -> dict[str, torch.Tensor]:
        """Return what a ``ProxyStrategy`` tells of ``rows``, in float64 on the CPU."""
        assert self.proxy is not None
        batches = self.batches(rows, self.trainer.args.per_device_eval_batch_size)
        told = self.proxy.statistics(self.model, batches, self.trainer.run)
        return {name: value.detach().double().cpu() for name, value in told.items()}
