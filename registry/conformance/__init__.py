"""Test suites that a plugin author subclasses; each checks every law of a kind, on one process, DDP and ZeRO-1, 2 and 3.

    from tunery.registry.conformance import RegularizerLaws

    class TestMine(RegularizerLaws):
        plugin = "mine:strength=0.5"

That is all of a test file: name the plugin as a user selects it, with options under which it does something, and have it
installed. Class attributes say more where it is needed: ``models`` and ``stages`` to check it on; for a regularizer,
``stochastic`` and the ``strategies`` to combine it with; for a probe, the ``strategies`` it measures.

The laws train tiny models on CPU, offline; one plugin takes about half a minute. They need pytest.
"""

from __future__ import annotations

import pytest

_ASSERTING = ("gradients", "joint", "laws", "probe", "regularizer", "strategy", "traces")
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _ASSERTING))

from .joint import JointStrategyLaws  # assertions are rewritten as a module is imported
from .laws import PluginLaws
from .probe import ProbeLaws
from .regularizer import RegularizerLaws
from .strategy import StrategyLaws

__all__ = ["JointStrategyLaws", "PluginLaws", "ProbeLaws", "RegularizerLaws", "StrategyLaws"]
