"""The example is a distribution of its own: built, installed and used by name, and missed when it is gone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tunery
from tunery.registry.errors import ArtifactError

if TYPE_CHECKING:
    from conftest import Site

EXAMPLE = Path(__file__).parents[2] / "examples" / "tunery-noisytune"

FIND = """
import dataclasses, json
from tunery.registry.loading import load_plugins
print(json.dumps(dataclasses.asdict(load_plugins().catalog.find("strategy", "noisytune").origin)))
"""

TRAIN = """
import sys
import torch, transformers, tunery
folder = sys.argv[1]
torch.manual_seed(0)
sizes = dict(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
transformers.BertForSequenceClassification(transformers.BertConfig(**sizes)).save_pretrained(folder + "/base")
args = tunery.TrainingArguments(
    output_dir=folder + "/run", strategy="noisytune:intensity=0.1", max_steps=2, use_cpu=True, report_to="none"
)
rows = [{"input_ids": torch.arange(4), "labels": torch.tensor(i % 2)} for i in range(16)]
model = transformers.AutoModelForSequenceClassification.from_pretrained(folder + "/base")
trainer = tunery.Trainer(model=model, args=args, train_dataset=rows)
trainer.train()
trainer.save_model()
loaded = tunery.load_run(folder + "/run").model.state_dict()
assert all(torch.equal(value, loaded[name]) for name, value in trainer.model.state_dict().items())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's wheel, built from a copy: building leaves files behind."""
    source = tmp_path_factory.mktemp("example") / EXAMPLE.name
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("build", "dist", "*.egg-info", "__pycache__", ".*"))
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    built = subprocess.run(command, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(site: Site, wheel: Path) -> Site:
    """A site with the example installed by pip."""
    site.pip_install(wheel)
    return site


@pytest.fixture(scope="module")
def trained(installed: Site, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny run that named the example's strategy, and could be loaded back."""
    folder = tmp_path_factory.mktemp("trained")
    installed.script(TRAIN, str(folder))
    return folder


def test_wheel_holds_one_module(wheel: Path):
    """What a stranger ships is small: the module and its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if ".dist-info/" not in name] == ["tunery_noisytune.py"]


def test_module_is_short():
    """Writing a method takes under 40 lines."""
    assert len((EXAMPLE / "tunery_noisytune.py").read_text(encoding="utf-8").splitlines()) < 40


def test_readme_of_tunery_shows_all_of_it():
    """What the README calls the whole module is the module, to the letter."""
    module = (EXAMPLE / "tunery_noisytune.py").read_text(encoding="utf-8")
    assert module in (EXAMPLE.parents[1] / "README.md").read_text(encoding="utf-8")


def test_found_by_name_with_provenance(installed: Site):
    """Its distribution, version and file are known."""
    assert json.loads(installed.script(FIND)) == {
        "distribution": "tunery-noisytune",
        "version": "0.1.0",
        "module": "tunery_noisytune",
        "file": str(installed.folder / "tunery_noisytune.py"),
    }


def test_listed_by_the_command_line(installed: Site):
    """``tunery plugins list`` shows it among ours, ``plugins show`` its option."""
    rows = json.loads(installed.python("-m", "tunery", "plugins", "list", "--json").stdout)
    assert [row["distribution"] for row in rows if row["name"] == "noisytune"] == ["tunery-noisytune"]
    assert {"lora", "full"} < {row["name"] for row in rows}
    shown = json.loads(installed.python("-m", "tunery", "plugins", "show", "noisytune", "--json").stdout)
    assert [(option["name"], option["default"]) for option in shown["options"]] == [("intensity", "0.15")]
    assert shown["options"][0]["meaning"]


def test_trains_and_is_recorded(trained: Path):
    """A run names it, with what it was given."""
    manifest = json.loads((trained / "run" / "tunery.json").read_text(encoding="utf-8"))
    assert manifest["plugins"] == [
        {
            "kind": "strategy",
            "name": "noisytune",
            "distribution": "tunery-noisytune",
            "version": "0.1.0",
            "config": {"intensity": 0.1},
        }
    ]


def test_loading_needs_it(trained: Path):
    """Without the distribution, as here, the run says what to install."""
    with pytest.raises(ArtifactError, match="'noisytune'") as caught:
        tunery.load_run(trained / "run")
    assert str(caught.value).endswith("pip install tunery-noisytune==0.1.0")


def test_unknown_where_it_is_not_installed(bare_site: Site):
    """A name nobody offers is one line and exit code 2."""
    ran = bare_site.python("-m", "tunery", "plugins", "show", "noisytune")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "noisytune" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_readme_names_its_files():
    """The table in its README is true."""
    text = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    files = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert files and all((EXAMPLE / name).is_file() for name in files)
