"""What strategies that freeze an encoder share: only the fresh head trains, and what does not train stays in eval mode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..registry.errors import CompatibilityError

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from ..registry.context import RunContext


def train_head_alone(model: nn.Module, run: RunContext, strategy: str) -> RemovableHandle:
    """Freeze what is pre-trained, and keep it in eval mode until the returned hook is removed.

    Args:
        model: the plain model.
        run: tells the fresh head.
        strategy: its name, for the message.

    Raises:
        CompatibilityError: the model has no fresh head to train.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not run.is_pretrained(name) and parameter.is_floating_point())
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise CompatibilityError(
            f"strategy {strategy!r} finds no fresh head in {type(model).__name__}", remedy="use 'full' or 'lora'"
        )
    return keep_eval(model, (m for m in model.children() if not any(p.requires_grad for p in m.parameters())))


def train_everything(model: nn.Module) -> None:
    """Let every floating-point parameter train."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())


def keep_eval(model: nn.Module, modules: Iterable[nn.Module]) -> RemovableHandle:
    """Put ``modules`` of ``model`` into eval mode before every forward pass, whatever the trainer sets."""
    kept = list(modules)

    def evaluate(_module: nn.Module, _args: tuple[Any, ...]) -> None:
        for module in kept:
            if module.training:
                module.eval()

    return model.register_forward_pre_hook(evaluate)
