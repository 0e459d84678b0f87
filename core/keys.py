"""What ``--keys`` prints: every key of the argument classes, with its help and its default."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .arguments import PRESETS
from .options import CLASSES

_SET_BY_MACHINE = {"disable_tqdm": None, "dataloader_pin_memory": None}
_MORE = {"deepspeed": f"Or a preset that tunery brings: {', '.join(PRESETS)}."}


def help_text(more: Sequence[type] = (), defaults: Mapping[str, Any] | None = None) -> str:
    """Return every key of a run with its help and its default, grouped by argument class.

    Args:
        more: argument classes whose keys come first.
        defaults: other ones than those of the classes.
    """
    return describe_keys((*more, *CLASSES), {**_SET_BY_MACHINE, **(defaults or {})})


def describe_keys(classes: Sequence[type], defaults: Mapping[str, Any] | None = None) -> str:
    """Return the keys of argument classes with their help and, where it does not speak of one, their default.

    Args:
        classes: of the keys.
        defaults: other ones than those of the classes; ``None`` shows none.
    """
    changed = defaults or {}
    lines = []
    for cls in classes:
        lines.append(f"\n{cls.__name__}")
        for item in dataclasses.fields(cls):
            if item.init and not item.name.startswith("_"):
                text = " ".join(str(item.metadata.get("help", "")).replace("%%", "%").split())
                default = _written(changed[item.name] if item.name in changed else _default(item))
                if default and "default" not in text.lower():
                    text += f" Default: {default}."
                lines.append(f"  --{item.name}  {' '.join(filter(None, (text, _MORE.get(item.name))))}")
    return "\n".join(lines)


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return None if item.default is dataclasses.MISSING else item.default


def _written(value: Any) -> str:
    """Return a value as one writes it behind a flag; nothing for what is empty."""
    value = getattr(value, "value", value)  # of an enumeration
    if value is None or isinstance(value, dict):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
