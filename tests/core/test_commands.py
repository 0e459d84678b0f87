"""The command line: help at once, plugins without torch, and bad input answered in one line with nothing written."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import tunery
from tunery.registry.loading import load_plugins

Cli = Callable[..., Any]
Listing = Callable[[Path], Mapping[str, bytes]]


def run_command(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``tunery ARGUMENTS`` as a user does."""
    command = [sys.executable, "-m", "tunery", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def assert_one_line(err: str) -> str:
    """Check that ``err`` is one line of ours, and return it."""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("tunery: ")
    return lines[0]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own working directory, where nothing may appear."""
    folder = tmp_path / "place"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def recipe(place: Path, keys: Mapping[str, Any]) -> Path:
    """Write a recipe."""
    path = place / "recipe.yaml"
    path.write_text(yaml.safe_dump(dict(keys)), encoding="utf-8")
    return path


# ---- bad input: recipes

BAD_KEYS: list[tuple[dict[str, Any], str]] = [
    ({"learnin_rate": 1e-3}, "did you mean 'learning_rate'?"),
    ({"learning_rate": "fast"}, "learning_rate='fast': Input should be a valid number"),
    ({"learning_rate": -1.0}, "learning_rate=-1.0: Input should be greater than or equal to 0"),
    ({"max_steps": "ten"}, "max_steps='ten': Input should be a valid integer"),
    ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0: Input should be greater than or equal to 1"),
    ({"per_device_train_batch_size": 2.5}, "per_device_train_batch_size=2.5: Input should be a valid integer"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0: Input should be greater"),
    ({"seed": "lucky"}, "seed='lucky': Input should be a valid integer"),
    ({"use_cpu": "perhaps"}, "use_cpu='perhaps': Input should be a valid boolean"),
    ({"eval_strategy": "sometimes"}, "sometimes is not a valid IntervalStrategy"),
    ({"optim": "adamq"}, "adamq is not a valid OptimizerNames"),
    ({"report_to": "nobody"}, "report_to='nobody' is not installed or not known; known: none, all"),
    (
        {"load_best_model_at_end": True, "save_strategy": "steps"},
        "load_best_model_at_end requires the save and eval strategy to match",
    ),
    ({"model_name_or_path": None}, "model_name_or_path is missing; give it in the recipe or as --model_name_or_path"),
    ({"model_name_or_path": 3}, "model_name_or_path=3: Input should be a valid string"),
    ({"model_name_or_path": "no/folder/here"}, "cannot load model 'no/folder/here'"),
    ({"model_name_or_path": "package:no-such-package/model"}, "pip install no-such-package"),
    ({"dtype": "float23"}, "known: float32, bfloat16, float16, auto; did you mean 'float"),
    ({"train_file": None}, "no data is named; give one of dataset_name, data_files and train_file"),
    ({"train_file": "missing.jsonl"}, "file 'missing.jsonl' does not exist"),
    ({"label_column": "lable"}, "there is no column 'lable'; known: text (string), label (string); did you mean"),
    ({"max_length": "long"}, "max_length='long'"),
    ({"max_length": 4096}, "max_length=4096 is more than the 32 tokens of this tokenizer"),
    ({"metrics": ["acuracy"]}, "metric 'acuracy' is unknown; known: accuracy"),
    ({"strategy": "loar"}, "no strategy is called 'loar'; known: full, head, lora"),
    ({"strategy": "l2_sp"}, "'l2_sp' is a regularizer"),
    ({"strategy": "lora:rank=4"}, "strategy 'lora' has no option 'rank'; known: r, alpha"),
    ({"strategy": "lora:r=four"}, "option r = 'four': Input should be a valid integer"),
    ({"strategy": {"name": "lora", "r": 0}}, "option r = 0: Input should be greater than or equal to 1"),
    ({"strategy": "lora:r="}, "strategy 'lora': option r = ''"),
    ({"strategy": ["full", "lora"]}, "a run has one strategy, not 2; known: full, lora"),
    ({"strategy": "peft:peft_type=LORE"}, "PEFT knows no type 'LORE'"),
    ({"regularizers": ["l3_sp"]}, "no regularizer is called 'l3_sp'"),
    ({"regularizers": ["l2_sp", "l2_sp"]}, "regularizer 'l2_sp' is selected twice"),
    ({"probes": ["weight_distances"]}, "did you mean 'weight_distance'?"),
    ({"probe_moments": ["start"]}, "no probe moment 'start'; known: begin, evaluate, end"),
    ({"baselines": ["majorty"]}, "no strategy is called 'majorty'"),
    ({"deepspeed": "zero4"}, "no DeepSpeed preset or file 'zero4'; known: zero1, zero2, zero3"),
    ({"resume_from_checkpoint": "nowhere"}, "no folder nowhere"),
]


@pytest.mark.parametrize(("changes", "says"), BAD_KEYS, ids=lambda value: str(value)[:48])
def test_bad_key(changes: dict[str, Any], says: str, tiny: Any, place: Path, cli: Cli, listing: Listing):
    """A recipe with one wrong key or value is answered in one line; no output folder appears."""
    path = recipe(place, tiny.given(**{"output_dir": "out"} | changes))
    before = listing(place)
    code, out, err = cli("train", path)
    assert (code, out) == (2, "")
    assert says in assert_one_line(err)
    assert listing(place) == before


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a: [1, 2", "is not YAML"),
        (b"- model_name_or_path: x", "is not a mapping of keys to values"),
        (b"", "is not a mapping of keys to values"),
        (b"just words", "is not a mapping of keys to values"),
        (b"a: !!python/object/apply:os.system ['touch owned']", "is not YAML"),
        (b"\xff\xfe\x00 no text", "cannot read recipe"),
        (None, "cannot read recipe"),
    ],
)
def test_bad_recipe_file(content: bytes | None, says: str, place: Path, cli: Cli, listing: Listing):
    """A recipe that is no YAML mapping, no text or no file is refused, and no object in it is built."""
    path = place / "recipe.yaml"
    path.mkdir() if content is None else path.write_bytes(content)
    before = listing(place)
    code, _, err = cli("train", path)
    assert code == 2
    assert says in assert_one_line(err)
    assert listing(place) == before


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--learnin_rate", "1"], "cannot read '--learnin_rate'; in the flags; did you mean 'learning_rate'?"),
        (["--learning_rate", "fast"], "learning-rate: invalid float value: 'fast'"),
        (["--learning_rate"], "learning-rate: expected one argument"),
        (["more", "words"], "cannot read 'more'"),
        (["--zzz"], "cannot read '--zzz'; in the flags; see tunery train --keys"),
    ],
)
def test_bad_flag(flags: list[str], says: str, tiny: Any, place: Path, cli: Cli, listing: Listing):
    """An unknown flag or an unreadable value names itself and the nearest thing that exists."""
    path = recipe(place, tiny.given(output_dir="out"))
    before = listing(place)
    code, _, err = cli("train", path, *flags)
    assert code == 2
    assert says in assert_one_line(err)
    assert listing(place) == before


def test_recipe_after_flags(tiny: Any, place: Path, cli: Cli):
    """A recipe behind the flags is not taken for nonsense: the message says where it goes."""
    path = recipe(place, tiny.given(output_dir="out"))
    code, _, err = cli("train", "--max_steps", "3", path)
    assert code == 2
    assert "the recipe comes before the flags" in assert_one_line(err)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("rows.jsonl", b"", "the file is empty"),
        ("rows.csv", b"text,label\n", "there are no rows; in rows.csv"),
        ("rows.jsonl", b'{"text": "a", "label"', "the file cannot be read"),
        ("rows.jsonl", b"\xff\xfe\xfa\x00", "the file cannot be read"),
        ("rows.parquet", b"PAR1 nonsense", "the file cannot be read"),
        ("rows.txt", b"a b c", "file type '.txt' is not known; known: .json, .jsonl, .csv, .parquet"),
        ("rows.jsonl", b'{"text": "a", "verdict": 1}\n', "no label column is found; known: text (string), verdict"),
    ],
)
def test_bad_data(name: str, content: bytes, says: str, tiny: Any, place: Path, cli: Cli, listing: Listing):
    """Data that is empty, damaged or without a label is refused before anything is trained or written."""
    (place / name).write_bytes(content)
    path = recipe(place, tiny.given(train_file=name, output_dir="out"))
    before = listing(place)
    code, _, err = cli("train", path)
    assert code == 2
    assert says in assert_one_line(err)
    assert listing(place) == before


@pytest.mark.parametrize("taken", ["file", "below a file", "run"])
def test_output_dir_taken(taken: str, tiny: Any, place: Path, cli: Cli, listing: Listing):
    """An output folder that cannot be one, or holds a run, is refused and stays as it is."""
    target = {"file": "taken", "below a file": "taken/deeper", "run": "run"}[taken]
    (place / "taken").write_text("mine", encoding="utf-8")
    (place / "run").mkdir()
    (place / "run" / "result.json").write_text("{}", encoding="utf-8")
    path = recipe(place, tiny.given(output_dir=target))
    before = listing(place)
    code, _, err = cli("train", path)
    assert code == 2
    assert ("holds a run already" if taken == "run" else f"cannot write to {target}") in assert_one_line(err)
    assert listing(place) == before


def test_failing_start_keeps_the_earlier_run(tiny: Any, finished: Any, place: Path, cli: Cli, listing: Listing):
    """With ``overwrite_output_dir`` a run that cannot start does not cost the one that is there."""
    shutil.copytree(finished("lora:r=2"), place / "run")
    keys = tiny.given(output_dir="run", overwrite_output_dir=True, label_column="nothing")
    path = recipe(place, keys)
    before = listing(place)
    code, _, err = cli("train", path)
    assert code == 2
    assert "there is no column 'nothing'" in assert_one_line(err)
    assert listing(place) == before


# ---- bad input: artefacts


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what a manifest says."""
    path = folder / "tunery.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def flip_bit(path: Path, position: int = -1) -> None:
    """Turn one bit of a file over."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))


def missing_plugin(content: dict[str, Any]) -> None:
    content["plugins"][0] |= {"name": "magic", "distribution": "tunery-magic", "version": "1.2.3"}


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda run: os.truncate(run / "adapter_model.safetensors", 1000),
        "has 1000 bytes instead of",
    ),
    "bit flipped": (
        lambda run: flip_bit(run / "adapter_model.safetensors"),
        "does not match its hash in tunery.json",
    ),
    "weights missing": (lambda run: (run / "adapter_model.safetensors").unlink(), "is missing"),
    "newer format": (
        lambda run: edit_manifest(run, lambda content: content.update(format=99)),
        "has format 99; known: up to 1; pip install --upgrade tunery",
    ),
    "missing plugin": (
        lambda run: edit_manifest(run, missing_plugin),
        "in tunery-magic 1.2.3; pip install tunery-magic==1.2.3",
    ),
    "option gone": (
        lambda run: edit_manifest(run, lambda content: content["plugins"][0]["config"].update(rank=3)),
        "strategy 'lora' has no option 'rank'",
    ),
    "no manifest": (lambda run: (run / "tunery.json").unlink(), "has no tunery.json"),
    "manifest cut": (lambda run: os.truncate(run / "tunery.json", 40), "cannot read"),
    "manifest no text": (lambda run: (run / "tunery.json").write_bytes(b"\xff\xfe"), "cannot read"),
    "manifest of others": (
        lambda run: (run / "tunery.json").write_text("[]", encoding="utf-8"),
        "is not a manifest of tunery",
    ),
    "manifest lacks": (lambda run: edit_manifest(run, lambda content: content.pop("files")), "lacks 'files'"),
    "base model gone": (
        lambda run: edit_manifest(run, lambda content: content["base_model"].update(name_or_path="gone/away")),
        "cannot load model 'gone/away'",
    ),
    "no run": (shutil.rmtree, "no folder"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_run(damage: str, finished: Any, place: Path, cli: Cli, listing: Listing):
    """A damaged run, or one this installation cannot read, is neither exported nor probed."""
    run = Path(shutil.copytree(finished("lora:r=2"), place / "run"))
    break_it, says = DAMAGES[damage]
    break_it(run)
    before = listing(place)
    for command in (("export", "run", "--output_dir", "out/adapter"), ("probe", "weight_distance", "--model", "run")):
        code, out, err = cli(*command)
        assert (code, out) == (2, "")
        assert says in assert_one_line(err)
        assert listing(place) == before


@pytest.mark.parametrize("damage", ["truncated", "bit flipped", "newer format", "manifest cut"])
def test_damaged_checkpoint(damage: str, tiny: Any, finished: Any, place: Path, cli: Cli, listing: Listing):
    """Training does not go on from a damaged checkpoint, nor silently from an older one."""
    run = Path(shutil.copytree(finished("lora:r=2"), place / "run"))
    break_it, says = DAMAGES[damage]
    break_it(run / "checkpoint-10")
    path = recipe(place, tiny.given(strategy="lora:r=2", output_dir="run"))
    before = listing(place)
    code, _, err = cli("train", path, "--resume_from_checkpoint")
    assert code == 2
    assert says in assert_one_line(err)
    assert listing(place) == before


def test_wrong_base_model(finished: Any, other_base: Path, place: Path, cli: Cli, listing: Listing):
    """An adapter is not put on a base model whose weights have changed since."""
    shutil.copytree(finished("lora:r=2"), place / "run")
    edit_manifest(place / "run", lambda content: content["base_model"].update(name_or_path=str(other_base)))
    before = listing(place)
    code, _, err = cli("export", "run", "--output_dir", "out")
    assert code == 2
    assert "is not the base model that run was trained on" in assert_one_line(err)
    assert listing(place) == before


def test_resume_on_wrong_base_model(
    tiny: Any, finished: Any, other_base: Path, place: Path, cli: Cli, listing: Listing
):
    """A checkpoint does not go on with another base model."""
    shutil.copytree(finished("lora:r=2"), place / "run")
    keys = tiny.given(strategy="lora:r=2", output_dir="run", model_name_or_path=str(other_base))
    path = recipe(place, keys)
    before = listing(place)
    code, _, err = cli("train", path, "--resume_from_checkpoint")
    assert code == 2
    assert "was trained on another base model" in assert_one_line(err)
    assert listing(place) == before


def test_export_target_exists(finished: Any, place: Path, cli: Cli, listing: Listing):
    """Export writes over nothing."""
    (place / "out").mkdir()
    (place / "out" / "mine.txt").write_text("mine", encoding="utf-8")
    before = listing(place)
    code, _, err = cli("export", finished("lora:r=2"), "--output_dir", "out")
    assert code == 2
    assert "out exists already; choose another --output_dir" in assert_one_line(err)
    assert listing(place) == before


def test_merge_what_cannot_merge(finished: Any, place: Path, cli: Cli, listing: Listing):
    """A PEFT method without a merge says so."""
    before = listing(place)
    prompt = finished("peft:peft_type=PROMPT_TUNING,num_virtual_tokens=2")
    code, _, err = cli("export", prompt, "--output_dir", "out", "--merge")
    assert code == 2
    assert "PEFT type PROMPT_TUNING cannot be merged; export it as an adapter" in assert_one_line(err)
    assert listing(place) == before


def test_output_dir_that_is_a_file(finished: Any, place: Path, cli: Cli, listing: Listing):
    """Nor does a probe or an export end in a traceback where a file is in the way."""
    (place / "taken").write_text("mine", encoding="utf-8")
    before = listing(place)
    for says, *command in (
        (
            "cannot write to taken; in ",
            "probe",
            "weight_distance",
            "--model",
            finished("full"),
            "--output_dir",
            "taken",
        ),
        ("cannot write taken/x: Not a directory; choose", "export", finished("full"), "--output_dir", "taken/x"),
    ):
        code, _, err = cli(*command)
        assert code == 2
        assert says in assert_one_line(err)
        assert listing(place) == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("plugins", "show", "weight_distanse"), "did you mean 'weight_distance'?"),
        (("probe", "lora", "--model", "run"), "no probe is called 'lora'"),
        (("probe", "weight_distance", "--model", "run", "--jsn"), "did you mean 'json'?"),
        (("probe", "--model", "run"), "no probe is named; known: apoz, "),
        (("probe", "weight_distance"), "no model to measure; give --model, --models or --runs"),
        (("probe", "--models", "run", "weight_distance"), "the probe's name comes first"),
        (("probe", "weight_distance", "--runs", "out/*"), "--runs 'out/*' fits no folder"),
        (("probe", "weight_distance", "--models", "a", "b", "--revisions", "r"), "revisions of 2 models"),
        (("probe", "weight_distance", "--models", "a", "b", "--tokens", "1B"), "1 --tokens for 2 models"),
        (("probe", "weight_distance", "--model", "a", "--tokens", "many"), "'many' is no count; known: 1e9, 41B, 2.4T"),
        (("probe", "weight_distance", "--model", "a", "--dataset_nam", "x"), "did you mean 'dataset_name'?"),
        (("probe", "weight_distance", "--model", "no/such"), "no folder no/such"),
        (
            ("probe", "weight_distance", "--model", "a", "--per_device_eval_batch_size", "0"),
            "per_device_eval_batch_size=0: Input should be greater than or equal to 1; see tunery probe --keys",
        ),
        (("probe", "weight_distance", "--model", "a", "--seed", "-1"), "seed=-1: Input should be greater than"),
        (("probe", "weight_distance", "--model", "a", "--dtype", "float17"), "dtype='float17'; known: float32"),
    ],
)
def test_other_commands(arguments: tuple[str, ...], says: str, place: Path, cli: Cli):
    """The other commands answer in the same way."""
    code, _, err = cli(*arguments)
    assert code == 2
    assert says in assert_one_line(err)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("train", "recipe.yaml"), "no key 'num_clients'; in recipe.yaml; it is one of tunery federate RECIPE"),
        (
            ("train", "--num_clients", "3"),
            "cannot read '--num_clients'; in the flags; it is one of tunery federate RECIPE",
        ),
        (("federate", "recipe.yaml", "--zzz"), "cannot read '--zzz'; in the flags; see tunery federate --keys"),
        (
            ("federate", "recipe.yaml", "--alpha", "much"),
            "invalid float value: 'much'; in the flags; see tunery federate --keys",
        ),
        (
            ("federate", "recipe.yaml", "--alpha", "-1"),
            "alpha=-1.0: Input should be greater than 0; see tunery federate --keys",
        ),
        (
            ("federate", "recipe.yaml", "--seed", "-1"),
            "seed=-1: Input should be greater than or equal to 0; see tunery federate",
        ),
        (("federate", "recipe.yaml", "--optim", "adamq"), "invalid choice: 'adamq'"),
        (
            ("federate", "provison", "project.yaml"),
            "no recipe provison; known: provision, server, site, submit; did you mean 'provision'?",
        ),
    ],
)
def test_federated_keys(words: tuple[str, ...], says: str, tiny: Any, place: Path, cli: Cli):
    """Where rounds are meant, what is wrong with their keys names the command that lists them."""
    recipe(place, {"num_clients": 4, **tiny.given(output_dir="out")})
    code, _, err = cli(*words)
    assert code == 2
    assert says in assert_one_line(err)
    assert ("train --keys" in err) is False


def test_keys_of_probe(cli: Cli):
    """Listed without a probe; a run's length does not say which step it stands at."""
    code, out, err = cli("probe", "--keys")
    assert (code, err) == (0, "")
    assert "--dataset_name" in out
    assert "--steps  Steps of each model. Default: from its name.\n" in out


OWN_PROCESS = {
    "train": (("train", "recipe.yaml"), "strategy 'lora' has no option 'rank'"),
    "export": (("export", "run", "--output_dir", "out"), "does not match its hash"),
}


@pytest.mark.parametrize("command", ["train", pytest.param("export", marks=pytest.mark.slow)])
def test_bad_input_in_a_process_of_its_own(command: str, tiny: Any, finished: Any, place: Path, listing: Listing):
    """What holds inside this process holds for the installed command: one line, code 2, nothing written."""
    shutil.copytree(finished("lora:r=2"), place / "run")
    flip_bit(place / "run" / "adapter_model.safetensors")
    recipe(place, tiny.given(output_dir="out", strategy="lora:rank=4"))
    before = listing(place)
    arguments, says = OWN_PROCESS[command]
    ran = run_command(*arguments, cwd=place)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert says in assert_one_line(ran.stderr)
    assert listing(place) == before


# ---- what answers


@pytest.mark.parametrize("arguments", [["--help"], ["plugins", "list"], ["plugins", "show", "l2_sp"]])
def test_light_commands_import_no_framework(arguments: list[str]):
    """What answers from metadata loads neither torch nor what stands on it."""
    code = (
        "import sys; sys.argv = ['tunery', *sys.argv[1:]]\n"
        "from tunery.core.commands import main\n"
        "try:\n    main()\n"
        "except SystemExit as stop:\n"
        "    print(stop.code, *{'torch', 'transformers', 'peft', 'datasets', 'deepspeed'} & set(sys.modules),"
        " file=sys.stderr)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert ran.stderr.split() == ["0"]


def test_help_names_every_command(cli: Cli):
    """The commands of the README are there, and no others."""
    code, out, _ = cli("--help")
    assert code == 0
    listed = re.findall(r"^│ (\w+)", out, flags=re.MULTILINE)
    assert sorted(listed) == [
        "bench",
        "env",
        "export",
        "federate",
        "plugins",
        "probe",
        "report",
        "sensitivity",
        "tasks",
        "train",
    ]


def test_plugins_list(cli: Cli):
    """Every plugin has its kind, origin, existing file and summary, as JSON and as a table."""
    rows = json.loads(cli("plugins", "list", "--json").out)
    assert {(row["kind"], row["name"]) for row in rows} >= {
        ("strategy", "full"),
        ("strategy", "head"),
        ("strategy", "lora"),
        ("strategy", "peft"),
        ("regularizer", "l2_sp"),
        ("probe", "weight_distance"),
    }
    table = cli("plugins", "list").out
    for row in rows:
        assert list(row) == ["kind", "name", "distribution", "version", "file", "summary"]
        assert importlib.metadata.version(row["distribution"]) == row["version"]
        assert Path(row["file"]).is_file()
        assert row["summary"].strip()
        assert row["name"] in table


@pytest.mark.parametrize("name", sorted(entry.name for entry in load_plugins().catalog))
def test_plugins_show(name: str, cli: Cli):
    """Every option of every plugin is shown with its type, default and a meaning from the Config's docstring."""
    shown = json.loads(cli("plugins", "show", name, "--json").out)
    entry = next(entry for entry in load_plugins().catalog if entry.name == name)
    fields = [item for item in dataclasses.fields(entry.cls.Config)]
    assert [option["name"] for option in shown["options"]] == [
        "any other" if item.metadata.get("open") else item.name for item in fields
    ]
    for option in shown["options"]:
        assert option["type"].strip(), option
        assert option["default"].strip(), option
        assert len(option["meaning"].split()) > 2, option
    assert shown["reference"] == entry.cls.reference
    text = cli("plugins", "show", name).out
    assert entry.cls.summary in " ".join(text.split())
    assert all(option["name"] in text for option in shown["options"])


def test_plugins_show_says_what_a_plugin_takes(cli: Cli):
    """Task kinds and ZeRO stages come from the plugin's ``supports``; types and defaults are readable."""
    shown = json.loads(cli("plugins", "show", "head", "--json").out)
    assert shown["tasks"] == "classification, image_classification, other, regression"
    assert shown["zero_stages"] == "0, 1, 2, 3"
    options = {option["name"]: option for option in json.loads(cli("plugins", "show", "lora", "--json").out)["options"]}
    assert options["r"]["default"] == "8"
    assert options["r"]["type"].startswith("int")
    assert options["target_modules"]["default"] == "null"


def test_env(cli: Cli):
    """``tunery env`` prints what a bug report needs."""
    code, out, err = cli("env")
    assert (code, err) == (0, "")
    facts = {words[0]: " ".join(words[1:]) for line in out.splitlines() if (words := line.split())}
    for name in ("torch", "transformers", "peft", "deepspeed"):
        assert facts[name] == importlib.metadata.version(name)
    assert facts["tunery"] == tunery.__version__
    assert facts["python"] == sys.version.split()[0]
    assert "lora" in facts["plugins"]


def test_train_and_probe(tiny: Any, place: Path, cli: Cli):
    """A recipe trains, prints its result beside the baselines, and the run can be measured; stdout of JSON is JSON."""
    path = recipe(place, tiny.given(strategy="lora:r=2", baselines=["majority"], max_steps=2))
    code, out, err = cli("train", path, "--output_dir", "run")
    assert (code, err) == (0, "")
    assert "majority" in out
    assert "lora" in out
    assert "run/ holds the weights, result.json and training_curve.png" in out
    code, out, err = cli("probe", "weight_distance", "--model", "run", "--json")
    assert (code, err) == (0, "")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["layer"] for row in rows if "layer" in row] == [0, 1]
    assert all(row["model"] == "run" and row["probe"] == "weight_distance" for row in rows)
    assert all(row["value"] > 0 for row in rows)
    assert "relative_distance" in cli("probe", "weight_distance", "--model", "run").out


def test_keys(cli: Cli):
    """``tunery train --keys`` lists every key a recipe may hold, each with a help text."""
    from tunery.core.data import DataArguments
    from tunery.core.options import RunArguments, TrainingArguments

    lines = cli("train", "--keys").out.splitlines()
    shown = {words[0]: words[1:] for line in lines if (words := line.split()) and words[0].startswith("--")}
    names = [item.name for cls in (RunArguments, DataArguments, TrainingArguments) for item in dataclasses.fields(cls)]
    assert set(shown) == {f"--{name}" for name in names}
    assert [name for name in ("strategy", "max_length", "baselines", "learning_rate") if not shown[f"--{name}"]] == []
