"""Replay: the formula, how often, which block and which mask, texts and their errors."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
)

from tunery.core.anatomy import find_anatomy
from tunery.core.sharding import ModelSharding
from tunery.plugins.regularizers.replay import Replay
from tunery.registry.context import Batch, RunContext, Task, TaskKind
from tunery.registry.errors import CompatibilityError, DataError

WORDS, LENGTH = 61, 6
DOCUMENTS = torch.randint(1, WORDS, (20, 17), generator=torch.Generator().manual_seed(0)).tolist()
CAUSAL, MASKED = (Task(name="task", kind=kind) for kind in (TaskKind.CAUSAL_LM, TaskKind.MASKED_LM))


def context(task: Task, seed: int = 0) -> RunContext:
    return RunContext(
        tasks=(task,),
        seed=seed,
        sharding=ModelSharding(),
        pretrained_parameters=frozenset(),
        logger=logging.getLogger("test"),
        find_anatomy=find_anatomy,
    )


@pytest.fixture(params=["causal", "masked"])
def task(request: Any) -> Task:
    return CAUSAL if request.param == "causal" else MASKED


@pytest.fixture
def model(task: Task) -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"vocab_size": WORDS, "max_position_embeddings": 32, "initializer_range": 0.3}
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**sizes)) if task is CAUSAL else BertForMaskedLM(BertConfig(**sizes))
    return made.double().eval()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"input_ids": document}) + "\n" for document in DOCUMENTS), encoding="utf-8")
    return file


def attached(model: nn.Module, task: Task, data: object, seed: int = 0, **options: Any) -> Replay:
    given = {"length": LENGTH, "share": 0.4, "mask_token_id": 0} | options
    regularizer = Replay(Replay.Config(data=str(data), **given))
    regularizer.attach(model, context(task, seed))
    return regularizer


def batch(model: nn.Module, task: Task, rows: int = 8, seed: int = 0, step: int = 0) -> Batch:
    ids = torch.randint(1, WORDS, (rows, 9), generator=torch.Generator().manual_seed(seed))
    return Batch(inputs={"input_ids": ids}, outputs=None, model=model, task=task, step=step)


def seen(model: nn.Module) -> list[Tensor]:
    """Keep what the model is called with."""
    calls: list[Tensor] = []
    model.register_forward_pre_hook(lambda _m, _a, kwargs: calls.append(kwargs["input_ids"]), with_kwargs=True)
    return calls


def test_formula(model: Any, task: Task, text: Path) -> None:
    """1/(q B) times the sum of transformers' own loss on each block that came along."""
    regularizer, calls, given = attached(model, task, text), seen(model), batch(model, task)
    value = regularizer.penalty(given)
    assert value is not None and value.requires_grad
    (inputs,) = calls
    assert 1 <= len(inputs) <= 8
    flat = [token for document in DOCUMENTS for token in document]
    blocks = {tuple(flat[start : start + LENGTH]) for start in range(0, len(flat) // LENGTH * LENGTH, LENGTH)}
    if task is CAUSAL:
        losses = [model(input_ids=row[None], labels=row[None]).loss for row in inputs]
        assert {tuple(row) for row in inputs.tolist()} <= blocks
    else:
        losses = []
        for row, labels in map(regularizer._example, _brought(regularizer, given)):
            whole = torch.where(labels == -100, row, labels)
            assert tuple(whole.tolist()) in blocks and (labels != -100).any()
            losses.append(model(input_ids=row[None], labels=labels[None]).loss)
        assert len(losses) == len(inputs)
    q = 0.4 / 0.6
    torch.testing.assert_close(value, sum(losses).double() / (q * 8), rtol=1e-5, atol=0, check_dtype=False)


def _brought(regularizer: Replay, given: Batch) -> list[bytes]:
    """Return the draws of the rows that bring a block, as the docstring says they are made."""
    import hashlib

    rows = [f"0 {given.step} ".encode() + row.numpy().tobytes() for row in given.inputs["input_ids"]]
    draws = [hashlib.blake2b(row, digest_size=24).digest() for row in rows]
    return [draw for draw in draws if int.from_bytes(draw[:8], "big") / 2**64 < 0.4 / 0.6]


@pytest.mark.parametrize("task", [CAUSAL])
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_share_of_rows(model: Any, task: Task, text: Path, share: float) -> None:
    """Of all rows, the task's and the replayed, ``share`` are replayed; every block has its turn."""
    regularizer, calls = attached(model, task, text, share=share), seen(model)
    with torch.no_grad():
        for step in range(20):
            regularizer.penalty(batch(model, task, rows=100, seed=step, step=step))
    replayed = sum(map(len, calls))
    assert replayed / (replayed + 2000) == pytest.approx(share, abs=0.02)
    blocks = {tuple(row) for call in calls for row in call.tolist()}
    assert len(blocks) == 20 * 17 // LENGTH


@pytest.mark.parametrize("task", [CAUSAL])
def test_depends_on_seed_step_and_row_alone(model: Any, task: Task, text: Path) -> None:
    """The same row at the same step brings the same block, whatever its padding; another step or seed, another."""
    given = batch(model, task)
    values = [attached(model, task, text).penalty(given) for _ in range(2)]
    assert torch.equal(*values)
    ids, pad = given.inputs["input_ids"], torch.zeros(8, 3, dtype=torch.long)
    mask = torch.cat([torch.ones_like(ids), pad], dim=1)
    padded = Batch(
        inputs={"input_ids": torch.cat([ids, pad], dim=1), "attention_mask": mask}, outputs=None, model=model, task=task
    )
    torch.testing.assert_close(attached(model, task, text).penalty(padded), values[0])
    assert attached(model, task, text).penalty(batch(model, task, step=1)) != values[0]
    assert attached(model, task, text, seed=1).penalty(given) != values[0]


@pytest.mark.parametrize("task", [CAUSAL])
def test_runs_the_model_also_where_no_row_brings_a_block(model: Any, task: Task, text: Path) -> None:
    """Every rank runs it as often; what ran for nothing weighs nothing."""
    regularizer, calls = attached(model, task, text, share=1e-9), seen(model)
    value = regularizer.penalty(batch(model, task))
    assert value is not None and value.item() == 0
    value.backward()
    assert [len(call) for call in calls] == [1]
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("task", [MASKED])
def test_masks_as_bert_does(model: Any, task: Task, text: Path) -> None:
    """15 % of tokens are predicted: of these 80 % are hidden, 10 % others, 10 % as they are; the rest is untouched."""
    regularizer = attached(model, task, text, length=30)
    inputs, labels = map(
        torch.cat,
        zip(*[regularizer._example((i * 7**60 % 2**192).to_bytes(24, "big")) for i in range(2000)], strict=True),
    )
    chosen = labels != -100
    assert chosen.float().mean().item() == pytest.approx(0.15, abs=0.01)
    assert (inputs[chosen] == 0).float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert (inputs[chosen] == labels[chosen]).float().mean().item() == pytest.approx(0.1 + 0.1 / WORDS, abs=0.02)


# ---- texts


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A folder with a tokenizer of one id a letter and an eos token."""
    vocabulary = {token: number for number, token in enumerate(("[PAD]", "[UNK]", "[EOS]", "[MASK]", *"abcdef"))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]", mask_token="[MASK]"
    )
    fast.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.mark.parametrize("kind", ["text.txt", "text.jsonl", "folder"])
def test_texts(model: Any, task: Task, words: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of a file, records of a file and rows of a dataset are tokenized, joined and cut the same."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    documents, data = ["a b c", "d e f a"], tmp_path / kind
    if kind == "folder":
        data.mkdir()
        Dataset.from_dict({"text": documents}).to_parquet(data / "train.parquet")
    elif kind == "text.txt":
        data.write_text("\n".join(documents) + "\n\n", encoding="utf-8")
    else:
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    regularizer = attached(model, task, data, tokenizer=str(words), length=3, mask_token_id=None)
    assert regularizer._blocks_NT.tolist() == [[4, 5, 6], [2, 7, 8], [9, 4, 2]]
    assert regularizer._mask == (None if task is CAUSAL else 3)


@pytest.mark.parametrize("task", [CAUSAL])
def test_part_of_a_dataset(model: Any, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several configurations, one of its splits, and no more documents than asked for."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, name in enumerate(("one", "two")):
        rows = [[10 * number + row] * LENGTH for row in range(1, 4)]
        Dataset.from_dict({"input_ids": rows}).to_parquet(folder / f"{name}.parquet")
    parts = "- config_name: a\n  data_files: one.parquet\n- config_name: b\n  data_files:\n  - path: two.parquet\n    split: dev\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n{parts}---\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"cannot read .* Config name is missing.*see data_config and split"):
        attached(model, task, folder)
    whole = attached(model, task, folder, data_config="b", split="dev")
    assert whole._blocks_NT[:, 0].tolist() == [11, 12, 13]
    first = attached(model, task, folder, data_config="b", split="dev", max_documents=2)
    assert first._blocks_NT[:, 0].tolist() == [11, 12]


@pytest.mark.parametrize("task", [CAUSAL])
@pytest.mark.parametrize(
    ("name", "content", "options", "says"),
    [
        ("none.txt", None, {}, "cannot read"),
        ("bad.jsonl", "{", {}, "cannot read"),
        ("other.jsonl", '{"body": "a"}\n', {}, "has no text 'text'; known: body"),
        ("short.jsonl", '{"input_ids": [1, 2]}\n', {}, "fewer tokens than one block"),
        ("large.jsonl", '{"input_ids": [1, 2, 3, 4, 5, 99]}\n', {}, "token 99 of a vocabulary of 61"),
        ("negative.jsonl", '{"input_ids": [1, 2, 3, 4, 5, -1]}\n', {}, "token -1 of a vocabulary of 61"),
        ("word.jsonl", '{"input_ids": ["a", 2, 3, 4, 5, 6]}\n', {}, "token 'a' of a vocabulary of 61"),
        ("text.txt", "a b c\n", {"tokenizer": "."}, "finds no tokenizer in '.'"),
        ("long.jsonl", '{"input_ids": [1]}\n', {"length": 40}, "more than the 32 positions"),
    ],
)
def test_refuses(
    model: Any,
    task: Task,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: str | None,
    options: dict[str, Any],
    says: str,
) -> None:
    """Text that cannot be used is one line before training begins."""
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises((DataError, CompatibilityError)) as caught:
        attached(model, task, tmp_path / name, **options)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("task", [CAUSAL])
def test_refuses_a_damaged_dataset(model: Any, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder whose file breaks off says so in one line."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "a"}\n{"te', encoding="utf-8")
    with pytest.raises(DataError, match=r"regularizer 'replay' cannot read .*JSON") as caught:
        attached(model, task, folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("task", [MASKED])
def test_refuses_a_tokenizer_without_a_mask(model: Any, task: Task, words: Path, text: Path) -> None:
    """A masked language model needs a token that hides."""
    file = words / "tokenizer_config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    del content["mask_token"]
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(DataError, match="has no mask_token_id"):
        attached(model, task, text, tokenizer=str(words), mask_token_id=None)


def test_roberta_takes_fewer_tokens_than_it_has_positions(tmp_path: Path) -> None:
    """Its positions are counted from behind the pad's; as many tokens as are left train, one more is refused."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = RobertaConfig(vocab_size=WORDS, max_position_embeddings=34, pad_token_id=1, **sizes)
    model = RobertaForMaskedLM(config).double()
    file = tmp_path / "text.jsonl"
    file.write_text(json.dumps({"input_ids": [2] * 80}) + "\n", encoding="utf-8")
    with pytest.raises(CompatibilityError, match="length=33 is more than the 32 positions"):
        attached(model, MASKED, file, length=33)
    regularizer = attached(model, MASKED, file, length=32)
    assert regularizer.penalty(batch(model, MASKED)) is not None
