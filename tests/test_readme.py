"""The README's code runs: every ``python`` and ``bash`` block whose info string does not say ``no-run``, in order."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
LANGUAGES = ("python", "bash")


@dataclass(frozen=True)
class Block:
    """One fenced block: the line it starts on, its info string's words, its code."""

    line: int
    words: tuple[str, ...]
    code: str

    @property
    def runs(self) -> bool:
        """Whether the reader is promised that it works as it stands."""
        return self.words[:1] != () and self.words[0] in LANGUAGES and "no-run" not in self.words


def blocks() -> list[Block]:
    """Read the README's fenced blocks; none where there is no README, which a test of its own reports."""
    text = README.read_text(encoding="utf-8") if README.exists() else ""
    fences = [token for token in MarkdownIt().parse(text) if token.type == "fence" and token.map]
    return [Block(token.map[0] + 1, tuple(token.info.split()), token.content) for token in fences if token.map]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, shared by the blocks: a later one may use what an earlier one made."""
    copy = tmp_path_factory.mktemp("readme") / "checkout"
    ignore = shutil.ignore_patterns(".*", "build", "dist", "runs", "results", "*.egg-info", "__pycache__")
    return Path(shutil.copytree(ROOT, copy, ignore=ignore))


def test_readme_has_code_that_runs():
    """The README exists and shows at least one thing that works as it stands."""
    assert README.exists(), "README.md is missing"
    assert any(block.runs for block in blocks())


def test_languages_are_spelt_so_that_they_run():
    """A block marked ``py`` or ``sh`` would silently not be tested."""
    aliases = {"py", "python3", "pycon", "sh", "shell", "zsh", "console"}
    assert [f"README.md:{block.line}" for block in blocks() if aliases.intersection(block.words[:1])] == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("block", [b for b in blocks() if b.runs], ids=lambda block: f"line{block.line}")
def test_block_runs(block: Block, checkout: Path, tmp_path: Path):
    """The block does what it says, with ``tunery`` on the PATH, in a copy of the repository."""
    script = tmp_path / "block"
    script.write_text(block.code, encoding="utf-8")
    interpreter = [sys.executable] if block.words[0] == "python" else ["bash", "-euo", "pipefail"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ran = subprocess.run(
        [*interpreter, str(script)],
        check=False,
        cwd=checkout,
        env={**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ran.returncode == 0, f"README.md:{block.line} ended with {ran.returncode}:\n{ran.stdout[-4000:]}"
