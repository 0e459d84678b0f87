"""tunery: fine-tuning methods as plugins for transformers' Trainer. The public names load when first used (PEP 562)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "Trainer": "tunery.core.trainer",
    "PluginTrainerMixin": "tunery.core.trainer",
    "PluginArguments": "tunery.core.arguments",
    "TrainingArguments": "tunery.core.arguments",
    "LoadedRun": "tunery.core.finished",
    "load_run": "tunery.core.finished",
    "export_run": "tunery.core.finished",
    "keep_tasks": "tunery.core.finished",
    "probe_model": "tunery.core.probing",
    "train": "tunery.core.run",
    "build_options": "tunery.core.options",
    "federate": "tunery.core.federated.run",
    "build_federated_options": "tunery.core.federated.arguments",
    "Strategy": "tunery.registry.contracts",
    "Regularizer": "tunery.registry.contracts",
    "Probe": "tunery.registry.contracts",
    "ProxyStrategy": "tunery.registry.proxy",
    "Anatomy": "tunery.registry.context",
    "AnatomySpec": "tunery.registry.context",
    "Batch": "tunery.registry.context",
    "Measurement": "tunery.registry.context",
    "RunContext": "tunery.registry.context",
    "Stage": "tunery.registry.context",
    "Subject": "tunery.registry.context",
    "Support": "tunery.registry.context",
    "Task": "tunery.registry.context",
    "TaskKind": "tunery.registry.context",
    "TuneryError": "tunery.registry.errors",
    "hookimpl": "tunery.registry.hookspecs",
}

if TYPE_CHECKING:
    from .core.arguments import PluginArguments as PluginArguments
    from .core.arguments import TrainingArguments as TrainingArguments
    from .core.federated.arguments import build_federated_options as build_federated_options
    from .core.federated.run import federate as federate
    from .core.finished import LoadedRun as LoadedRun
    from .core.finished import export_run as export_run
    from .core.finished import keep_tasks as keep_tasks
    from .core.finished import load_run as load_run
    from .core.options import build_options as build_options
    from .core.probing import probe_model as probe_model
    from .core.run import train as train
    from .core.trainer import PluginTrainerMixin as PluginTrainerMixin
    from .core.trainer import Trainer as Trainer
    from .registry.context import Anatomy as Anatomy
    from .registry.context import AnatomySpec as AnatomySpec
    from .registry.context import Batch as Batch
    from .registry.context import Measurement as Measurement
    from .registry.context import RunContext as RunContext
    from .registry.context import Stage as Stage
    from .registry.context import Subject as Subject
    from .registry.context import Support as Support
    from .registry.context import Task as Task
    from .registry.context import TaskKind as TaskKind
    from .registry.contracts import Probe as Probe
    from .registry.contracts import Regularizer as Regularizer
    from .registry.contracts import Strategy as Strategy
    from .registry.errors import TuneryError as TuneryError
    from .registry.hookspecs import hookimpl as hookimpl
    from .registry.proxy import ProxyStrategy as ProxyStrategy

__all__ = sorted(_HOMES)  # noqa: PLE0605  # a list, made once


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tunery' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
