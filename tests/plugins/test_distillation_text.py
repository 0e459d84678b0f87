"""Stand-ins that learn from unlabelled text of their own before they are tuned, instead of from the training rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tunery.core.recipe import choose
from tunery.plugins.texts import DistillationText, TextBatches
from tunery.registry.conformance.models import MODELS, base_model
from tunery.registry.conformance.trials import Trial
from tunery.registry.errors import TuneryError

STRATEGIES = {
    "bert_classifier": "proxy_sub_fm:ratio=0.5,retained=[0],r=2,dropout=0,learning_rate=0.01,distill_steps=2",
    "deep_bert_classifier": "offsite:adapter_layers=[1,1],emulator_layers=1,r=2,dropout=0,learning_rate=0.01,distill_steps=2",
}
TOKENS = list(range(1, 9))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    documents = (TOKENS[:5], TOKENS[5:], [3, 4])  # a block of eight, and a rest
    path.write_text("".join(json.dumps({"input_ids": tokens}) + "\n" for tokens in documents), encoding="utf-8")
    return path


def aligned(folder: Path, kind: str, **options: Any) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return what the alignment of a run measured, and what it changed."""
    more = "".join(f",{key}={value}" for key, value in options.items())
    trainer = Trial(model=kind, strategy=STRATEGIES[kind] + more, steps=1).trainer(folder)
    trainer.train()
    names = set(trainer.recipe.strategy.stored(trainer.model, trainer.run))
    return dict(trainer.alignment), {n: p.detach().clone() for n, p in trainer.model.named_parameters() if n in names}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_run_learns_from_the_text_it_names(kind: str, text: Path, tmp_path: Path) -> None:
    """As from batches that hold the documents end to end, to the bit; and not what the training rows teach."""
    measured, learnt = aligned(tmp_path / "text", kind, data=text, length=8, batch_size=4)
    assert measured["alignment_steps"] == 2
    other, plain = aligned(tmp_path / "rows", kind)
    assert other["alignment_loss_first"] != measured["alignment_loss_first"]
    assert any(not torch.equal(learnt[name], plain[name]) for name in learnt)

    trainer = Trial(model=kind, strategy=STRATEGIES[kind], steps=1).trainer(tmp_path / "by_hand")
    batch = {"input_ids": torch.tensor([TOKENS]), "attention_mask": torch.ones(1, 8, dtype=torch.long)}
    assert trainer.recipe.strategy.distill(None, trainer.model, [batch], trainer.run) == measured
    live = dict(trainer.model.named_parameters())
    assert all(torch.equal(value, live[name]) for name, value in learnt.items())


def test_every_pass_has_all_rows_in_an_order_of_the_seed(tmp_path: Path) -> None:
    """Batches of as many rows as asked for, the last one fewer."""
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps({"input_ids": [n % 20 for n in range(10 * 4 + 3)]}), encoding="utf-8")
    config = DistillationText(distill_steps=1, data=str(path), length=4, batch_size=4)
    model = MODELS["bert_classifier"].load(base_model("bert_classifier", dropout=False))
    batches = TextBatches(config, model, 3, "who")
    first, second = ([batch["input_ids"].tolist() for batch in batches] for _ in range(2))
    again = [batch["input_ids"].tolist() for batch in TextBatches(config, model, 3, "who")]
    assert [len(rows) for rows in first] == [4, 4, 2] and first == again != second
    blocks = sorted([n % 20 for n in range(at, at + 4)] for at in range(0, 40, 4))
    assert all(sorted(row for rows in each for row in rows) == blocks for each in (first, second))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.jsonl", None, "cannot read"),
        ("other.jsonl", '{"body": "a"}\n', "has no text 'text'; known: body"),
        ("short.jsonl", '{"input_ids": [1, 2]}\n', "fewer tokens than one block"),
    ],
)
def test_no_text_is_one_line(name: str, content: str | None, words: str, tmp_path: Path) -> None:
    """Missing, without text, or too short: before anything trains."""
    path = tmp_path / name
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(TuneryError, match=words) as caught:
        aligned(tmp_path / "run", "bert_classifier", data=path, length=8)
    assert "strategy 'proxy_sub_fm'" in str(caught.value) and "\n" not in str(caught.value)
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_what_takes_no_text_or_learns_nothing_says_so(text: Path) -> None:
    """A model of images; a text without steps to learn from it."""
    config = DistillationText(distill_steps=1, data=str(text))
    vit = MODELS["vit_classifier"].load(base_model("vit_classifier", dropout=False))
    with pytest.raises(TuneryError, match="is text, and this model takes none"):
        TextBatches(config, vit, 0, "who")
    for strategy in ("proxy_sub_fm", "offsite"):
        with pytest.raises(TuneryError, match="option data: with distill_steps=0 nothing is learnt from it"):
            choose(f"{strategy}:data=text.txt")
