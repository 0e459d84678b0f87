"""The distribution a model's parameters were drawn from before pre-training, read off its own ``_init_weights``.

The architecture is built once more from its config on the meta device, where no number is drawn, and every call of an
initialiser of torch or transformers on a whole parameter is taken down; the last one counts, as it would for the values. So
rules of one architecture (GPT-2 divides the standard deviation of its residual projections by sqrt(2 n_layer)) are found like
the common ones. The row of a padding token, set to zero afterwards, counts as drawn like the other rows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from ..registry.errors import CompatibilityError

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Mean and standard deviation that each entry of a parameter was drawn with; std 0 for a constant."""

    mean: float = 0.0
    std: float = 0.0

    @property
    def rms(self) -> float:
        """Root mean square of an entry."""
        return math.hypot(self.mean, self.std)


def initial_distributions(model: nn.Module) -> dict[str, Drawn]:
    """Return how each parameter of the transformers model in ``model`` was drawn, by its name there, tied ones by each name.

    Parameters that no initialiser sets are left out.

    Raises:
        CompatibilityError: there is no transformers model in ``model``, or it cannot be built from its config.
    """
    import torch
    from transformers import PreTrainedModel

    original = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if original is None:
        raise CompatibilityError(
            f"nothing says how {type(model).__name__} was initialised", remedy="probe a transformers model"
        )
    drawn: dict[int, Drawn] = {}
    with _recorded(drawn):
        try:
            with torch.device("meta"):
                shadow: Any = type(original)(copy.deepcopy(original.config))
        except Exception as error:  # noqa: BLE001  # whatever a stranger's constructor raises
            raise CompatibilityError(
                f"{type(original).__name__} cannot be built from its config: {error}", remedy="probe another model"
            ) from None
        shadow.initialize_weights()
    named = shadow.named_parameters(remove_duplicate=False)
    return {name: drawn[place] for name, parameter in named if (place := _place(parameter)) in drawn}


def _place(tensor: torch.Tensor) -> int:
    """Tell a tensor by its memory, which ``parameter.data`` shares with the parameter."""
    place: int = tensor.untyped_storage()._cdata
    return place


@contextmanager
def _recorded(drawn: dict[int, Drawn]) -> Iterator[None]:
    """Inside, initialisers of whole tensors are taken down by memory instead of run."""
    import torch
    from transformers import initialization

    def recorder(rule: Callable[..., Drawn]) -> Callable[..., torch.Tensor]:
        def record(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
                kwargs.pop("generator", None)
                drawn[_place(tensor)] = rule(tensor, *args, **kwargs)
            return tensor

        return record

    recorders: dict[str, Any] = {name: recorder(rule) for name, rule in _RULES.items()}
    with (
        patch.multiple(torch.nn.init, **recorders),
        patch.dict(initialization.TORCH_INIT_FUNCTIONS, recorders),
    ):
        yield


def _uniform(tensor: torch.Tensor, a: float = 0.0, b: float = 1.0) -> Drawn:
    return Drawn(mean=(a + b) / 2, std=(b - a) / math.sqrt(12))


def _normal(tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> Drawn:
    return Drawn(mean=mean, std=std)


def _truncated(tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0) -> Drawn:
    from scipy.stats import truncnorm

    cut = truncnorm((a - mean) / std, (b - mean) / std, loc=mean, scale=std)
    return Drawn(mean=float(cut.mean()), std=float(cut.std()))


def _constant(tensor: torch.Tensor, val: float) -> Drawn:
    return Drawn(mean=val)


def _xavier(tensor: torch.Tensor, gain: float = 1.0) -> Drawn:
    from torch.nn import init

    fans = init._calculate_fan_in_and_fan_out(tensor)
    return Drawn(std=gain * math.sqrt(2 / sum(fans)))


def _kaiming(tensor: torch.Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu") -> Drawn:
    from torch.nn import init

    fan_in, fan_out = init._calculate_fan_in_and_fan_out(tensor)
    return Drawn(std=init.calculate_gain(nonlinearity, a) / math.sqrt(fan_in if mode == "fan_in" else fan_out))


def _orthogonal(tensor: torch.Tensor, gain: float = 1) -> Drawn:
    rows = len(tensor)
    return Drawn(std=gain / math.sqrt(max(rows, tensor.numel() // rows)))


def _sparse(tensor: torch.Tensor, sparsity: float, std: float = 0.01) -> Drawn:
    return Drawn(std=std * math.sqrt(1 - math.ceil(sparsity * len(tensor)) / len(tensor)))


def _pattern(tensor: torch.Tensor, groups: int = 1) -> Drawn:
    """Return the mean of a pattern of ones and zeros, which is no more random than a constant."""
    ones = min(len(tensor) // groups, tensor.shape[1]) * groups
    return Drawn(mean=math.sqrt(ones / tensor.numel()))


_RULES: Mapping[str, Callable[..., Drawn]] = {
    "uniform_": _uniform,
    "normal_": _normal,
    "trunc_normal_": _truncated,
    "constant_": _constant,
    "zeros_": lambda tensor: Drawn(),
    "ones_": lambda tensor: Drawn(mean=1.0),
    "eye_": _pattern,
    "dirac_": _pattern,
    "xavier_uniform_": _xavier,
    "xavier_normal_": _xavier,
    "kaiming_uniform_": _kaiming,
    "kaiming_normal_": _kaiming,
    "orthogonal_": _orthogonal,
    "sparse_": _sparse,
}
