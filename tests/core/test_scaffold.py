"""``tunery plugins new`` writes a whole distribution or nothing."""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tunery.core.scaffold import write_plugin_skeleton
from tunery.registry.contracts import KINDS
from tunery.registry.errors import DuplicatePluginError, RecipeError
from tunery.registry.loading import Loaded
from tunery.registry.selection import Selection, configure


@pytest.mark.parametrize("kind", KINDS)
def test_writes_a_distribution(kind: str, tmp_path: Path):
    """Module, entry point, README and conformance test, with nothing left to fill in, and nothing else."""
    files = write_plugin_skeleton("my_method", kind, tmp_path / "new")
    folder = tmp_path / "new" / "tunery-my-method"
    names = {"pyproject.toml", "README.md", "tunery_my_method.py", "tests/test_conformance.py"}
    assert set(files) == {folder / name for name in names} == {path for path in folder.rglob("*") if path.is_file()}
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "tunery-my-method"
    assert project["entry-points"]["tunery"] == {"my_method": "tunery_my_method"}
    assert list((tmp_path / "new").iterdir()) == [folder]
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert "$" not in text and "TODO" not in text
        if file.suffix == ".py":
            tree = ast.parse(text)
            assert ast.get_docstring(tree)
    classes = [
        node for node in ast.parse((folder / "tunery_my_method.py").read_text()).body if isinstance(node, ast.ClassDef)
    ]
    assert [cls.name for cls in classes] == [f"MyMethod{kind.capitalize()}"]
    assert f"class TestMyMethod{kind.capitalize()}({kind.capitalize()}Laws)" in files[-1].read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["annotated", "ge", "any", "class", "support", "measurement", "strategy", "probe", "x_2b"]
)
def test_every_good_name_gives_a_plugin(name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also one that, as a class, would hide what the module imports, or is a word of Python's."""
    folder = write_plugin_skeleton(name, kind, tmp_path)[0].parent
    monkeypatch.syspath_prepend(folder)
    sys.modules.pop(f"tunery_{name}", None)  # of another kind
    catalog = Loaded([EntryPoint(name, f"tunery_{name}", "tunery")]).catalog
    cls = catalog.find(kind, name).cls
    assert configure(cls, Selection(name), owner="") == cls.Config()
    assert [entry.cls for entry in catalog] == [cls]


@pytest.mark.parametrize(
    "name", ["", "MyMethod", "my-method", "2fast", "_mine", "mine_", "my__method", "../mine", "mïne", "a b"]
)
def test_refuses_a_bad_name(name: str, tmp_path: Path):
    """A name that could not be a plugin's, a module's and a distribution's."""
    with pytest.raises(RecipeError, match="is no name for a plugin"):
        write_plugin_skeleton(name, "strategy", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_refuses_a_taken_name(kind: str, tmp_path: Path):
    """Of whatever kind; the owner is told."""
    with pytest.raises(
        DuplicatePluginError, match=r"'lora' is taken; in tunery \S+ \(tunery.plugins.strategies.lora\)"
    ):
        write_plugin_skeleton("lora", kind, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_refuses_an_unknown_kind(tmp_path: Path):
    """The kinds are listed."""
    with pytest.raises(RecipeError, match="known: strategy, regularizer, probe; did you mean 'regularizer'"):
        write_plugin_skeleton("mine", "regulariser", tmp_path)


def test_leaves_an_existing_folder_alone(tmp_path: Path):
    """Somebody's work is in it."""
    (tmp_path / "tunery-mine").mkdir()
    with pytest.raises(RecipeError, match="tunery-mine is there already"):
        write_plugin_skeleton("mine", "probe", tmp_path)
    assert list(tmp_path.rglob("*")) == [tmp_path / "tunery-mine"]


def test_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A full disk in the middle of it: one line, and no folder, not even a temporary one."""
    write = Path.write_text

    def full_disk(path: Path, *args: str, **kwargs: str) -> int:
        if path.suffix == ".py":
            raise OSError(28, "No space left on device")
        return write(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(RecipeError, match=r"cannot write .*tunery-mine: No space left on device"):
        write_plugin_skeleton("mine", "strategy", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("output_dir", ["a_file", "a_file/below"])
def test_output_dir_that_is_a_file(output_dir: str, tmp_path: Path):
    """The reason is the operating system's, on one line."""
    (tmp_path / "a_file").touch()
    with pytest.raises(RecipeError, match="cannot write"):
        write_plugin_skeleton("mine", "strategy", tmp_path / output_dir)


def test_name_too_long_for_a_file_system(tmp_path: Path):
    """It is a good name for a plugin, and no folder can have it."""
    with pytest.raises(RecipeError, match="File name too long"):
        write_plugin_skeleton("m" * 300, "strategy", tmp_path)
