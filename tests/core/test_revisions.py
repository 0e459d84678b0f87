"""A run on another revision of a hub's model: what it leaves names that commit, and is loaded on it again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForPreTraining

from tunery.benchmarks.inputs import differences
from tunery.benchmarks.sensitivity.cells import Study
from tunery.benchmarks.sensitivity.plan import make_plan
from tunery.core.artifacts import read_manifest
from tunery.core.context import infer_task, make_context
from tunery.core.finished import _Bare, export_run, load_run
from tunery.core.models import commit_of
from tunery.core.options import build_options
from tunery.core.run import train
from tunery.plugins.strategies.surt import Surt
from tunery.registry.catalog import Origin
from tunery.registry.context import Measurement, Subject
from tunery.registry.contracts import Probe
from tunery.registry.loading import load_plugins

# PEFT asks the hub itself, which cannot be reached, whether the vocabulary has changed.
pytestmark = pytest.mark.filterwarnings("ignore:Could not find a config file")

NAME, COMMITS = "someone/tiny", {"main": "a" * 40, "second": "b" * 40}


@pytest.fixture
def hub(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache with one model in two revisions; the second's embeddings are twice as large, its head's bias is 1."""
    cache = tmp_path / "hub"
    repository = cache / f"models--{NAME.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    for number, (branch, commit) in enumerate(COMMITS.items()):
        (repository / "refs" / branch).write_text(commit, encoding="utf-8")
        folder = repository / "snapshots" / commit
        shutil.copytree(tiny.base, folder)
        model = BertForPreTraining.from_pretrained(folder)
        model.bert.embeddings.word_embeddings.weight.data *= 1 + number
        model.cls.predictions.bias.data.fill_(number)
        model.save_pretrained(folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    return cache


def trained(tiny: Any, folder: Path, strategy: str) -> Path:
    keys = tiny.given(model_name_or_path=NAME, model_revision="second", strategy=strategy, output_dir=str(folder))
    train(build_options(keys))
    return folder


def test_commit_of(hub: Path, tiny: Any) -> None:
    """Of a branch what it stands for; of a folder nothing."""
    assert [commit_of(NAME), commit_of(NAME, "second"), commit_of(str(tiny.base))] == ["a" * 40, "b" * 40, None]


def test_an_adapter_is_loaded_on_the_commit_it_was_trained_on(hub: Path, tiny: Any, tmp_path: Path) -> None:
    """Also when the branch has moved on; and PEFT's own loader finds the same model."""
    run = trained(tiny, tmp_path / "run", "lora:r=2")
    assert read_manifest(run)["base_model"]["revision"] == COMMITS["second"]
    assert json.loads((run / "adapter_config.json").read_text(encoding="utf-8"))["revision"] == COMMITS["second"]
    (hub / "models--someone--tiny" / "refs" / "second").write_text(COMMITS["main"], encoding="utf-8")
    loaded = load_run(run, with_reference=True).model
    given = AutoTokenizer.from_pretrained(run)(["a b c", "d e f"], return_tensors="pt")
    expected = loaded(**given).logits
    merged = AutoModelForSequenceClassification.from_pretrained(export_run(run, tmp_path / "merged", merge=True))
    adapter = AutoPeftModelForSequenceClassification.from_pretrained(
        export_run(run, tmp_path / "adapter"), num_labels=2
    )
    for model in (merged, adapter):
        torch.testing.assert_close(model.eval()(**given).logits, expected)


def test_a_fully_tuned_run_knows_where_it_began(hub: Path, tiny: Any, tmp_path: Path) -> None:
    """Its pre-trained values are those of that commit."""
    reference = load_run(trained(tiny, tmp_path / "run", "full"), with_reference=True).reference
    assert reference is not None
    found = {name: piece for name, _, piece in reference.pieces()}["bert.embeddings.word_embeddings.weight"]
    start = BertForPreTraining.from_pretrained(NAME, revision=COMMITS["second"])
    torch.testing.assert_close(
        found.float().cpu(), start.bert.embeddings.word_embeddings.weight.data.reshape(found.shape)
    )


class Size(Probe):
    """The size of the word embeddings, which tells the two revisions apart."""

    name = "size"
    summary = "a probe for tests"
    reference = "none"

    def measure(self, subject: Subject) -> Iterable[Measurement]:
        yield Measurement(name="size", value=subject.model.get_input_embeddings().weight.norm().item())


@pytest.fixture
def size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offer the probe as an installed distribution would."""
    catalog = load_plugins().catalog
    monkeypatch.setattr(catalog, "entries", dict(catalog.entries))
    catalog.add(Size, Origin(distribution="size", version="1.0", module="size"))


def test_revisions_are_probed_as_what_they_are_now(
    hub: Path, size: None, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    """Each is its own model; a branch that has moved is measured anew, one that has not is not."""
    call = ("probe", "size", "--model", NAME, "--revisions", "main,second", "--output_dir", tmp_path / "kept")
    code, out, err = cli(*call, "--json")
    assert (code, err) == (0, "")
    first, second = (json.loads(line)["value"] for line in out.splitlines())
    assert second == pytest.approx(2 * first)
    (hub / "models--someone--tiny" / "refs" / "main").write_text(COMMITS["second"], encoding="utf-8")
    code, out, err = cli(*call, "--json")
    assert [json.loads(line)["value"] for line in out.splitlines()] == [second, second]
    assert err.splitlines() == [
        f"tunery: {NAME}@main: measured anew: another weights",
        f"tunery: {NAME}@second: measured before",
    ]


def test_a_sensitivity_study_knows_the_commit(hub: Path, tiny: Any, tmp_path: Path) -> None:
    """A cell of a branch that has moved has other inputs."""
    (tmp_path / "text.jsonl").write_text('{"text": "a b c"}\n' * 4, encoding="utf-8")
    text = {"validation_file": str(tmp_path / "text.jsonl")}
    content = {
        "name": "hub",
        "models": [NAME],
        "learning_rates": [1e-3],
        "in_domain": {"train_file": text["validation_file"]},
    }
    plan = make_plan({**content, "out_of_domain": text})
    (cell, *_), found = plan.cells(plan.points()), []
    for commit in COMMITS.values():
        (hub / "models--someone--tiny" / "refs" / "main").write_text(commit, encoding="utf-8")
        found.append(Study(plan, tmp_path).inputs(cell))
    assert differences(*found) == [f'model.commit: "{COMMITS["main"][:36]}... -> "{COMMITS["second"][:36]}...']


def test_surt_re_trains_with_the_head_of_that_commit(hub: Path) -> None:
    """The masked language model's bias is the second's."""
    model = AutoModelForSequenceClassification.from_pretrained(NAME, revision="second")
    run = make_context(model, _Bare(seed=0), [infer_task(model)], COMMITS["second"])
    strategy = Surt(Surt.Config())
    stage = strategy.stages(strategy.prepare(model, run), run)[0]
    with strategy.staged(model, run, stage) as language_model:
        assert (language_model.cls.predictions.bias == 1).all()  # type: ignore[union-attr]
