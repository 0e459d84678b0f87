"""Entry points to catalog: each loaded on its own, so that one broken plugin harms nobody else.

``TUNERY_DISABLE_PLUGINS=name-or-distribution,...`` leaves entry points out, and a name that fits none is warned of. There is no built-in list: tunery's own
plugins come in through the same entry-point group as everyone's.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import traceback
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

import pluggy

from . import hookspecs
from .catalog import Broken, Catalog, Origin
from .errors import BrokenPluginError, did_you_mean
from .hookspecs import PROJECT

if TYPE_CHECKING:
    from types import ModuleType

DISABLE_VARIABLE = "TUNERY_DISABLE_PLUGINS"
_KIND_HOOKS = ("tunery_strategies", "tunery_regularizers", "tunery_probes")


class Loaded:
    """The plugin manager and the catalog that were made from the installed entry points.

    Attributes:
        manager: pluggy's manager; ``manager.hook`` calls hooks.
        catalog: what was found.
    """

    def __init__(self, points: list[EntryPoint], disabled: frozenset[str] = frozenset()) -> None:
        self.manager = pluggy.PluginManager(PROJECT)
        self.manager.add_hookspecs(hookspecs)
        self.catalog = Catalog()
        # Sorted, and ours first, so that hooks run in one order whatever the installation order was.
        for point in sorted(points, key=lambda p: (_distribution(p) != PROJECT, _distribution(p), p.name, p.value)):
            if {point.name, _distribution(point)} & disabled:
                self.catalog.disabled.append(point.name)
            else:
                self._load(point)
        known = {name for point in points for name in (point.name, _distribution(point))}
        for name in sorted(disabled - known):
            near = did_you_mean(name, known)
            logging.getLogger(PROJECT).warning(
                "%s: no plugin or distribution is called %r%s", DISABLE_VARIABLE, name, f"; {near}" if near else ""
            )

    def _load(self, point: EntryPoint) -> None:
        name = point.value.partition(":")[0].strip()  # point.module raises where the value is no module's name
        origin = Origin(distribution=_distribution(point), version=_metadata(point, "Version"), module=name)
        try:
            module = importlib.import_module(name)
            origin = dataclasses.replace(origin, file=getattr(module, "__file__", None) or "")
            if not self.manager.is_registered(module):
                self._register(module, origin)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # a module that calls sys.exit() is as broken as any
            last = traceback.format_exception_only(error)[-1].strip()
            self.catalog.broken.append(Broken(name=point.name, origin=origin, error=" ".join(last.split())))

    def _register(self, module: ModuleType, origin: Origin) -> None:
        try:
            self.manager.register(module, name=f"{origin.distribution}:{origin.module}")
            self.manager.check_pending()  # a misspelt hook is an error, not silence
            found = []
            for hook in _KIND_HOOKS:
                for implementation in getattr(self.manager.hook, hook).get_hookimpls():
                    if implementation.plugin is module:
                        found += list(implementation.function())
            trial = Catalog()
            for cls in found:
                trial.add(cls, origin)
        except BaseException:
            if self.manager.is_registered(module):  # older pluggy keeps a module whose hook has a wrong argument
                self.manager.unregister(module)
            raise
        if not self.manager.get_hookcallers(module):
            self.manager.unregister(module)
            raise BrokenPluginError(
                f"module {origin.module} implements no hook of tunery", remedy="mark one with @hookimpl"
            )
        for key, entries in trial.entries.items():
            self.catalog.entries.setdefault(key, []).extend(entries)


def _distribution(point: EntryPoint) -> str:
    return _metadata(point, "Name")


def _metadata(point: EntryPoint, key: str) -> str:
    """Return a field of the distribution's metadata, which a broken installation may lack altogether."""
    metadata = point.dist.metadata if point.dist is not None else None
    return metadata[key] if metadata is not None and key in metadata else "unknown"


def disabled_names() -> frozenset[str]:
    """Return the names and distributions that the environment variable leaves out."""
    return frozenset(filter(None, (item.strip() for item in os.environ.get(DISABLE_VARIABLE, "").split(","))))


@cache
def _loaded(disabled: frozenset[str]) -> Loaded:
    return Loaded(list(entry_points(group=PROJECT)), disabled)


def load_plugins() -> Loaded:
    """Return the installed plugins; loaded once a process and setting of ``TUNERY_DISABLE_PLUGINS``."""
    return _loaded(disabled_names())
