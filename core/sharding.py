"""Read, perturb, restore and collect parameters the same way on one process, under DDP and under ZeRO-1, 2 and 3.

Only ZeRO-3 differs: there a parameter's ``.data`` is empty outside its module's forward and backward, its shard lives in
``ds_tensor`` (flat, padded at the end of the last rank's), and writing needs a gather that names the rank that wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

_COMPANIONS = "_tunery_companions"


class ModelSharding:
    """The ``Sharding`` service of a run; see ``tunery.registry.context.Sharding`` for the meaning of each method."""

    def __init__(self, zero_stage: int = 0) -> None:
        self.zero_stage = zero_stage
        self.is_perturbed = False
        self._model: nn.Module | None = None

    def watch(self, model: nn.Module) -> None:
        """Tell which module is sharded: what ZeRO-3 has fetched ahead for it lands before anything reads or writes."""
        self._model = model

    def _land(self) -> None:
        # A forward pass without a backward leaves parameters in flight, which neither gathers nor partitions.
        inflight = getattr(self._model, "ds_inflight_param_registry", {})
        for handle in inflight.values():
            handle.wait()
        inflight.clear()

    def rest(self) -> None:
        """Leave ZeRO-3 as between two passes: nothing in flight, and no module at work.

        A module stays at work when its forward or backward pass does not end: after an error, and where no gradient reaches
        its inputs.
        """
        self._land()
        for param in self._model.parameters() if self._model is not None else ():
            if is_sharded(param):
                param.ds_active_sub_modules.clear()  # type: ignore[attr-defined]

    @property
    def rank(self) -> int:
        """Rank of this process, 0 alone."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        """Number of processes, 1 alone."""
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    def gathered(self, params: Iterable[nn.Parameter]) -> Any:
        """Return a context in which parameters have their full shape; for reading."""
        self._land()
        return gather(params, modifier_rank=None)

    def written(self, params: Iterable[nn.Parameter]) -> Any:
        """Return a context in which parameters have their full shape and rank 0's writes reach every rank."""
        self._land()
        return _written(list(params)) if self.world_size > 1 else gather(params, modifier_rank=0)

    def local(self, param: nn.Parameter) -> torch.Tensor:
        """Return this rank's own piece, flat, sharing memory: all of it without ZeRO-3."""
        if not is_sharded(param):
            return param.detach().reshape(-1)
        start, stop = _span(param)
        shard: torch.Tensor = param.ds_tensor  # type: ignore[attr-defined]
        return shard.detach()[: stop - start]

    def local_of(self, param: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        """Cut out of ``full`` what corresponds to :meth:`local`."""
        if not is_sharded(param):
            return full.reshape(-1)
        start, stop = _span(param)
        return full.reshape(-1)[start:stop]

    def updated(self, param: nn.Parameter) -> tuple[torch.Tensor, int] | None:
        """Return this rank's own part of what the optimizer updates, flat, sharing memory, and where it begins."""
        if is_sharded(param):
            start, stop = _span(param)
            owner = param._z3_optimizer  # type: ignore[attr-defined]
            return (owner.get_local_fp32_param(param)[: stop - start], start) if stop > start else None
        if self.zero_stage:
            part = param._hp_mapping  # type: ignore[attr-defined]
            return None if part is None else (part.get_hp_fragment(), part.lp_fragment_address.start)
        return param.data.reshape(-1), 0

    def sum_shards(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks under ZeRO-3; elsewhere every rank already has the whole."""
        if self.zero_stage == 3 and self.world_size > 1:
            moved = values.to(_collective_device(), copy=True)
            dist.all_reduce(moved)
            return moved.to(values.device)
        return values

    @contextmanager
    def perturbed(self, params: Iterable[nn.Parameter]) -> Iterator[None]:
        """Give every bit back afterwards; costs one copy of this rank's pieces in host memory."""
        self.rest()
        kept = [(param, _pieces(param)) for param in params]
        saved = [[piece.detach().to("cpu", copy=True) for piece in pieces] for _, pieces in kept]
        outer, self.is_perturbed = self.is_perturbed, True
        try:
            yield
        finally:
            self.is_perturbed = outer
            self.rest()
            with torch.no_grad():
                for (param, _), copies in zip(kept, saved, strict=True):
                    for piece, copy in zip(_pieces(param), copies, strict=True):
                        piece.copy_(copy if piece.shape == copy.shape else _whole(param).reshape(piece.shape))

    def companion(self, module: nn.Module, name: str, like: str, value: torch.Tensor | None = None) -> nn.Parameter:
        """Register a frozen parameter beside ``module.<like>``: sharded as it is, in no state_dict."""
        origin = getattr(module, like)
        with self.gathered([origin]):
            frozen = nn.Parameter((origin if value is None else value).detach().clone(), requires_grad=False)
        if is_sharded(origin):
            origin.convert_to_zero_parameters(param_list=[frozen])
        module.register_parameter(name, frozen)
        _hide(module, name)
        return frozen

    def adopt(self, module: nn.Module, name: str, child: nn.Module) -> None:
        """Make ``child`` a submodule that trains, in no state_dict; what shards the model shards it too."""
        module.add_module(name, child)
        for owner in child.modules():
            for parameter, _ in owner.named_parameters(recurse=False):
                _hide(owner, parameter)

    def remove_companion(self, module: nn.Module, name: str) -> None:
        """Take a companion away again; the last one takes the state_dict hooks along."""
        delattr(module, name)
        names, hooks = getattr(module, _COMPANIONS)
        names.discard(name)
        if not names:
            for hook in hooks:
                hook.remove()
            delattr(module, _COMPANIONS)


def companion_names(model: nn.Module) -> frozenset[str]:
    """Return the full names of all companions and adopted parameters in ``model``: what no file of it may contain."""
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in getattr(module, _COMPANIONS, ((), ()))[0]
    )


def adopted_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train with ``model`` without being part of it, by full name."""
    live = dict(model.named_parameters())
    return {name: live[name] for name in sorted(companion_names(model)) if live[name].requires_grad}


def is_sharded(param: nn.Parameter) -> bool:
    """Whether ZeRO-3 keeps this parameter in shards."""
    return hasattr(param, "ds_tensor")


def load_full_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> tuple[list[str], list[str]]:
    """Load full tensors, also into a model that is sharded: one parameter is gathered at a time, rank 0's file counts.

    Returns:
        The names that ``state`` lacks, and those that the model lacks.
    """
    sharded = {name: param for name, param in model.named_parameters(remove_duplicate=False) if is_sharded(param)}
    result = model.load_state_dict({key: value for key, value in state.items() if key not in sharded}, strict=False)
    for name, param in sharded.items():  # in this order on every rank
        if name in state:
            with gather([param], modifier_rank=0), torch.no_grad():
                param.copy_(state[name])
    return [name for name in result.missing_keys if name not in state], list(result.unexpected_keys)


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """Return how many parameters train and how many there are, tied ones once, companions not at all.

    What a regularizer trains beside the model counts.
    """
    hidden = companion_names(model) - adopted_parameters(model).keys()
    sizes = [
        (int(getattr(param, "ds_numel", param.numel())), param.requires_grad)
        for name, param in model.named_parameters()
        if name not in hidden
    ]
    return {"trainable": sum(size for size, trains in sizes if trains), "total": sum(size for size, _ in sizes)}


def _span(param: nn.Parameter) -> tuple[int, int]:
    """Return where this rank's shard begins and ends in the flat full parameter."""
    size = param.ds_tensor.numel()  # type: ignore[attr-defined]
    rank = dist.get_rank(param.ds_process_group)  # type: ignore[attr-defined]
    numel = param.ds_numel  # type: ignore[attr-defined]
    return min(rank * size, numel), min((rank + 1) * size, numel)


def _pieces(param: nn.Parameter) -> list[torch.Tensor]:
    """Return every tensor that holds this rank's bits of ``param``: a small one may be gathered beside its shard."""
    if not is_sharded(param):
        return [param.data]
    return [param.ds_tensor.data, param.data]  # type: ignore[attr-defined]


def _whole(param: nn.Parameter) -> torch.Tensor:
    """Return the full value that all ranks' shards say, flat; empty where this rank holds no gathered copy."""
    if not param.numel():
        return param.data
    shard: torch.Tensor = param.ds_tensor.data  # type: ignore[attr-defined]
    group = param.ds_process_group  # type: ignore[attr-defined]
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, shard, group=group)
    return torch.cat(shards)[: param.numel()]


def gather(params: Iterable[nn.Parameter], modifier_rank: int | None) -> Any:
    """Return a context in which parameters have their full shape, and what ``modifier_rank`` writes reaches every rank."""
    sharded = [param for param in params if is_sharded(param)]
    if not sharded:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(sharded, modifier_rank=modifier_rank)


@contextmanager
def _written(params: list[nn.Parameter]) -> Iterator[None]:
    with gather(params, modifier_rank=0):
        yield
    for param in params:
        if not is_sharded(param):
            moved = param.data.to(_collective_device())
            dist.broadcast(moved, src=0)
            param.data.copy_(moved)


def _collective_device() -> torch.device:
    """Return where the process group communicates: a model still on the CPU has to go there and back under NCCL."""
    return torch.device("cpu") if dist.get_backend() == "gloo" else torch.device("cuda", torch.cuda.current_device())


def _hide(module: nn.Module, name: str) -> None:
    """Keep a parameter out of ``state_dict`` and off the list of keys a loaded one misses."""
    if not hasattr(module, _COMPANIONS):
        names: set[str] = set()
        missing: set[str] = set()  # of the load at hand

        def drop(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
            for key in names:
                state.pop(prefix + key, None)

        def locate(_module: nn.Module, _state: dict[str, Any], prefix: str, *_: Any) -> None:
            missing.clear()
            missing.update(prefix + key for key in names)

        def forgive(_module: nn.Module, incompatible: Any) -> None:
            incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if key not in missing]

        hooks: list[RemovableHandle] = [
            module.register_state_dict_post_hook(drop),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(locate),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_post_hook(forgive),  # type: ignore[no-untyped-call]
        ]
        setattr(module, _COMPANIONS, (names, hooks))
    getattr(module, _COMPANIONS)[0].add(name)
