"""The overtraining study: its text and tokenizer, its pre-training runs, and the whole of it as a user runs it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tunery.benchmarks.studies.overtraining import __main__ as command
from tunery.benchmarks.studies.overtraining import pretraining
from tunery.benchmarks.studies.overtraining.pretraining import SIZES, Pretraining, passes, pretrain, schedule
from tunery.benchmarks.studies.overtraining.text import DOCUMENT, documents, split, train_tokenizer
from tunery.core.data.python_docs import HELD_OUT
from tunery.core.run import train
from tunery.registry.errors import DataError, RecipeError


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder with a file of forty documents."""
    pieces = [f"part {n} " + "of some text, " * 160 for n in range(40)]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "all.txt").write_text("\n\n".join(pieces), encoding="utf-8")
    return tmp_path / "text"


@pytest.fixture
def asked(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pretraining:
    """Two budgets of the smallest decoder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return Pretraining(size=SIZES["quick"], budgets=[1280, 2560], sources=[str(text)])


def test_documents_of_the_standard_library():
    """Enough to pre-train on, each once, none of the packages that are fine-tuned on."""
    found = documents([])
    assert len(found) == len(set(found)) > 1000
    assert sum(map(len, found)) / len(found) < 3 * DOCUMENT
    assert "asyncio" in HELD_OUT
    assert not any("class AbstractEventLoop" in piece for piece in found)


def test_files_and_rows(text: Path, tmp_path: Path):
    """Text files and JSON rows say the same; what has no text is refused in one line."""
    found = documents([str(text)])
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in found), encoding="utf-8")
    assert documents([str(rows)]) == found
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no \.txt or \.jsonl"):
        documents([str(tmp_path / "empty")])
    rows.write_text('{"txt": 1}\n', encoding="utf-8")
    with pytest.raises(DataError, match="cannot read"):
        documents([str(rows)])


def test_the_split_does_not_move():
    """Whether a document is held out depends on it alone."""
    texts = [f"document {number}" for number in range(2000)]
    trained, held = split(texts)
    assert sorted(trained + held) == sorted(texts)
    assert 60 < len(held) < 140
    assert set(split(texts[::2])[1]) <= set(held)


def test_every_text_can_be_written():
    """Byte-level: nothing is unknown, and decoding gives it back."""
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 20, 300, 64)
    for odd in ("naïve\n\tλ=5 🙂", "def f(y):"):
        assert tokenizer.decode(tokenizer(odd).input_ids) == odd
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0


def test_budgets_are_trained_once(asked: Pretraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From one initialisation, as many tokens as asked, the learning rate down to zero; a second call trains nothing."""
    folder = tmp_path / "study"
    runs = pretrain(asked, folder, print)
    assert [run.name for run in runs] == ["tokens1.28K", "tokens2.56K"]
    for run, budget in zip(runs, asked.budgets, strict=True):
        state = json.loads((run / "trainer_state.json").read_text())
        assert state["global_step"] * asked.size.batch_size * asked.size.max_length == budget
        rates = [row["learning_rate"] for row in state["log_history"] if "learning_rate" in row]
        assert rates[-1] < 0.1 * max(rates)
        assert max(rates) > 0.8 * asked.size.learning_rate
        assert not list(run.glob("checkpoint-*"))
        assert 0 < passes(run) <= 1
    first, last = (json.loads((run / "result.json").read_text())["metrics"]["perplexity"] for run in runs)
    assert last < first < asked.size.vocab_size
    monkeypatch.setattr(pretraining, "train", lambda _: pytest.fail("trained again"))
    assert pretrain(asked, folder, print) == runs
    with pytest.raises(RecipeError, match="pre-trained with another seed"):
        pretrain(dataclasses.replace(asked, seed=1), folder, print)


def test_text_that_does_not_suffice_is_repeated(asked: Pretraining, tmp_path: Path):
    """How often, is told and said in the report; it is what tokens asked for and tokens there are come to."""
    told: list[str] = []
    (run,) = pretrain(dataclasses.replace(asked, max_documents=13, budgets=[10240]), tmp_path / "study", told.append)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "study" / "initial")
    lines = (tmp_path / "study" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    there = sum(len(tokenizer(json.loads(line)["text"]).input_ids) + 1 for line in lines)
    assert passes(run) == pytest.approx(10240 / there, rel=0.1)
    assert passes(run) > 1.1
    assert told[-1].endswith(f"; text read {passes(run):.3g} times")
    assert command._repeated([run]) == f"Text was repeated: it was read {passes(run):.3g} times on 10.24K tokens."


def test_micro_batches_make_the_same_steps(asked: Pretraining, tmp_path: Path):
    """A step of two halves leaves the weights of a whole one; bfloat16 leaves others, and is another study."""
    weights = {}
    for name, changes in (("whole", {}), ("halves", {"micro_batch_size": 2}), ("coarse", {"bf16": True})):
        changed = dataclasses.replace(asked, budgets=[1280], size=dataclasses.replace(asked.size, **changes))
        (run,) = pretrain(changed, tmp_path / name, print)
        weights[name] = LlamaForCausalLM.from_pretrained(run).model.embed_tokens.weight
    torch.testing.assert_close(weights["halves"], weights["whole"], atol=1e-4, rtol=0)
    assert (weights["coarse"] - weights["whole"]).abs().max() > 1e-4
    pretrain(dataclasses.replace(asked, budgets=[1280]), tmp_path / "halves", print)  # which is done
    with pytest.raises(RecipeError, match="pre-trained with another size"):
        pretrain(changed, tmp_path / "whole", print)


def test_steps_that_cannot_be_made_are_refused(asked: Pretraining, tmp_path: Path):
    """Before anything is written."""
    for changes, says in (
        ({"budgets": [10**6, 127]}, "a budget of 127 tokens, where a step has 128"),
        ({"size": dataclasses.replace(asked.size, micro_batch_size=3)}, "a divisor of the 4 blocks"),
    ):
        with pytest.raises(RecipeError, match=says):
            pretrain(dataclasses.replace(asked, **changes), tmp_path / "study", print)
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize("size", ["15m", "30m", "90m"])
def test_the_command_of_the_recipes(size: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """It pre-trains with the paper's budgets; flags say how they fit into memory."""
    seen: list[Pretraining] = []

    def stop(asked: Pretraining, *_: Any) -> Any:
        seen.append(asked)
        raise RecipeError("stop")

    monkeypatch.setattr(command, "pretrain", stop)
    call = ["--size", size, "--data_files", "FOLDER", "--output_dir", str(tmp_path)]
    assert command.main(call) == 2
    assert command.main([*call, "--budgets", "1B", "--pretrain_micro_batch_size", "32", "--bf16"]) == 2
    plain, fitted = seen
    assert [budget / 1e9 for budget in plain.budgets] == [4, 8, 16, 32, 64, 128]
    keys = schedule(fitted, fitted.budgets[0])
    assert (fitted.budgets, keys["bf16"], schedule(plain, 4 * 10**9)["bf16"]) == ([10**9], True, False)
    assert (keys["per_device_train_batch_size"], keys["gradient_accumulation_steps"]) == (32, 8)


def test_a_killed_run_goes_on_with_the_same_weights(
    asked: Pretraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Interrupted after its first checkpoint, it ends as one that was not."""
    asked = dataclasses.replace(asked, budgets=[1280])
    # Constant, so that a run cut short takes the first steps of one that is not.
    monkeypatch.setattr(pretraining, "schedule", lambda *of: schedule(*of) | {"lr_scheduler_type": "constant"})
    (straight,) = pretrain(asked, tmp_path / "straight", print)

    def interrupted(options):
        train(options.replace(max_steps=4, save_steps=2))  # what a kill leaves: checkpoints without a result
        raise KeyboardInterrupt

    monkeypatch.setattr(pretraining, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pretrain(asked, tmp_path / "killed", print)
    place = tmp_path / "killed" / "pretrained" / "tokens1.28K"
    (place / "result.json").unlink()
    monkeypatch.setattr(pretraining, "train", train)
    assert pretrain(asked, tmp_path / "killed", print) == [place]
    assert (place / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("size", "layers", "width", "inner", "parameters", "halved"),
    [("15m", 3, 192, 768, 1.8e6, 1.1e6), ("30m", 6, 384, 1536, 14.2e6, 8.8e6), ("90m", 9, 576, 2304, 47.8e6, 29.9e6)],
)
def test_table_3(size: str, layers: int, width: int, inner: int, parameters: float, halved: float):
    """Layers, heads, widths, context, batch, learning rate; and that the names do not match the table."""
    asked = SIZES[size]
    assert (asked.num_hidden_layers, asked.num_attention_heads) == (layers, layers)
    assert (asked.hidden_size, asked.intermediate_size, asked.vocab_size) == (width, inner, 50304)
    assert (asked.max_length, asked.batch_size, asked.learning_rate) == (1024, 256, 3e-4)
    keys = schedule(Pretraining(size=asked, budgets=[]), 4 * 10**9)
    assert keys["max_steps"] == round(4e9 / (256 * 1024))
    assert (keys["warmup_steps"], keys["weight_decay"], keys["adam_beta2"]) == (0.1, 0.1, 0.95)
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=width,
                intermediate_size=inner,
                num_hidden_layers=layers,
                num_attention_heads=layers,
                vocab_size=50304,
            )
        )
    inside = sum(weight.numel() for name, weight in model.named_parameters() if ".layers." in name)
    assert inside == pytest.approx(parameters, rel=0.02)
    # OLMo's SwiGLU halves the inner width that the table prints: its three matrices have half as many numbers.
    assert inside - layers * 3 * width * inner / 2 == pytest.approx(halved, rel=0.02)


def test_flags_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """One line, and code 2; every flag has its default."""
    assert command.main(["--data_files", str(tmp_path), "--output_dir", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("overtraining: no .txt or .jsonl in ")
    assert command.main(["--budgets", "many", "--output_dir", str(tmp_path / "out")]) == 2
    assert "'many' is no count" in capsys.readouterr().err


def test_only_the_runs_of_this_study_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder's name is no pattern: what an earlier study left beside it stays out."""
    runs = [tmp_path / "study*" / name for name in ("tokens1K", "tokens2K")]
    for folder in (*runs, tmp_path / "study-before" / "tokens1K", tmp_path / "study*" / "gaussian"):
        folder.mkdir(parents=True)
    seen: list[Any] = []

    def stop(points: Any, *_: Any) -> Any:
        seen.extend(points)
        raise RecipeError("stop")

    def stop_plan(plan: Any, _: Any) -> Any:
        return stop(plan.points())

    for name, other in (("pretrain", lambda *_: runs), ("held_out", lambda *_: {}), ("measure_points", stop)):
        monkeypatch.setattr(command, name, other)
    call = ["--quick", "--output_dir", str(tmp_path / "study*")]
    assert command.main(call) == 2
    assert [Path(point.reference) for point in seen] == runs
    seen.clear()
    monkeypatch.setattr(command, "measure_points", lambda *_: [])
    monkeypatch.setattr(command, "draw", lambda *_: True)
    monkeypatch.setattr(command, "fine_tune", stop_plan)
    assert command.main(call) == 2
    assert [Path(point.reference) for point in seen] == runs


@pytest.mark.slow
def test_the_study_as_a_user_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Everything in small: checkpoints, noise, fine-tuning, a report; and a second call finds all of it done."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    out = tmp_path / "out"
    assert command.main(["--quick", "--output_dir", str(out)]) == 0
    report = (out / "report.md").read_text(encoding="utf-8")
    assert "## Gaussian noise in the weights" in report and "## Fine-tuning" in report
    assert len(list((out / "fine_tuning").glob("*.png"))) == 4
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*--*.json")}
    assert command.main(["--quick", "--output_dir", str(out)]) == 0
    assert (out / "report.md").read_text(encoding="utf-8") == report
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*--*.json")} == before
