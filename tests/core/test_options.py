"""A recipe and its flags: the same keys, merged so that flags win, typed, and turned into the arguments of one run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tunery.core.arguments import PRESETS, PluginArguments, TrainingArguments, resolve_deepspeed
from tunery.core.data import DataArguments
from tunery.core.federated.arguments import federated_help
from tunery.core.keys import help_text
from tunery.core.options import Options, RunArguments, build_options, read_options
from tunery.registry.errors import DataError, RecipeError, SelectionError
from tunery.registry.selection import Selection, parse_selections

Read = Callable[..., Options]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Read a recipe given as YAML text, and flags."""

    def read_both(text: str = "", *flags: str) -> Options:
        path = tmp_path / "recipe.yaml"
        path.write_text(f"model_name_or_path: base\noutput_dir: {tmp_path}/run\nuse_cpu: true\n{text}", "utf-8")
        return read_options(path, flags)

    return read_both


def test_keys_reach_their_arguments(read: Read):
    """One flat mapping feeds model, data and training."""
    options = read("train_file: a.jsonl\nmax_length: 64\nmax_steps: 7\nstrategy: full\nbaselines: [majority]")
    assert (options.run.model_name_or_path, options.run.baselines) == ("base", ["majority"])
    assert (options.data.train_file, options.data.max_length) == ("a.jsonl", 64)
    assert (options.training.max_steps, options.training.strategy) == (7, "full")
    assert options.given["max_steps"] == 7


def test_flags_win(read: Read):
    """A flag replaces the recipe's value; what is not given as a flag stays, defaults included."""
    options = read(
        "learning_rate: 1e-3\nmax_steps: 7\nseed: 3\nstrategy: full",
        "--learning_rate",
        "5e-4",
        "--strategy=lora:r=2",
        "--seed",
        "42",  # the default, given
    )
    training = options.training
    assert (training.learning_rate, training.max_steps, training.seed) == (5e-4, 7, 42)
    assert training.strategy == "lora:r=2"
    assert training.weight_decay == 0


def test_flags_alone():
    """Everything can be said without a recipe."""
    options = read_options(None, ["--model_name_or_path", "base", "--output_dir", "out", "--use_cpu"])
    assert options.run.model_name_or_path == "base"
    assert options.training.output_dir == "out"
    assert options.training.use_cpu is True


@pytest.mark.parametrize("text", ["1e-5", "1.0e-5", "0.00001", "1E-5", ".1e-4"])
def test_small_numbers(text: str, read: Read):
    """``1e-5`` is a number in YAML here, as it is everywhere else."""
    assert read(f"learning_rate: {text}").training.learning_rate == 1e-5
    assert read("", "--learning_rate", text).training.learning_rate == 1e-5


@pytest.mark.parametrize(("text", "steps"), [('"10"', 10), ("10", 10), ("10.0", 10)])
def test_numbers_are_numbers(text: str, steps: int, read: Read):
    """A quoted number, or a whole one with a point, becomes what its key is."""
    assert read(f"max_steps: {text}").training.max_steps == steps
    assert type(read(f"max_steps: {text}").training.max_steps) is int


def test_selections_from_yaml_and_flags(read: Read):
    """Lists of selections mean the same as strings, as mappings and as flags."""
    expected = (Selection("l2_sp", {"alpha": 0.2, "weight": 0.5}),)
    for given in (
        read("regularizers: [{name: l2_sp, alpha: 0.2, weight: 0.5}]"),
        read("regularizers: ['l2_sp:alpha=0.2,weight=0.5']"),
        read("regularizers:\n- name: l2_sp\n  alpha: 2e-1\n  weight: 0.5"),
        read("regularizers: {name: l2_sp, alpha: 0.2, weight: 0.5}"),
        read("", "--regularizers", "l2_sp:alpha=0.2,weight=0.5"),
        read("", "--regularizers", "{name: l2_sp, alpha: 0.2, weight: 0.5}"),
        read("regularizers: [l2_sp]", "--regularizers=l2_sp:alpha=.2,weight=5e-1"),
    ):
        assert parse_selections(given.training.regularizers, "regularizer") == expected


def test_several_selections(read: Read):
    """Several plugins keep their order, from a list in YAML and from one flag with several values."""
    for given in (read("probes: [weight_distance, other:x=1]"), read("", "--probes", "weight_distance", "other:x=1")):
        chosen = parse_selections(given.training.probes, "probe")
        assert chosen == (Selection("weight_distance"), Selection("other", {"x": 1}))


def test_strategy_as_a_mapping(read: Read):
    """A strategy may be a mapping as well."""
    options = read("strategy:\n  name: lora\n  r: 4\n  target_modules: [query]")
    chosen = Selection("lora", {"r": 4, "target_modules": ["query"]})
    assert parse_selections(options.training.strategy, "strategy") == (chosen,)


def test_two_strategies(read: Read):
    """A run has one strategy."""
    with pytest.raises(RecipeError, match="a run has one strategy, not 2; known: full, lora"):
        read("strategy: [full, lora]")


def test_replace(read: Read):
    """``replace`` changes some keys of what was given; ``None`` goes back to the default, and the original stays."""
    options = read("max_steps: 7\nseed: 3\nprobes: [weight_distance]\nlearning_rate: 1e-3")
    other = options.replace(strategy="head", probes=None, seed=None)
    assert (other.training.strategy, other.training.probes, other.training.seed) == ("head", None, 42)
    assert (other.training.max_steps, other.training.learning_rate) == (7, 1e-3)
    assert (options.training.strategy, options.training.seed) == (None, 3)
    assert options.training.probes == ["weight_distance"]


@pytest.mark.parametrize(
    ("text", "asked"),
    [("", None), ("resume_from_checkpoint: true", True), ("resume_from_checkpoint: some/folder", "some/folder")],
)
def test_resume_in_a_recipe(text: str, asked: object, read: Read):
    """A recipe may ask to resume with a yes or with a folder."""
    assert read(text).training.resume_from_checkpoint == asked


def test_resume_flag(read: Read):
    """The bare flag means: from where the run stopped."""
    assert read("", "--resume_from_checkpoint").training.resume_from_checkpoint == "last"
    assert read("", "--resume_from_checkpoint", "some/folder").training.resume_from_checkpoint == "some/folder"


def test_flags_are_not_abbreviated(read: Read):
    """``--learning`` is not guessed to be ``--learning_rate``: a later release could give it another meaning."""
    with pytest.raises(RecipeError, match="cannot read '--learning'"):
        read("", "--learning", "1e-3")


def test_wrong_data_argument(read: Read):
    """What the data arguments refuse is theirs to say."""
    with pytest.raises(DataError, match="max_length='long'"):
        read("max_length: long")


def test_missing_model(tmp_path: Path):
    """The one key that every run needs."""
    with pytest.raises(RecipeError, match="model_name_or_path is missing; give it in the recipe or as --model"):
        build_options({"output_dir": str(tmp_path)})


def test_unknown_keys_from_python(tmp_path: Path):
    """A key that no argument has is refused, not dropped."""
    given = {"model_name_or_path": "base", "output_dir": str(tmp_path), "use_cpu": True}
    options = build_options(given)
    for make in (lambda: build_options({**given, "max_step": 3}), lambda: options.replace(max_step=3)):
        with pytest.raises(RecipeError, match=r"no key 'max_step'; .*did you mean 'max_steps'\?"):
            make()


def test_help_lists_every_key():
    """``--keys`` names each key of the three argument classes once."""
    names = re.findall(r"^  --(\w+)", help_text(), flags=re.MULTILINE)
    classes = (RunArguments, DataArguments, TrainingArguments)
    assert names == [item.name for cls in classes for item in dataclasses.fields(cls) if item.init]
    assert len(set(names)) == len(names)


def test_help_says_defaults():
    """Once each, as one writes them in a recipe; not where a machine decides; presets are named, percents are single."""
    lines = {line.split()[0]: line for line in help_text().splitlines() if line.startswith("  --")}
    for name, default in (
        ("max_length", "128"),
        ("learning_rate", "5e-05"),
        ("dtype", "float32"),
        ("overwrite_output_dir", "false"),
        ("probe_moments", "begin evaluate end"),
        ("eval_strategy", "no"),
        ("weight_decay", "0.0"),
    ):
        assert lines[f"--{name}"].endswith(f" Default: {default}.")
    for name in ("model_name_or_path", "baselines", "dataset_name", "disable_tqdm", "dataloader_pin_memory"):
        assert "Default: " not in lines[f"--{name}"]
    assert max(line.lower().count("default: ") for line in lines.values()) == 1
    assert "%%" not in "".join(lines.values())
    assert "zero1, zero2, zero3" in lines["--deepspeed"]
    assert re.search(r"--num_train_epochs  .* Default: 1\.\n", federated_help())


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("[!f]*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_read(recipe: Path):
    """Every recipe we ship holds known keys with valid values."""
    options = read_options(recipe, ["--use_cpu"])
    assert options.given.keys() == yaml.safe_load(recipe.read_text(encoding="utf-8")).keys() | {"use_cpu"}


# ---- TrainingArguments itself


def arguments(tmp_path: Path, **given: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **given)


def test_probe_moments(tmp_path: Path):
    """Probes measure at all three moments unless told otherwise; an unknown moment is refused."""
    assert arguments(tmp_path).probe_moments == ["begin", "evaluate", "end"]
    assert arguments(tmp_path, probe_moments=["end"]).probe_moments == ["end"]
    with pytest.raises(RecipeError, match="no probe moment 'start'; known: begin, evaluate, end"):
        arguments(tmp_path, probe_moments=["start"])


def test_unreadable_selection(tmp_path: Path):
    """A selection that cannot be read fails when the arguments are made, before any model is loaded."""
    with pytest.raises(SelectionError, match="cannot read option"):
        arguments(tmp_path, strategy="lora:r")


def test_activation_checkpointing_is_not_reentrant(tmp_path: Path):
    """Re-entrant checkpointing breaks two-forward losses: it is off unless asked for."""
    kwargs = arguments(tmp_path, activation_checkpointing=True).activation_checkpointing_kwargs
    assert kwargs == {"use_reentrant": False}
    asked = {"use_reentrant": True}
    given = arguments(tmp_path, activation_checkpointing=True, activation_checkpointing_kwargs=asked)
    assert given.activation_checkpointing_kwargs == asked


def test_deepspeed_presets(tmp_path: Path):
    """``zero1`` to ``zero3`` are the bundled files; a file of one's own, a dict and JSON pass through."""
    for name, stage in (("zero1", 1), ("zero2", 2), ("zero3", 3)):
        path = Path(resolve_deepspeed(name))
        assert path == PRESETS[name]
        assert yaml.safe_load(path.read_text(encoding="utf-8"))["zero_optimization"]["stage"] == stage
    own = tmp_path / "own.json"
    own.write_text("{}", encoding="utf-8")
    for value in (str(own), {"zero_optimization": {}}, '{"zero_optimization": {}}', None):
        assert resolve_deepspeed(value) == value
    with pytest.raises(RecipeError, match=r"no DeepSpeed preset or file 'zero33'; known: .*did you mean 'zero3'\?"):
        resolve_deepspeed("zero33")


def test_plugin_fields_come_from_one_class():
    """The fields another arguments class gains by the mixin are exactly these."""
    assert [item.name for item in dataclasses.fields(PluginArguments)] == [
        "strategy",
        "regularizers",
        "probes",
        "probe_moments",
        "dropout",
    ]
