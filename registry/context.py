"""What a plugin is handed: frozen objects, and the protocols of the services the core puts into them.

Plugins never import the core. Whatever they may know about a run reaches them through these types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import logging

    import torch
    from torch import nn

    from .sharding import Sharding

_SAVED_MODULE = re.compile(r"\.modules_to_save\.[^.]+\.")


def plain_name(name: str) -> str:
    """Return what a parameter of a model wrapped by PEFT is called in the model itself."""
    plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", ".")
    return _SAVED_MODULE.sub(".", plain)


class TaskKind(StrEnum):
    """What a task predicts, and so which loss, head and metrics it has."""

    CLASSIFICATION = "classification"
    REGRESSION = "regression"
    CAUSAL_LM = "causal_lm"
    MASKED_LM = "masked_lm"
    IMAGE_CLASSIFICATION = "image_classification"
    OTHER = "other"

    @property
    def is_language_modelling(self) -> bool:
        """Whether the head comes with the pre-trained model (a language-modelling head) rather than with the task."""
        return self in (TaskKind.CAUSAL_LM, TaskKind.MASKED_LM)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task of a run.

    Attributes:
        name: how results name it.
        kind: what it predicts.
        label_names: class names in label order; empty for regression and language modelling.
        metrics: names of the metrics that evaluate it; the first one is the main one.
    """

    name: str
    kind: TaskKind
    label_names: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()

    @property
    def num_labels(self) -> int:
        """Width of the head: the number of classes, 1 for regression, 0 for language modelling."""
        return 1 if self.kind is TaskKind.REGRESSION else len(self.label_names)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Where one transformer layer keeps its parts; every field holds full module names (``model.named_modules()``).

    Attributes:
        name: the layer itself.
        query, key, value: the attention projections; all three equal where one module projects them together (GPT-2).
        attention_output: the projection after attention.
        ffn_in: the modules a hidden state enters the feed-forward block by: one, or gate and up for gated blocks.
        ffn_out: the module it leaves by.
        norms: the layer's normalisation modules.
    """

    name: str
    query: str
    key: str
    value: str
    attention_output: str
    ffn_in: tuple[str, ...]
    ffn_out: str
    norms: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """Where a model keeps its layers, embeddings, norms and head; names are those of ``model.named_modules()``.

    Attributes:
        model_type: transformers' ``config.model_type``.
        layers: the transformer layers, from the input to the output.
        embeddings: every ``nn.Embedding`` (or patch projection) of the input.
        final_norms: normalisation modules of the backbone outside its layers, before or after them.
        head: the final linear layer of the head, or ``None`` for a model without one.
        conv1d: whether the layers' projections are transformers' ``Conv1D``, whose weight is (in, out).
    """

    model_type: str
    layers: tuple[Layer, ...]
    embeddings: tuple[str, ...]
    final_norms: tuple[str, ...]
    head: str | None
    conv1d: bool = False


@dataclass(frozen=True, kw_only=True)
class AnatomySpec:
    """How to find the parts of one ``model_type``: names inside the backbone, and inside one of its layers.

    A plugin teaches tunery a new architecture by returning these from ``tunery_anatomies``. The names are relative:
    ``layers``, ``embeddings`` and ``final_norms`` to the backbone (``model.base_model``), ``head`` to the model, the others
    to one layer. Every name but those of ``head`` must exist.

    Attributes:
        layers: dotted name of the ``nn.ModuleList`` of layers, for example ``"encoder.layer"``.
        query, key, value, attention_output: attention projections, for example ``"attention.self.query"``.
        ffn_in: one name, or gate and up.
        ffn_out: the module that leaves the feed-forward block.
        norms: normalisation modules of a layer.
        embeddings: input embeddings.
        final_norms: normalisation modules of the backbone outside its layers, before or after them.
        head: names of the head's final linear layer in the models with a head (``*ForSequenceClassification``, ...); the
            first that exists and has a ``weight`` counts.
        conv1d: whether projections are ``Conv1D`` with weight (in, out).
    """

    layers: str
    query: str
    key: str
    value: str
    attention_output: str
    ffn_in: tuple[str, ...]
    ffn_out: str
    norms: tuple[str, ...]
    embeddings: tuple[str, ...]
    final_norms: tuple[str, ...] = ()
    head: tuple[str, ...] = ("classifier", "score", "lm_head", "qa_outputs")
    conv1d: bool = False


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a run whose strategy trains in several, and what it changes; ``None`` leaves what the run was given.

    The last stage is the run itself and only has a name. Every stage before it trains without the run's regularizers,
    probes, callbacks and evaluations, in a run folder of its own, ``stages/<name>``.

    Attributes:
        name: lower_snake_case; unique in the run.
        objective: ``None`` for the task's own; ``MASKED_LM`` or ``CAUSAL_LM`` for the run's training inputs without their
            labels, and the loss of the language-modelling head that ``Strategy.staged`` gives the model.
        num_train_epochs: passes over the training rows; ``None`` also leaves the run's ``max_steps``.
        learning_rate: peak learning rate.
        mlm_probability: share of the tokens that masked language modelling has to predict.
    """

    name: str
    objective: TaskKind | None = None
    num_train_epochs: float | None = None
    learning_rate: float | None = None
    mlm_probability: float = 0.15


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What a plugin may know about the run it is part of.

    Attributes:
        tasks: the tasks trained and evaluated; at least one.
        seed: the seed set before anything random.
        sharding: parameter access that is right on every stage.
        pretrained_parameters: names, in the model as it was handed in, of the parameters that come pre-trained; all but
            a fresh task head.
        logger: for the plugin's own words.
        activation_checkpointing: whether layers are re-run in the backward pass.
        stage: the stage being trained before the last one; ``None`` for the run itself.
        regularizers: names of the run's regularizers, which look at one forward pass a micro-batch.
        revision: the base model's commit, branch or tag on a hub; ``None`` where it came from files or nobody said.
        optimizer: its name in lower case, as transformers or DeepSpeed has it, or that of its class; empty where nobody said.
    """

    tasks: tuple[Task, ...]
    seed: int
    sharding: Sharding
    pretrained_parameters: frozenset[str]
    logger: logging.Logger
    activation_checkpointing: bool = False
    stage: Stage | None = None
    regularizers: tuple[str, ...] = ()
    revision: str | None = None
    optimizer: str = ""
    find_anatomy: Callable[[nn.Module], Anatomy] = field(repr=False)

    @property
    def task(self) -> Task:
        """The first task: the only one of most runs."""
        return self.tasks[0]

    def is_pretrained(self, name: str) -> bool:
        """Whether parameter ``name``, of the model as handed in or as wrapped by PEFT, comes with a pre-trained value."""
        return plain_name(name) in self.pretrained_parameters

    def anatomy(self, model: nn.Module) -> Anatomy:
        """Return where ``model`` keeps its parts.

        Raises:
            AnatomyError: nobody described this architecture.
        """
        return self.find_anatomy(model)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch after the model's forward pass.

    Attributes:
        inputs: what the model was called with, labels included.
        outputs: what it returned.
        model: the model as it was called, perhaps wrapped by DDP or DeepSpeed.
        task: the task of the batch.
        step: optimizer steps done before the one it belongs to; the same after resuming, and for all its micro-batches.
    """

    inputs: Mapping[str, Any]
    outputs: Any
    model: nn.Module
    task: Task
    step: int = 0


class Reference(Protocol):
    """The pre-trained values of the parameters that train, one copy of a rank's own pieces in host memory.

    Taken when the strategy has prepared the model: what a strategy does to a weight before training counts as its start.
    """

    def pieces(self) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
        """Yield name, live parameter and this rank's piece of its pre-trained value (see ``Sharding.local``)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a probe measures.

    Attributes:
        model: the model, not wrapped.
        run: the run it belongs to.
        reference: its pre-trained values.
        evaluate: runs the evaluation set and returns its metrics, or ``None`` where there is none.
        batches: yields the evaluation set's batches, collated, on the model's device, this rank's share of each; ``None``
            where there is none.
        step: optimizer steps done.
        whole: of a model that is a stand-in (``ProxyStrategy``), makes it the full model inside a context; else ``None``.
    """

    model: nn.Module
    run: RunContext
    reference: Reference
    evaluate: Callable[[], Mapping[str, float]] | None = None
    batches: Callable[[], Iterable[Mapping[str, Any]]] | None = None
    step: int = 0
    whole: Callable[[], AbstractContextManager[nn.Module]] | None = None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measured number: one row of ``measurements.jsonl``.

    Attributes:
        name: what was measured, in the probe's words.
        value: the number.
        unit: its unit; empty for a pure number.
        where: what it belongs to, for example ``{"layer": 3}`` or ``{"gamma": 0.01}``.
    """

    name: str
    value: float
    unit: str = ""
    where: Mapping[str, str | int | float] = field(default_factory=dict)


ALL_ZERO_STAGES = frozenset({0, 1, 2, 3})


@dataclass(frozen=True, kw_only=True)
class Support:
    """What a plugin works with; checked once when a run starts, so that no method ever does nothing in silence.

    Attributes:
        tasks: the task kinds it takes; ``None`` for all.
        zero_stages: the ZeRO stages it takes; 0 stands for one process and DDP.
        activation_checkpointing: whether layers may be re-run in the backward pass.
        excludes: names of plugins it cannot be combined with, each with the reason.
        needs_anatomy: whether it must know where the model keeps its parts.
        needs_stand_in: whether it compares a stand-in with the model it stands for; of probes.
        several_tasks: whether one batch may hold rows of several tasks, each with its own labels.
    """

    tasks: frozenset[TaskKind] | None = None
    zero_stages: frozenset[int] = ALL_ZERO_STAGES
    activation_checkpointing: bool = True
    excludes: Mapping[str, str] = field(default_factory=dict)
    needs_anatomy: bool = False
    needs_stand_in: bool = False
    several_tasks: bool = False
