"""Leaving rows out: distances against heads learnt by an independent solver, and what is drawn."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from scipy.optimize import minimize
from scipy.special import log_softmax

from tunery import Measurement, Task, TaskKind, probe_model
from tunery.registry.conformance.models import MODELS, base_model
from tunery.registry.errors import CompatibilityError

TASK = Task(name="classes", kind=TaskKind.CLASSIFICATION, label_names=("a", "b", "c"))
L2 = 0.05


@pytest.fixture(scope="module")
def model() -> Any:
    return MODELS["bert_classifier"].load(base_model("bert_classifier", False)).eval()


ROWS: Any = MODELS["bert_classifier"].rows(14)


def learnt(x: Any, labels: Any) -> Any:
    """Return weight and bias, the latter adding up to zero, by a general minimiser in float64."""
    rows, width = x.shape

    def loss(flat: Any) -> float:
        weight, bias = flat[: 3 * width].reshape(3, width), flat[3 * width :]
        nats = -log_softmax(x @ weight.T + bias, axis=1)[np.arange(rows), labels]
        return nats.mean() + L2 / 2 * (weight**2).sum() + 1e-9 * bias.sum() ** 2

    found = minimize(loss, np.zeros(3 * width + 3), method="BFGS", options={"gtol": 1e-7, "maxiter": 5000}).x
    found[3 * width :] -= found[3 * width :].mean()
    return found


def test_leave_one_out_is_the_distance_of_two_minima(model: Any):
    """Every row left out once: the mean distance, plain and normalised, as an independent solver finds them."""
    batch = transformers.default_data_collator(ROWS)
    with torch.no_grad():
        x = model.bert(batch["input_ids"], attention_mask=batch["attention_mask"]).pooler_output.double().numpy()
    labels = batch["labels"].numpy()
    whole = learnt(x, labels)
    distances, normalized = [], []
    for row in range(len(x)):
        if (labels == labels[row]).sum() == 1:
            continue
        one = learnt(np.delete(x, row, 0), np.delete(labels, row))
        distances.append(np.linalg.norm(one - whole))
        normalized.append(np.linalg.norm(one / np.linalg.norm(one) - whole / np.linalg.norm(whole)))
    found = probe_model(model, f"data_perturbation:l2={L2},reruns=0", ROWS, task=TASK, batch_size=5)
    assert {m.name: m.value for m in found} == pytest.approx(
        {"leave_one_out": np.mean(distances), "normalized_leave_one_out": np.mean(normalized)}, rel=1e-3
    )


def values(found: list[Measurement], name: str) -> list[float]:
    return [m.value for m in found if m.name == name and m.where]


def test_leaving_a_share_out(model: Any):
    """Each rerun is there with its distance and its accuracy on what it never saw, then their means and the deviation."""
    found = probe_model(model, "data_perturbation:leave_one_out=0,reruns=6,share=0.25", ROWS, task=TASK)
    assert not any("leave_one_out" in m.name for m in found)
    overall = {m.name: m.value for m in found if not m.where}
    for name in ("distance", "normalized_distance", "held_out_accuracy"):
        assert 2 <= len(values(found, name)) <= 6
        assert overall[name] == pytest.approx(statistics.fmean(values(found, name)))
    assert len(set(values(found, "distance"))) > 1
    assert all(round(value * 4, 9).is_integer() for value in values(found, "held_out_accuracy"))
    assert overall["held_out_accuracy_std"] == pytest.approx(statistics.stdev(values(found, "held_out_accuracy")))
    again = probe_model(model, "data_perturbation:leave_one_out=0,reruns=6,share=0.25", ROWS, task=TASK, batch_size=3)
    assert [m.value for m in again] == pytest.approx([m.value for m in found], rel=1e-4)


def test_one_class_is_refused(model: Any):
    """A head that has one class to learn is none."""
    rows = [row for row in ROWS if row["labels"] == ROWS[0]["labels"]]
    with pytest.raises(CompatibilityError, match="finds rows of 1 class"):
        probe_model(model, "data_perturbation", rows, task=TASK)


def test_rows_without_labels_are_refused(model: Any):
    """In a line that says what they have."""
    rows = [{key: value for key, value in row.items() if key != "labels"} for row in ROWS]
    with pytest.raises(CompatibilityError, match="finds no labels among input_ids"):
        probe_model(model, "data_perturbation", rows, task=TASK)
