"""The documentation names every hook with its exact arguments, and no hook that does not exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from tunery.registry import hookspecs

ROOT = Path(__file__).parents[1]


def declared() -> set[str]:
    """Return ``name(argument, ...)`` of every hook specification."""
    hooks = {name: hook for name, hook in vars(hookspecs).items() if hasattr(hook, f"{hookspecs.PROJECT}_spec")}
    return {f"{name}({', '.join(inspect.signature(hook).parameters)})" for name, hook in hooks.items()}


def test_hooks_are_documented_as_they_are():
    """Every hook stands in README.md or CONTRIBUTING.md as it is declared; a stale signature is found too."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages if page.exists())
    # A definition in an example carries annotations; only the bare form is a mention of the signature.
    mentioned = set(re.findall(r"\btunery_[a-z_]+\([a-z_, ]*\)", re.sub(r"\bdef tunery_\w+", "", text)))
    assert mentioned == declared()
