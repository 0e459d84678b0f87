"""Listing plugins stays quick: the registry and first-party plugins import no framework."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tunery

ROOT = Path(tunery.__file__).parent
HEAVY = {"torch", "transformers", "peft", "datasets", "deepspeed", "numpy", "pytest"}
POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]["tunery"]
REGISTRY = sorted(f"tunery.registry.{path.stem}" for path in (ROOT / "registry").glob("[!_]*.py"))


def heavy_after(code: str) -> set[str]:
    """Return the frameworks that are loaded after running ``code`` in a new interpreter."""
    code = f"import sys; {code}; print(*set(sys.modules) & {HEAVY})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


@pytest.mark.parametrize("modules", [REGISTRY, sorted(POINTS.values())], ids=["registry", "plugins"])
def test_modules_import_no_framework(modules: list[str]):
    """What a plugin imports at the top of its module, every start of the command line pays for."""
    assert heavy_after(f"import {', '.join(modules)}") == set()


def test_loading_and_configuring_plugins_imports_no_framework():
    """A wrong option is reported before anything heavy is loaded."""
    assert (
        heavy_after("from tunery.core.recipe import choose; choose('lora:r=4', ['l2_sp'], ['weight_distance'])")
        == set()
    )
