"""What the scripts train: a real encoder on real text, and a model so small that only the loop around it is left."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from ...core.data import python_docs
from ...registry.errors import RecipeError

Rows = list[dict[str, Any]]

def minilm(num_labels: int) -> nn.Module:
    """Load the 22.7-million-parameter encoder of the quickstart with a fresh classification head.

    Raises:
        RecipeError: its package is not installed.
    """
    transformers.set_seed(0)
    with quiet():
        return transformers.AutoModelForSequenceClassification.from_pretrained(_minilm_folder(), num_labels=num_labels)
