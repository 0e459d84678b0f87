"""Feature drift, noise stability and APoZ against what each row says alone, without hooks, pads or batches."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tunery import Measurement, Subject, Task, TaskKind
from tunery.core.context import make_context
from tunery.core.probing import Snapshot, measure
from tunery.plugins.perturbation import seed_of
from tunery.plugins.probes.apoz import Apoz
from tunery.plugins.probes.feature_drift import FeatureDrift
from tunery.plugins.probes.noise_stability import NoiseStability
from tunery.registry.conformance.models import MODELS
from tunery.registry.errors import CompatibilityError

TASK = Task(name="classes", kind=TaskKind.CLASSIFICATION, label_names=("a", "b", "c"))
ROWS = MODELS["bert_classifier"].rows(7)


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=61,
        max_position_embeddings=12,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        initializer_range=0.2,
        hidden_act="relu",
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config).eval()


def subject_of(model: Any, sizes: tuple[int, ...] = (4, 3), rows: Any = ROWS) -> Subject:
    run = make_context(model, SimpleNamespace(seed=5), [TASK])
    batches, start = [], 0
    for size in sizes:
        batches.append(transformers.default_data_collator(rows[start : start + size]))
        start += size
    return Subject(model=model, run=run, reference=Snapshot(model, run.sharding), batches=lambda: batches)


def by_layer(found: list[Measurement], name: str) -> list[float]:
    return [m.value for m in found if m.name == name and m.where]


def overall(found: list[Measurement], name: str) -> float:
    return next(m.value for m in found if m.name == name and not m.where)


def alone(model: Any, row: Any) -> dict[str, torch.Tensor]:
    """Return one row's inputs without its pads."""
    valid = int(row["attention_mask"].sum())
    return {"input_ids": row["input_ids"][None, :valid], "attention_mask": row["attention_mask"][None, :valid]}


def hidden_states(model: Any, row: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return [h[0].double() for h in model(**alone(model, row), output_hidden_states=True).hidden_states]


# ---- APoZ


@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_apoz_counts_what_relu_silences(model: Any, threshold: float):
    """A layer's share is that of zeros behind its ReLU over all tokens of all rows; pads do not count."""
    found = measure(Apoz(Apoz.Config(threshold=threshold)), subject_of(model))
    silent, total = np.zeros(3), np.zeros(3)
    for row in ROWS:
        hidden = hidden_states(model, row)
        for number, layer in enumerate(model.bert.encoder.layer):
            with torch.no_grad():
                attended = layer.attention(hidden[number][None].float())[0]
                active = torch.relu(layer.intermediate.dense(attended))
            silent[number] += (active <= threshold).sum().item()
            total[number] += active.numel()
    assert by_layer(found, "apoz") == pytest.approx(silent / total, abs=1e-3)
    assert overall(found, "apoz") == pytest.approx(silent.sum() / total.sum(), abs=1e-3)
    assert 0.2 < overall(found, "apoz") < 0.9


# ---- feature drift


def test_features_that_have_not_moved(model: Any):
    """At the start of a run everything is 1."""
    found = measure(FeatureDrift(None), subject_of(model))
    assert [m.value for m in found] == pytest.approx([1.0] * 8)
    assert [m.where["layer"] for m in found if m.name == "cka" and m.where] == [1, 2, 3]


def test_drift_is_that_of_each_rows_mean_feature(model: Any):
    """CKA and cosine by numpy from unpadded rows; the weights are as they were afterwards."""
    subject = subject_of(model)

    def features() -> list[np.ndarray[Any, Any]]:
        rows = [hidden_states(model, row) for row in ROWS]
        return [np.stack([row[layer].mean(0).numpy() for row in rows]) for layer in (1, 2, 3)]

    before = features()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.bert.encoder.layer[1:].parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    now, weights = features(), [p.clone() for p in model.parameters()]
    found = measure(FeatureDrift(None), subject)
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    ckas, cosines = [], []
    for x, y in zip(now, before, strict=True):
        cosines.append(((x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)).mean())
        x, y = x - x.mean(0), y - y.mean(0)
        kernel = (x @ x.T, y @ y.T)  # the same by rows instead of features
        ckas.append((kernel[0] * kernel[1]).sum() / np.linalg.norm(kernel[0]) / np.linalg.norm(kernel[1]))
    assert by_layer(found, "cka") == pytest.approx(ckas, abs=1e-5)
    assert by_layer(found, "cosine") == pytest.approx(cosines, abs=1e-5)
    assert by_layer(found, "cka")[0] == pytest.approx(1.0)
    assert by_layer(found, "cka")[2] < 0.95
    assert overall(found, "cka") == pytest.approx(sum(ckas) / 3, abs=1e-5)


# ---- noise stability


@pytest.mark.parametrize("relative", [False, True])
def test_noise_stability_is_the_squared_distance_of_the_upper_layers(model: Any, relative: bool):
    """Rows alone, without pads, through the layers by hand; how rows are batched and padded does not matter."""
    config = NoiseStability.Config(layer=1, sigma=0.1, relative=relative, draws=1, seed=9)
    found = measure(NoiseStability(config), subject_of(model))
    table = 0.1 * torch.randn((4096, 16), generator=torch.Generator().manual_seed(seed_of("9 0")))
    expected = np.zeros(2)
    for row in ROWS:
        clean = hidden_states(model, row)
        scale = clean[1].square().mean(-1, keepdim=True).sqrt() if relative else 1.0
        noisy = (clean[1] + table[: len(clean[1])] * scale)[None].float()
        for number, layer in enumerate(model.bert.encoder.layer[1:]):
            with torch.no_grad():
                noisy = layer(noisy)
                noisy = noisy[0] if isinstance(noisy, tuple) else noisy
            expected[number] += (noisy[0].double() - clean[2 + number]).square().sum(-1).mean().item() / len(ROWS)
    assert by_layer(found, "noise_stability") == pytest.approx(expected, rel=1e-3)
    assert [m.where["layer"] for m in found[:-1]] == [2, 3]
    assert overall(found, "noise_stability") == pytest.approx(expected.sum(), rel=1e-3)
    apart = measure(NoiseStability(config), subject_of(model, sizes=(1, 6)))
    assert [m.value for m in apart] == pytest.approx([m.value for m in found], rel=1e-4)


def test_half_the_noise_moves_layers_a_quarter_as_far(model: Any):
    """For little noise the quantity goes with sigma squared, and draws are averaged."""
    values = [
        overall(
            measure(NoiseStability(NoiseStability.Config(sigma=sigma, draws=2)), subject_of(model)), "noise_stability"
        )
        for sigma in (0.002, 0.001)
    ]
    assert values[0] / values[1] == pytest.approx(4, rel=0.05)


def test_what_cannot_be_measured_is_refused_in_a_line(model: Any):
    """No layer above the noise, no evaluation set."""
    with pytest.raises(CompatibilityError, match="no layer above layer=3 in a model of 3"):
        measure(NoiseStability(NoiseStability.Config(layer=3)), subject_of(model))
    bare = subject_of(model)
    bare = Subject(model=model, run=bare.run, reference=bare.reference)
    for probe in (Apoz(Apoz.Config()), FeatureDrift(None), NoiseStability(NoiseStability.Config())):
        with pytest.raises(CompatibilityError, match=f"probe '{probe.name}' has no evaluation set"):
            measure(probe, bare)
    assert math.isfinite(overall(measure(Apoz(Apoz.Config()), subject_of(model)), "apoz"))
