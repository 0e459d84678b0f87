"""The whole extension surface: every hook a distribution may implement, each with the moment and what it returns.

A distribution names one module in the entry-point group ``tunery``; tunery imports that module and calls the functions
in it that are marked with :data:`hookimpl`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import typer

    from .context import AnatomySpec, Measurement, RunContext
    from .contracts import Probe, Regularizer, Strategy

PROJECT = "tunery"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def tunery_strategies() -> Sequence[type[Strategy]]:  # type: ignore[empty-body]
    """Return the strategies this module offers. Called once, when plugins are loaded."""


@hookspec
def tunery_regularizers() -> Sequence[type[Regularizer]]:  # type: ignore[empty-body]
    """Return the regularizers this module offers. Called once, when plugins are loaded."""


@hookspec
def tunery_probes() -> Sequence[type[Probe]]:  # type: ignore[empty-body]
    """Return the probes this module offers. Called once, when plugins are loaded."""


@hookspec
def tunery_commands(app: typer.Typer) -> None:
    """Add sub-commands to ``app``, the command line. Called when ``tunery`` starts; import heavy things inside commands."""


@hookspec
def tunery_anatomies() -> Mapping[str, AnatomySpec]:  # type: ignore[empty-body]
    """Return how to find the parts of further architectures, by ``config.model_type``. Called at the first unknown one."""


@hookspec
def tunery_run_begin(run: RunContext) -> None:
    """Observe that training begins: the model is sharded, no step is done. Called on every rank, in every stage."""


@hookspec
def tunery_measured(run: RunContext, measurement: Measurement) -> None:
    """Observe one measurement of a probe, as it is logged. Called on rank 0."""


@hookspec
def tunery_run_end(run: RunContext, result: Mapping[str, Any]) -> None:
    """Observe the end of training; ``result`` is what ``train()`` returns as metrics. Called on every rank, in every stage."""
