"""What a run leaves: exports that others load without tunery, manifests that tell, folders that are whole or not there."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from peft import PeftModel, PolyConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertModel, set_seed

import tunery
from tunery.core import artifacts
from tunery.core.artifacts import (
    fingerprint,
    folder_in_place,
    git_state,
    last_checkpoint,
    read_manifest,
    seal,
    strategy_of,
    tasks_of,
    write_json,
)
from tunery.core.context import infer_task, make_context
from tunery.core.finished import export_run, load_run
from tunery.core.models import label_config, load_model
from tunery.core.weights import load_weights
from tunery.plugins.adapters import export_adapter
from tunery.registry.context import Task, TaskKind
from tunery.registry.errors import ArtifactError, CompatibilityError

TASK = Task(name="rows", kind=TaskKind.CLASSIFICATION, label_names=("no", "yes"), metrics=("accuracy",))
STRATEGIES = {
    "full": "full",
    "head": "head",
    "lora": "lora:r=2",
    "lora_merged": "lora:r=2",
    "peft": "peft:peft_type=IA3",
    "peft_merged": "peft:peft_type=IA3",
    "prompt": "peft:peft_type=PROMPT_TUNING,num_virtual_tokens=2",
    "multi_lora": "multi_lora:r=2",
    "multi_lora_merged": "multi_lora:r=2",
}
ADAPTERS = {"lora", "peft", "prompt", "multi_lora"}
OTHER = Task(name="other", kind=TaskKind.CLASSIFICATION, label_names=("a", "b", "c"), metrics=("accuracy",))
TEXTS = ["a b c d", "e f", "l k j i h g"]

# Loads every export the way its documentation says, in a process where tunery cannot be imported.
LOADER = """
import json, sys
sys.modules["tunery"] = None
import numpy as np, torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer
base, texts, folders, out = json.loads(sys.argv[1])
logits = {}
for name, (folder, is_adapter) in folders.items():
    if is_adapter:
        torch.manual_seed(99)
        model = PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained(base), folder)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(folder)
    batch = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits[name] = model.eval()(**batch).logits.numpy()
assert sys.modules["tunery"] is None
np.savez(out, **logits)
"""


class Exports(NamedTuple):
    """Logits of the live trained models, and of their exports in a process without tunery."""

    trained: dict[str, Any]
    exported: dict[str, Any]
    folders: dict[str, Path]


@pytest.fixture(scope="module")
def exports(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """Train with each strategy through the Python API, keep the live model's logits, export, and load elsewhere."""
    root = tmp_path_factory.mktemp("exports")
    tokenizer = AutoTokenizer.from_pretrained(tiny.base)
    live: dict[str, Any] = {}
    for strategy in dict.fromkeys(STRATEGIES.values()):
        trained(tiny, strategy, root / strategy, tokenizer, live)
    folders = {
        name: export_run(
            root / strategy,
            root / "out" / name,
            merge=name.endswith("_merged"),
            task=TASK.name if name.startswith("multi_lora") else None,
        )
        for name, strategy in STRATEGIES.items()
    }
    where = {name: (str(folder), name in ADAPTERS) for name, folder in folders.items()}
    arguments = json.dumps([str(tiny.base), TEXTS, where, str(root / "logits.npz")])
    ran = subprocess.run([sys.executable, "-c", LOADER, arguments], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return Exports(
        trained={name: live[strategy] for name, strategy in STRATEGIES.items()},
        exported=dict(np.load(root / "logits.npz")),
        folders=folders,
    )


def trained(tiny: Any, strategy: str, folder: Path, tokenizer: Any, live: dict[str, Any]) -> None:
    """Train five steps, save, and keep the logits of the model in memory; one of several tasks is the second."""
    several = strategy.startswith("multi_lora")
    args = tunery.TrainingArguments(
        output_dir=str(folder),
        strategy=strategy,
        max_steps=5,
        learning_rate=0.05,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    rows = [{**tokenizer(text), "labels": int(text == TEXTS[0])} for text in TEXTS * 4]
    if several:
        rows = [{**row, "task_ids": number % 2} for number, row in enumerate(rows)]
    set_seed(0)
    model = load_model(str(tiny.base), TASK)
    trainer = tunery.Trainer(
        model=model,
        args=args,
        task=[OTHER, TASK] if several else TASK,
        base_model=str(tiny.base),
        train_dataset=rows,
        processing_class=tokenizer,
    )
    if several:
        trainer.model.base_model.set_task(TASK.name)
    start = logits_of(trainer.model, tokenizer)
    trainer.train()
    trainer.save_model()
    live[strategy] = logits_of(trainer.model, tokenizer)
    assert np.abs(live[strategy] - start).max() > 1e-3, "nothing was learnt, so nothing would be compared"


def logits_of(model: Any, tokenizer: Any) -> Any:
    """Return the logits of ``TEXTS`` in eval mode."""
    with torch.no_grad():
        return model.eval()(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits.numpy()


# ---- exports


@pytest.mark.parametrize("name", STRATEGIES)
def test_export_loads_without_tunery(name: str, exports: Exports):
    """transformers or PEFT alone give the trained model's logits: to 1e-6 as trained, to 1e-5 with the adapter folded in."""
    tolerance = 1e-5 if name.endswith("_merged") else 1e-6
    np.testing.assert_allclose(exports.exported[name], exports.trained[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", STRATEGIES)
def test_export_holds_weights_tokenizer_and_manifest_alone(name: str, exports: Exports):
    """An export has the weights, their config, the tokenizer and who made it: no optimizer state, nothing pickled."""
    weights = (
        {"adapter_config.json", "adapter_model.safetensors", "README.md"}
        if name in ADAPTERS
        else {"config.json", "model.safetensors"}
    )
    found = {path.name for path in exports.folders[name].iterdir()}
    assert found == weights | {"tokenizer.json", "tokenizer_config.json", "tunery.json"}
    manifest = read_manifest(exports.folders[name])
    assert manifest["plugins"][0]["name"] == STRATEGIES[name].split(":")[0]


def test_export_of_a_checkpoint(finished: Callable[[str], Path], tmp_path: Path):
    """A checkpoint exports like a run, with its own weights."""
    run = finished("lora:r=2")
    half = export_run(run / "checkpoint-5", tmp_path / "half")
    whole = export_run(run, tmp_path / "whole")
    first, last = (load_file(folder / "adapter_model.safetensors") for folder in (half, whole))
    assert first.keys() == last.keys()
    assert any(not torch.equal(first[key], last[key]) for key in first)


@pytest.mark.parametrize(
    ("strategy", "cls"), [("full", "transformers.PreTrainedModel"), ("lora:r=2", "peft.PeftModel")]
)
@pytest.mark.parametrize("before", [False, True], ids=["at once", "after writing"])
def test_failing_export_leaves_nothing(
    strategy: str, cls: str, before: bool, finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An export that fails midway leaves neither its target nor a temporary folder."""

    def fail(self: Any, folder: Path, **kwargs: Any) -> None:
        if before:
            (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(f"{cls}.save_pretrained", fail)
    with pytest.raises(OSError, match="no space left"):
        export_run(finished(strategy), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_failing_merge_leaves_nothing(finished: Any, tmp_path: Path):
    """A method that cannot be merged is refused before anything is written."""
    with pytest.raises(CompatibilityError, match="PEFT type PROMPT_TUNING cannot be merged"):
        export_run(finished(STRATEGIES["prompt"]), tmp_path / "deep" / "out", merge=True)
    assert list(tmp_path.iterdir()) == []


def test_a_method_that_refuses_to_merge_only_inside_is_one_line(tmp_path: Path):
    """PEFT's POLY has the method to merge, which raises."""
    base = BertModel(
        BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    )
    model = get_peft_model(base, PolyConfig(target_modules=["query"], r=2, n_tasks=1))
    with pytest.raises(CompatibilityError, match="PEFT type POLY cannot be merged; export it as an adapter"):
        export_adapter(model, merge=True)


def test_export_into_an_empty_folder(finished: Any, tmp_path: Path):
    """An empty folder is as good as none; a file is not."""
    (tmp_path / "out").mkdir()
    assert export_run(finished("full"), tmp_path / "out").joinpath("model.safetensors").is_file()
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    with pytest.raises(ArtifactError, match="file exists already"):
        export_run(finished("full"), tmp_path / "file")


@pytest.mark.parametrize("strategy", ["full", "head", "lora:r=2", "peft:peft_type=IA3"])
def test_load_run_is_bit_identical(strategy: str, finished: Any, tiny: Any):
    """What ``load_run`` gives back has exactly the stored weights, in eval mode, whatever the seed was in between."""
    run = finished(strategy)
    torch.manual_seed(12345)
    loaded = load_run(run)
    assert not loaded.model.training
    state = loaded.model.state_dict()
    stored = load_file(next(run.glob("*model.safetensors")))
    for key, value in stored.items():
        matches = [live for name, live in state.items() if plain(name) == plain(key)]
        assert len(matches) == 1, key
        assert torch.equal(matches[0], value), key
    assert len(stored) >= 2


def plain(name: str) -> str:
    """Return a parameter's name without what PEFT adds for its one adapter."""
    return name.replace("modules_to_save.default.", "").replace(".default", "")


def test_load_run_needs_no_base_for_whole_models(finished: Any, tmp_path: Path):
    """A fully written run loads where its base model is gone; with the reference it says what is missing."""
    run = Path(shutil.copytree(finished("full"), tmp_path / "run"))
    content = json.loads((run / "tunery.json").read_text(encoding="utf-8"))
    content["base_model"]["name_or_path"] = str(tmp_path / "gone")
    write_json(run / "tunery.json", content)
    assert isinstance(load_run(run).model, torch.nn.Module)
    with pytest.raises(tunery.TuneryError, match="cannot load model"):
        load_run(run, with_reference=True)


def test_load_run_keeps_the_reference(finished: Any, tiny: Any):
    """With the reference come the base model's own values, not the trained ones."""
    loaded = load_run(finished("full"), with_reference=True)
    base = BertModel.from_pretrained(tiny.base).state_dict()
    pieces = {name: (live.detach(), kept) for name, live, kept in loaded.reference.pieces()}
    name = "encoder.layer.0.attention.self.query.weight"
    live, kept = pieces[f"bert.{name}"]
    assert torch.equal(kept, base[name].reshape(-1))
    assert not torch.equal(live.reshape(-1), kept)


# ---- manifests


def test_manifest_tells_everything(finished: Any, tiny: Any):
    """The manifest names plugins with distribution and version, base model, task, seed, versions and file hashes."""
    run = finished("lora:r=2")
    content = json.loads((run / "tunery.json").read_text(encoding="utf-8"))
    assert content["format"] == 1
    assert content["seed"] == 42
    assert content["plugins"] == [
        {
            "kind": "strategy",
            "name": "lora",
            "distribution": "tunery",
            "version": importlib.metadata.version("tunery"),
            "config": {"r": 2, "alpha": 16, "dropout": 0.0, "target_modules": None, "use_rslora": False},
        }
    ]
    assert content["base_model"]["name_or_path"] == str(tiny.base)
    assert content["base_model"]["class"] == "BertForSequenceClassification"
    assert content["tasks"][0]["label_names"] == ["no", "yes"]
    assert content["versions"]["torch"] == importlib.metadata.version("torch")
    assert {"transformers", "peft", "python"} <= content["versions"].keys()
    weights = (run / "adapter_model.safetensors").read_bytes()
    assert content["files"] == {
        "adapter_model.safetensors": {"bytes": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}
    }
    assert tasks_of(content)[0].num_labels == 2
    assert strategy_of(content).options["r"] == 2


def test_every_checkpoint_has_its_manifest(finished: Any):
    """Checkpoints carry a manifest too, and its hashes are those of their own weights."""
    run = finished("lora:r=2")
    assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-5", "checkpoint-10"}
    hashes = [
        read_manifest(folder)["files"]["adapter_model.safetensors"]["sha256"] for folder in run.glob("checkpoint-*")
    ]
    assert len(set(hashes)) == 2


def test_nothing_is_left_behind(finished: Any):
    """A finished run has no temporary files or folders in it."""
    assert [path.name for path in finished("full").rglob(".*")] == []


def test_missing_strategy_says_what_to_install():
    """An artefact whose plugin is not installed names the distribution and version to install."""
    row = {"kind": "strategy", "name": "magic", "distribution": "tunery-magic", "version": "0.3", "config": {}}
    with pytest.raises(ArtifactError, match=r"pip install tunery-magic==0\.3") as error:
        strategy_of({"plugins": [row]})
    assert error.value.owner == "tunery-magic 0.3"
    assert strategy_of({"plugins": [{**row, "kind": "regularizer"}]}) is None


def test_seal_records_every_weight_file(tmp_path: Path):
    """Sharded weights are each recorded, and a missing or longer shard is noticed."""
    for index in (1, 2):
        save_file({"x": torch.full((3,), float(index))}, tmp_path / f"model-{index}.safetensors")
    base = {"format": 1, "plugins": [], "base_model": {}, "tasks": [], "seed": 0}
    seal(tmp_path, base)
    assert set(read_manifest(tmp_path)["files"]) == {"model-1.safetensors", "model-2.safetensors"}
    with (tmp_path / "model-1.safetensors").open("ab") as file:
        file.write(b"!")
    with pytest.raises(ArtifactError, match=r"model-1\.safetensors has \d+ bytes instead of"):
        read_manifest(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"model-1\.safetensors is missing"):
        read_manifest(tmp_path)


# ---- weights


def classifier(tiny: Any) -> Any:
    return load_model(str(tiny.base), TASK)


def without_head(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if not key.startswith("classifier")}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without_head, "do not fit BertForSequenceClassification: 'classifier.weight'"),
        (lambda state: {**state, "extra": torch.zeros(1)}, "do not fit BertForSequenceClassification: 'extra'"),
        (lambda state: {**state, "classifier.weight": torch.zeros(3, 16)}, "size mismatch for classifier.weight"),
    ],
)
def test_weights_must_fit(change: Any, says: str, tiny: Any, tmp_path: Path):
    """Weights of another model are refused by the first key that does not fit, never half loaded in silence."""
    save_file(change(classifier(tiny).state_dict()), tmp_path / "model.safetensors")
    with pytest.raises(ArtifactError, match=says) as error:
        load_weights(classifier(tiny), tmp_path)
    assert "\n" not in str(error.value)


def test_adapter_must_fit(finished: Any, tiny: Any, tmp_path: Path):
    """An adapter with a key the model lacks, or for a model without one, is refused."""
    run = finished("lora:r=2")
    with pytest.raises(ArtifactError, match="is an adapter and BertForSequenceClassification has none"):
        load_weights(classifier(tiny), run)
    state = load_file(run / "adapter_model.safetensors")
    key = next(key for key in state if "lora_A" in key)
    state[key.replace("layer.0", "layer.9")] = state[key].clone()
    save_file(state, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ArtifactError, match=r"holds '.*layer\.9.*', which BertForSequenceClassification lacks"):
        load_weights(load_run(run).model, tmp_path)


def test_no_weights(tiny: Any, tmp_path: Path):
    """A folder without weights says which files would have been taken."""
    with pytest.raises(ArtifactError, match=r"holds no weights; known: model\.safetensors, adapter_model"):
        load_weights(classifier(tiny), tmp_path)


def test_weights_that_are_no_safetensors(tiny: Any, tmp_path: Path):
    """A file of another format is one line, and nothing in it is unpickled."""
    torch.save({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ArtifactError, match="cannot load the weights in"):
        load_weights(classifier(tiny), tmp_path)


# ---- fingerprints


def fingerprint_of(model: Any) -> str:
    class Arguments:
        seed = 0
        activation_checkpointing = False

    return fingerprint(model, make_context(model, Arguments(), [infer_task(model)]))


def test_fingerprint_tells_base_models_apart(tiny: Any, other_base: Path):
    """The same base gives the same print, in any precision and with any head; other weights give another."""
    first = fingerprint_of(classifier(tiny))
    torch.manual_seed(7)
    assert fingerprint_of(classifier(tiny)) == first
    assert fingerprint_of(load_model(str(tiny.base), TASK, dtype="bfloat16")) == first
    three = AutoModelForSequenceClassification.from_pretrained(
        tiny.base, **label_config(Task(name="t", kind=TaskKind.CLASSIFICATION, label_names=("a", "b", "c")))
    )
    assert fingerprint_of(three) == first
    assert fingerprint_of(load_model(str(other_base), TASK)) != first


@pytest.mark.parametrize("name", ["bert.embeddings.word_embeddings.weight", "bert.pooler.dense.bias"])
def test_fingerprint_sees_every_parameter(name: str, tiny: Any):
    """A change of any one pre-trained parameter is seen."""
    model = classifier(tiny)
    before = fingerprint_of(model)
    with torch.no_grad():
        model.get_parameter(name).add_(0.5)
    assert fingerprint_of(model) != before


def test_fingerprint_sees_shapes():
    """Two models with the same names and the same sampled values, but wider layers in one, differ."""
    prints = set()
    for width in (64, 128):
        sizes = {"vocab_size": 8, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = BertModel(BertConfig(**sizes, intermediate_size=width))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        prints.add(fingerprint_of(model))
    assert len(prints) == 2


# ---- files that are whole or not there


def test_write_json_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where writing fails, the old content is still there and nothing beside it."""
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_folder_in_place(tmp_path: Path):
    """The folder appears under its name when the block has ended, and not before."""
    target = tmp_path / "deep" / "target"
    with folder_in_place(target) as temporary:
        (temporary / "file").write_text("x", encoding="utf-8")
        assert not target.exists()
    assert [path.name for path in target.parent.rglob("*")] == ["target", "file"]


def test_folder_in_place_vanishes_on_error(tmp_path: Path):
    """When the block fails, even by an interrupt, nothing of it is left."""
    target = tmp_path / "target"
    with pytest.raises(KeyboardInterrupt), folder_in_place(target) as temporary:
        (temporary / "file").write_text("x", encoding="utf-8")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_last_checkpoint_counts_only_whole_ones(tmp_path: Path):
    """The newest checkpoint with a manifest, by its number; what is still being written is none."""
    assert last_checkpoint(tmp_path / "nowhere") is None
    assert last_checkpoint(tmp_path) is None
    for name, whole in (
        ("checkpoint-5", True),
        ("checkpoint-10", True),
        ("checkpoint-15", False),
        (".saving/checkpoint-20", True),
        (".old-checkpoint-30", True),
        ("checkpoint-last", True),
    ):
        (tmp_path / name).mkdir(parents=True)
        if whole:
            (tmp_path / name / artifacts.MANIFEST).write_text("{}", encoding="utf-8")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_peft_is_what_peft_writes(finished: Any):
    """A run folder itself is already what PEFT loads, without an export."""
    run = finished("lora:r=2")
    config = json.loads((run / "adapter_config.json").read_text(encoding="utf-8"))
    base = AutoModelForSequenceClassification.from_pretrained(config["base_model_name_or_path"])
    assert isinstance(PeftModel.from_pretrained(base, str(run)), PeftModel)


def test_a_manifest_says_what_the_code_was_when_the_process_began(tmp_path: Path) -> None:
    """Commit and cleanliness of the folder; no repository, nothing."""
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    assert git_state(str(tmp_path)) is None
    repository = tmp_path / "repository"

    def git(*words: str) -> str:
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *names, *words], cwd=repository, capture_output=True, text=True, check=True
        ).stdout.strip()

    repository.mkdir()
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    (repository / "file").write_text("changed", encoding="utf-8")
    first = {"commit": git("rev-parse", "HEAD"), "clean": False}
    assert git_state(str(repository)) == first
    git("commit", "-q", "--allow-empty", "-m", "second")
    assert git_state(str(repository)) == first
