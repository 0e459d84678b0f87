"""Two regularizers in one run: each sees the model as the other has changed it, whichever was named first."""

from __future__ import annotations

import itertools
import json

import pytest

from tunery.registry.conformance.gradients import assert_same_gradients, gradients
from tunery.registry.conformance.models import VOCABULARY
from tunery.registry.conformance.trials import ONE, Trial

OPTIONS = {
    "mixout": "mixout:p=0.5",
    "lnsr": "lnsr:sigma=0.1",
    "l2_sp": "l2_sp:alpha=0.5,beta=0.1",
    "mhloss": "mhloss:heads=4",
}
ON = {
    "llama_causal_lm": ("mixout", "lnsr", "l2_sp", "replay"),
    "bert_classifier": ("mixout", "lnsr", "l2_sp", "mhloss"),
}
PAIRS = [(model, *pair) for model, names in ON.items() for pair in itertools.combinations(names, 2)]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """How each is selected; replay needs a text."""
    text = tmp_path_factory.mktemp("text") / "text.jsonl"
    documents = [[1 + (7 * row + 3 * column) % (VOCABULARY - 1) for column in range(17)] for row in range(40)]
    text.write_text("".join(json.dumps({"input_ids": document}) + "\n" for document in documents), encoding="utf-8")
    return OPTIONS | {"replay": f"replay:data={text},share=0.3,length=10"}


@pytest.mark.parametrize(("model", "first", "second"), PAIRS)
def test_two_regularizers(model: str, first: str, second: str, options: dict[str, str]) -> None:
    """The order of selection changes no bit, neither is lost, and accumulation keeps the gradients."""
    trial = Trial(model=model, strategy="full", regularizers=(options[first], options[second]), steps=3)
    dropping = trial.but(dropout=True)
    other_order = dropping.but(regularizers=dropping.regularizers[::-1])
    assert dropping.run().bits == other_order.run().bits
    alone = [dropping.but(regularizers=(options[name],)).run().bits for name in (first, second)]
    assert dropping.run().bits not in alone
    whole = gradients(trial)
    assert_same_gradients(whole.but(accumulation=2), ONE, whole)
