"""The noise is the paper's, and falls where it should."""

import math
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from tunery import Trainer, TrainingArguments

CONFIG = BertConfig(
    vocab_size=400, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=3
)


@pytest.fixture(scope="module")
def base() -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(CONFIG)


def noisy(base: BertForSequenceClassification, folder: Path, strategy: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the weights training would start from."""
    args = TrainingArguments(output_dir=str(folder), strategy=strategy, seed=seed, use_cpu=True, report_to="none")
    return Trainer(model=deepcopy(base), args=args).model.state_dict()


def test_noise_is_uniform_and_scaled_by_each_weight(base: BertForSequenceClassification, tmp_path: Path):
    after = noisy(base, tmp_path, "noisytune:intensity=0.3")
    for name, weight in base.bert.named_parameters(prefix="bert"):
        noise = (after[name] - weight.detach()) / weight.detach().std(correction=0).clamp(min=1e-12)
        assert noise.abs().max() <= 0.15 * (1 + 1e-3), name
        if weight.numel() > 10_000:
            assert noise.std().item() == pytest.approx(0.3 / math.sqrt(12), rel=0.02)
            assert abs(noise.mean().item()) < 0.005


def test_constant_weights_and_the_fresh_head_get_no_noise(base: BertForSequenceClassification, tmp_path: Path):
    after = noisy(base, tmp_path, "noisytune:intensity=0.3")
    for name in ("classifier.weight", "classifier.bias", "bert.encoder.layer.0.output.LayerNorm.weight"):
        assert torch.equal(after[name], base.state_dict()[name])


def test_the_seed_decides(base: BertForSequenceClassification, tmp_path: Path):
    one, same, other = (noisy(base, tmp_path, "noisytune", seed)["bert.pooler.dense.weight"] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_no_intensity_is_full_fine_tuning(base: BertForSequenceClassification, tmp_path: Path):
    after = noisy(base, tmp_path, "noisytune:intensity=0")
    assert all(torch.equal(after[name], weight) for name, weight in base.state_dict().items())
