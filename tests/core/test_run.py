"""What one run does and leaves: result, curve, baselines, and its manners in a folder that is not empty."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tunery.core.finished import load_run
from tunery.core.options import build_options
from tunery.core.probe_points import probe_run
from tunery.core.run import peak_memory, stored_parameters, train
from tunery.registry.errors import ArtifactError, CompatibilityError, RecipeError, TuneryError

RESULT_KEYS = {
    "task",
    "metrics",
    "main_metrics",
    "train_loss",
    "examples",
    "parameters",
    "seconds",
    "peak_memory_bytes",
    "seed",
    "plugins",
    "base_model",
    "data",
    "versions",
}


@pytest.fixture(scope="module")
def compared(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A LoRA run beside two baselines, with a probe: its folder, and what ``train`` returned."""
    folder = tmp_path_factory.mktemp("compared") / "run"
    keys = tiny.given(
        output_dir=str(folder),
        strategy="lora:r=2",
        baselines=["majority", "head"],
        probes=["weight_distance"],
        regularizers=["l2_sp"],
        eval_strategy="steps",
        eval_steps=5,
        logging_steps=5,
        seed=7,
    )
    return folder, train(build_options(keys))


def test_result_json(compared: tuple[Path, dict[str, Any]], tiny: Any):
    """``result.json`` holds the documented keys, and they are true."""
    folder, returned = compared
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert result == returned
    assert result.keys() == RESULT_KEYS | {"baselines"}
    assert result["task"] == "rows"
    assert result["main_metrics"] == ["accuracy"]
    assert result["seed"] == 7
    assert result["base_model"] == str(tiny.base)
    assert result["data"] == {"train_file": str(tiny.rows), "max_length": 16}
    assert [(plugin["kind"], plugin["name"]) for plugin in result["plugins"]] == [
        ("strategy", "lora"),
        ("regularizer", "l2_sp"),
        ("probe", "weight_distance"),
    ]
    assert result["examples"]["train"] + result["examples"]["validation"] == 48
    assert set(result["metrics"]) == {"loss", "accuracy", "f1"}
    assert 0 < result["seconds"] < 60
    assert result["peak_memory_bytes"] > 2**20
    assert math.isfinite(result["train_loss"])


def test_parameters_are_counted(compared: tuple[Path, dict[str, Any]], finished: Callable[[str], Path]):
    """Trainable, stored and total numbers: two rank-2 pairs in each of two layers, and the head."""
    lora, head = 2 * 2 * (16 * 2 + 2 * 16), 16 * 2 + 2
    counts = compared[1]["parameters"]
    assert counts["trainable"] == lora + head
    assert counts["stored"] == lora + head
    full = json.loads((finished("full") / "result.json").read_text(encoding="utf-8"))["parameters"]
    assert full["trainable"] == full["total"] == full["stored"]
    assert counts["total"] == full["total"] + lora + head


def test_metrics_are_those_of_the_stored_model(compared: tuple[Path, dict[str, Any]], tiny: Any):
    """Accuracy and loss agree with a plain evaluation of the stored weights on the same validation rows."""
    from tunery.core.data import DataArguments, load_task_data
    from tunery.core.models import load_processor

    folder, result = compared
    loaded = load_run(folder)
    data = load_task_data(DataArguments(train_file=str(tiny.rows), max_length=16), seed=7)
    tokenizer = load_processor(str(tiny.base), data.task)
    rows = data.splits["validation"]
    with torch.no_grad():
        logits = loaded.model(**tokenizer(rows["text"][:], padding=True, return_tensors="pt")).logits
    labels = torch.tensor(rows["labels"][:])
    assert result["metrics"]["accuracy"] == pytest.approx((logits.argmax(-1) == labels).float().mean().item())
    assert result["metrics"]["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), 1e-5)


def test_baselines(compared: tuple[Path, dict[str, Any]], tiny: Any):
    """The majority class is counted from the rows; the head is a run of its own, with the same arguments."""
    folder, result = compared
    majority, head = result["baselines"]["majority"], result["baselines"]["head"]
    assert majority["parameters"]["trainable"] == 0
    assert set(majority["metrics"]) == {"accuracy", "f1"}
    assert majority["metrics"]["accuracy"] >= 0.5
    assert head["parameters"]["trainable"] == 16 * 2 + 2
    assert [plugin["name"] for plugin in head["plugins"]] == ["head"]
    assert head["seed"] == 7
    assert head["examples"] == result["examples"]
    assert json.loads((folder / "baselines" / "head" / "result.json").read_text(encoding="utf-8")) == head


def test_finished_baseline_is_not_trained_again(compared: tuple[Path, dict[str, Any]], tiny: Any, tmp_path: Path):
    """A resumed run takes over the baselines that were done."""
    folder = Path(shutil.copytree(compared[0], tmp_path / "run"))
    done = folder / "baselines" / "head" / "result.json"
    marked = json.loads(done.read_text(encoding="utf-8")) | {"mark": "kept"}
    done.write_text(json.dumps(marked), encoding="utf-8")
    keys = tiny.given(output_dir=str(folder), max_steps=1, baselines=["head"], resume_from_checkpoint="last")
    assert train(build_options(keys))["baselines"]["head"]["mark"] == "kept"


def test_curve_is_a_picture(compared: tuple[Path, dict[str, Any]]):
    """``training_curve.png`` is a PNG with something on it."""
    with Image.open(compared[0] / "training_curve.png") as picture:
        picture.load()
        assert picture.format == "PNG"
        assert min(picture.size) > 300
        assert len(picture.convert("RGB").getcolors(maxcolors=2**24)) > 10


def test_terms_of_the_loss_are_logged(compared: tuple[Path, dict[str, Any]]):
    """The log has the task loss and the penalty by name, and they add up to the loss."""
    history = json.loads((compared[0] / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    rows = [row for row in history if "loss" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["loss/task"] + row["loss/l2_sp"] == pytest.approx(row["loss"], rel=1e-5)
        assert row["loss/l2_sp"] > 0


def test_probe_run_agrees_with_the_run(compared: tuple[Path, dict[str, Any]]):
    """A probe over the finished run measures what it measured at the run's end."""
    folder, _ = compared
    lines = (folder / "measurements.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["moment"] for row in rows[::4]] == ["begin", "evaluate", "evaluate", "end"]
    assert all(row["value"] == 0 for row in rows if row["moment"] == "begin")
    at_end = [{**row, "model": str(folder)} for row in rows if row["moment"] == "end"]
    for row in at_end:
        assert row.pop("step") == 10
        assert row.pop("moment") == "end"
    measured = probe_run("weight_distance", folder)
    assert [{**row, "value": None} for row in measured] == [{**row, "value": None} for row in at_end]
    assert [row["value"] for row in measured] == pytest.approx([row["value"] for row in at_end], rel=1e-6)


# ---- folders that are not empty


def test_occupied_folder_is_refused(finished: Callable[[str], Path], tiny: Any, tmp_path: Path):
    """A folder with a run in it is not written over without a word."""
    run = Path(shutil.copytree(finished("lora:r=2"), tmp_path / "run"))
    with pytest.raises(RecipeError, match="holds a run already; add --resume_from_checkpoint"):
        train(build_options(tiny.given(output_dir=str(run))))


@pytest.mark.parametrize(
    "left", ["tunery.json", "measurements.jsonl", "checkpoint-3/optimizer.pt", "model.safetensors"]
)
def test_any_trace_of_a_run_occupies(left: str, tiny: Any, tmp_path: Path):
    """Also what an interrupted run leaves is a run."""
    path = tmp_path / "run" / left
    path.parent.mkdir(parents=True)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(RecipeError, match="holds a run already"):
        train(build_options(tiny.given(output_dir=str(tmp_path / "run"))))


def test_overwriting_takes_only_our_files(
    finished: Callable[[str], Path], tiny: Any, tmp_path: Path, listing: Callable[[Path], Mapping[str, bytes]]
):
    """With ``overwrite_output_dir`` the earlier run goes and everything else stays; the new run is a clean one."""
    run = Path(shutil.copytree(finished("lora:r=2"), tmp_path / "run"))
    mine = {"notes.txt": b"mine", "data/rows.csv": b"a,b\n", "other-5/x": b"?"}
    for name, content in mine.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(content)
    train(build_options(tiny.given(output_dir=str(run), max_steps=1, overwrite_output_dir=True)))
    after = listing(run)
    assert {name: after[name] for name in mine} == mine
    assert not [name for name in after if name.startswith(("checkpoint-", "adapter_"))]
    assert load_run(run).recipe.strategy.name == "full"
    assert set(load_file(run / "model.safetensors")) == set(load_file(finished("full") / "model.safetensors"))


def test_folder_with_other_files_is_taken(tiny: Any, tmp_path: Path):
    """Files that no run wrote do not stand in the way."""
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    train(build_options(tiny.given(output_dir=str(tmp_path), max_steps=1)))
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"
    assert (tmp_path / "result.json").is_file()


def test_same_seed_same_bits(tiny: Any, tmp_path: Path):
    """The same recipe twice gives the same weights to the bit; another seed gives others."""
    weights = []
    for index, seed in enumerate((3, 3, 4)):
        folder = tmp_path / str(index)
        train(build_options(tiny.given(output_dir=str(folder), strategy="lora:r=2", max_steps=3, seed=seed)))
        weights.append((folder / "adapter_model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_regression(tiny: Any, tmp_path: Path):
    """Float labels make it a regression, with its own metrics; its majority baseline is the mean."""
    rows = [{"text": "a b c " * (i % 3 + 1), "score": i / 10} for i in range(20)]
    keys = tiny.given(train_file=write_rows(tmp_path / "scores.jsonl", rows), output_dir=str(tmp_path / "run"))
    result = train(build_options(keys | {"max_steps": 2, "baselines": ["majority"]}))
    assert result["main_metrics"] == ["pearson"]
    assert set(result["metrics"]) == {"loss", "pearson", "spearman", "mse"}
    assert result["baselines"]["majority"]["metrics"]["mse"] > 0
    assert load_run(tmp_path / "run").model.config.num_labels == 1


@pytest.fixture(scope="module")
def language_model(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A one-layer Llama with its head, and texts without labels: the keys that differ from a classifier's recipe."""
    folder = tmp_path_factory.mktemp("language_model")
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, intermediate_size=32, max_position_embeddings=32, pad_token_id=0, eos_token_id=3)
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    AutoTokenizer.from_pretrained(tiny.base).save_pretrained(folder / "llama")
    rows = write_rows(folder / "texts.jsonl", [{"text": "a b c d e f g h"}] * 40)
    return {"model_name_or_path": str(folder / "llama"), "train_file": rows, "max_steps": 2}


def test_language_modelling(language_model: dict[str, Any], tiny: Any, tmp_path: Path):
    """Texts alone make it a causal language model, whose main metric is the perplexity exp(loss)."""
    changes = {"strategy": "lora:r=2", "output_dir": str(tmp_path / "run"), "baselines": ["majority"]}
    result = train(build_options(tiny.given(**language_model | changes)))
    assert result["main_metrics"] == ["perplexity"]
    assert result["metrics"]["perplexity"] == pytest.approx(math.exp(result["metrics"]["loss"]))
    assert result["baselines"]["majority"]["metrics"] == {}
    assert result["parameters"]["trainable"] == 2 * (16 * 2 + 2 * 16)
    assert type(load_run(tmp_path / "run").model.get_base_model()) is LlamaForCausalLM


@pytest.mark.parametrize("changes", [{"strategy": "head"}, {"baselines": ["head"]}])
def test_what_cannot_work_stops_before_training(
    changes: dict[str, Any], language_model: dict[str, Any], tiny: Any, tmp_path: Path
):
    """A strategy that does not take the task stops the run before anything is written, also as a baseline."""
    keys = tiny.given(**language_model | changes, output_dir=str(tmp_path / "run"))
    with pytest.raises(CompatibilityError, match="strategy 'head' does not take task kind 'causal_lm'"):
        train(build_options(keys))
    assert list(tmp_path.iterdir()) == []


def test_load_run_of_nothing(tmp_path: Path):
    """A folder that is no run is refused, whichever way it is not."""
    with pytest.raises(ArtifactError, match="no folder"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match=r"has no tunery\.json; name a run or checkpoint folder"):
        load_run(tmp_path)


def test_load_run_without_a_named_base(finished: Callable[[str], Path], tmp_path: Path):
    """An adapter trained on a model that never had a name says what to do about it."""
    run = Path(shutil.copytree(finished("lora:r=2"), tmp_path / "run"))
    content = json.loads((run / "tunery.json").read_text(encoding="utf-8"))
    content["base_model"]["name_or_path"] = ""
    (run / "tunery.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ArtifactError, match="does not name its base model; train from a hub name"):
        load_run(run)


def test_probe_run_refuses_unknown_probes(finished: Callable[[str], Path]):
    """A wrong probe costs no loading."""
    with pytest.raises(TuneryError, match="no probe is called 'distance'"):
        probe_run("distance", finished("full"))


def test_stored_parameters(finished: Callable[[str], Path], tmp_path: Path):
    """What the weight files hold is counted from their headers; no files, no numbers."""
    state = load_file(finished("full") / "model.safetensors")
    assert stored_parameters(finished("full")) == sum(value.numel() for value in state.values())
    assert stored_parameters(tmp_path) == 0


def test_peak_memory_is_in_bytes():
    """A process with torch loaded has used between 50 MB and 1 TB."""
    assert 50e6 < peak_memory() < 1e12


@pytest.fixture(scope="module")
def joint(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run on two tasks beside a baseline that trains on each alone: its folder, and what ``train`` returned."""
    folder = tmp_path_factory.mktemp("joint")
    scores = folder / "scores.jsonl"
    rows = [json.loads(line) for line in tiny.rows.read_text(encoding="utf-8").splitlines()]
    lines = [json.dumps({"text": row["text"], "score": float(len(row["text"]))}) for row in rows]
    scores.write_text("\n".join(lines), encoding="utf-8")
    keys = tiny.given(
        train_file=None,
        tasks=[{"name": "yes", "train_file": str(tiny.rows)}, {"name": "length", "train_file": str(scores)}],
        mixing="round_robin",
        strategy="multi_lora:r=2",
        baselines=["majority", "lora:r=2"],
        output_dir=str(folder / "run"),
        seed=7,
    )
    return folder / "run", train(build_options(keys))


def test_run_on_two_tasks(joint: tuple[Path, dict[str, Any]]) -> None:
    """One result with every task's metrics and their mean, beside baselines trained on each task alone."""
    folder, result = joint
    assert result["task"] == "yes+length"
    assert result["main_metrics"] == ["yes_accuracy", "length_pearson", "mean"]
    rows = [result, *result["baselines"].values()]
    assert all(set(result["main_metrics"]) <= set(row["metrics"]) for row in rows)
    for row in rows:
        metrics = row["metrics"]
        assert metrics["mean"] == pytest.approx((metrics["yes_accuracy"] + metrics["length_pearson"]) / 2)
    assert [task.name for task in load_run(folder).run.tasks] == ["yes", "length"]
    for task in ("yes", "length"):
        alone = json.loads((folder / "baselines" / "lora-r2" / task / "result.json").read_text(encoding="utf-8"))
        assert len(alone["main_metrics"]) == 1
    assert (folder / "training_curve.png").stat().st_size > 0


@pytest.mark.parametrize("metric", ["mean", "eval_length_pearson"])
def test_baselines_alone_choose_by_a_metric_of_their_own(metric: str, joint: Any, tiny: Any, tmp_path: Path) -> None:
    """Of the joint metric a baseline on one task takes its own part; by the mean, or another's, its main one."""
    given = json.loads((joint[0] / "result.json").read_text(encoding="utf-8"))["data"]
    keys = tiny.given(
        **{"train_file": None, **given},
        max_steps=2,
        strategy="multi_lora:r=2",
        baselines=["lora:r=2"],
        output_dir=str(tmp_path / "run"),
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model=metric,
    )
    train(build_options(keys))
    for task, own in (("yes", "accuracy"), ("length", "pearson")):
        folder = tmp_path / "run" / "baselines" / "lora-r2" / task
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        assert state["best_metric"] == max(row[f"eval_{own}"] for row in state["log_history"] if f"eval_{own}" in row)


def test_a_failing_baseline_loses_nothing(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's own result is written before the first baseline begins."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr("tunery.core.run._baseline", fail)
    with pytest.raises(RuntimeError, match="no memory left"):
        train(build_options(tiny.given(max_steps=1, baselines=["head"], output_dir=str(tmp_path / "run"))))
    kept = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert set(kept["metrics"]) >= {"accuracy", "loss"} and "baselines" not in kept


def test_tasks_of_a_run_are_listed_exported_and_renamed(
    joint: tuple[Path, dict[str, Any]], cli: Any, tmp_path: Path
) -> None:
    """From the command line."""
    folder, _ = joint
    assert "length" in cli("tasks", "list", folder).out
    assert cli("tasks", "keep", folder, "--task", "length=size", "--output_dir", tmp_path / "kept").code == 0
    assert [task.name for task in load_run(tmp_path / "kept").run.tasks] == ["size"]
    twice = cli("tasks", "keep", folder, "--task", "yes=x", "--task", "yes=y", "--output_dir", tmp_path / "twice")
    assert (twice.code, "--task 'yes' twice" in twice.err, (tmp_path / "twice").exists()) == (2, True, False)
    refused = cli("export", folder, "--output_dir", tmp_path / "out")
    assert refused.code == 2
    assert "--task" in refused.err
    assert cli("export", folder, "--output_dir", tmp_path / "out", "--task", "yes").code == 0
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_several_tasks_need_a_strategy_that_takes_them(tiny: Any, tmp_path: Path) -> None:
    """The ones that do are named; nothing is written."""
    tasks = [{"name": name, "train_file": str(tiny.rows)} for name in ("one", "two")]
    for strategy, words in (("lora:r=2", "'lora' does not take several"), (None, "several tasks without a strategy")):
        keys = tiny.given(train_file=None, tasks=tasks, strategy=strategy, output_dir=str(tmp_path / "run"))
        with pytest.raises(CompatibilityError, match=f"{words}.*known: multi_lora"):
            train(build_options(keys))
    assert not (tmp_path / "run").exists()


def test_scores_the_test_split(tiny: Any, tmp_path: Path):
    """``do_predict`` scores the test split with the final weights, beside validation, majority included."""
    rows = tiny.rows.read_text(encoding="utf-8")
    (tmp_path / "validation.jsonl").write_text(rows, encoding="utf-8")
    keys = tiny.given(
        validation_file=str(tmp_path / "validation.jsonl"),
        test_split="validation",
        do_predict=True,
        baselines=["majority"],
        output_dir=str(tmp_path / "run"),
    )
    result = train(build_options(keys))
    assert set(result["metrics"]) == {
        f"{prefix}{name}" for prefix in ("", "test_") for name in ("loss", "accuracy", "f1")
    }
    labels = [json.loads(line)["label"] for line in rows.splitlines()]
    most = max(labels.count("yes"), labels.count("no")) / len(labels)
    assert result["baselines"]["majority"]["metrics"]["test_accuracy"] == most
    again = load_run(tmp_path / "run")
    with torch.no_grad():
        tokenizer = AutoTokenizer.from_pretrained(tiny.base)
        texts = [json.loads(line)["text"] for line in rows.splitlines()]
        logits = again.model(**tokenizer(texts, return_tensors="pt", padding=True)).logits
    answers = [("no", "yes")[int(row)] for row in logits.argmax(-1)]
    right = sum(answer == label for answer, label in zip(answers, labels, strict=True))
    assert result["metrics"]["test_accuracy"] == right / len(labels)


def test_do_predict_needs_a_test_split(tiny: Any, tmp_path: Path):
    with pytest.raises(TuneryError, match="do_predict without a labelled test split"):
        train(build_options(tiny.given(do_predict=True, output_dir=str(tmp_path / "run"))))


def test_early_stopping(tiny: Any, tmp_path: Path):
    """With a learning rate of 0 nothing gets better: the run ends after the first evaluation and ``patience`` more."""
    keys = tiny.given(
        learning_rate=0.0,
        max_steps=50,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_only_model=True,
        save_total_limit=1,
        load_best_model_at_end=True,
        early_stopping_patience=3,
        output_dir=str(tmp_path / "run"),
    )
    train(build_options(keys))
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["global_step"] == 8
    assert state["best_global_step"] == 2


def test_early_stopping_needs_the_best_model(tiny: Any):
    with pytest.raises(RecipeError, match="early_stopping_patience without load_best_model_at_end"):
        build_options(tiny.given(early_stopping_patience=3))
