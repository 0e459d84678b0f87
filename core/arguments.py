"""``TrainingArguments``: the transformers ones, plus the plugins of a run and bundled DeepSpeed presets."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from ..registry.errors import RecipeError, did_you_mean
from ..registry.selection import parse_selections

PRESETS = {f"zero{stage}": Path(__file__).parent / "deepspeed" / f"zero{stage}.json" for stage in (1, 2, 3)}
PLUGIN_FIELDS = ("strategy", "regularizers", "probes")
# Older transformers know it by its older name only.
CHECKPOINTING = (
    "activation_checkpointing"
    if hasattr(transformers.TrainingArguments, "activation_checkpointing")
    else "gradient_checkpointing"
)
PROBE_MOMENTS = ("begin", "evaluate", "end")


@dataclass
class PluginArguments:
    """The fields tunery adds; mix it into any arguments class: ``class MyConfig(PluginArguments, trl.SFTConfig)``.

    Args:
        strategy: what trains: ``"lora:r=8"`` or ``{"name": "lora", "r": 8}``; ``None`` leaves the model as it is.
        regularizers: what the loss adds: a list of names or of mappings, applied in this order.
        probes: what is measured about the weights: a list of names or of mappings.
        probe_moments: when probes measure: ``begin``, ``evaluate`` (after every evaluation), ``end``.
        dropout: what every dropout of the model is set to, in [0, 1), before the strategy adds its own; see
            :mod:`.dropout`. 0 is what methods that replace dropout, as MixOut does, are published with.

    ``deepspeed`` may also be ``"zero1"``, ``"zero2"`` or ``"zero3"``, the bundled presets.

    Raises:
        SelectionError: a selection that cannot be read.
        RecipeError: an unknown probe moment or DeepSpeed preset, or a ``dropout`` out of range.
    """

    strategy: str | None = field(default=None, metadata={"help": "What trains, for example lora:r=8."})
    regularizers: list[str] | None = field(
        default=None, metadata={"help": "What the loss adds, for example l2_sp:alpha=0.1; several may follow."}
    )
    probes: list[str] | None = field(
        default=None, metadata={"help": "What is measured about the weights, for example weight_distance."}
    )
    probe_moments: list[str] = field(
        default_factory=lambda: list(PROBE_MOMENTS), metadata={"help": "When probes measure: begin, evaluate, end."}
    )
    dropout: float | None = field(
        default=None,
        metadata={
            "help": "Set every dropout of the model to this probability, 0 for none. Default: as the model has it."
        },
    )

    def __post_init__(self) -> None:
        strategies = parse_selections(self.strategy, "strategy")
        if len(strategies) > 1:
            raise RecipeError(f"a run has one strategy, not {len(strategies)}", known=[s.name for s in strategies])
        parse_selections(self.regularizers, "regularizer")
        parse_selections(self.probes, "probe")
        for moment in self.probe_moments:
            if moment not in PROBE_MOMENTS:
                raise RecipeError(f"no probe moment {moment!r}", known=PROBE_MOMENTS)
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise RecipeError(f"dropout={self.dropout:g} is no probability below 1")
        arguments: Any = self  # the transformers.TrainingArguments this class is mixed into
        # Said aloud, so that several processes without a GPU count themselves right from the start.
        arguments.use_cpu = arguments.use_cpu or not torch.accelerator.is_available()
        arguments.deepspeed = resolve_deepspeed(arguments.deepspeed)
        if arguments.deepspeed:
            _start_deepspeed(use_cpu=arguments.use_cpu)
        super().__post_init__()  # type: ignore[misc]
        # Re-entrant checkpointing breaks losses of two forward passes and shared weights.
        if checkpoints_activations(arguments):
            kwargs = getattr(arguments, f"{CHECKPOINTING}_kwargs") or {}
            setattr(arguments, f"{CHECKPOINTING}_kwargs", {"use_reentrant": False, **kwargs})


@dataclass
class TrainingArguments(PluginArguments, transformers.TrainingArguments):
    """Everything ``transformers.TrainingArguments`` takes, and the fields of :class:`PluginArguments`."""


def checkpoints_activations(args: Any) -> bool:
    """Whether layers are re-run in the backward pass instead of kept."""
    return bool(getattr(args, CHECKPOINTING, False))


def resolve_deepspeed(value: Any) -> Any:
    """Return the path of a bundled preset for ``zero1``, ``zero2``, ``zero3``; anything else as it is.

    Raises:
        RecipeError: neither a preset nor an existing file.
    """
    if not isinstance(value, str) or value.lstrip().startswith("{"):
        return value
    if value in PRESETS:
        return str(PRESETS[value])
    if not Path(value).is_file():
        raise RecipeError(
            f"no DeepSpeed preset or file {value!r}", known=list(PRESETS), remedy=did_you_mean(value, PRESETS)
        )
    return value


def _start_deepspeed(use_cpu: bool) -> None:
    """Choose accelerator and back-end before DeepSpeed looks for itself; alone, be a world of one without a launcher."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if use_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        # An op of DeepSpeed's for inference: building it takes a C++ compiler and a minute, and training never calls it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # Also where the user has made a process group already: DeepSpeed takes it over only when told.
        deepspeed.init_distributed("gloo", verbose=False)
