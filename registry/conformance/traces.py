"""What a plugin may have left behind: changed bits, hooks, classes of its own."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..contracts import Plugin

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def bits_of(model: nn.Module) -> dict[str, str]:
    """Return a hash of every parameter and buffer, by name."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: _hash(value) for name, value in named}


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    """Return the names whose hash differs, or that only one of both has."""
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def anatomy_of(model: nn.Module) -> dict[str, Any]:
    """Return everything about a model but its values: what attaching and detaching must leave as it was."""
    return {
        "state_dict": list(model.state_dict()),
        "parameters": [
            (name, tuple(getattr(parameter, "ds_shape", parameter.shape)), parameter.requires_grad)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        ],
        "buffers": [(name, tuple(buffer.shape)) for name, buffer in model.named_buffers()],
        "classes": [(name, type(module)) for name, module in model.named_modules()],
        "hooks": [(name, kind, len(getattr(m, kind))) for name, m in model.named_modules() for kind in _HOOKS],
        "attributes": [(name, sorted(vars(module))) for name, module in model.named_modules()],
    }


def assert_no_trace(model: nn.Module, plugin: type[Plugin]) -> None:
    """Fail if ``model`` has a class, a hook or a forward that comes from tunery or from the plugin's package."""
    packages = ("tunery", plugin.__module__.partition(".")[0])
    for name, module in model.named_modules():
        owned = [type(module), *(hook for kind in _HOOKS for hook in getattr(module, kind).values())]
        owned += [vars(module)["forward"]] if "forward" in vars(module) else []
        for thing in owned:
            home = _home(thing)
            assert home.partition(".")[0] not in packages, f"{name or type(model).__name__} keeps {thing} of {home}"


def _home(thing: Any) -> str:
    while isinstance(thing, functools.partial):
        thing = thing.func
    return getattr(thing, "__module__", None) or type(thing).__module__


def everything(trainer: Any) -> dict[str, str]:
    """Return hashes of all that a probe must leave alone, on this rank, by what it is."""
    import numpy as np
    import torch

    model, sharding = trainer.model, trainer.run.sharding
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = sharding.local(parameter)
        found[f"gathered copy of {name} is stale"] = torch.tensor(_is_stale(parameter, sharding))
        found[f"gradient of {name}"] = parameter.grad
    found |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    found |= {f"mode of {name}": torch.tensor(module.training) for name, module in model.named_modules()}
    found |= {f"optimizer {path}": value for path, value in _optimizer_tensors(trainer)}
    hashes = {name: _hash(value) for name, value in found.items()}
    hashes["attributes"] = repr(anatomy_of(model))
    hashes["random"] = _digest(repr(random.getstate()).encode())
    hashes["numpy"] = _digest(repr(np.random.get_state()).encode())
    hashes["torch"] = _hash(torch.get_rng_state())
    if torch.cuda.is_available():
        hashes |= {f"torch {number}": _hash(state) for number, state in enumerate(torch.cuda.get_rng_state_all())}
    return hashes


def _is_stale(parameter: Any, sharding: Any) -> bool:
    """Whether ZeRO-3 holds a gathered copy that is not what this rank's shard says: it would compute with the copy."""
    if not hasattr(parameter, "ds_tensor") or parameter.numel() != parameter.ds_numel:
        return False
    return not sharding.local_of(parameter, parameter.detach()).equal(sharding.local(parameter))


def _optimizer_tensors(trainer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor an optimizer holds, whoever wraps it: state, master weights, gradients not yet applied."""
    optimizer = getattr(trainer.model_wrapped, "optimizer", None) or trainer.optimizer
    level = 0
    while optimizer is not None:
        yield from _tensors(vars(optimizer), str(level))
        optimizer, level = getattr(optimizer, "optimizer", None), level + 1


def _tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield path, getattr(value, "ds_tensor", value)  # gathered or not, its shard is what ZeRO-3 keeps
    elif isinstance(value, Mapping):
        for index, (key, item) in enumerate(value.items()):
            yield from _tensors(item, f"{path}.{key if isinstance(key, str) else index}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{path}.{index}")


def _hash(value: torch.Tensor | None) -> str:
    if value is None or value.is_meta:
        return "nothing"
    import torch

    plain = value.detach().cpu().contiguous()
    content = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return _digest(f"{plain.dtype}{tuple(plain.shape)}".encode() + content)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
