"""A whole study on tiny decoders: scored, resumed, damaged, interrupted, drawn."""

from __future__ import annotations

import gc
import json
import math
import random
import shutil
from pathlib import Path

import datasets
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from tunery.benchmarks.sensitivity import cells
from tunery.benchmarks.sensitivity.cells import Scores, Study, run_cells
from tunery.benchmarks.sensitivity.commands import study
from tunery.benchmarks.sensitivity.plan import BASE, Cell, Plan, make_plan
from tunery.registry.errors import DataError, TuneryError

LETTERS = "abcdefgh"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Two decoders of one layer, text of other letters for each domain, two learning rates and two seeds."""
    folder = tmp_path_factory.mktemp("sensitivity")
    words = Tokenizer(models.WordLevel({token: n for n, token in enumerate(("[EOS]", "[UNK]", *LETTERS))}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="[EOS]", unk_token="[UNK]", pad_token="[EOS]", model_max_length=32
    )
    for seed, tokens in enumerate(("1B", "2B")):
        set_seed(seed)
        config = LlamaConfig(
            vocab_size=10,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=32,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
        )
        LlamaForCausalLM(config).save_pretrained(folder / f"model-tokens{tokens}")
        tokenizer.save_pretrained(folder / f"model-tokens{tokens}")
    pick = random.Random(0)
    for name, letters in (("in", LETTERS[:4]), ("out", LETTERS)):
        rows = [{"text": " ".join(pick.choices(letters, k=15))} for _ in range(24)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return make_plan(
        {
            "name": "tiny",
            "runs": [str(folder / "model-*")],
            "learning_rates": [1e-3, 1e-2],
            "seeds": [0, 1],
            "in_domain": {
                "train_file": str(folder / "in.jsonl"),
                "test_file": str(folder / "in.jsonl"),
                "max_length": 16,
            },
            "out_of_domain": {"validation_file": str(folder / "out.jsonl"), "max_length": 16},
            "training": {"max_steps": 6, "per_device_train_batch_size": 4, "use_cpu": True},
        }
    )


@pytest.fixture(autouse=True, scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory):
    """One thread, a cache of its own, no bars, and no walk through every imported module when a Trainer starts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    transformers.logging.disable_progress_bar()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield
    transformers.logging.enable_progress_bar()
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def done(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the finished study."""
    folder = tmp_path_factory.mktemp("done")
    analysis, failed = study(plan, folder)
    assert analysis is not None and not failed
    return folder


def scores_of(plan: Plan, folder: Path) -> dict[str, Scores]:
    """Read every cell's scores as a second call would."""
    work = Study(plan, folder)
    return {cell.name: work.found(cell)[0] for cell in plan.cells(plan.points())}


def test_scores_are_what_they_say(plan: Plan, done: Path):
    """Perplexity before is what the model itself says of the text; fine-tuning helps in domain, and moves the weights."""
    first = plan.points()[0]
    found = {
        (cell.point, cell.learning_rate, cell.seed): Study(plan, done).found(cell)[0]
        for cell in plan.cells(plan.points())
    }
    model = LlamaForCausalLM.from_pretrained(first.reference)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(first.reference)
    texts = [json.loads(line)["text"] for line in Path(plan.out_of_domain["validation_file"]).read_text().splitlines()]
    ids = torch.tensor([[*tokenizer(text).input_ids, 0] for text in texts])
    with torch.no_grad():
        logits = model(ids).logits[:, :-1].double()
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 10), ids[:, 1:].reshape(-1))
    assert found[first, BASE, 0].out_of_domain == pytest.approx(math.exp(loss), rel=1e-5)
    assert found[first, BASE, 0].distance == 0.0
    for seed in (0, 1):
        assert found[first, 1e-2, seed].test < found[first, 1e-3, seed].test < found[first, BASE, 0].test
        assert found[first, 1e-2, seed].distance > found[first, 1e-3, seed].distance > 0
    assert found[first, 1e-2, 0] != found[first, 1e-2, 1]


def test_files(done: Path):
    """One file a cell, the table, four pictures; no weights."""
    assert len(list(done.glob("model-*.json")) + list(done.glob("*--*.json"))) >= 10
    results = json.loads((done / "results.json").read_text())
    assert [row["tokens"] for row in results["table"]] == ["1B", "2B"]
    assert any("scenario" in line for line in results["findings"])
    assert len(list(done.glob("*.png"))) == 4
    assert not list(done.rglob("*.safetensors"))


def test_nothing_is_done_twice(plan: Plan, done: Path, monkeypatch: pytest.MonkeyPatch):
    """A second call reads; a damaged file and a changed training are done again, and said why."""
    monkeypatch.setattr(cells, "_do", lambda *_: pytest.fail("a finished cell was done again"))
    every = plan.cells(plan.points())
    assert all(isinstance(found, Scores) for _, found in run_cells(Study(plan, done), every, print))
    told: list[str] = []
    monkeypatch.setattr(cells, "_do", lambda _, cell, __: Scores(validation=1.0, test=1.0, out_of_domain=1.0))
    other = plan.model_copy(update={"training": {**plan.training, "max_steps": 7}})
    list(run_cells(Study(other, done), every, told.append))
    assert len(told) == 8  # not the two that only score
    assert all("training.max_steps: 6 -> 7" in line for line in told)
    path = Study(plan, done).path(every[0])
    before = path.read_bytes()
    path.write_bytes(before.replace(b'"out_of_domain": ', b'"out_of_domain": 1'))
    assert Study(plan, done).found(every[0]) == (None, "the file does not match its hash")
    path.write_bytes(before)


def test_a_cell_that_fails_does_not_stop_the_others(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It is named in one line, and the checkpoints that are complete are analysed."""
    models = [point.reference for point in plan.points()]
    broken = tmp_path / "broken-tokens3B"
    shutil.copytree(models[0], broken)
    (broken / "tokenizer.json").write_text("{", encoding="utf-8")  # its reader raises a bare Exception
    gone = plan.model_copy(
        update={
            "runs": [],
            "models": [*models, str(broken), "gone/away-tokens4B"],
            "learning_rates": [1e-2],
            "seeds": [0],
        }
    )
    analysis, failed = study(gone, tmp_path / "out")
    assert len(failed) == 4
    assert all("cannot load model 'gone/away-tokens4B'" in error for name, error in failed.items() if "4B" in name)
    assert len(capsys.readouterr().err.splitlines()) == 4
    assert analysis is not None and len(analysis.labels) == 2
    assert not list((tmp_path / "out").rglob("*.run-*"))


def test_whatever_a_cell_raises_the_others_go_on(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Errors that nobody foresaw too."""
    first, second, *_ = plan.cells(plan.points())
    scores = Scores(validation=1.0, test=1.0, out_of_domain=1.0)

    def do(_: Study, cell: Cell, __: Path) -> Scores:
        if cell is first:
            raise TypeError("an argument\nof the wrong kind")
        return scores

    monkeypatch.setattr(cells, "_do", do)
    found = list(run_cells(Study(plan, tmp_path), [first, second], print))
    assert found == [(first, "an argument of the wrong kind"), (second, scores)]


def test_the_same_seed_gives_the_same_scores(plan: Plan, done: Path, tmp_path: Path):
    """To the bit, whatever was done before."""
    work = Study(plan, tmp_path)
    cell = plan.cells(plan.points())[-1]
    ((_, again),) = run_cells(work, [cell], print)
    assert again == Study(plan, done).found(cell)[0]


@pytest.fixture(scope="module")
def classes(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A classification of letters: after a or b comes one token, after others two."""
    folder = tmp_path_factory.mktemp("classes")
    pick = random.Random(1)
    for name, count in (("train", 48), ("validation", 8), ("test", 12)):
        prompts = [pick.choices(LETTERS[:4], k=3) for _ in range(count)]
        rows = [{"prompt": " ".join(p), "completion": "g" if p[-1] in "ab" else "h h"} for p in prompts]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    in_domain = {f"{name}_file": str(folder / f"{name}.jsonl") for name in ("train", "validation", "test")}
    return make_plan(
        {
            **plan.model_dump(),
            "runs": [plan.points()[0].reference],
            "learning_rates": [1e-2],
            "seeds": [0],
            "metric": "class_perplexity",
            "in_domain": {
                **in_domain,
                "task_kind": "causal_lm",
                "text_columns": ["prompt", "completion"],
                "max_length": 16,
            },
            "training": {**plan.training, "max_steps": 40},
        }
    )


def class_scores(model: torch.nn.Module, file: str) -> tuple[float, float]:
    """Return class perplexity and accuracy of the rows of a file, each row and class by itself."""
    ids = {letter: number for number, letter in enumerate(LETTERS, start=2)}
    nats, hits = [], []
    for line in Path(file).read_text().splitlines():
        row = json.loads(line)
        prompt = [ids[letter] for letter in row["prompt"].split()]
        scores = {}
        for name in ("g", "h h"):
            completion = [*(ids[letter] for letter in name.split()), 0]
            with torch.no_grad():
                log_p = model(torch.tensor([[*prompt, *completion]])).logits[0].double().log_softmax(-1)
            each = [log_p[len(prompt) - 1 + place, token].item() for place, token in enumerate(completion)]
            scores[name] = sum(each) / len(each)
        nats.append(math.log(sum(map(math.exp, scores.values()))) - scores[row["completion"]])
        hits.append(max(scores, key=scores.__getitem__) == row["completion"])
    return math.exp(sum(nats) / len(nats)), sum(hits) / len(hits)


def test_classes_are_scored_by_their_likelihood(classes: Plan, plan: Plan, tmp_path: Path):
    """Before and after, on validation and test; the table has the accuracy, and what is said names the metric."""
    analysis, failed = study(classes, tmp_path)
    assert analysis is not None and not failed
    base, tuned = (Study(classes, tmp_path).found(cell)[0] for cell in classes.cells(classes.points()))
    model = LlamaForCausalLM.from_pretrained(classes.points()[0].reference)
    assert (base.test, base.accuracy) == pytest.approx(class_scores(model, classes.in_domain["test_file"]), rel=1e-5)
    assert base.validation == pytest.approx(class_scores(model, classes.in_domain["validation_file"])[0], rel=1e-5)
    assert base.validation != base.test
    assert tuned.test < 1.5 < base.test and tuned.validation < base.validation
    assert base.out_of_domain > 5  # of text, whatever is scored in domain
    (row,) = analysis.table()
    assert (row["accuracy before"], row["accuracy tuned"]) == (base.accuracy, tuned.accuracy)
    assert (row["in-domain before"], row["in-domain tuned"]) == (base.test, tuned.test)
    assert analysis.title("in-domain perplexity") == "in-domain class perplexity"
    other = make_plan({**classes.model_dump(), "metric": "perplexity"})
    assert "metric" in Study(other, tmp_path).found(other.cells(other.points())[0])[1]


def test_classes_that_are_none(classes: Plan, plan: Plan, tmp_path: Path):
    """Refused before anything is trained."""
    for changes, says in (
        ({"in_domain": plan.in_domain}, "0 different completions.*text_columns"),
        (
            {
                "in_domain": {**classes.in_domain, "text_columns": ["completion", "prompt"]},
                "metric": "class_perplexity:max_classes=3",
            },
            "no classes",
        ),
        ({"metric": "class_perplexity:max_class=2"}, "did you mean 'max_classes'"),
    ):
        with pytest.raises(TuneryError, match=says):
            Study(make_plan({**classes.model_dump(), **changes}), tmp_path)


def test_data_without_a_perplexity(plan: Plan, tmp_path: Path):
    """A classification has to be written as prompt and completion."""
    (tmp_path / "rows.jsonl").write_text(
        '{"text": "a b", "label": "x"}\n{"text": "b", "label": "y"}\n' * 3, encoding="utf-8"
    )
    wrong = plan.model_copy(update={"in_domain": {"train_file": str(tmp_path / "rows.jsonl")}})
    with pytest.raises(DataError, match="has no perplexity"):
        Study(wrong, tmp_path)
    with pytest.raises(DataError, match="out_of_domain names no data"):
        Study(plan.model_copy(update={"out_of_domain": {}}), tmp_path)


def test_checkpoints_are_scored_in_the_precision_they_train_in(plan: Plan, done: Path, tmp_path: Path):
    """As it is, a checkpoint has the loss of its weights in bfloat16; and is not taken for one in float32."""
    half = plan.model_copy(update={"training": {**plan.training, "dtype": "bfloat16"}})
    cell = plan.cells(plan.points())[0]
    ((_, found),) = run_cells(Study(half, tmp_path), [cell], print)
    model = LlamaForCausalLM.from_pretrained(cell.point.reference, dtype=torch.bfloat16)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(cell.point.reference)
    texts = [json.loads(line)["text"] for line in Path(plan.out_of_domain["validation_file"]).read_text().splitlines()]
    ids = torch.tensor([[*tokenizer(text).input_ids, 0] for text in texts])
    with torch.no_grad():
        losses = [model(input_ids=part, labels=part).loss.item() for part in ids.split(8)]
    assert found.out_of_domain == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert found.out_of_domain != scores_of(plan, done)[cell.name].out_of_domain
    assert Study(half, done).found(cell)[1] == 'changed: training.dtype: nothing -> "bfloat16"'


def test_mixed_precision_is_that_of_before_and_after(plan: Plan, done: Path, tmp_path: Path):
    """What training leaves as it was is scored as before, in the mixed precision that runs have."""
    mixed = plan.model_copy(update={"training": {**plan.training, "bf16": True}, "learning_rates": [1e-12]})
    before, after, *_ = mixed.cells(mixed.points())
    found = [scores for _, scores in run_cells(Study(mixed, tmp_path), [before, after], print)]
    assert all(isinstance(scores, Scores) for scores in found), found
    for name in ("validation", "test", "out_of_domain"):
        first, second = (getattr(scores, name) for scores in found)
        assert first == pytest.approx(second, rel=1e-7)
        assert first != pytest.approx(getattr(scores_of(plan, done)[before.name], name), rel=1e-6)
    assert Study(mixed, done).found(before)[1] == "changed: training.bf16: nothing -> true"
