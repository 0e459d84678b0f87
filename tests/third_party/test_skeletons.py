"""What ``tunery plugins new`` writes installs as it is, and the example and it keep every law."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tunery.core.scaffold import write_plugin_skeleton
from tunery.registry.contracts import KINDS

if TYPE_CHECKING:
    from conftest import Site

EXAMPLE = Path(__file__).parents[2] / "examples" / "tunery-noisytune"
# Names that, written as a class, would hide something the modules import.
NAMES = {"strategy": "annotated", "regularizer": "batch", "probe": "measurement_2"}

FIND = """
import json
from tunery.registry.loading import load_plugins
catalog = load_plugins().catalog
print(json.dumps([[e.kind, e.name, e.origin.distribution, e.origin.version] for e in catalog] + catalog.broken))
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A skeleton of each kind, and a copy of the example."""
    folder = tmp_path_factory.mktemp("sources")
    for kind in KINDS:
        write_plugin_skeleton(NAMES[kind], kind, folder)
    shutil.copytree(EXAMPLE, folder / EXAMPLE.name, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    return folder


@pytest.fixture(scope="module")
def installed(site: Site, sources: Path) -> Site:
    """All of them installed by pip."""
    site.pip_install(*sources.iterdir())
    return site


@pytest.mark.slow
def test_skeletons_install(installed: Site):
    """pip builds and installs what was written, and tunery finds it by name."""
    found = json.loads(installed.script(FIND))
    for kind, name in NAMES.items():
        assert [kind, name, f"tunery-{name.replace('_', '-')}", "0.1.0"] in found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_skeletons_and_example_keep_every_law(installed: Site, sources: Path):
    """Their own tests pass, on one process, DDP and every ZeRO stage: those of one model, in one session, for time."""
    options = ("--import-mode=importlib", "-q", "-p", "no:cacheprovider", "-k", "not llama")
    ran = installed.python("-m", "pytest", *options, str(sources))
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
