"""Runs of several stages: what each leaves, where a killed one goes on, and what is refused before anything is trained."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import tunery
from tunery.core.artifacts import MANIFEST, last_checkpoint, read_manifest
from tunery.core.finished import load_run
from tunery.core.options import build_options
from tunery.core.run import train
from tunery.core.staging import check_stages, place_to_resume, points_to_resume, stage_arguments
from tunery.registry.context import Stage, TaskKind
from tunery.registry.errors import ArtifactError, CompatibilityError, DataError, InvalidPluginError, RecipeError

ONE = (Stage(name="only"),)
THREE = (Stage(name="first"), Stage(name="second"), Stage(name="last"))
HEAD_STEPS, STEPS, EVERY = 12, 12, 3


def given(tiny: Any, output_dir: Path, **changes: Any) -> dict[str, Any]:
    """Return a recipe of twelve steps for the head and twelve for everything, with what carries state over a kill."""
    keys: dict[str, Any] = {
        "output_dir": str(output_dir),
        "strategy": "lp_ft:head_epochs=2,head_learning_rate=0.02",
        "max_steps": STEPS,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": EVERY,
        "logging_steps": EVERY,
        "regularizers": ["l2_sp:alpha=0.01"],
        "probes": ["weight_distance"],
    }
    return tiny.given(**keys | changes)


def weights(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every saved weight."""
    return {name: value.numpy().tobytes() for name, value in load_file(folder / "model.safetensors").items()}


@pytest.fixture(scope="module")
def finished_run(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A staged run from beginning to end; only to read."""
    folder = tmp_path_factory.mktemp("staged") / "run"
    return folder, train(build_options(given(tiny, folder)))


# ---- what a run leaves


def test_a_stage_is_a_run_folder_of_its_own(finished_run: tuple[Path, dict[str, Any]]):
    """It has checkpoints, a log, a curve, and a manifest that says which stage it is; others can load it."""
    stage = finished_run[0] / "stages" / "head"
    manifest = read_manifest(stage)
    assert manifest["stage"]["name"] == "head"
    assert manifest["plugins"] == []
    assert last_checkpoint(stage) == stage / f"checkpoint-{HEAD_STEPS}"
    assert (stage / "training_curve.png").is_file()
    assert {name: value.numpy().tobytes() for name, value in load_run(stage).model.state_dict().items()} == weights(
        stage
    )


def test_result_records_every_stage(finished_run: tuple[Path, dict[str, Any]]):
    """Name, objective, steps, mean loss and seconds, as the stage's own log has them; the run's own loss stays its own."""
    folder, result = finished_run
    log = json.loads((folder / "stages" / "head" / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    losses = [row["loss"] for row in log if "loss" in row]
    (stage,) = result["stages"]
    assert stage == {
        "name": "head",
        "objective": "task",
        "steps": HEAD_STEPS,
        "train_loss": pytest.approx(sum(losses) / len(losses), abs=1e-6),
        "seconds": log[-1]["train_runtime"],
    }
    assert stage["seconds"] <= result["seconds"]
    assert [row["step"] for row in log if "loss" in row] == list(range(EVERY, HEAD_STEPS + 1, EVERY))
    assert json.loads((folder / "result.json").read_text(encoding="utf-8")) == result


def test_the_last_stage_begins_where_the_first_ended(tiny: Any, tmp_path: Path):
    """With a rate of zero it ends with the very weights of the stage before."""
    train(build_options(given(tiny, tmp_path / "run", learning_rate=0.0, max_steps=1)))
    assert weights(tmp_path / "run") == weights(tmp_path / "run" / "stages" / "head")


def test_regularizers_start_from_what_was_learnt(tiny: Any, tmp_path: Path):
    """L2-SP pulls towards the weights fine-tuning begins with: nothing at its first step, something later."""
    rows = mask_rows(tiny)
    keys = {
        "max_steps": 2,
        "logging_steps": 1,
        "gradient_accumulation_steps": 1,
        "regularizers": ["l2_sp:alpha=1,beta=0"],
    }
    trainer = trainer_of(tiny, tmp_path, train_dataset=rows, strategy="surt:lm_epochs=1,lm_learning_rate=0.01", **keys)
    start = trainer.model.bert.embeddings.word_embeddings.weight.clone()
    trainer.train()
    assert not torch.equal(load_file(tmp_path / "stages/retraining/model.safetensors")[WORDS], start)
    first, second = [row["loss/l2_sp"] for row in trainer.state.log_history if "loss/l2_sp" in row]
    assert first == 0
    assert second > 0


def test_one_stage_leaves_no_trace_of_stages(finished: Callable[[str], Path]):
    """Neither folder nor key, in the manifest or the result."""
    run = finished("full")
    assert not (run / "stages").exists()
    assert "stage" not in read_manifest(run)
    assert "stages" not in json.loads((run / "result.json").read_text(encoding="utf-8"))


def test_observers_hear_of_every_stage(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run begins and ends in each; ``run.stage`` tells them apart."""
    heard = []

    def hear(moment: str, **arguments: Any) -> None:
        heard.append((moment, arguments["run"].stage and arguments["run"].stage.name))

    for module in ("trainer", "moments"):
        monkeypatch.setattr(f"tunery.core.{module}.observe", hear)
    train(build_options(given(tiny, tmp_path, probes=None, max_steps=1)))
    assert heard == [
        ("tunery_run_begin", "head"),
        ("tunery_run_end", "head"),
        ("tunery_run_begin", None),
        ("tunery_run_end", None),
    ]


# ---- a Trainer of one's own


class Weighted(tunery.Trainer):
    """A subclass with an argument, a loss and a count of its own."""

    def __init__(self, *args: Any, factor: float, **kwargs: Any) -> None:
        self.factor = factor
        self.folders: list[str] = []
        super().__init__(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.folders.append(Path(self.args.output_dir).name)
        return super().compute_loss(*args, **kwargs) * self.factor


WORDS = "bert.embeddings.word_embeddings.weight"


def mask_rows(tiny: Any) -> list[dict[str, Any]]:
    """Encoded rows of the tiny task, unpadded."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.base)
    rows = [json.loads(line) for line in tiny.rows.read_text(encoding="utf-8").splitlines()]
    return [{**tokenizer(row["text"]), "labels": int(row["label"] == "yes")} for row in rows]


def trainer_of(
    tiny: Any, folder: Path, cls: Any = tunery.Trainer, keywords: Mapping[str, Any] | None = None, **changes: Any
) -> Any:
    """Return a Trainer of a staged strategy over the tiny model, with a tokenizer that has a mask token."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.base, mask_token="l")
    rows = changes.pop("train_dataset", None) or mask_rows(tiny)
    arguments = {"output_dir": str(folder), "strategy": "lp_ft", "use_cpu": True, "report_to": "none", "max_steps": 1}
    args = tunery.TrainingArguments(**arguments | {"disable_tqdm": True, "dataloader_pin_memory": False} | changes)
    model = AutoModelForSequenceClassification.from_pretrained(tiny.base, num_labels=2)
    given = {"processing_class": tokenizer, "train_dataset": rows, **(keywords or {})}
    return cls(model=model, args=args, **given)


def test_a_subclass_keeps_its_loss_in_every_stage_of_its_own_task(tiny: Any, tmp_path: Path):
    """Its loss and its own attributes are in the head's stage too; without labels the model's own loss counts."""
    trainer = trainer_of(tiny, tmp_path / "a", Weighted, {"factor": 0.0}, strategy="lp_ft:head_epochs=1")
    before = trainer.model.classifier.weight.clone()
    trainer.train()
    assert set(trainer.folders) == {"head", "a"}
    assert torch.equal(trainer.model.classifier.weight, before)
    trainer = trainer_of(tiny, tmp_path / "b", Weighted, {"factor": 0.0}, strategy="surt:lm_epochs=1")
    before = trainer.model.bert.embeddings.word_embeddings.weight.clone()
    trainer.train()
    assert set(trainer.folders) == {"b"}
    assert not torch.equal(trainer.model.bert.embeddings.word_embeddings.weight, before)


def test_half_precision_is_on_in_every_stage_and_wraps_once(tiny: Any, tmp_path: Path):
    """Autocast runs in the last stage as in the first, and leaves nothing on the module in between."""
    dtypes: dict[str, set[Any]] = {}

    class Looking(tunery.Trainer):
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            query = self.model.bert.encoder.layer[0].attention.self.query
            seen = dtypes.setdefault(Path(self.args.output_dir).name, set())
            hook = query.register_forward_hook(lambda _module, _args, output: seen.add(output.dtype))
            try:
                return super().compute_loss(model, *args, **kwargs)
            finally:
                hook.remove()

    trainer = trainer_of(tiny, tmp_path / "run", Looking, strategy="lp_ft:head_epochs=1", bf16=True)
    depths = []
    staged = trainer.recipe.strategy.staged
    trainer.recipe.strategy.staged = lambda model, *args: depths.append(depth(model)) or staged(model, *args)
    before = depth(trainer.model)
    trainer.train()
    single = trainer_of(tiny, tmp_path / "single", strategy="full", bf16=True)
    single.train()
    assert dtypes == {"head": {torch.bfloat16}, "run": {torch.bfloat16}}
    assert depth(trainer.model) == depth(single.model) > before == depths[0]


def depth(model: Any) -> int:
    """How many decorators ``forward`` has."""
    forward, layers = model.forward, 0
    while hasattr(forward, "__wrapped__"):
        forward, layers = forward.__wrapped__, layers + 1
    return layers


def test_stage_arguments_leave_the_runs_alone(tmp_path: Path):
    """A stage has its own folder, epochs and rate, and no plugins or evaluation; what it does not say is the run's."""
    args = tunery.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=7,
        num_train_epochs=2,
        learning_rate=0.5,
        eval_strategy="steps",
        eval_on_start=True,
        use_cpu=True,
    )
    before = args.to_dict()
    changed = stage_arguments(args, Stage(name="first", num_train_epochs=4, learning_rate=0.25))
    assert args.to_dict() == before
    assert (changed.num_train_epochs, changed.max_steps, changed.learning_rate) == (4, -1, 0.25)
    assert changed.output_dir == str(tmp_path / "stages" / "first")
    assert (changed.eval_strategy, changed.eval_on_start) == ("no", False)
    same = stage_arguments(args, Stage(name="first"))
    assert (same.num_train_epochs, same.max_steps, same.learning_rate) == (2, 7, 0.5)


# ---- killed and resumed


def left_by_a_kill(finished: Path, run: Path, stage: int | None, step: int | None) -> Path:
    """Copy what a kill leaves: after ``stage`` steps of the first stage (``None``: finished) and ``step`` of the last."""
    shutil.copytree(finished, run)
    keep = {"checkpoint-" + str(n) for n in range((step or 0) + 1)}
    for path in run.iterdir():
        if path.name not in {"stages", "measurements.jsonl", *keep}:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if stage is not None:
        keep = {f"checkpoint-{n}" for n in range(stage + 1)}
        for path in (run / "stages" / "head").iterdir():
            if path.name not in keep:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return run


@pytest.mark.parametrize(
    ("stage", "step"), [(0, None), (3, None), (HEAD_STEPS, None), (None, None), (None, 6)],
    ids=["before a checkpoint", "amid the first", "its end", "between", "amid the last"],
)  # fmt: skip
def test_resumes_from_any_stage(
    stage: int | None, step: int | None, finished_run: tuple[Path, dict[str, Any]], tiny: Any, tmp_path: Path
):
    """Same weights, measurements and metrics as unbroken; a finished stage is not trained again."""
    folder, unbroken = finished_run
    run = left_by_a_kill(folder, tmp_path / "run", stage, step)
    written = run / "stages" / "head" / "model.safetensors"
    stamp = written.stat().st_mtime_ns if written.exists() else None
    result = train(build_options(given(tiny, run, resume_from_checkpoint="last")))
    assert weights(run) == weights(folder)
    assert weights(run / "stages" / "head") == weights(folder / "stages" / "head")
    assert (run / "measurements.jsonl").read_text() == (folder / "measurements.jsonl").read_text()
    assert result["metrics"] == unbroken["metrics"]
    assert [row["steps"] for row in result["stages"]] == [HEAD_STEPS]
    assert (written.stat().st_mtime_ns == stamp) == (stage is None)


def test_resumed_elsewhere_the_stages_come_along(finished_run: tuple[Path, dict[str, Any]], tiny: Any, tmp_path: Path):
    """From a checkpoint of another folder; the new folder can be resumed in its turn."""
    folder, _ = finished_run
    run = tmp_path / "run"
    train(build_options(given(tiny, run, resume_from_checkpoint=str(folder / "checkpoint-6"))))
    assert weights(run) == weights(folder)
    assert weights(run / "stages" / "head") == weights(folder / "stages" / "head")
    assert not list((run / "stages" / "head").glob("checkpoint-*"))
    train(build_options(given(tiny, run, resume_from_checkpoint="last")))
    assert weights(run) == weights(folder)


def test_a_new_run_does_not_take_over_old_stages(tiny: Any, tmp_path: Path):
    """Trained without resuming in a used folder, the first stage is trained anew."""
    trainer_of(tiny, tmp_path, strategy="lp_ft:head_epochs=2").train()
    trainer_of(tiny, tmp_path, strategy="lp_ft:head_epochs=1").train()
    assert read_manifest(tmp_path / "stages" / "head")["stage"]["num_train_epochs"] == 1
    assert [path.name for path in (tmp_path / "stages" / "head").glob("checkpoint-*")] == ["checkpoint-6"]


def test_a_stage_with_other_options_is_not_taken_over(
    finished_run: tuple[Path, dict[str, Any]], tiny: Any, other_base: Path, tmp_path: Path
):
    """Nor one that began with another model."""
    run = left_by_a_kill(finished_run[0], tmp_path / "run", None, None)
    for changes, complaint in (
        ({"strategy": "lp_ft:head_epochs=3"}, "trained as stage"),
        ({"model_name_or_path": str(other_base)}, "another base model"),
    ):
        with pytest.raises(ArtifactError, match=complaint) as caught:
            train(build_options(given(tiny, run, resume_from_checkpoint="last", **changes)))
        assert "\n" not in str(caught.value)
    assert weights(run / "stages" / "head") == weights(finished_run[0] / "stages" / "head")


def test_a_damaged_stage_is_refused(finished_run: tuple[Path, dict[str, Any]], tiny: Any, tmp_path: Path):
    """One line, and no training from half of it."""
    run = left_by_a_kill(finished_run[0], tmp_path / "run", None, None)
    with (run / "stages" / "head" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(ArtifactError, match="does not match its hash"):
        train(build_options(given(tiny, run, resume_from_checkpoint="last")))


def test_a_used_folder_is_refused_or_cleared(tiny: Any, tmp_path: Path):
    """A folder that holds nothing but an earlier stage holds a run."""
    (tmp_path / "stages" / "old").mkdir(parents=True)
    with pytest.raises(RecipeError, match="holds a run already"):
        train(build_options(given(tiny, tmp_path)))
    train(build_options(given(tiny, tmp_path, overwrite_output_dir=True, max_steps=1)))
    assert sorted(path.name for path in (tmp_path / "stages").iterdir()) == ["head"]


@pytest.fixture
def folders(tmp_path: Path) -> Callable[..., Path]:
    """Make a run folder with manifests at the given places."""

    def make(*places: str) -> Path:
        for place in places:
            (tmp_path / place).mkdir(parents=True, exist_ok=True)
            (tmp_path / place / MANIFEST).write_text("{}", encoding="utf-8")
        return tmp_path

    return make


def test_points_to_resume(folders: Callable[..., Path]):
    """Each stage goes on from its finished folder, its newest checkpoint, or its beginning."""
    run = folders("stages/first", "stages/second/checkpoint-2", "stages/second/checkpoint-10")
    stages = run / "stages"
    assert points_to_resume(THREE, None) == [None, None, None]
    assert place_to_resume(run) == stages
    assert points_to_resume(THREE, stages) == [stages / "first", stages / "second" / "checkpoint-10", None]
    named = stages / "second" / "checkpoint-2"
    assert points_to_resume(THREE, named) == [stages / "first", named, None]
    folders("stages/second", "checkpoint-4")
    assert points_to_resume(THREE, stages) == [stages / "first", stages / "second", None]
    assert place_to_resume(run) == run / "checkpoint-4"
    assert points_to_resume(THREE, run / "checkpoint-4") == [stages / "first", stages / "second", run / "checkpoint-4"]


def test_points_to_resume_of_one_stage(folders: Callable[..., Path]):
    """A checkpoint is a checkpoint, whatever its folders are called."""
    run = folders("stages/first/checkpoint-2")
    assert points_to_resume(ONE, run / "stages/first/checkpoint-2") == [run / "stages/first/checkpoint-2"]


def test_a_checkpoint_without_the_stages_before_it(folders: Callable[..., Path]):
    """One line names the stage that is missing."""
    run = folders("stages/first", "stages/second/checkpoint-2", "checkpoint-4")
    with pytest.raises(ArtifactError, match="needs stage 'second' before it") as caught:
        points_to_resume(THREE, run / "checkpoint-4")
    assert "\n" not in str(caught.value)


# ---- refused before anything is trained


def checked(*stages: Stage, args: Any = None, **keywords: Any) -> tuple[Stage, ...]:
    return check_stages(stages, "somewhere", args or SimpleNamespace(), keywords)


@pytest.mark.parametrize(
    ("stages", "complaint"),
    [
        ((), "one or more"),
        ((Stage(name="same"), Stage(name="same")), "a name of its own"),
        ((Stage(name="../up"), Stage(name="last")), "a name of its own"),
        ((Stage(name="last", num_train_epochs=2),), "it is the run itself"),
        ((Stage(name="first", objective=TaskKind.REGRESSION), Stage(name="last")), "known: masked_lm, causal_lm"),
    ],
)
def test_stages_no_run_can_have(stages: tuple[Stage, ...], complaint: str):
    """The author of a strategy is told in one line, with the strategy's origin."""
    with pytest.raises(InvalidPluginError, match=complaint) as caught:
        checked(*stages)
    assert "\n" not in str(caught.value)
    assert "in somewhere" in str(caught.value)


class Stream(torch.utils.data.IterableDataset):
    """Rows without numbers."""

    def __iter__(self) -> Any:
        yield {}


@pytest.mark.parametrize(
    ("keywords", "complaint"),
    [
        ({"processing_class": None}, "given no tokenizer"),
        ({"train_dataset": Stream()}, "not a stream: Stream"),
        ({"optimizers": (object(), None)}, "does not go with optimizers"),
    ],
)
def test_what_a_staged_run_cannot_be_given(keywords: dict[str, Any], complaint: str, tiny: Any, tmp_path: Path):
    """Refused by the constructor, in one line; nothing has been written."""
    with pytest.raises(CompatibilityError, match=complaint) as caught:
        trainer_of(tiny, tmp_path / "run", keywords=keywords, strategy="surt")
    assert "\n" not in str(caught.value)
    assert "surt" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_other_refusals(tiny: Any, tmp_path: Path):
    """A model built by a function, a tokenizer without a mask, rows without tokens, DeepSpeed's own optimizer, FSDP."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.base)
    with pytest.raises(CompatibilityError, match="no mask token"):
        trainer_of(tiny, tmp_path, keywords={"processing_class": tokenizer}, strategy="surt")
    rows = [{"text": "a b", "labels": 0}] * 4
    with pytest.raises(DataError, match="learns from input_ids, and the training rows hold text, labels"):
        trainer_of(tiny, tmp_path, train_dataset=rows, strategy="surt").train()
    with pytest.raises(CompatibilityError, match="does not go with model_init"):
        checked(*THREE, model_init=print)
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(config={"optimizer": {}, "scheduler": {}}))
    with pytest.raises(CompatibilityError, match="optimizer and scheduler in the DeepSpeed config"):
        checked(*THREE, args=SimpleNamespace(deepspeed_plugin=plugin))
    with pytest.raises(CompatibilityError, match="does not go with fsdp"):
        checked(*THREE, args=SimpleNamespace(fsdp=["full_shard"]))
    with pytest.raises(CompatibilityError, match="does not go with several tasks"):
        check_stages(THREE, "somewhere", SimpleNamespace(), {}, num_tasks=2)
    assert checked(*ONE, model_init=print) == ONE


# ---- real processes, really killed


@pytest.mark.slow
def test_kill_9_in_both_stages(finished_run: tuple[Path, dict[str, Any]], tiny: Any, tmp_path: Path):
    """``kill -9`` amid the first stage and amid the last; resumed each time, it ends with the unbroken run's bits."""
    run, recipe = tmp_path / "run", tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(given(tiny, run)), encoding="utf-8")
    command = [sys.executable, "-m", "tunery", "train", str(recipe), "--resume_from_checkpoint"]
    for reached in ("stages/head/checkpoint-3", "stages/head", "checkpoint-6"):
        victim = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not (run / reached / MANIFEST).exists():
            assert victim.poll() is None, reached
            time.sleep(0.002)
        victim.kill()
        victim.wait()
        assert not (run / "result.json").exists(), reached
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert weights(run) == weights(finished_run[0])
    assert weights(run / "stages" / "head") == weights(finished_run[0] / "stages" / "head")
