"""Test suites that a plugin author subclasses; each checks every law of a kind, on one process, DDP and ZeRO-1, 2 and 3.

    from tunery.registry.conformance import RegularizerLaws

    class TestMine(RegularizerLaws):
        plugin = "mine:weight=0.5"

The plugin has to be installed. The laws train tiny models on CPU, offline; needs pytest and torch.
"""

from __future__ import annotations

import pytest

_ASSERTING = ("gradients", "laws", "probe", "regularizer", "strategy", "traces")
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _ASSERTING))

from .laws import PluginLaws
from .probe import ProbeLaws  # assertions are rewritten as a module is imported
from .regularizer import RegularizerLaws
from .strategy import StrategyLaws

__all__ = ["PluginLaws", "ProbeLaws", "RegularizerLaws", "StrategyLaws"]
