"""From names to the configured plugins of one run, and the start-up check that they go together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..registry.catalog import Catalog, Entry
from ..registry.context import RunContext, Task
from ..registry.contracts import Plugin, Probe, Regularizer, Strategy
from ..registry.errors import ArtifactError, CompatibilityError, DuplicatePluginError
from ..registry.loading import DISABLE_VARIABLE, load_plugins
from ..registry.selection import Selection, configure, parse_selections

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Chosen:
    """One plugin of a run: where it comes from, and its instance."""

    entry: Entry
    plugin: Any

    def describe(self) -> dict[str, Any]:
        """Return what a manifest records of it."""
        return {
            "kind": self.entry.kind,
            "name": self.entry.name,
            "distribution": self.entry.origin.distribution,
            "version": self.entry.origin.version,
            "config": self.options(),
        }

    def options(self) -> dict[str, Any]:
        """Return its options as a selection gives them: the content of an open field stands among the others.

        A field whose metadata say ``recorded=False`` matters only when a run begins, and is left out.
        """
        options: dict[str, Any] = {}
        for item in dataclasses.fields(self.plugin.config):
            value = getattr(self.plugin.config, item.name)
            if item.metadata.get("recorded", True):
                options.update(value if item.metadata.get("open") else {item.name: value})
        return options


@dataclass(frozen=True)
class Recipe:
    """The plugins of one run, in order: the strategy, then regularizers and probes as they were given."""

    chosen: tuple[Chosen, ...] = field(default=())

    def _of(self, kind: type[Plugin]) -> list[Any]:
        return [item.plugin for item in self.chosen if isinstance(item.plugin, kind)]

    @property
    def strategy(self) -> Strategy | None:
        """The strategy, if one was chosen."""
        return next(iter(self._of(Strategy)), None)

    @property
    def regularizers(self) -> list[Regularizer]:
        """The regularizers whose weight is not zero: a zero weight is the same as not choosing it, to the bit.

        The one that replaces the task loss comes first: what it puts into the model, the others see.
        """
        chosen = [regularizer for regularizer in self._of(Regularizer) if regularizer.config.weight]
        return sorted(chosen, key=_keeps_task_loss)

    @property
    def probes(self) -> list[Probe]:
        """The probes."""
        return self._of(Probe)

    def describe(self) -> list[dict[str, Any]]:
        """Return what manifests and results record."""
        return [item.describe() for item in self.chosen]

    def check(self, model: nn.Module, run: RunContext) -> None:
        """Refuse combinations that cannot work, before anything is trained.

        Raises:
            CompatibilityError: naming the plugin, its distribution and what it does not go with.
            AnatomyError: a plugin needs to know the model's parts and nobody described them.
        """
        names = {item.entry.name for item in self.chosen}
        if len(run.tasks) > 1 and self.strategy is None:
            raise CompatibilityError("several tasks without a strategy", known=_taking_several("strategy"))
        for item in self.chosen:
            supports, owner = item.plugin.supports, str(item.entry.origin)
            asked = f"{item.entry.kind} {item.entry.name!r}"
            for task in run.tasks:
                if supports.tasks is not None and task.kind not in supports.tasks:
                    known = sorted(kind.value for kind in supports.tasks)
                    raise CompatibilityError(
                        f"{asked} does not take task kind {task.kind.value!r}", known=known, owner=owner
                    )
            if len(run.tasks) > 1 and not supports.several_tasks:
                known = _taking_several(item.entry.kind)
                raise CompatibilityError(f"{asked} does not take several tasks at once", known=known, owner=owner)
            if run.sharding.zero_stage not in supports.zero_stages:
                known = [f"zero{stage}" if stage else "no DeepSpeed" for stage in sorted(supports.zero_stages)]
                raise CompatibilityError(
                    f"{asked} does not run on ZeRO-{run.sharding.zero_stage}", known=known, owner=owner
                )
            if run.activation_checkpointing and not supports.activation_checkpointing:
                raise CompatibilityError(
                    f"{asked} does not go with activation_checkpointing", owner=owner, remedy="leave one of them out"
                )
            for other in sorted(names & supports.excludes.keys()):
                raise CompatibilityError(
                    f"{asked} does not go with {other!r}: {supports.excludes[other]}",
                    owner=owner,
                    remedy="leave one of them out",
                )
            if supports.needs_anatomy:
                run.anatomy(model)
        if len(self._replacing) > 1:
            raise CompatibilityError(
                f"regularizers {', '.join(map(repr, self._replacing))} each replace the task loss",
                remedy="choose one of them",
            )

    def check_stand_in(self, there: bool) -> None:
        """Refuse probes that compare a stand-in with its model where none trains, before anything does.

        Raises:
            CompatibilityError: naming the probe.
        """
        for probe in self.probes:
            if probe.supports.needs_stand_in and not there:
                raise CompatibilityError(
                    f"probe {probe.name!r} compares a stand-in with its model, and this strategy trains the model itself",
                    remedy="use a strategy that trains a stand-in",
                )

    @property
    def _earlier(self) -> tuple[str, Mapping[str, Any]] | None:
        """The run whose weights this one begins with, if there is one: its folder and manifest."""
        from .artifacts import MANIFEST, read_manifest

        folder = None if self.strategy is None else self.strategy.builds_on()
        if folder is None or not (Path(folder) / MANIFEST).is_file():  # an adapter alone does not say
            return None
        return folder, read_manifest(Path(folder))

    @property
    def earlier_tasks(self) -> tuple[Task, ...]:
        """The tasks of the run whose weights this one begins with; none where there is no such run.

        Raises:
            ArtifactError: its manifest cannot be read.
        """
        from .artifacts import tasks_of

        earlier = self._earlier
        return () if earlier is None else tasks_of(earlier[1])

    def check_base(self, model: nn.Module, run: RunContext, base: Mapping[str, Any]) -> None:
        """Refuse to begin with the weights of a run on another base model than ``base``, as a manifest describes it.

        A model with another head counts as the same where the backbone is: a classifier's run knows of no other part.

        Raises:
            ArtifactError: it was another, or the run's manifest cannot be read.
        """
        from .artifacts import backbone_fingerprint

        if (earlier := self._earlier) is None:
            return
        folder, theirs = earlier[0], earlier[1]["base_model"]
        same = theirs["fingerprint"] == base["fingerprint"]
        if not same and (theirs["class"] == base["class"] or theirs["fingerprint"] != backbone_fingerprint(model, run)):
            raise ArtifactError(
                f"{folder} was trained on another base model: {theirs['name_or_path'] or theirs['class']}",
                remedy="start from the model that run began with",
            )

    @property
    def _replacing(self) -> list[str]:
        return [regularizer.name for regularizer in self.regularizers if not _keeps_task_loss(regularizer)]

    def check_arguments(self, args: Any) -> None:
        """Refuse training arguments that a regularizer would make nothing of, or that would make nothing of it.

        Raises:
            CompatibilityError: label smoothing where the task loss is replaced; micro-batches of a single row, all ranks'
                together, for a regularizer that looks at relations between their rows.
        """
        if getattr(args, "label_smoothing_factor", 0) and self._replacing:
            raise CompatibilityError(
                f"regularizer {self._replacing[0]!r} replaces the task loss, label_smoothing_factor included",
                remedy="leave one of them out",
            )
        ranks = 1 if args.accelerator_config.split_batches else args.world_size
        together = [regularizer.name for regularizer in self.regularizers if regularizer.batch_wise]
        if together and args.train_batch_size * ranks < 2:
            raise CompatibilityError(
                f"regularizer {together[0]!r} would do nothing: it compares the rows of a micro-batch, and there is only one",
                remedy="raise per_device_train_batch_size",
            )


def _keeps_task_loss(regularizer: Regularizer) -> bool:
    return type(regularizer).task_loss is Regularizer.task_loss


def choose(strategy: object = None, regularizers: object = None, probes: object = None) -> Recipe:
    """Find, validate and instantiate the plugins of a run.

    Raises:
        SelectionError: a selection that cannot be read, or with options its plugin does not take.
        PluginError: a name nobody offers, or that failed to load, or that two distributions offer.
    """
    catalog = load_plugins().catalog
    chosen: list[Chosen] = []
    for kind, value in (("strategy", strategy), ("regularizer", regularizers), ("probe", probes)):
        chosen += [make(catalog, kind, selection) for selection in parse_selections(value, kind)]
    return Recipe(tuple(chosen))


def _taking_several(kind: str) -> list[str]:
    return [e.name for e in load_plugins().catalog if e.kind == kind and e.cls.supports.several_tasks]


def make(catalog: Catalog, kind: str, selection: Selection) -> Chosen:
    """Return one configured plugin."""
    entry = catalog.find(kind, selection.name)
    return Chosen(entry, entry.cls(configure(entry.cls, selection, owner=str(entry.origin))))


@cache
def _taught_anatomies() -> dict[str, Any]:
    """Return the architectures plugins describe, by ``config.model_type``.

    Raises:
        DuplicatePluginError: two modules describe one architecture.
    """
    specs: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for implementation in load_plugins().manager.hook.tunery_anatomies.get_hookimpls():
        offered = cast("Mapping[str, Any]", implementation.function())
        for model_type, spec in offered.items():
            if model_type in specs:
                raise DuplicatePluginError(
                    f"architecture {model_type!r} is described by {owners[model_type]} and by {implementation.plugin_name}",
                    remedy=f"uninstall one, or set {DISABLE_VARIABLE} to one of the distributions",
                )
            specs[model_type], owners[model_type] = spec, implementation.plugin_name
    return specs


def anatomy_finder() -> Callable[[nn.Module], Any]:
    """Return the function that finds a model's parts, plugins' descriptions included."""
    from .anatomy import find_anatomy

    return lambda model: find_anatomy(model, _taught_anatomies())


def observe(moment: str, **arguments: Any) -> None:
    """Call one of the run hooks ``tunery_run_begin``, ``tunery_measured``, ``tunery_run_end``."""
    getattr(load_plugins().manager.hook, moment)(**arguments)


__all__: Sequence[str] = ("Chosen", "Recipe", "anatomy_finder", "choose", "make", "observe")
