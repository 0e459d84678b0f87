"""Multi-LoRA: tasks that train together as if alone, leave as plain LoRAs, come later, and are told apart in one batch."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

import tunery
from tunery.core.recipe import choose
from tunery.plugins.strategies.multi_lora import MultiLoraConfig
from tunery.plugins.strategies.multi_lora.layers import MultiLoraLayer
from tunery.plugins.strategies.multi_lora.packing import can_pack
from tunery.plugins.strategies.multi_lora.routing import Router
from tunery.plugins.strategies.multi_lora.splitting import STEP, cheapest_cuts, pieces
from tunery.registry.conformance.models import MODELS, base_model
from tunery.registry.conformance.trials import Trial
from tunery.registry.conformance.workers import STAGES
from tunery.registry.errors import ArtifactError, CompatibilityError, DataError, TuneryError

TASKS = [
    {"name": "cola", "num_labels": 2},
    {"name": "stsb", "kind": "regression"},
    {"name": "trec", "num_labels": 3},
]
ROWS = 6  # of each task
TARGETS = {"bert": ["query", "value"], "gpt2": ["c_attn"], "vit": ["q_proj", "v_proj"], "roberta": ["query", "value"]}
SIZES: dict[str, Any] = {
    "bert": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
}
SIZES["roberta"] = {**SIZES["bert"], "max_position_embeddings": 40}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def classifier(kind: str = "bert", **config: Any) -> Any:
    """Make a tiny classifier without dropout; weights spread enough for gradients that matter."""
    quiet = QUIET if kind != "gpt2" else {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    made = transformers.AutoConfig.for_model(
        kind, vocab_size=61, num_labels=2, initializer_range=0.2, pad_token_id=0, **SIZES[kind], **quiet, **config
    )
    torch.manual_seed(0)
    return transformers.AutoModelForSequenceClassification.from_config(made)


def adapted(kind: str = "bert", tasks: Any = TASKS, **options: Any) -> Any:
    """Make a tiny model with Multi-LoRA, in float64, every B away from 0 unless ``fresh``."""
    fresh = options.pop("fresh", False)
    model = get_peft_model(
        classifier(kind), MultiLoraConfig(**{"tasks": tasks, "target_modules": TARGETS[kind], "r": 4, **options})
    ).double()
    generator = torch.Generator().manual_seed(1)
    for name, value in model.named_parameters():
        if value.requires_grad and "lora_" in name and not fresh:
            value.data = torch.randn(value.shape, generator=generator, dtype=value.dtype) * 0.2
    return model


def batch_of(task: int, step: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    """The rows one task gives to one step, always as long, so that a joint batch pads nothing more."""
    generator = torch.Generator().manual_seed(1000 * step + task)
    ids = torch.randint(1, 61, (rows, 7), generator=generator)
    labels = (
        torch.rand(rows, generator=generator)
        if task == 1
        else torch.randint(2 + task // 2, (rows,), generator=generator)
    )
    return {"input_ids": ids, "labels": labels.double(), "task_ids": torch.full((rows,), task)}


def mixed(step: int, shuffle: bool = False) -> dict[str, torch.Tensor]:
    """All tasks' rows of one step in one batch."""
    parts = [batch_of(task, step) for task in range(len(TASKS))]
    joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    order = torch.randperm(len(joined["labels"]), generator=torch.Generator().manual_seed(step)) if shuffle else ...
    return {key: value[order] for key, value in joined.items()}


def trained(model: Any, batches: Iterator[dict[str, torch.Tensor]], clip: bool = False) -> dict[str, torch.Tensor]:
    """Train with AdamW, weight decay on, and return every weight."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    model.train()
    strategy = choose("multi_lora").strategy if clip else None
    for batch in batches:
        model(**batch).loss.backward()
        for group in strategy.gradient_groups(model, None) if strategy else ():
            nn.utils.clip_grad_norm_(group, 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_two_tasks_on_one_a_by_hand() -> None:
    """A=[[1,2]], B1=[1,0], B2=[0,1], alpha/r=2, x=(1,1): W0 x plus (6,0) and plus (0,6)."""
    base = nn.Linear(2, 2, bias=False)
    router = Router(["one", "two"])
    layer = MultiLoraLayer(
        base, "it", router, r=1, alpha=2, dropout=0.0, gaussian=False, frozen="a", trains={"one": True, "two": True}
    )
    layer.lora_A.copy_(torch.tensor([[1.0, 2.0]]))
    layer.per_task.put("one", torch.tensor([[1.0], [0.0]]), trains=True)
    layer.per_task.put("two", torch.tensor([[0.0], [1.0]]), trains=True)
    x = torch.ones(3, 1, 2)
    router.route(torch.tensor([1, 0, 1]), 3)
    update = (layer(x) - base(x))[:, 0]
    torch.testing.assert_close(update, torch.tensor([[0.0, 6.0], [6.0, 0.0], [0.0, 6.0]]))


@pytest.mark.parametrize("clip", [False, True], ids=["unclipped", "clipped"])
@pytest.mark.parametrize(("kind", "frozen"), [("bert", "a"), ("roberta", "a"), ("gpt2", "a"), ("bert", "b")])
def test_joint_training_is_training_each_task_alone(kind: str, frozen: str, clip: bool) -> None:
    """After 50 steps every B_i and head_i is what the task alone, on the same rows, arrives at (paper, claim 4.2)."""
    steps = 50 if (kind, frozen) == ("bert", "a") else 10
    start = adapted(kind, frozen=frozen)
    joint = trained(adapted(kind, frozen=frozen), (mixed(step, shuffle=True) for step in range(steps)), clip)
    for number, task in enumerate(TASKS):
        alone = adapted(kind, frozen=frozen)
        alone.load_state_dict(start.state_dict())
        weights = trained(alone, (batch_of(number, step) for step in range(steps)), clip)
        own = [name for name in weights if f".{task['name']}" in name]
        assert len(own) >= (5 if kind != "gpt2" else 3)
        for name in own:
            assert not torch.equal(weights[name], start.state_dict()[name]), name
            torch.testing.assert_close(joint[name], weights[name], rtol=0, atol=1e-6)


def test_float32_says_how_far_apart_rounding_drives_them() -> None:
    """The same in float32 stays within 2e-4 after 50 steps of AdamW, which divides small gradients by themselves."""
    joint = trained(adapted().float(), ({**mixed(s), "labels": mixed(s)["labels"].float()} for s in range(50)))
    rows = ({**batch_of(0, s), "labels": batch_of(0, s)["labels"].float()} for s in range(50))
    alone = trained(adapted().float(), rows)
    own = [name for name in alone if ".cola" in name]
    assert max((joint[name] - alone[name]).abs().max() for name in own) < 2e-4


def test_step_of_one_task_leaves_the_others_and_a_alone() -> None:
    """Not a bit of another task's moves, momentum and weight decay notwithstanding; A never does."""
    model = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    model.train()(**mixed(0)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(**batch_of(2, 1)).loss.backward()
    optimizer.step()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad and ".trec" in name}


@pytest.mark.parametrize(
    ("stage", "frozen"),
    [*((stage, "a") for stage in ("one", *STAGES)), *((stage, "b") for stage in ("one", STAGES[0]))],
)
def test_joint_run_is_each_tasks_run_alone(stage: str, frozen: str) -> None:
    """By the Trainer too, in float32: after 50 steps on the same rows, alone or among others', a task ends the same.

    The shared factor keeps every bit, and so do the other tasks' when one trains alone.
    """
    strategy = f"multi_lora:r=4,frozen={frozen}"
    options = {"max_grad_norm": 0.0, "train_sampling_strategy": "sequential"}
    trial = Trial(strategy=strategy, tasks=3, batch=12, rows=36, steps=50, options=options)
    joint, start = trial.run(stage).weights, trial.but(steps=1, options={"learning_rate": 0.0}).run(stage).weights
    for task in range(3):
        alone = trial.but(batch=4, only=task).run(stage).weights
        assert joint.keys() == alone.keys()
        for name in joint:
            if f".task{task}" in name:
                torch.testing.assert_close(joint[name], alone[name], rtol=0, atol=1e-6)
                assert not torch.equal(joint[name], start[name]) or joint[name].numel() == 1, name
            else:
                assert torch.equal(alone[name], start[name]), name
            if ".task" not in name:
                assert torch.equal(joint[name], start[name]), name


@pytest.mark.parametrize("regularizers", [(), ("l2_sp:beta=0.5",)], ids=["plain", "l2_sp"])
def test_tasks_without_rows_rest_wherever_they_train(regularizers: tuple[str, ...]) -> None:
    """Steps of two rows leave one of three tasks out: two ranks, and two micro-batches, end as one process does."""
    options = {"max_grad_norm": 0.0, "weight_decay": 0.1}
    trial = Trial(strategy="multi_lora:r=4", regularizers=regularizers, tasks=3, batch=2, rows=36, options=options)
    expected = trial.run().weights
    for found in (trial.run("ddp").weights, trial.but(accumulation=2).run().weights):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_counts_are_the_papers() -> None:
    """RoBERTa-base, query and value, r=8, k=8: A + 8 B is 1,327,104, 56.25 % of eight LoRAs' 2,359,296."""
    with torch.device("meta"):
        base = transformers.RobertaForSequenceClassification(transformers.RobertaConfig(num_labels=2))
        tasks = [{"name": f"t{number}", "num_labels": 2} for number in range(8)]
        model = get_peft_model(base, MultiLoraConfig(tasks=tasks, target_modules=["query", "value"], r=8))
    counts = model.base_model.parameter_counts()
    assert counts["paper"] == 1_327_104
    assert counts["loras"] == 2_359_296
    heads = 8 * (768 * 768 + 768 + 768 * 2 + 2)
    assert counts["trains"] == 1_327_104 - 12 * 2 * 8 * 768 + heads
    assert counts["stored"] == 1_327_104 + heads


def test_mixed_batch_answers_each_row_as_its_task_does() -> None:
    """Inference on a mixed batch, the context manager, and a merged model say the same."""
    model = adapted().eval()
    batch = mixed(3, shuffle=True)
    task_ids, ids = batch["task_ids"], batch["input_ids"]
    together = model(input_ids=ids, task_ids=task_ids).logits
    for number, task in enumerate(TASKS):
        rows = task_ids == number
        with model.task(task["name"]):
            alone = model(input_ids=ids[rows]).logits
        torch.testing.assert_close(together[rows][:, : alone.shape[1]], alone, rtol=0, atol=1e-12)
        assert torch.isneginf(together[rows][:, alone.shape[1] :]).all()
    model.set_task("trec")
    merged = model.merge_and_unload()
    assert isinstance(merged.classifier, nn.Linear)
    assert merged.config.num_labels == 3
    torch.testing.assert_close(merged(input_ids=ids[task_ids == 2]).logits, together[task_ids == 2], rtol=0, atol=1e-12)


def test_beams_keep_their_task() -> None:
    """Beam search repeats rows: each goes on with its own task's update, as the merged model generates."""
    tiny = MODELS["gpt2_causal_lm"]
    tasks = [{"name": "e2e", "kind": "causal_lm"}, {"name": "dart", "kind": "causal_lm"}]

    def make() -> Any:
        base = tiny.load(base_model("gpt2_causal_lm", dropout=False))
        torch.manual_seed(0)
        made = get_peft_model(base, MultiLoraConfig(tasks=tasks, target_modules=["c_attn"], r=4)).eval()
        for name, value in made.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(value, std=0.5)
        return made

    ids = torch.tensor([[5, 6, 7], [9, 3, 2]])
    settings = {
        "num_beams": 3,
        "max_new_tokens": 5,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids),
    }
    found = []
    for task in ("e2e", "dart"):
        model = make()
        with model.task(task):
            found.append(model.generate(input_ids=ids, **settings))
        model = make()
        model.set_task(task)
        assert torch.equal(found[-1], model.merge_and_unload().generate(input_ids=ids, **settings))
    assert not torch.equal(*found)
    model = make()
    for task_ids in ([1, 0], [0, 1], [1, 1]):
        together = model.generate(input_ids=ids, task_ids=torch.tensor(task_ids), **settings)
        for row, task in enumerate(task_ids):
            width = max(together.shape[1], found[task].shape[1])
            both = [functional.pad(answer, (0, width - answer.shape[1])) for answer in (together, found[task])]
            assert torch.equal(both[0][row], both[1][row])
    with pytest.raises(DataError, match=r"1 task_ids for 2 rows; known: 0 \(e2e\), 1 \(dart\)"):
        model.generate(input_ids=ids, task_ids=torch.tensor([1]), **settings)
    with pytest.raises(DataError, match="a batch without task_ids"):  # nothing is left of the last call
        model(input_ids=ids)
    with pytest.raises(DataError, match="a batch without task_ids"):
        model.generate(input_ids=ids, **settings)


def test_saved_adapter_loads_with_peft(tmp_path: Path) -> None:
    """One safetensors file: A once, B and head a task; PEFT's own loader gives the same bits."""
    model = adapted().float().eval()
    model.save_pretrained(tmp_path / "adapter")
    state = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sum(key.endswith("lora_A") for key in state) == 4
    assert sum(".lora_B." in key for key in state) == 4 * len(TASKS)
    loaded = PeftModel.from_pretrained(classifier(), tmp_path / "adapter").eval()
    batch = mixed(0)
    answers = [m(input_ids=batch["input_ids"], task_ids=batch["task_ids"]).logits for m in (model, loaded)]
    assert torch.equal(*answers)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


# ---- tasks that come later, go, or change their names


@pytest.fixture(scope="module")
def finished() -> Path:
    """A finished run on three tasks."""
    trial = Trial(strategy="multi_lora:r=4", tasks=3, batch=12, rows=36, options={"max_grad_norm": 0.0})
    return trial.run().folder


def files_of(folder: Path, task: str, target: Path) -> dict[str, bytes]:
    """What a task's export consists of."""
    exported = tunery.export_run(folder, target, task=task)
    return {
        p.name: p.read_bytes() for p in exported.iterdir() if p.suffix == ".safetensors" or p.stem == "adapter_config"
    }


@pytest.mark.parametrize("stage", ["one", *(stage for stage in STAGES if stage == "zero3")])
def test_added_task_leaves_the_others_files_as_they_are(stage: str, finished: Path, tmp_path: Path) -> None:
    """Byte for byte, exports of the earlier tasks before and after; the new one is there and has trained."""
    trial = Trial(
        strategy={"name": "multi_lora", "r": 4, "add_to": str(finished)},
        rows=36,
        batch=12,
        options={"max_grad_norm": 0.0},
    )
    after = trial.run(stage).folder
    before, now = (load_file(folder / "adapter_model.safetensors") for folder in (finished, after))
    assert all(torch.equal(now[key], before[key]) for key in before)
    added = {key for key in now if key not in before}
    assert added and all(".task" in key and ".task0" not in key for key in added)
    assert all(now[key].any() for key in added if "lora_B" in key)
    for task in ("task0", "task1", "task2"):
        old = files_of(finished, task, tmp_path / f"old-{task}")
        assert files_of(after, task, tmp_path / f"new-{task}") == old


def test_a_run_on_another_base_model_is_not_added_to(finished: Path, tmp_path: Path) -> None:
    """Of the same shapes, but other weights: its tasks would answer nonsense on this one."""
    job = Trial(strategy={"name": "multi_lora", "r": 4, "add_to": str(finished)}).job("one", tmp_path)
    other = MODELS["bert_classifier"].load(job.base)
    with torch.no_grad():
        other.bert.encoder.layer[0].intermediate.dense.weight.mul_(2)
    args = tunery.TrainingArguments(**job.arguments())
    with pytest.raises(
        ArtifactError, match=r"was trained on another base model: .*start from the model that run began"
    ):
        tunery.Trainer(model=other, args=args)
    tunery.Trainer(model=MODELS["bert_classifier"].load(job.base), args=args)


def test_dropped_and_renamed_tasks(finished: Path, tmp_path: Path) -> None:
    """What stays answers the same, under its new name and number, and its exports are the same bytes."""
    kept = tunery.keep_tasks(finished, tmp_path / "kept", {"task2": "two", "task0": "zero"})
    state = load_file(kept / "adapter_model.safetensors")
    assert not any("task" in key for key in state)
    assert [task.name for task in tunery.load_run(kept).run.tasks] == ["two", "zero"]
    for old, new in (("task2", "two"), ("task0", "zero")):
        assert files_of(kept, new, tmp_path / new) == files_of(finished, old, tmp_path / old)


def test_task_that_trained_alone_can_be_renamed(tmp_path: Path) -> None:
    """Which tasks trained is no part of what is loaded back."""
    strategy = {"name": "multi_lora", "r": 4, "tasks": ["task1"]}
    folder = Trial(strategy=strategy, tasks=3, batch=12, rows=36, options={"max_grad_norm": 0.0}).run().folder
    kept = tunery.keep_tasks(folder, tmp_path / "kept", {"task0": "renamed"})
    assert [task.name for task in tunery.load_run(kept).run.tasks] == ["renamed"]


# ---- what cannot be


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_damaged_run_is_not_added_to(name: str, finished: Path, tmp_path: Path) -> None:
    """One line, whichever file is cut off."""
    shutil.copytree(finished, tmp_path / "damaged", ignore=shutil.ignore_patterns("checkpoint-*"))
    file = tmp_path / "damaged" / name
    file.write_bytes(file.read_bytes()[:100])
    selection = {"name": "multi_lora", "r": 4, "add_to": str(tmp_path / "damaged")}
    with pytest.raises(ArtifactError, match=r"cannot be read|is damaged") as error:
        Trial(strategy=selection).trainer(tmp_path / "run")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("task_id", "words"), [(3, "task id 3"), (-1, "task id -1"), (None, "without task_ids")])
def test_trainer_refuses_rows_of_no_task(task_id: int | None, words: str, tmp_path: Path) -> None:
    """In words, not by an index."""
    trainer = Trial(strategy="multi_lora:r=4", tasks=3, batch=12, rows=36).trainer(tmp_path / "run")
    for row in trainer.train_dataset:
        row["task_ids"] = task_id
        if task_id is None:
            del row["task_ids"]
    with pytest.raises(DataError, match=words):
        trainer.train()


@pytest.mark.parametrize(
    ("tasks", "options", "words"),
    [
        ([], {}, "without a task"),
        ([{"name": "a", "num_labels": 2}] * 2, {}, "two tasks are called 'a'"),
        ([{"name": "a", "num_labels": 1}], {}, "1 labels"),
        ([{"name": "a.b", "num_labels": 2}], {}, "task name 'a.b'"),
        ([{"name": "forward", "num_labels": 2}], {}, "task name 'forward'"),
        ([{"name": "a", "kind": "translation"}], {}, "kind 'translation'"),
        (TASKS, {"r": 17}, "r=17 is more than"),
        (TASKS, {"r": 0}, "r=0; known: an integer, 1 or more"),
        (TASKS, {"r": 2.5}, "r=2.5; known: an integer, 1 or more"),
        (TASKS, {"lora_alpha": 0}, "lora_alpha=0; known: a number above 0"),
        (TASKS, {"lora_dropout": 1.5}, "lora_dropout=1.5; known: a number from 0 to below 1"),
        (TASKS, {"init": "zeros"}, "init='zeros'; known: default, gaussian"),
        (TASKS, {"frozen": "c"}, "frozen='c'; known: a, b"),
        (TASKS, {"heads": ["nosuch"]}, "has no module 'nosuch'; known: classifier"),
        (TASKS, {"heads": ["dropout"]}, "no linear layer in dropout; known: classifier"),
        (TASKS, {"target_modules": ["LayerNorm"]}, "cannot adapt"),
        (TASKS, {"target_modules": None}, "without target_modules"),
        (TASKS, {"target_modules": []}, "without target_modules; known: dense, key, query, value"),
        (TASKS, {"target_modules": ["foo"]}, "no module 'foo' outside classifier; known: dense, key, query, value"),
        (TASKS, {"target_modules": ["query", "foo"]}, "no module 'foo' outside"),
        (TASKS, {"target_modules": ".*foo"}, r"no module '\.\*foo' outside"),
        (TASKS, {"target_modules": ["query", "classifier"]}, "no module 'classifier' outside classifier"),
        (TASKS, {"task_type": "SEQ_CLS"}, "task_type"),
        (
            [*TASKS, {"name": "e2e", "kind": "causal_lm"}],
            {},
            "task 'e2e' models language and BertFor.*AutoModelForCausalLM",
        ),
    ],
)
def test_bad_configuration_is_one_line(tasks: Any, options: dict[str, Any], words: str) -> None:
    """Said before anything is trained."""
    with pytest.raises(TuneryError, match=words) as error:
        adapted(tasks=tasks, **options)
    assert "\n" not in str(error.value)


def test_module_that_cannot_be_adapted_is_refused_with_those_that_can() -> None:
    """The list of what could be."""
    with pytest.raises(CompatibilityError, match="dense, key, query, value"):
        adapted(target_modules=["word_embeddings"])


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_heads_are_no_targets(kind: str, tmp_path: Path) -> None:
    """All linear layers but the heads', also where a name fits both; the same ones are adapted when it is loaded."""
    everything = adapted(kind, target_modules="all-linear", fresh=True).float().eval()
    layers = {name for name, part in everything.named_modules() if isinstance(part, MultiLoraLayer)}
    assert len(layers) == 2 * 6 + (kind == "bert")  # BERT's pooler
    assert not any("classifier" in name for name in layers)
    named = adapted(kind, target_modules=["query", "key", "value", "dense"])
    assert {name for name, part in named.named_modules() if isinstance(part, MultiLoraLayer)} == layers
    everything.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(classifier(kind), tmp_path).eval()
    batch = {"input_ids": mixed(0)["input_ids"], "task_ids": mixed(0)["task_ids"]}
    assert torch.equal(loaded(**batch).logits, everything(**batch).logits)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")  # PEFT's, before it asks us
def test_weight_of_two_modules_is_no_target() -> None:
    """GPT-2's output layer is its input embedding: an update folded into one would be in both."""
    tasks = [{"name": "e2e", "kind": "causal_lm"}]
    base = MODELS["gpt2_causal_lm"].load(base_model("gpt2_causal_lm", dropout=False))
    with pytest.raises(CompatibilityError, match=r"'lm_head', whose weight is another .* known: c_attn, c_fc, c_proj$"):
        get_peft_model(base, MultiLoraConfig(tasks=tasks, target_modules=["lm_head"]))
    llama = MODELS["llama_causal_lm"].load(base_model("llama_causal_lm", dropout=False))
    assert get_peft_model(llama, MultiLoraConfig(tasks=tasks, target_modules=["lm_head"], r=2)).base_model.adaptable


def test_model_without_a_head_is_refused() -> None:
    """Nothing to give the tasks."""
    base = transformers.BertModel(classifier().config)
    with pytest.raises(CompatibilityError, match="BertModel has no head"):
        get_peft_model(base, MultiLoraConfig(tasks=TASKS, target_modules=["query"]))


def test_run_without_a_fresh_head_is_refused(tmp_path: Path) -> None:
    """As plain PEFT is, and before anything is trained."""
    job = Trial(strategy="multi_lora:r=4", tasks=3, batch=12, rows=36).job("one", tmp_path / "run")
    args, tasks = tunery.TrainingArguments(**job.arguments()), MODELS["bert_classifier"].tasks(3)
    with pytest.raises(CompatibilityError, match="BertModel has no fresh head to give the tasks; start from a model"):
        tunery.Trainer(model=transformers.BertModel.from_pretrained(job.base), args=args, task=tasks)


@pytest.mark.parametrize(
    ("task_ids", "words"),
    [
        (None, "without task_ids"),
        (torch.tensor([0, 3]), "task id 3"),
        (torch.tensor([0, -1]), "task id -1"),
        (torch.tensor([0]), "1 task_ids for 2 rows"),
        (torch.tensor([0, 0, 1]), "3 task_ids for 2 rows"),
        (torch.tensor([0.0, 1.0]), r"type torch\.float32"),
        (torch.tensor([True, False]), r"type torch\.bool"),
        (["cola", "trec"], "type list"),
        ([0, 1], "type list"),
    ],
)
def test_rows_without_a_known_task_are_refused(task_ids: Any, words: str) -> None:
    """Which tasks there are is part of the line."""
    with pytest.raises(DataError, match=rf"{words}.*known: .*cola"):
        adapted()(input_ids=torch.ones(2, 4, dtype=torch.long), task_ids=task_ids)


def test_unknown_task_is_refused() -> None:
    """By every way of choosing one."""
    with pytest.raises(DataError, match="no task 'mnli'; known: cola, stsb, trec"):
        adapted().set_task("mnli")


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        ({"tasks": ["mnli"]}, "tasks='mnli' is none of the run's"),
        ({"tasks": ["task", "task"]}, "tasks='task' twice"),
        ({"tasks": []}, r"option tasks = \[\]: .*at least 1 item"),
        ({"target_modules": []}, "without target_modules; known: dense, key, query, value"),
        ({"target_modules": ["foo"]}, "no module 'foo' outside classifier; known: dense, key, query, value"),
        ({"add_to": "nowhere"}, "holds no adapter"),
        ({"add_to": "FINISHED", "r": 2}, "was trained with r=4, not 2"),
    ],
)
def test_bad_selection_is_one_line(selection: dict[str, Any], words: str, finished: Path, tmp_path: Path) -> None:
    """Before anything is trained or written."""
    if selection.get("add_to") == "FINISHED":
        selection = {**selection, "add_to": str(finished)}
    with pytest.raises(TuneryError, match=words):
        Trial(strategy={"name": "multi_lora", "r": 4, **selection}).trainer(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_export_asks_which_task(finished: Path, tmp_path: Path) -> None:
    """Several tasks leave one by one."""
    with pytest.raises(CompatibilityError, match=r"known: task0, task1, task2.*--task"):
        tunery.export_run(finished, tmp_path / "out")
    with pytest.raises(ArtifactError, match="no task 'task9'"):
        tunery.export_run(finished, tmp_path / "out", task="task9")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
        ({"max_grad_norm": 1.0, "deepspeed": "zero2"}, "clips"),
    ],
)
def test_arguments_that_would_mix_the_tasks_are_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    """What is not computed task by task is not computed at all."""
    if "deepspeed" in options and "zero2" not in STAGES:
        pytest.skip("DeepSpeed does not run on this platform")
    where = options.pop("deepspeed", "one")
    trial = Trial(strategy="multi_lora:r=4", tasks=3, batch=12, rows=36, options=options)
    with pytest.raises(CompatibilityError, match=words):
        trial.run(where)


def test_losses_of_mixed_batch_are_the_formulas() -> None:
    """Cross-entropy by each classifier's own labels, squared error for the regression, summed."""
    model = adapted().train()
    batch = mixed(0)
    output = model(**batch)
    logits, labels = output.logits, batch["labels"]
    expected = [
        functional.cross_entropy(logits[:6, :2], labels[:6].long()),
        ((logits[6:12, 0] - labels[6:12]) ** 2).mean(),
        functional.cross_entropy(logits[12:], labels[12:].long()),
    ]
    torch.testing.assert_close(output.task_losses, torch.stack(expected), rtol=0, atol=1e-12)
    torch.testing.assert_close(output.loss, sum(expected), rtol=0, atol=1e-12)
    assert model.eval()(**batch).task_losses is None


# ---- a batch in pieces, or without its padding


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=16), overhead=st.integers(0, 200))
def test_cuts_are_the_cheapest(lengths: list[int], overhead: int) -> None:
    """Against every way of cutting at multiples of the step."""
    lengths.sort()

    def cost(cuts: list[tuple[int, int]]) -> int:
        return sum(overhead + (end - start) * lengths[end - 1] for start, end in cuts)

    inner = range(STEP, len(lengths), STEP)
    ways = [
        list(pairwise([0, *chosen, len(lengths)]))
        for count in range(len(inner) + 1)
        for chosen in combinations(inner, count)
    ]
    found = cheapest_cuts(lengths, overhead)
    assert [end for _, end, _ in found[:-1]] == [start for start, _, _ in found[1:]]
    assert all(longest == lengths[end - 1] for _, end, longest in found)
    assert cost([(start, end) for start, end, _ in found]) == min(map(cost, ways))


@pytest.mark.parametrize("kind", ["bert", "gpt2", "roberta"])
def test_pieces_answer_as_the_whole_batch(kind: str) -> None:
    """Logits, losses and gradients of a batch with much padding are those without splitting."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 61, (24, 20), generator=generator)
    lengths = torch.randint(2, 21, (24,), generator=generator)
    mask = (torch.arange(20) < lengths[:, None]).long()
    batch = {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "task_ids": torch.arange(24) % 3,
        "labels": torch.randint(2, (24,), generator=generator).double(),
    }
    assert len(pieces(mask)) > 1
    assert can_pack(adapted(kind).base_model.model, mask) == (kind != "gpt2")
    found = {}
    for split in (True, False):
        model = adapted(kind).train()
        model.base_model.split = split
        output = model(**batch)
        output.loss.backward()
        found[split] = output, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(found[True][0].logits, found[False][0].logits, rtol=0, atol=1e-10)
    torch.testing.assert_close(found[True][0].task_losses, found[False][0].task_losses, rtol=0, atol=1e-10)
    assert found[True][1].keys() == found[False][1].keys()
    for name, gradient in found[True][1].items():
        torch.testing.assert_close(gradient, found[False][1][name], rtol=0, atol=1e-10)


def test_who_asks_for_hidden_states_gets_them() -> None:
    """Also from a batch that would run in pieces."""
    mask = (torch.arange(20) < torch.tensor([2, 20] * 12)[:, None]).long()
    assert len(pieces(mask)) > 1
    batch = {"input_ids": mask * 5, "attention_mask": mask, "task_ids": torch.arange(24) % 3}
    assert adapted().eval()(**batch).logits.shape == adapted().eval()(**batch, return_dict=False)[0].shape == (24, 3)
    by_call, by_config = adapted().eval(), adapted().eval()
    by_config.config.output_hidden_states = True
    for output in (by_call(**batch, output_hidden_states=True), by_config(**batch)):
        assert [value.shape for value in output.hidden_states] == [(24, 20, 16)] * 3


def test_who_looks_on_sees_the_whole_batch() -> None:
    """A probe that hooks on to layers measures the same, whether or not batches may run in pieces."""
    mask = (torch.arange(20) < torch.tensor([2, 20] * 12)[:, None]).long()
    batch = {"input_ids": mask * 5, "attention_mask": mask, "task_ids": torch.arange(24) % 3}
    seen: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for split in (True, False):
        model = adapted().eval()
        model.base_model.split = split
        layer = model.base_model.model.bert.encoder.layer[0]
        layer.register_forward_hook(lambda module, args, output, split=split: seen[split].append(output))
        model(**batch)
    assert [value.shape for value in seen[True]] == [(24, 20, 16)]
    torch.testing.assert_close(seen[True], seen[False])


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_layers_that_run_again_find_the_whole_batch() -> None:
    """With activation checkpointing nothing is split, in either pass, and the gradients are those without it."""
    mask = (torch.arange(20) < torch.tensor([2, 20] * 12)[:, None]).long()
    labels = torch.zeros(24, dtype=torch.float64)
    batch = {"input_ids": mask * 5, "attention_mask": mask, "task_ids": torch.arange(24) % 3, "labels": labels}
    found, seen = {}, []
    for again in (False, True):
        model = adapted().train()
        model.base_model.split = again
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            layer = model.base_model.model.bert.encoder.layer[0]
            layer.attention.register_forward_hook(lambda module, args, output: seen.append(args[0].shape))
        model(**batch).loss.backward()
        found[again] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert seen == [(24, 20, 16)] * 2
    torch.testing.assert_close(found[True], found[False], rtol=0, atol=1e-12)


@pytest.mark.parametrize("tasks", [1, 3])
def test_encoder_computes_no_padding(tasks: int) -> None:
    """Its layers see as many positions as there are tokens; afterwards, also after an error, all is as it was."""
    mask = (torch.arange(20) < torch.tensor([2, 20] * 12)[:, None]).long()
    batch = {"input_ids": mask * 5, "attention_mask": mask, "task_ids": torch.arange(24) % tasks}
    model = adapted().train()
    encoder = model.base_model.model.bert.encoder
    model.base_model.model.config = copy.deepcopy(encoder.config)  # what its layers do not read
    layers = encoder.layer
    seen: list[torch.Size] = []
    hook = layers[1].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    assert model(**batch).logits.shape == (
        24,
        max(task["num_labels"] for task in TASKS[:tasks] if "num_labels" in task),
    )
    assert seen == [(264, 1, 16)]
    hook.remove()
    broken = layers[1].register_forward_hook(lambda module, args, output: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**batch)
    broken.remove()
    assert encoder.config._attn_implementation == "sdpa"
    assert encoder._forward_hooks == encoder._forward_pre_hooks == {}
    assert model.base_model.router.groups.rows == 24


def test_padding_elsewhere_than_on_the_right_is_computed() -> None:
    """Heads read the first position, which then is padding; and a batch without padding has none to leave out."""
    model = adapted().base_model.model
    mask = (torch.arange(20) < torch.tensor([2, 20] * 12)[:, None]).long()
    assert can_pack(model, mask)
    assert not can_pack(model, mask.flip(1))
    assert not can_pack(model, torch.ones_like(mask))


def test_padding_on_the_left_is_kept() -> None:
    """A row that ends where the batch ends needs all its positions."""
    mask = torch.zeros(32, 40, dtype=torch.long)
    mask[:, 30:] = 1
    assert pieces(mask) == []


def test_regularizers_see_one_forward_pass(tmp_path: Path) -> None:
    """A run with one does not split."""
    trial = Trial(strategy="multi_lora:r=4", tasks=3, batch=12, rows=36)
    assert trial.trainer(tmp_path / "plain").model.base_model.split
    assert not trial.but(regularizers=("l2_sp",)).trainer(tmp_path / "with").model.base_model.split
