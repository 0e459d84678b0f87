"""What is installed: kind and name to class, with where each came from."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .context import Support
from .contracts import KINDS, Plugin, Regularizer
from .errors import BrokenPluginError, DuplicatePluginError, InvalidPluginError, UnknownPluginError, did_you_mean

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a plugin comes from.

    Attributes:
        distribution: name of the installed distribution.
        version: its version.
        module: the module its entry point names.
        file: that module's file, empty if it could not be imported.
    """

    distribution: str
    version: str
    module: str
    file: str = ""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} ({self.module})"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One plugin class and where it comes from."""

    cls: type[Plugin]
    origin: Origin

    @property
    def kind(self) -> str:
        """``"strategy"``, ``"regularizer"`` or ``"probe"``."""
        return self.cls.kind

    @property
    def name(self) -> str:
        """What a user types."""
        return self.cls.name

    @property
    def owner(self) -> str:
        """How messages name it."""
        return f"{self.kind} {self.name!r} of {self.origin}"


@dataclass(frozen=True, kw_only=True)
class Broken:
    """An entry point that failed to load.

    Attributes:
        name: the entry point's name.
        origin: where it comes from.
        error: last line of what it raised.
    """

    name: str
    origin: Origin
    error: str


@dataclass
class Catalog:
    """Every plugin found, every clash and everything that failed to load."""

    entries: dict[tuple[str, str], list[Entry]] = field(default_factory=dict)
    broken: list[Broken] = field(default_factory=list)
    disabled: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Entry]:
        for kind in KINDS:
            for (entry_kind, _), entries in sorted(self.entries.items()):
                if entry_kind == kind:
                    yield from entries

    def add(self, cls: type[Plugin], origin: Origin) -> None:
        """Add a class.

        Raises:
            InvalidPluginError: it does not meet the contract of its kind.
        """
        check_contract(cls, origin)
        self.entries.setdefault((cls.kind, cls.name), []).append(Entry(cls=cls, origin=origin))

    def names(self, kind: str) -> list[str]:
        """Return the names of one kind, sorted."""
        return sorted(name for entry_kind, name in self.entries if entry_kind == kind)

    def find(self, kind: str, name: str) -> Entry:
        """Return the one plugin of that kind and name.

        Raises:
            UnknownPluginError: nobody offers it.
            DuplicatePluginError: more than one distribution offers it.
            BrokenPluginError: the distribution that offers it failed to load.
        """
        entries = self.entries.get((kind, name), [])
        if len(entries) > 1:
            raise DuplicatePluginError(
                f"{kind} {name!r} is offered by {' and by '.join(str(entry.origin) for entry in entries)}",
                remedy="uninstall one, or set TUNERY_DISABLE_PLUGINS to one of the distributions",
            )
        if entries:
            return entries[0]
        for broken in self.broken:
            if broken.name == name:
                raise BrokenPluginError(
                    f"{kind} {name!r} failed to load: {broken.error}",
                    owner=str(broken.origin),
                    remedy="mend or reinstall that distribution",
                )
        known = self.names(kind)
        hints = [did_you_mean(name, known)]
        hints += [f"{name!r} is a {other}" for other in KINDS if other != kind and (other, name) in self.entries]
        if self.disabled:
            hints.append(f"TUNERY_DISABLE_PLUGINS leaves out {', '.join(self.disabled)}")
        if self.broken:
            hints.append(f"failed to load: {', '.join(broken.name for broken in self.broken)}")
        raise UnknownPluginError(f"no {kind} is called {name!r}", known=known, remedy="; ".join(filter(None, hints)))


def check_contract(cls: type[Plugin], origin: Origin) -> None:
    """Refuse a class that does not meet the contract of its kind.

    Raises:
        InvalidPluginError: naming the class, its distribution and the first thing that is wrong.
    """
    shown = getattr(cls, "__name__", repr(cls))

    def refuse(why: str) -> InvalidPluginError:
        remedy = " Have you forgotten to leave out the parentheses?" if isinstance(cls, Plugin) else ""
        return InvalidPluginError(f"{shown} {why}{remedy}", owner=str(origin))

    if not isinstance(cls, type) or not issubclass(cls, Plugin):
        raise refuse("is not a subclass of Strategy, Regularizer or Probe.")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise refuse(f"does not define {missing}")
    for attribute in ("kind", "name", "summary", "reference"):
        value = getattr(cls, attribute, None)
        if not isinstance(value, str) or not value.strip() or "\n" in value:
            raise refuse(f"needs a one-line text in its class attribute {attribute!r}")
    if not _NAME.fullmatch(cls.name):
        raise refuse(f"has the name {cls.name!r}: use lower case letters, digits and underscores")
    if not issubclass(cls, KINDS.get(cls.kind, ())):
        raise refuse(f"has the kind {cls.kind!r}: leave that to Strategy, Regularizer or Probe")
    if not isinstance(cls.supports, Support):
        raise refuse("needs a Support in its class attribute 'supports'")
    config = cls.Config
    # A subclass of a dataclass without the decorator is one as well, whose new fields count for nothing.
    if not isinstance(config, type) or "__dataclass_params__" not in vars(config) or not _is_frozen(config):
        raise refuse("needs a Config that is a frozen dataclass: @dataclass(frozen=True, kw_only=True)")
    if any(item.init and not item.kw_only for item in dataclasses.fields(config)):
        raise refuse("needs a keyword-only Config: @dataclass(frozen=True, kw_only=True)")
    if any(item.name == "name" for item in dataclasses.fields(config)):
        raise refuse("has a Config field called 'name', which selects the plugin: rename it")
    if issubclass(cls, Regularizer) and not issubclass(config, Regularizer.Config):
        raise refuse("needs a Config that subclasses Regularizer.Config, which holds the weight")


def _is_frozen(config: type) -> bool:
    return bool(config.__dataclass_params__.frozen)  # type: ignore[attr-defined]
