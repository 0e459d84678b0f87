"""Weights of a run or checkpoint, loaded back into the model that its strategy prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from torch import nn

from ..registry.errors import ArtifactError, TuneryError
from .sharding import gather, load_full_state

STORED = "strategy.safetensors"


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load the weights of a run or checkpoint into the model its strategy prepared; every key must fit.

    Raises:
        ArtifactError: no weights, unreadable ones, or ones that belong to another model.
    """
    adapter = folder / "adapter_model.safetensors"
    try:
        if adapter.is_file():
            _load_adapter(model, adapter)
        else:
            _load_full(model, folder)
        load_stored(model, folder)
    except (SafetensorError, OSError, RuntimeError, KeyError) as error:
        if isinstance(error, TuneryError):
            raise
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise ArtifactError(f"cannot load the weights in {folder}: {' '.join(first[:2])}") from None


def load_stored(model: nn.Module, folder: Path) -> None:
    """Load the frozen parameters that a strategy stored in a run or checkpoint (``Strategy.stored``), if any.

    Raises:
        ArtifactError: they belong to another model.
    """
    if not (folder / STORED).is_file():
        return
    live = dict(model.named_parameters())
    for name, value in _read(folder / STORED).items():  # in this order on every rank
        if name not in live:
            raise ArtifactError(f"{folder / STORED} holds {name!r}, which {type(model).__name__} lacks")
        with gather([live[name]], modifier_rank=0), torch.no_grad():
            if live[name].shape != value.shape:
                raise ArtifactError(
                    f"{folder / STORED} holds {name!r} in shape {tuple(value.shape)}, which does not fit"
                )
            live[name].copy_(value)


def _load_adapter(model: nn.Module, path: Path) -> None:
    if not isinstance(model, PeftModel):
        raise ArtifactError(f"{path} is an adapter and {type(model).__name__} has none")
    state = _read(path)
    with gather([parameter for parameter in model.parameters() if parameter.requires_grad], modifier_rank=0):
        result: Any = set_peft_model_state_dict(model, state)
    # A prompt is loaded apart from the rest, and still counts as unexpected then.
    is_prompt = model.peft_config[model.active_adapter].is_prompt_learning
    unexpected = [key for key in result.unexpected_keys if not (is_prompt and key == "prompt_embeddings")]
    if unexpected:
        raise ArtifactError(f"{path} holds {unexpected[0]!r}, which {type(model.get_base_model()).__name__} lacks")


def _load_full(model: nn.Module, folder: Path) -> None:
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ArtifactError(f"{folder} holds no weights", known=("model.safetensors", "adapter_model.safetensors"))
    state: dict[str, torch.Tensor] = {}
    for file in files:
        state.update(_read(file))
    missing, unexpected = load_full_state(model, state)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    misfits = [key for key in missing if key not in tied] or unexpected
    if misfits:
        raise ArtifactError(f"the weights in {folder} do not fit {type(model).__name__}: {misfits[0]!r}")


def _read(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # not a mapping


def name_revision(model: nn.Module, revision: str | None) -> None:
    """Have an adapter's config say which revision of the base model it belongs to, as PEFT's own loader asks."""
    if revision is not None and isinstance(model, PeftModel):
        for config in model.peft_config.values():
            config.revision = revision
