"""The probes of a federation: what they measure on the server, on the rows that evaluate it, and what is shown of it.

A probe that compares a stand-in with its model (``Support.needs_stand_in``) is handed the stand-in, any other one the model
that the result is about: the full one with the adapter in it. Nothing it does changes what rounds compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import transformers

from ...registry.context import Subject
from ..alignment import whole_of
from ..probing import Snapshot, measure, own_batches
from ..recipe import Recipe, observe
from .server import Server

BEGIN, BEFORE_ALIGNMENT, ROUND = "begin", "before_alignment", "round"
Rows = list[dict[str, Any]]


class ServerProbes:
    """The probes that the server of a federation measures with.

    Args:
        recipe: holds the probes, and nothing else.
        server: whose adapter and models they measure.

    Raises:
        CompatibilityError: a probe that does not fit the model or the strategy.
    """

    def __init__(self, recipe: Recipe, server: Server) -> None:
        self.recipe = recipe
        self._server = server
        self._resident = server.resident
        trainer = self._resident.trainer
        Recipe((*trainer.recipe.chosen, *recipe.chosen)).check(self._resident.model, trainer.run)
        recipe.check_stand_in(self._resident.proxy is not None)

    def measure(self, moment: str, done: int) -> Rows:
        """Measure with every probe now; return rows as ``measurements.jsonl`` of other runs holds them, without the step.

        Args:
            moment: ``begin``, ``before_alignment`` or ``round``, its end.
            done: rounds done.
        """
        found: Rows = []
        for probe in self.recipe.probes:
            for m in measure(probe, self._subject(probe.supports.needs_stand_in, done)):
                observe("tunery_measured", run=self._resident.trainer.run, measurement=m)
                row = {"moment": moment, "probe": probe.name, "name": m.name, "value": m.value, "unit": m.unit}
                found.append({**row, **m.where})
        return found

    def _subject(self, compares: bool, done: int) -> Subject:
        """Return the model that the server has now, or the stand-in where that is to be compared with it."""
        server, resident = self._server, self._resident
        proxy = resident.proxy
        trainer: transformers.Trainer
        if compares or proxy is None:
            resident.load(server.adapter)
            trainer, model, reference = resident.trainer, resident.model, self._start
            whole = whole_of(proxy, model, resident.trainer.run)
        else:
            reference, whole = self._full_start, None  # before the adapter of now is plugged in
            model = server.plug_in(server.adapter)
            trainer = server.evaluator_of(model)
        return Subject(
            model=model,
            run=resident.trainer.run,
            reference=reference,
            evaluate=lambda: _evaluate(trainer, server.validation),
            batches=lambda: self._batches(trainer),
            step=done,
            whole=whole,
        )

    @cached_property
    def _start(self) -> Snapshot:
        self._resident.load(self._server.initial)
        start = Snapshot(self._resident.model, self._resident.trainer.run.sharding)
        self._resident.load(self._server.adapter)
        return start

    @cached_property
    def _full_start(self) -> Snapshot:
        return Snapshot(self._server.plug_in(self._server.initial), self._resident.trainer.run.sharding)

    def _batches(self, trainer: Any) -> Iterator[Mapping[str, Any]]:
        loader = trainer.get_eval_dataloader(self._server.validation)
        for batch in own_batches(loader, trainer.args.per_device_eval_batch_size, self._resident.trainer.run.sharding):
            yield trainer._prepare_inputs(batch)


def _evaluate(trainer: transformers.Trainer, rows: Any) -> dict[str, float]:
    loader = trainer.get_eval_dataloader(rows)
    return dict(trainer.evaluation_loop(loader, description="Probe", metric_key_prefix="eval").metrics or {})


def course(began: Sequence[Mapping[str, Any]], rounds: Sequence[Mapping[str, Any]]) -> Rows:
    """Return every measurement of a federation with the round it belongs to, in order; 0 is before the first.

    Args:
        began: what was measured before the first round.
        rounds: the rows of ``rounds.jsonl``.
    """
    return [
        {"round": number, **row}
        for number, rows in ((0, began), *((each["round"], each.get("probes", ())) for each in rounds))
        for row in rows
    ]


_FIXED = frozenset({"round", "moment", "probe", "name", "value", "unit"})


def overall(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the measurements that belong to no layer, draw or other part."""
    return [row for row in rows if row.keys() <= _FIXED]
