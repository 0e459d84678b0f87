"""Multi-LoRA beside PEFT's LoRA, which knows nothing of it: the same training task by task, and less to store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from tunery.plugins.strategies.multi_lora import MultiLoraConfig

TASKS = [
    {"name": "cola", "num_labels": 2},
    {"name": "stsb", "kind": "regression"},
    {"name": "trec", "num_labels": 3},
]
WIDTHS = {"cola": 2, "stsb": 1, "trec": 3}
LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["query", "value"]}
STEPS = 50


def classifier(labels: int = 2) -> Any:
    """Make a tiny BERT, the same bits every time but for its head."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=61,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
        num_labels=labels,
    )
    return transformers.BertForSequenceClassification(config)


def rows_of(task: int, step: int) -> dict[str, torch.Tensor]:
    """Return what one task gives to one step; regression has targets in float64."""
    generator = torch.Generator().manual_seed(1000 * step + task)
    ids = torch.randint(1, 61, (6, 7), generator=generator)
    labels = torch.randint(max(2, WIDTHS[TASKS[task]["name"]]), (6,), generator=generator)
    return {"input_ids": ids, "labels": labels.double() / 2 if task == 1 else labels}


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """Return AdamW on what trains."""
    return torch.optim.AdamW([p for p in model.train().parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)


def peer(labels: int, start: dict[str, torch.Tensor], name: str) -> Any:
    """Make PEFT's LoRA of one task, with the joint run's A, frozen, and its head as both began."""
    model = get_peft_model(classifier(labels), LoraConfig(**LORA, modules_to_save=["classifier"])).double()
    for key, value in model.named_parameters():
        if "lora_A" in key:
            value.data = start[key.removesuffix(".default.weight")].clone()
            value.requires_grad_(False)
        elif "modules_to_save" in key:
            value.data = start[key.replace("modules_to_save.default", f"heads.{name}")].clone()
    return model


def test_joint_training_is_the_training_of_peft_loras_on_the_same_a() -> None:
    """After 50 steps in float64 every B_i and head_i is, to 1e-6, what PEFT and transformers' own loss arrive at."""
    joint = get_peft_model(classifier(), MultiLoraConfig(tasks=TASKS, **LORA)).double()
    start = {key: value.clone() for key, value in joint.state_dict().items()}
    optimizer = optimizer_of(joint)
    for step in range(STEPS):
        parts = [rows_of(task, step) for task in range(3)]
        batch = {
            key: torch.cat([part[key].double() if key == "labels" else part[key] for part in parts]) for key in parts[0]
        }
        joint(**batch, task_ids=torch.arange(3).repeat_interleave(6)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = joint.state_dict()
    for number, (name, labels) in enumerate(WIDTHS.items()):
        alone = peer(labels, start, name)
        optimizer = optimizer_of(alone)
        for step in range(STEPS):
            alone(**rows_of(number, step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        compared = 0
        for key, value in alone.named_parameters():
            if value.requires_grad:
                ours = key.replace("modules_to_save.default", f"heads.{name}").replace("default.weight", name)
                torch.testing.assert_close(found[ours], value.detach(), rtol=0, atol=1e-6)
                assert not torch.equal(value, start[ours])
                compared += 1
        assert compared == 4 + 2


def adapter_bytes(folder: Path) -> int:
    """Return what the adapter's own numbers take in a file, heads aside."""
    state = load_file(folder / "adapter_model.safetensors")
    return sum(value.numel() * value.element_size() for name, value in state.items() if "lora_" in name)


def test_eight_tasks_take_nine_sixteenths_of_eight_loras(tmp_path: Path) -> None:
    """On disk, heads aside, where the modules are square: A once and eight B against eight of each."""
    tasks = [{"name": f"t{number}", "num_labels": 2} for number in range(8)]
    get_peft_model(classifier(), MultiLoraConfig(tasks=tasks, **LORA)).save_pretrained(tmp_path / "ours")
    get_peft_model(classifier(), LoraConfig(**LORA)).save_pretrained(tmp_path / "theirs")
    assert adapter_bytes(tmp_path / "ours") / (8 * adapter_bytes(tmp_path / "theirs")) == 0.5625
