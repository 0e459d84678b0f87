"""Combinations in which a regularizer would do nothing stop before training, in one line that says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunery.registry.conformance.trials import Trial
from tunery.registry.errors import CompatibilityError


@pytest.mark.parametrize(
    ("strategy", "regularizer", "says"),
    [
        ("head", "mmr", "'mmr' would do nothing: every parameter before the head's last layer 'classifier' is frozen"),
        ("head", "mixout", "'mixout' finds no linear layer with a pre-trained weight that trains"),
        ("head", "lnsr", "'lnsr' finds no layer that trains"),
        ("head", "l2_sp:beta=0", "'l2_sp' would do nothing: 2 parameters train, 0 of them pre-trained"),
        ("lora:r=2", "l2_sp:beta=0", "'l2_sp' would do nothing: 10 parameters train, 0 of them pre-trained"),
        ("lora:r=2", "mixout", "'mixout' finds no linear layer with a pre-trained weight that trains"),
    ],
)
def test_is_refused(strategy: str, regularizer: str, says: str, tmp_path: Path) -> None:
    """Under a frozen encoder, and under LoRA whose B has no pre-trained value to mix in."""
    with pytest.raises(CompatibilityError) as caught:
        Trial(strategy=strategy, regularizers=(regularizer,)).trainer(tmp_path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
