"""Class perplexity: the formula row by row, with padding on either side, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tunery import Task, TaskKind, probe_model
from tunery.registry.conformance.models import MODELS, base_model
from tunery.registry.errors import CompatibilityError

CLASSES = [(5, 9), (7,), (5, 2, 2)]
PROMPTS = [(11, 12, 13), (14,), (15, 16), (17, 18, 19, 20)]
GOLD = [0, 1, 2, 1]
TASK = Task(name="words", kind=TaskKind.CAUSAL_LM)


@pytest.fixture(scope="module")
def model() -> Any:
    return MODELS["llama_causal_lm"].load(base_model("llama_causal_lm", False)).eval()


def rows(left: bool = False) -> list[dict[str, Any]]:
    """Return the rows, padded to one length on one side, pads and prompts without labels."""
    found = []
    for prompt, gold in zip(PROMPTS, GOLD, strict=True):
        ids = [*prompt, *CLASSES[gold]]
        labels = [-100] * len(prompt) + list(CLASSES[gold])
        pads = 8 - len(ids)
        row = {
            "input_ids": [0] * pads + ids if left else ids + [0] * pads,
            "labels": [-100] * pads + labels if left else labels + [-100] * pads,
            "attention_mask": [0] * pads + [1] * len(ids) if left else [1] * len(ids) + [0] * pads,
        }
        found.append({key: torch.tensor(value) for key, value in row.items()})
    return found


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_formula(model: Any, left: bool, batch_size: int):
    """Each row and class by itself: mean log-likelihood of the class's tokens, made to add up to one over classes."""
    nats, hits = 0.0, 0
    for prompt, gold in zip(PROMPTS, GOLD, strict=True):
        scores = []
        for completion in CLASSES:
            ids = torch.tensor([[*prompt, *completion]])
            with torch.no_grad():
                log_p = model(input_ids=ids).logits[0].double().log_softmax(-1)
            each = [log_p[len(prompt) - 1 + place, token].item() for place, token in enumerate(completion)]
            scores.append(sum(each) / len(each))
        total = math.log(sum(map(math.exp, scores)))
        nats += total - scores[gold]
        hits += scores.index(max(scores)) == gold
    found = probe_model(model, "class_perplexity", rows(left), task=TASK, batch_size=batch_size)
    value = {m.name: m.value for m in found}
    assert value["class_perplexity"] == pytest.approx(math.exp(nats / 4), rel=1e-5)
    assert value["class_accuracy"] == hits / 4
    assert value["classes"] == 3


def test_a_model_that_knows_nothing_is_as_perplexed_as_there_are_classes(model: Any):
    """With all logits equal every class has the same likelihood a token, however long it is."""
    head = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    found = probe_model(model, "class_perplexity", rows(), task=TASK)
    with torch.no_grad():
        model.lm_head.weight.copy_(head)
    assert found[0].value == pytest.approx(3)


def test_text_without_classes_is_refused(model: Any):
    """As many completions as rows are no classes, and one is none either."""
    with pytest.raises(CompatibilityError, match=r"finds 3 different completions, which are no classes.*max_classes"):
        probe_model(model, "class_perplexity:max_classes=2", rows(), task=TASK)
    with pytest.raises(CompatibilityError, match="finds 1 different completions"):
        probe_model(model, "class_perplexity", rows()[1:2], task=TASK)


def test_rows_without_labels_are_refused(model: Any):
    """In a line that says what they have."""
    bare = [{key: value for key, value in row.items() if key != "labels"} for row in rows()]
    with pytest.raises(CompatibilityError, match="finds no labels among input_ids, attention_mask"):
        probe_model(model, "class_perplexity", bare, task=TASK)
