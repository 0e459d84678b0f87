"""What the server keeps: the adapter, the model it is evaluated in, and with a ``ProxyStrategy`` the stand-in and its versions.

Every client gets the adapter in every round. Of the stand-in's frozen part a node gets what it lacks: all of it once, and later
the slices that an alignment changed. With regularizers the first adapter of all comes with it: they may hold on to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import nn
from transformers import set_seed

from ...registry.errors import FederationError
from ..data.metrics import add_perplexity
from ..memory import give_back
from .payload import Payload, grouped
from .resident import Resident
from .rows import NoRows
from .stand_in import Changes, everything, find_changes, merge, pack
from .worker import ADAPTER, INITIAL, label_line, other_setup

_TIMING = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


class Server:
    """The server's side of every round.

    Args:
        resident: the prepared model; in one process with the clients, theirs too.
        full: the whole model, which a ``ProxyStrategy`` plugs its adapter into; ``None`` with any other strategy.
        validation: encoded rows that evaluate it.
        rows: the server's own rows, looked at without labels; ``None`` if it has none.
        run_id: tells this federation's versions from another one's.
    """

    def __init__(self, resident: Resident, full: nn.Module | None, validation: Any, rows: Any, run_id: str) -> None:
        self.resident = resident
        self.adapter = self.initial = resident.state()
        self.run_id = run_id
        self.changes: list[Changes] = []
        self._full = None if full is None else full.to(resident.trainer.args.device)
        self.validation = validation
        self._rows = rows
        self._has: dict[str, str] = {}
        self._evaluator: transformers.Trainer | None = None
        self._labels = label_line(resident)

    @property
    def version(self) -> str:
        """The version of everything but the adapter: of a stand-in one that counts on, else the base model's."""
        if self.resident.proxy is None:
            return self.resident.fingerprint
        return f"{self.run_id}:{len(self.changes)}"

    @property
    def realign_every(self) -> int:
        """Rounds between two alignments; 0 for never."""
        return 0 if self.resident.proxy is None else self.resident.proxy.realign_every

    def meet(self, replies: Mapping[str, Payload]) -> None:
        """Learn what nodes have, from what they describe.

        Raises:
            FederationError: a node has another base model, strategy, regularizer or option.
        """
        for node, reply in replies.items():
            version = str(reply.scalars.get("version", ""))
            if self.resident.proxy is None and version != self.version:
                raise FederationError(
                    f"client {node} has another base model than the server: {version[:12]} instead of "
                    f"{self.version[:12]}",
                    remedy="give every client the model the server has",
                )
            if "error" not in reply.scalars and reply.scalars.get("setup") != self.resident.setup:
                raise other_setup(node)
            self._has[node] = version

    def request(self, node: str, scalars: Mapping[str, Any]) -> Payload:
        """Return what ``node`` needs to train: the adapter, and what it lacks."""
        has = self._has.get(node, "")
        missing: Changes = {}
        if self.resident.proxy is not None:
            versions = [f"{self.run_id}:{number}" for number in range(len(self.changes) + 1)]
            known = has in versions
            missing = merge(self.changes[versions.index(has) :]) if known else everything(self.resident.frozen())
            has = has if known else ""
        arrays = {**grouped(ADAPTER, self.adapter), **pack(self.resident.frozen() if missing else {}, missing)}
        if missing and not has and self.resident.is_regularized:
            arrays |= grouped(INITIAL, self.initial)
        agreed = {"labels": self._labels, "setup": self.resident.setup}
        return Payload(arrays, {**scalars, **agreed, "version": self.version, "from_version": has})

    def heard(self, node: str, accepted: bool) -> None:
        """Remember what a node has now; of one whose answer did not count, nothing is known."""
        if accepted:
            self._has[node] = self.version
        elif self.resident.proxy is not None:
            self._has.pop(node, None)

    # ---- the stand-in

    @cached_property
    def statistics_like(self) -> dict[str, torch.Tensor]:
        """What statistics look like, which clients shall tell: those of a row of the server's own."""
        return {} if self._rows is None else self.resident.statistics([self._rows[0]])

    def _batches(self, seed: int) -> Iterable[Mapping[str, Any]]:
        if self._rows is None:
            return NoRows()
        size = self.resident.trainer.args.per_device_train_batch_size
        return self.resident.batches(self._rows, size, seed)

    def distill(self, seed: int) -> dict[str, float]:
        """Bring an untrained stand-in closer to the model; return what was measured."""
        proxy = self.resident.proxy
        if proxy is None or self._full is None:
            return {}
        set_seed(seed)
        measured = proxy.distill(self._full, self.resident.model, self._batches(seed), self.resident.trainer.run)
        self.adapter = self.resident.state()
        give_back()
        return dict(measured)

    def plug_in(self, adapter: Mapping[str, torch.Tensor]) -> nn.Module:
        """Return the full model with an adapter in it, which the stand-in then has too."""
        proxy = self.resident.proxy
        assert proxy is not None and self._full is not None
        self.resident.load(adapter)
        self._full = proxy.plug_in(self._full, self.resident.model, self.resident.trainer.run)
        return self._full

    def realign(self, statistics: Mapping[str, torch.Tensor], seed: int) -> dict[str, float]:
        """Bring the stand-in closer again, the adapter in both models; return what was measured."""
        proxy = self.resident.proxy
        assert proxy is not None
        full = self.plug_in(self.adapter)
        before = {name: value.clone() for name, value in self.resident.frozen().items()}
        set_seed(seed)
        run, batches = self.resident.trainer.run, self._batches(seed)
        measured = proxy.realign(full, self.resident.model, statistics, batches, run)
        self.changes.append(find_changes(before, self.resident.frozen()))
        del before
        give_back()
        return dict(measured)

    # ---- evaluation

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the model with the adapter in it: of a ``ProxyStrategy`` the full model."""
        if self.resident.proxy is None:
            self.resident.load(self.adapter)
            metrics = self.resident.trainer.evaluate(eval_dataset=self.validation)
        else:
            metrics = self.evaluator_of(self.plug_in(self.adapter)).evaluate(eval_dataset=self.validation)
        if self.resident.trainer.run.task.kind.is_language_modelling:
            metrics = add_perplexity(metrics)
        plain = {key.removeprefix("eval_"): value for key, value in metrics.items() if key.startswith("eval_")}
        return {key: float(value) for key, value in plain.items() if key not in _TIMING}

    def evaluator_of(self, model: nn.Module) -> transformers.Trainer:
        """Return a Trainer that evaluates the full model as the resident's does the stand-in."""
        trainer = self.resident.trainer
        if self._evaluator is None or self._evaluator.model is not model:
            self._evaluator = transformers.Trainer(
                model=model,
                args=trainer.args,
                data_collator=trainer.data_collator,
                processing_class=trainer.processing_class,
                compute_metrics=trainer.compute_metrics,
            )
            self._evaluator.remove_callback(transformers.PrinterCallback)
        return self._evaluator
