"""The wheel holds the package and nothing else, and the metadata around it tells the truth."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from configparser import ConfigParser
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tunery

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CODE = ("registry", "core", "plugins", "benchmarks")
NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "runs", "results", "*.egg-info", "__pycache__")

PUBLIC = [
    "Anatomy",
    "AnatomySpec",
    "Batch",
    "LoadedRun",
    "Measurement",
    "PluginArguments",
    "PluginTrainerMixin",
    "Probe",
    "ProxyStrategy",
    "Regularizer",
    "RunContext",
    "Stage",
    "Strategy",
    "Subject",
    "Support",
    "Task",
    "TaskKind",
    "Trainer",
    "TrainingArguments",
    "TuneryError",
    "build_federated_options",
    "build_options",
    "export_run",
    "federate",
    "hookimpl",
    "keep_tasks",
    "load_run",
    "probe_model",
    "train",
]


def code_files() -> Iterator[str]:
    """Yield every Python file of the package, as its path below the root."""
    yield from (path.name for path in ROOT.glob("*.py"))
    for folder in CODE:
        yield from (path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy: building in place leaves a build/ folder whose stale files enter the next wheel."""
    source = tmp_path_factory.mktemp("source") / "any-folder-name"
    shutil.copytree(ROOT, source, ignore=NOT_SOURCE)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    built = subprocess.run(command, check=False, capture_output=True, text=True, cwd=out)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def contents(wheel: Path) -> set[str]:
    """Paths inside the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def read(wheel: Path, name: str) -> str:
    """Read one file of the wheel's dist-info folder."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"tunery-{tunery.__version__}.dist-info/{name}").decode()


def test_root_has_two_python_files():
    """Any other would be shipped, and importable, as a module of the package."""
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_wheel_top_level(contents: set[str]):
    """Installing tunery puts ``tunery`` into site-packages and nothing beside it."""
    assert {PurePosixPath(name).parts[0] for name in contents} == {
        "tunery",
        f"tunery-{tunery.__version__}.dist-info",
    }


def test_wheel_has_exactly_the_code(contents: set[str]):
    """No subpackage is forgotten in ``packages``, and no test or example slips in."""
    assert {name for name in contents if name.endswith(".py")} == {f"tunery/{name}" for name in code_files()}


def test_every_code_folder_is_a_package():
    """A folder without ``__init__.py`` would be invisible to import-linter, and to mypy half the time."""
    folders = {PurePosixPath(name).parent for name in code_files()}
    assert [str(folder) for folder in sorted(folders) if not (ROOT / folder / "__init__.py").exists()] == []


def test_wheel_has_the_data_files(contents: set[str]):
    """The bundled ZeRO presets, the suites and the typing marker are installed, and no other data file is."""
    presets = {f"tunery/core/deepspeed/zero{stage}.json" for stage in (1, 2, 3)}
    suites = {f"tunery/{path.relative_to(ROOT)}" for path in (ROOT / "benchmarks").rglob("*.yaml")}
    assert {PurePosixPath(name).parent.name for name in suites} == {"suites", "recipes"}
    assert {n for n in contents if n.startswith("tunery/") and not n.endswith(".py")} == presets | suites | {
        "tunery/py.typed"
    }


def test_wheel_passes_check_wheel_contents(wheel: Path):
    """Nothing compiled, duplicated or misplaced is in it."""
    command = [sys.executable, "-m", "check_wheel_contents", str(wheel)]
    checked = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_wheel_carries_the_licence(wheel: Path):
    """The Apache licence goes with every copy, as it asks."""
    assert read(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "License-Expression: Apache-2.0" in read(wheel, "METADATA").splitlines()


def test_entry_points_are_those_of_the_project(wheel: Path, contents: set[str]):
    """Each first-party plugin comes through the public door, and the module behind it is shipped."""
    parser = ConfigParser(delimiters="=")
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # the documented way to keep case
    parser.read_string(read(wheel, "entry_points.txt"))
    points = PROJECT["project"]["entry-points"]["tunery"]
    assert {group: dict(parser[group]) for group in parser.sections()} == {
        "console_scripts": PROJECT["project"]["scripts"],
        "tunery": points,
    }
    modules = {module.replace(".", "/") for module in points.values()}
    assert [m for m in sorted(modules) if not contents & {f"{m}.py", f"{m}/__init__.py"}] == []


def test_every_plugin_file_has_an_entry_point():
    """A plugin nobody registers would be dead code that looks alive."""
    registered = set(PROJECT["project"]["entry-points"]["tunery"].values())
    found = {
        f"tunery.plugins.{kind}.{path.stem}"
        for kind in ("strategies", "regularizers", "probes")
        for path in (ROOT / "plugins" / kind).iterdir()
        if not path.name.startswith("_")
    }
    assert found == {module for module in registered if module.startswith("tunery.plugins.")}


def test_version_is_said_once():
    """``tunery.__version__`` is the version the distribution carries."""
    assert tunery.__version__ == PROJECT["project"]["version"]


def test_import_is_light():
    """``import tunery`` loads no framework, so that the command line starts at once."""
    code = "import sys, tunery; print(*{'torch', 'transformers', 'peft', 'datasets', 'pydantic'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


def test_public_names_are_pinned():
    """Adding or losing a public name is a decision, made here."""
    assert tunery.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_resolves(name: str):
    """Every public name loads from the module that ``tunery`` says it lives in."""
    home = importlib.import_module(tunery._HOMES[name])
    assert getattr(tunery, name) is getattr(home, name)


def test_unknown_public_name():
    """A misspelt name is an ordinary AttributeError that names the package."""
    with pytest.raises(AttributeError, match=r"module 'tunery' has no attribute 'Trainr'"):
        _ = tunery.Trainr


def test_type_checkers_see_the_same_names():
    """What editors complete is what the package gives."""
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    seen = {
        alias.name: f"tunery.{node.module}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
    }
    assert seen == tunery._HOMES


def test_constraints_pin_every_requirement():
    """Each declared dependency has one exact pin, which satisfies what is declared."""
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r"([a-z0-9-]+)==([0-9a-z.]+)", line)
            assert match, f"not an exact, portable pin: {line}"
            pins[match[1]] = match[2]
    extras = PROJECT["project"]["optional-dependencies"].values()
    declared = [Requirement(line) for line in chain(PROJECT["project"]["dependencies"], *extras)]
    unmet = [
        str(requirement)
        for requirement in declared
        if requirement.name != "tunery"
        and not requirement.specifier.contains(pins.get(canonicalize_name(requirement.name), "0.dev0"))
    ]
    assert unmet == []
    assert pins["torch"] == "2.13.0"
