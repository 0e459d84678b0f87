"""Prompts of validation and test are completed after training, once each, and the answers are scored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch
from accelerate import Accelerator
from peft import get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tunery.core.console import show_result
from tunery.core.data import DataArguments, load_tasks
from tunery.core.data.generation import Questions, Writer, _NoRepeat, questions
from tunery.core.data.metrics import text_scores
from tunery.core.options import build_options
from tunery.core.run import train
from tunery.plugins.strategies.multi_lora import MultiLoraConfig
from tunery.registry.conformance.trials import ONE
from tunery.registry.conformance.workers import STAGES, on_stage
from tunery.registry.errors import DataError

WORDS = [f"w{number}" for number in range(30)]
ROWS = [
    {"mr": "w1", "ref": "w10 w11 w12 w13 w14 w15"},
    {"mr": "w2 w3", "ref": "w12 w11 w20 w21 w22"},
    {"mr": "w4 w5 w6", "ref": "w13 w23 w24 w25 w26 w27 w28"},
]
LABELLED = [{"text": row["mr"], "label": int(len(row["mr"].split()) > 1)} for row in ROWS]
FAST = {"num_beams": 3, "max_new_tokens": 8, "max_length": 16, "metrics": ["bleu", "chrf"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-layer GPT-2 with random weights, and a tokenizer of one id a word, a line break among them."""
    folder = tmp_path_factory.mktemp("writer")
    vocabulary = {word: number for number, word in enumerate(["<eos>", "<unk>", "\n", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    words.pre_tokenizer = pre_tokenizers.Sequence([words.pre_tokenizer, pre_tokenizers.Split("\n", "isolated")])
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", unk_token="<unk>", pad_token="<eos>", model_max_length=32
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(vocabulary),
        n_positions=32,
        n_embd=32,
        n_layer=1,
        n_head=2,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def write(folder: Path, rows: list[Mapping[str, Any]]) -> str:
    """Write the same rows as train, validation and test."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(folder)


def recipe(base: Path, **changes: Any) -> dict[str, Any]:
    """Return the keys of a run long enough to know three completions by heart."""
    return {
        "model_name_or_path": str(base),
        "strategy": "full",
        "max_steps": 40,
        "per_device_train_batch_size": 3,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **FAST,
        **changes,
    }


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def writer(model: Any, base: Path, **changes: Any) -> Writer:
    tokenizer = AutoTokenizer.from_pretrained(base)
    return Writer(model=model, tokenizer=tokenizer, accelerator=Accelerator(cpu=True), **{"batch_size": 2, **changes})


def asked_of(base: Path, rows: list[Mapping[str, Any]], folder: Path, **changes: Any) -> list[Questions]:
    """Return the questions of one task with these rows."""
    args = DataArguments(data_files=write(folder, rows), **FAST | {"task_kind": "causal_lm"} | changes)
    config = GPT2Config.from_pretrained(base)
    return questions(load_tasks(args, seed=0), AutoTokenizer.from_pretrained(base), config)


def test_a_model_that_knows_its_rows_by_heart_scores_100(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """BLEU and chrF of validation and test are in the result and its table, answers beside their references in a file."""
    folder = write(tmp_path / "data", ROWS)
    result = train(build_options(recipe(base, data_files=folder, output_dir=str(tmp_path / "run"))))
    for name in ("bleu", "chrf", "test_bleu", "test_chrf"):
        assert result["metrics"][name] == pytest.approx(100), name
    assert (result["task"], result["main_metrics"]) == ("data", ["bleu"])
    assert read(tmp_path / "run" / "predictions.jsonl") == [
        {"task": "data", "split": split, "prompt": row["mr"], "prediction": row["ref"], "references": [row["ref"]]}
        for split in ("validation", "test")
        for row in ROWS
    ]
    show_result(result, tmp_path / "run")
    shown = capsys.readouterr().out
    assert "test bleu" in shown
    assert shown.count("100.0000") == 2


class Keys:
    """The keys of a run, which a worker unpickles as its options: training arguments belong to the process they are made in."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        self.keys = keys

    def __reduce__(self) -> tuple[Any, ...]:
        return build_options, (self.keys,)


# Every parameter in shards and gathered for each use: the preset keeps small ones whole, and this model has no others.
ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    },
}


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage in ("ddp", "zero3")])
def test_ranks_share_the_prompts(base: Path, tmp_path: Path, stage: str) -> None:
    """Three prompts on two ranks, with answers of unequal length: both ranks come to an end, and every prompt has its own."""
    changes = {
        "data_files": write(tmp_path / "data", ROWS),
        "output_dir": str(tmp_path / "run"),
        "ddp_backend": "gloo",
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 1,
        "num_beams": 1,  # ends with the answer, where a search goes on for a while
        "deepspeed": ZERO3 if stage == "zero3" else None,
    }
    keys = {key: value for key, value in recipe(base, **changes).items() if value is not None}
    result = on_stage(stage, train, Keys(keys))
    assert result["metrics"]["test_bleu"] == pytest.approx(100)
    answers = {row["prompt"]: row["prediction"] for row in read(tmp_path / "run" / "predictions.jsonl")}
    assert answers == {row["mr"]: row["ref"] for row in ROWS}


@pytest.mark.parametrize("beams", [1, 3])
def test_every_task_answers_with_its_own_adapter(base: Path, tmp_path: Path, beams: int) -> None:
    """The answers are those of ``generate`` with that task's B active, and no two tasks' are the same."""
    torch.manual_seed(1)
    config = MultiLoraConfig(
        tasks=[{"name": name, "kind": "causal_lm"} for name in ("first", "second")],
        r=4,
        lora_alpha=32,
        target_modules=["c_attn"],
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.5)
    (validation, _) = asked_of(base, ROWS, tmp_path / "data", num_beams=beams, no_repeat_ngram_size=0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    answers = {}
    for number, name in enumerate(("first", "second")):
        one = Questions(**{**vars(validation), "number": number})
        answers[name] = writer(model, base, several_tasks=True).answers(one)
        expected = []
        for ids in validation.input_ids:
            with model.task(name), torch.no_grad():
                settings = {"num_beams": beams, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
                settings |= {"length_penalty": 0.8} if beams > 1 else {}
                prompt = torch.tensor([ids])
                output = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **settings)
            expected.append(tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True).strip())
        assert answers[name] == expected
    assert answers["first"] != answers["second"]
    with pytest.raises(DataError, match="a batch without task_ids"):  # nothing is left of the last task
        model(input_ids=torch.tensor([[1]]))


@pytest.mark.parametrize("where", [ONE, *(stage for stage in STAGES if stage == "zero3")])
def test_several_tasks_in_one_run(base: Path, tmp_path: Path, where: str) -> None:
    """Each task has its metrics by name, one that classifies among them, and those that write have rows in the file."""
    other = [{"mr": row["mr"], "ref": " ".join(reversed(row["ref"].split()))} for row in ROWS]
    tasks = [
        {"name": "there", "data_files": write(tmp_path / "there", ROWS)},
        {"name": "back", "data_files": write(tmp_path / "back", other), "metrics": ["chrf", "perplexity"]},
        {"name": "many", "data_files": write(tmp_path / "many", LABELLED), "metrics": ["accuracy"]},
    ]
    strategy = "multi_lora:r=16,alpha=64,target_modules=[c_attn,c_proj,c_fc]"
    changes = {"strategy": strategy, "tasks": tasks, "max_grad_norm": 0, "output_dir": str(tmp_path / "run")}
    alone = {"per_device_train_batch_size": 10, "max_steps": 100}
    shared = {"per_device_train_batch_size": 5, "max_steps": 100, "deepspeed": ZERO3, "ddp_backend": "gloo"}
    keys = recipe(base, **changes | (alone if where == ONE else shared))
    result = train(build_options(keys)) if where == ONE else on_stage(where, train, Keys(keys))
    metrics = result["metrics"]
    known = {"there_bleu", "there_chrf", "there_test_bleu", "there_test_chrf"}
    known |= {"back_chrf", "back_test_chrf", "back_perplexity", "many_accuracy"}
    assert metrics.keys() == known | {"mean", "loss"}
    assert metrics["many_accuracy"] == 1
    assert metrics["mean"] == pytest.approx((metrics["there_bleu"] + metrics["back_chrf"] + 1) / 3)
    head = 2 * 32
    counts = {"trainable": 3 * 16 * (96 + 32 + 128 + 32) + head, "paper": 16 * (32 + 32 + 32 + 128) + 3 * 16 * 288}
    assert counts.items() <= result["parameters"].items()  # also where ranks hold shards
    assert result["parameters"]["stored"] == counts["paper"] + head
    answers = {(row["task"], row["prompt"]): row["prediction"] for row in read(tmp_path / "run" / "predictions.jsonl")}
    # One prompt, two tasks, two answers: what was learnt by heart came from the task's own adapter.
    assert answers == {
        (task, row["mr"]): row["ref"] for task, rows in (("there", ROWS), ("back", other)) for row in rows
    }


def test_scores_are_those_of_sacrebleu() -> None:
    """Prompts with one to three references: what sacrebleu says of reference streams padded by hand."""
    answers = ["the cat sat on the mat today", "a dog ran off into the wood", "rain fell all the day"]
    references = [
        ["the cat sat on a mat today", "today the cat sat on the mat"],
        ["a dog ran into the wood"],
        ["rain fell all day", "it rained all the day", "the rain fell all the day"],
    ]
    streams = [[texts[min(number, len(texts) - 1)] for texts in references] for number in range(3)]
    expected = {
        "bleu": sacrebleu.corpus_bleu(answers, streams).score,  # repeating a reference changes nothing
        "chrf": sacrebleu.corpus_chrf(answers, streams).score,
    }
    assert text_scores(["bleu", "chrf"], answers, references) == pytest.approx(expected)
    single = sacrebleu.corpus_bleu(answers, [[texts[0] for texts in references]]).score
    assert expected["bleu"] > single + 1


def test_answers_without_words_score_0() -> None:
    """A model that says nothing is no error."""
    assert text_scores(["bleu", "chrf"], ["", ""], [["a b"], ["c", "d e"]]) == {"bleu": 0, "chrf": 0}


def test_rows_of_one_prompt_are_asked_once(base: Path, tmp_path: Path) -> None:
    """All completions of a prompt are its references, in order and each once."""
    rows = [*ROWS, {"mr": "w1", "ref": "w16 w17"}, {"mr": "w1", "ref": ROWS[0]["ref"]}]
    validation, test = asked_of(base, rows, tmp_path / "data")
    assert validation.prompts == test.prompts == ["w1", "w2 w3", "w4 w5 w6"]
    assert validation.references == [[ROWS[0]["ref"], "w16 w17"], [ROWS[1]["ref"]], [ROWS[2]["ref"]]]
    assert validation.input_ids[1] == [5, 6, 2]  # w2, w3 and the line break training puts there


def test_answers_do_not_depend_on_the_batch(base: Path, tmp_path: Path) -> None:
    """Left padding: a short prompt beside a long one is answered as it is alone."""
    torch.manual_seed(2)
    rows = [{"mr": " ".join(WORDS[:size]), "ref": "w1"} for size in (1, 9, 3, 7, 2)]
    (validation, _) = asked_of(base, rows, tmp_path / "data")
    model = AutoModelForCausalLM.from_pretrained(base)
    alone = writer(model, base, batch_size=1).answers(validation)
    assert writer(model, base, batch_size=5).answers(validation) == alone
    assert len(set(alone)) > 1


def test_a_completion_may_repeat_the_prompt_but_not_itself() -> None:
    """Trigrams: what the prompt says is free, what the completion said is banned (LoRA's search, not transformers')."""
    free = _NoRepeat(3, width=3)(torch.tensor([[1, 2, 3, 1, 2]]), torch.zeros(1, 5))
    assert torch.equal(free, torch.zeros(1, 5))
    again = _NoRepeat(3, width=2)(torch.tensor([[4, 4, 1, 2, 3, 1, 2]]), torch.zeros(1, 5))
    assert again.tolist() == [[0, 0, 0, -torch.inf, 0]]


def test_long_prompts_leave_room_for_the_answer(base: Path, tmp_path: Path) -> None:
    """A prompt is cut from the left, to max_length and to what the model's positions leave; none left is one line."""
    rows = [{"mr": " ".join(WORDS[:28]), "ref": "w1 w2"}]
    (validation, _) = asked_of(base, rows, tmp_path / "data", max_length=32)
    assert validation.input_ids[0][-2:] == [WORDS.index("w27") + 3, 2]
    assert len(validation.input_ids[0]) == 32 - 8
    with pytest.raises(DataError, match="max_new_tokens=32 leaves no room for a prompt; in data; give less"):
        asked_of(base, rows, tmp_path / "data", max_new_tokens=32)


def test_without_such_a_metric_nothing_is_asked(base: Path, tmp_path: Path) -> None:
    """Perplexity alone costs no generation; bleu without a prompt is refused."""
    assert asked_of(base, ROWS, tmp_path / "data", metrics=["perplexity"]) == []
    with pytest.raises(DataError, match="metric 'bleu' needs a prompt; give text_columns: prompt and completion"):
        asked_of(base, ROWS, tmp_path / "data", text_columns=["ref"])
    with pytest.raises(DataError, match="metric 'bleu' does not fit classification"):
        asked_of(base, [{"text": "a", "label": n} for n in (0, 1)], tmp_path / "classes", task_kind=None)


def test_no_checkpoint_is_chosen_by_what_is_not_measured_yet(base: Path, tmp_path: Path) -> None:
    """A recipe that asks for it is told before it trains."""
    keys = recipe(base, data_files=write(tmp_path / "data", ROWS), output_dir=str(tmp_path / "run"))
    with pytest.raises(DataError, match="metric_for_best_model='bleu' is only measured after training"):
        train(build_options({**keys, "metric_for_best_model": "bleu"}))


def test_progress_is_shown_where_asked(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bar names task and split and goes to stderr; without it nothing is written."""
    (validation, _) = asked_of(base, ROWS, tmp_path / "data")
    model = AutoModelForCausalLM.from_pretrained(base)
    capsys.readouterr()
    writer(model, base).answers(validation)
    assert capsys.readouterr() == ("", "")
    writer(model, base, show_progress=True).answers(validation)
    assert "data validation: generating" in capsys.readouterr().err
