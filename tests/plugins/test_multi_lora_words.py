"""Multi-LoRA on a decoder: language modelling, classification and regression in one batch, each as if alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel, get_peft_model
from torch import nn
from torch.nn import functional

from tunery.core.recipe import choose
from tunery.plugins.strategies.multi_lora import MultiLoraConfig
from tunery.registry.errors import CompatibilityError, DataError

WORDS = {"name": "words", "kind": "causal_lm"}
KIND = {"name": "kind", "num_labels": 3}
SCORE = {"name": "grade", "kind": "regression"}
TASKS = [WORDS, KIND, SCORE]
ROWS, LONGEST = 4, 9  # rows of each task
SIZES: dict[str, Any] = {
    "gpt2": {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 32,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
    },
    "llama": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
}
TARGETS = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}


def decoder(kind: str = "gpt2", head: Any = transformers.AutoModelForCausalLM, **config: Any) -> Any:
    """Make a tiny decoder; one seed, so that two heads stand on one backbone."""
    tokens: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, **config}
    made = transformers.AutoConfig.for_model(kind, vocab_size=61, initializer_range=0.2, **SIZES[kind], **tokens)
    torch.manual_seed(0)
    return head.from_config(made)


def adapted(base: Any, tasks: Any = TASKS, **options: Any) -> Any:
    """Give a decoder Multi-LoRA, in float64, every B away from 0."""
    targets = TARGETS[base.config.model_type]
    model = get_peft_model(base, MultiLoraConfig(tasks=tasks, target_modules=targets, r=4, **options)).double()
    generator = torch.Generator().manual_seed(1)
    for name, value in sorted(model.named_parameters()):
        if value.requires_grad and "lora_B" in name:
            value.data = torch.randn(value.shape, generator=generator, dtype=value.dtype) * 0.2
    return model


def batch_of(task: int, step: int) -> dict[str, torch.Tensor]:
    """The rows one task gives to one step, of unequal lengths; a label beside language modelling stands first."""
    generator = torch.Generator().manual_seed(1000 * step + task)
    ids = torch.randint(1, 61, (ROWS, LONGEST - task), generator=generator)
    lengths = torch.randint(3, ids.shape[1] + 1, (ROWS,), generator=generator)
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100).double()
    if task:
        labels[:, 1:] = -100
        labels[:, 0] = torch.randint(3, (ROWS,), generator=generator) / (1 if task == 1 else 7)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels, "task_ids": torch.full((ROWS,), task)}


def mixed(step: int) -> dict[str, torch.Tensor]:
    """All tasks' rows of one step in one batch, shuffled."""
    pads = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    parts = [batch_of(task, step) for task in range(len(TASKS))]
    order = torch.randperm(len(TASKS) * ROWS, generator=torch.Generator().manual_seed(step))
    joined = {
        key: torch.cat([functional.pad(part[key], (0, LONGEST - part[key].shape[1]), value=pad) for part in parts])
        for key, pad in pads.items()
    }
    joined["task_ids"] = torch.cat([part["task_ids"] for part in parts])
    return {key: value[order] for key, value in joined.items()}


def as_alone(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows of one task as a model of that task alone takes them."""
    task, alone = int(batch["task_ids"][0]), {key: batch[key] for key in ("input_ids", "attention_mask")}
    labels = batch["labels"] if task == 0 else batch["labels"][:, 0]
    return {**alone, "labels": labels if task == 2 else labels.long()}


def trained(model: Any, batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Train with AdamW, each task's gradient clipped by itself, and return every weight."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    model.train()
    strategy: Any = choose("multi_lora").strategy
    for batch in batches:
        model(**batch).loss.backward()
        for group in strategy.gradient_groups(model, None):
            nn.utils.clip_grad_norm_(group, 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_joint_training_is_training_each_task_alone(kind: str) -> None:
    """After ten steps a task is where a run of its own ends: transformers' model of its kind, with transformers' own loss."""
    steps = range(10)
    model = adapted(decoder(kind))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    joint = trained(model, [mixed(step) for step in steps])
    for number, task in enumerate(TASKS):
        head = transformers.AutoModelForSequenceClassification if number else transformers.AutoModelForCausalLM
        labels: dict[str, Any] = {"num_labels": task.get("num_labels", 1)}
        if number:
            labels["problem_type"] = "regression" if number == 2 else "single_label_classification"
        alone = adapted(decoder(kind, head, **labels), [task])
        own = [name for name in alone.state_dict() if f".{task['name']}" in name]
        assert len(own) == {"gpt2": 2, "llama": 4}[kind] + (number > 0)
        shared = {
            name: value for name, value in start.items() if name in alone.state_dict() and "score.base" not in name
        }
        alone.load_state_dict(shared, strict=False)
        weights = trained(alone, [as_alone(batch_of(number, step)) for step in steps])
        for name in own:
            assert not torch.equal(weights[name], start[name]), name
            torch.testing.assert_close(joint[name], weights[name], rtol=0, atol=1e-6)
    frozen = [name for name in start if not any(f".{task['name']}" in name for task in TASKS)]
    assert all(torch.equal(joint[name], start[name]) for name in frozen)


def test_rows_of_one_kind_are_answered_as_in_the_mixed_batch() -> None:
    """Logits of both kinds in one tensor, of one kind as transformers shapes them; in training none of both."""
    model = adapted(decoder()).eval()
    batch = mixed(0)
    task_ids, mask = batch["task_ids"], batch["attention_mask"]
    asked = {key: batch[key] for key in ("input_ids", "attention_mask", "task_ids")}
    together = model(**asked).logits
    assert together.shape == (3 * ROWS, LONGEST, 61)
    for number, width in ((0, 61), (1, 3), (2, 1)):
        rows = task_ids == number
        alone = model(**{key: value[rows] for key, value in asked.items()}).logits
        assert alone.shape == ((ROWS, LONGEST, 61) if number == 0 else (ROWS, width))
        own = together[rows] if number == 0 else together[rows, 0, :width]
        torch.testing.assert_close(own, alone, rtol=0, atol=1e-12)
    assert torch.isneginf(together[task_ids == 1, 1:]).all() and torch.isneginf(together[task_ids > 0, :, 3:]).all()
    found = model(**batch, output_hidden_states=True)
    assert len(found.hidden_states) == 3 and found.hidden_states[-1].shape == (*mask.shape, 16)
    assert torch.equal(found.logits, together) and found.task_losses is None
    training = model.train()(**batch)
    assert training.logits is None
    torch.testing.assert_close(training.task_losses.sum(), found.loss, rtol=0, atol=1e-12)


def test_saved_adapter_loads_with_peft(tmp_path: Path) -> None:
    """The classifiers are in the one file, under the names they have in a classifier's; the shared head is not."""
    model = adapted(decoder()).float().eval()
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(decoder(), tmp_path).eval()
    asked = {key: mixed(0)[key] for key in ("input_ids", "attention_mask", "task_ids")}
    assert torch.equal(loaded(**asked).logits, model(**asked).logits)
    alone = adapted(decoder(head=transformers.AutoModelForSequenceClassification, num_labels=3), [KIND])
    assert {name for name in alone.state_dict() if ".kind" in name} <= set(loaded.state_dict())
    assert model.base_model.parameter_counts()["stored"] == 2 * 4 * (16 + 3 * 48) + (3 + 1) * 16


def test_tasks_that_write_generate_and_others_do_not() -> None:
    """A prompt goes on as the task's merged model does, beams included; a classifier's is refused, also by its number."""
    model = adapted(decoder()).float().eval()
    ids = torch.tensor([[5, 6, 7], [9, 3, 2]])
    settings = {"num_beams": 2, "max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with model.task("words"):
        found = model.generate(input_ids=ids, **settings)
    for chosen in ({"task_ids": torch.tensor([0, 1])}, {}):
        with pytest.raises(DataError, match="task 'kind' is a classification and writes no text; known: words"):
            model.set_task("kind")
            model.generate(input_ids=ids, **chosen, **settings)
    model.set_task("words")
    merged = model.merge_and_unload()
    assert type(merged) is transformers.GPT2LMHeadModel and not hasattr(merged, "score")
    assert torch.equal(found, merged.generate(input_ids=ids, **settings))


def test_merged_classifier_is_transformers_own() -> None:
    """It answers as the joint model did, has its labels, and shares no head with language modelling."""
    model = adapted(decoder()).eval()
    batch = batch_of(1, 0)
    asked = {key: batch[key] for key in ("input_ids", "attention_mask")}
    with model.task("kind"):
        expected = model(**asked).logits
    model.set_task("kind")
    merged = model.merge_and_unload()
    assert type(merged) is transformers.GPT2ForSequenceClassification
    assert (merged.config.num_labels, merged.training) == (3, False)
    torch.testing.assert_close(merged(**asked).logits, expected, rtol=0, atol=1e-12)


def test_what_is_kept_of_the_tasks_may_be_of_one_kind() -> None:
    """Classifiers alone on a decoder with its head, and language modelling alone, go on answering."""
    batch = batch_of(1, 0)
    asked = {key: batch[key] for key in ("input_ids", "attention_mask")}
    for name in ("words", "kind"):
        model = adapted(decoder()).eval()
        with model.task(name):
            expected = model(**asked).logits
        model.base_model.keep_tasks({name: "one"})
        assert torch.equal(model(**asked).logits, expected)


@pytest.mark.parametrize(
    ("head", "tasks", "options", "words"),
    [
        ("AutoModelForSequenceClassification", TASKS, {}, "'words' models language and GPT2ForSequence.*has no head"),
        (
            "AutoModelForCausalLM",
            TASKS,
            {"heads": ["lm_head"]},
            r"heads=\['lm_head'\] of a language model; known: score",
        ),
        ("AutoModelForCausalLM", [*TASKS, WORDS], {}, "two tasks are called 'words'"),
    ],
)
def test_what_does_not_go_together_is_one_line(head: str, tasks: Any, options: Any, words: str) -> None:
    """Said before anything is trained."""
    with pytest.raises((CompatibilityError, DataError), match=words) as error:
        adapted(decoder(head=getattr(transformers, head)), tasks, **options)
    assert "\n" not in str(error.value)


def test_encoder_is_refused() -> None:
    """Its classifier reads no last token, and it cannot model language causally."""
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    base: Any = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=61, intermediate_size=32, **sizes))
    with pytest.raises(
        CompatibilityError, match=r"BertForMaskedLM has no classifier that reads the last token.*decoder"
    ):
        get_peft_model(base, MultiLoraConfig(tasks=TASKS, target_modules=["query"]))


def test_row_whose_end_cannot_be_told_is_refused() -> None:
    """No pad token, or logits of the last positions alone."""
    ids, tasks = torch.ones(2, 4, dtype=torch.long), torch.tensor([0, 1])
    with pytest.raises(DataError, match="logits_to_keep with rows of a classifier"):
        adapted(decoder())(input_ids=ids, task_ids=tasks, logits_to_keep=1)
    model = adapted(decoder(pad_token_id=None))
    assert model.eval()(input_ids=ids, task_ids=tasks).logits.shape == (2, 4, 61)  # one row of a classifier
    with pytest.raises(DataError, match=r"no pad token; set model\.config\.pad_token_id"):
        model(input_ids=ids, task_ids=torch.tensor([1, 2]))
