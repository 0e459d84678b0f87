"""Every file in recipes/ can be read, and names plugins and tasks that are there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tunery.core.options import read_options
from tunery.core.recipe import choose
from tunery.registry.errors import DataError, SelectionError, TuneryError

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("[!f]*.yaml"))  # federations have keys of their own
NLG, GLUE = (path for name in ("nlg", "glue") for path in RECIPES if path.stem == f"multi_lora_{name}")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_read(path: Path):
    """Keys, types, plugins and every task's arguments are right; nothing is loaded for it."""
    options = read_options(path, ["--use_cpu"])
    choose(options.training.strategy, options.training.regularizers, options.training.probes)
    for name, data in options.data.each():
        assert data.dataset_name
        assert name or not options.data.tasks
    assert options.training.output_dir == f"runs/{path.stem}"


def test_nlg_settings():
    """GPT-2 medium on three tasks, with the paper's rank, alpha and dropout and the search of LoRA's command."""
    options = read_options(NLG, ["--use_cpu"])
    assert options.run.model_name_or_path.endswith("gpt2-medium")
    assert options.training.strategy == "multi_lora:r=4,alpha=32,dropout=0.1"
    training = options.training
    assert (training.learning_rate, training.weight_decay, training.warmup_steps) == (2e-4, 0.01, 500)
    assert (training.per_device_train_batch_size, training.num_train_epochs) == (8, 5)
    assert [name for name, _ in options.data.each()] == ["e2e", "dart", "webnlg"]
    search = {"num_beams": 10, "length_penalty": 0.8, "no_repeat_ngram_size": 4, "max_new_tokens": 64}
    assert all((data.decoding, data.metrics[0]) == (search, "bleu") for _, data in options.data.each())


def test_glue_settings():
    """RoBERTa-base on GLUE's eight, each with the metric GLUE reports first."""
    options = read_options(GLUE, ["--use_cpu"])
    assert (options.training.strategy, options.training.warmup_steps) == ("multi_lora:r=8,alpha=16", 0.06)
    metrics = {name: data.metrics[0] for name, data in options.data.each()}
    accurate = ("mnli", "mrpc", "qnli", "qqp", "rte", "sst2")
    assert metrics == dict.fromkeys(accurate, "accuracy") | {"cola": "matthews_correlation", "stsb": "pearson"}


def test_tasks_by_flag_take_the_place_of_the_recipes():
    """A task named by a flag keeps what the recipe says of it, but for source and columns where the flag has others."""
    flags = [
        "--tasks",
        "webnlg:data_files=here,text_columns=[tripleset,targets]",
        "e2e:num_beams=2",
        "mine:train_file=a.csv",
    ]
    tasks = dict(read_options(NLG, ["--use_cpu", *flags]).data.each())
    assert list(tasks) == ["webnlg", "e2e", "mine"]
    local = tasks["webnlg"]
    assert (local.data_files, local.text_columns) == ("here", ["tripleset", "targets"])
    assert (local.dataset_name, local.dataset_config_name, local.references_column) == (None, None, None)
    assert (tasks["e2e"].dataset_name, tasks["e2e"].num_beams) == ("tuetschek/e2e_nlg", 2)
    assert tasks["e2e"].text_columns == ["meaning_representation", "human_reference"]
    assert (tasks["mine"].train_file, tasks["mine"].max_length) == ("a.csv", 512)


def test_a_tasks_own_source_replaces_the_common_one():
    """GLUE's tasks share a dataset; one from files has nothing of it."""
    tasks = dict(read_options(GLUE, ["--use_cpu", "--tasks", "rte:data_files=here", "cola"]).data.each())
    assert (tasks["rte"].dataset_name, tasks["rte"].dataset_config_name, tasks["rte"].data_files) == (
        None,
        None,
        "here",
    )
    assert tasks["rte"].metrics == ["accuracy"]
    assert (tasks["cola"].dataset_name, tasks["cola"].dataset_config_name) == ("nyu-mll/glue", "cola")


@pytest.mark.parametrize(
    ("flag", "error", "message"),
    [
        ("rte:data_files", SelectionError, "rte:data_files"),
        ("rte:data_file=x", DataError, "no key 'data_file'; in tasks[0]; did you mean 'data_files'"),
        ("rte:num_beams=0", DataError, "num_beams=0: Input should be greater than or equal to 1"),
    ],
)
def test_a_wrong_task_flag_is_one_line(flag: str, error: type[TuneryError], message: str):
    """Grammar, key and value are checked."""
    with pytest.raises(error, match=r"^[^\n]*$") as caught:
        read_options(GLUE, ["--use_cpu", "--tasks", flag]).data.each()
    assert message in str(caught.value)


def test_local_recipe_trains(tiny, tmp_path: Path):
    """The GLUE recipe on a small model and files, by flags alone; a baseline trains on each task's own files."""
    from tunery.core.run import train

    folder = tmp_path / "mrpc"
    folder.mkdir()
    rows = [{"sentence1": "a b", "sentence2": "c d", "label": number % 2} for number in range(8)]
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    flags = f"--model_name_or_path {tiny.base} --max_length 16 --tasks mrpc:data_files={folder} rte:data_files={folder}"
    quick = (
        f"--max_steps 1 --report_to none --use_cpu --save_strategy no --baselines head --output_dir {tmp_path / 'run'}"
    )
    result = train(read_options(GLUE, f"{flags} {quick}".split()))
    known = {"mrpc_accuracy", "mrpc_f1", "rte_accuracy", "mean"}
    assert known <= result["metrics"].keys()
    assert known <= result["baselines"]["head"]["metrics"].keys()


def test_local_nlg_recipe_writes_and_is_scored(tiny, tmp_path: Path):
    """The NLG recipe on a small GPT-2 and files, by flags alone: each task completes its prompts and has its BLEU."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    from tunery.core.run import train

    base, folder = tmp_path / "base", tmp_path / "files"
    sizes = {"vocab_size": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=2, eos_token_id=3)).save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny.base).save_pretrained(base)
    folder.mkdir()
    rows = [{"meaning_representation": text, "human_reference": "c d e f"} for text in ("a b", "b a")]
    for split in ("train", "validation", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    flags = ["--model_name_or_path", str(base), "--output_dir", str(tmp_path / "run")]
    flags += ["--tasks", f"e2e:data_files={folder}", f"dart:data_files={folder},metrics=[chrf]"]
    quick = (
        "--max_steps 1 --max_length 16 --num_beams 2 --max_new_tokens 4 --report_to none --use_cpu --save_strategy no"
    )
    result = train(read_options(NLG, flags + quick.split()))
    assert {"e2e_bleu", "e2e_test_chrf", "e2e_perplexity", "dart_chrf", "mean"} <= result["metrics"].keys()
    written = (tmp_path / "run" / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    asked = [(row["task"], row["prompt"]) for row in map(json.loads, written) if row["split"] == "validation"]
    assert asked == [("e2e", "a b"), ("e2e", "b a"), ("dart", "a b"), ("dart", "b a")]
