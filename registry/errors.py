"""The exception tree. Every error a user can cause is one line: what was asked, what is known, whose it is, what to do.

TuneryError                    anything a user can mend; the command line prints it on one line and exits with 2
├── SelectionError             a selection that cannot be read: "mixout:p=", {"nme": "mixout"}, 3
│   └── ConfigError            a selection that reads well, with a key or a value its plugin does not take
├── PluginError                something about a plugin itself
│   ├── UnknownPluginError     nobody installed offers that name
│   ├── BrokenPluginError      the plugin is installed and failed to load
│   ├── DuplicatePluginError   two distributions offer one name
│   └── InvalidPluginError     a class that does not meet its contract
├── CompatibilityError         plugins, model, task or ZeRO stage that do not go together
├── AnatomyError               a model whose parts tunery does not know
├── RecipeError                a recipe file or a flag that cannot be read
├── DataError                  a data set that cannot be read or does not fit the task
├── ArtifactError              a run, checkpoint or adapter that cannot be loaded
└── FederationError            clients that do not fit, or too few of them that answer
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TuneryError(Exception):
    """Anything a user can mend.

    Args:
        asked: what was asked and could not be done.
        known: what would have been accepted; listed in the message.
        owner: whose it is: a plugin with its distribution and version, or a file.
        remedy: what to do about it.
    """

    def __init__(self, asked: str, *, known: Iterable[str] = (), owner: str = "", remedy: str = "") -> None:
        self.asked = asked
        self.known = tuple(known)
        self.owner = owner
        self.remedy = remedy
        parts = [asked]
        if self.known:
            parts.append(f"known: {', '.join(self.known)}")
        if owner:
            parts.append(f"in {owner}")
        if remedy:
            parts.append(remedy)
        super().__init__(" ".join("; ".join(parts).split()))

    def __reduce__(self) -> tuple[object, ...]:
        """Survive pickling between processes, which would call the class with the message alone."""
        state = {"asked": self.asked, "known": self.known, "owner": self.owner, "remedy": self.remedy}
        return (_rebuild, (type(self), state))


def _rebuild(cls: type[TuneryError], state: dict[str, object]) -> TuneryError:
    asked = str(state.pop("asked"))
    return cls(asked, **state)  # type: ignore[arg-type]  # the keys are the constructor's own


class SelectionError(TuneryError):
    """A selection cannot be read."""


class ConfigError(SelectionError):
    """A plugin does not take that key or that value."""


class PluginError(TuneryError):
    """Something about a plugin itself is wrong."""


class UnknownPluginError(PluginError):
    """No installed distribution offers a plugin of that kind and name."""


class BrokenPluginError(PluginError):
    """A plugin is installed and failed to load, and this run names it."""


class DuplicatePluginError(PluginError):
    """Two distributions offer one name, and this run needs it."""


class InvalidPluginError(PluginError):
    """A class does not meet the contract of its kind."""


class CompatibilityError(TuneryError):
    """The chosen plugins, model, task or ZeRO stage do not go together."""


class AnatomyError(TuneryError):
    """tunery does not know where this model keeps that part."""


class RecipeError(TuneryError):
    """A recipe file or a command-line flag cannot be read."""


class DataError(TuneryError):
    """A data set cannot be read or does not fit the task."""


class ArtifactError(TuneryError):
    """A run, checkpoint or adapter cannot be loaded or written."""


class FederationError(TuneryError):
    """A client does not fit the federation, or too few of them answer."""


def did_you_mean(asked: str, known: Iterable[str]) -> str:
    """Return ``"did you mean 'x'?"`` for the known name nearest to ``asked``, or an empty string."""
    near = difflib.get_close_matches(asked, list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else ""
