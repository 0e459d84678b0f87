"""Folders that hold strangers' distributions, put on the path of a new interpreter as ``pip install --target`` leaves them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


class Site:
    """A folder that new interpreters import from, beside what is installed anyway."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, distribution: str, module: str, source: str, *, name: str = "", version: str = "1.0") -> None:
        """Write a distribution by hand: its metadata, one entry point, and the module it names."""
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        metadata = f"Metadata-Version: 2.4\nName: {distribution}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[tunery]\n{name or module} = {module}\n", encoding="utf-8")
        (self.folder / f"{module}.py").write_text(source, encoding="utf-8")

    def python(self, *arguments: str, disabled: str = "") -> subprocess.CompletedProcess[str]:
        """Run a new interpreter that sees the folder."""
        return subprocess.run(
            [sys.executable, *arguments],
            check=False,
            capture_output=True,
            text=True,
            cwd=self.folder.parent,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")])),
                "TUNERY_DISABLE_PLUGINS": disabled,
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            },
        )

    def script(self, code: str, *arguments: str, disabled: str = "") -> str:
        """Run ``code`` and return the last line it printed; it has to end well."""
        ran = self.python("-c", code, *arguments, disabled=disabled)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout.strip().rpartition("\n")[-1]

    def pip_install(self, *sources: Path) -> None:
        """Install wheels or source folders without asking any index."""
        options = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
        command = [sys.executable, "-m", "pip", "install", *options, "--target", str(self.folder), *map(str, sources)]
        ran = subprocess.run(command, check=False, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A folder of its own for each test module."""
    return Site(tmp_path_factory.mktemp("strangers") / "site")


@pytest.fixture
def bare_site(tmp_path: Path) -> Site:
    """A folder with nothing in it."""
    return Site(tmp_path / "bare")
