"""WiSE-FT: (1 - alpha) theta_0 + alpha theta_1, from the pre-trained weights to the trained ones (Wortsman et al. 2022, eq. 1)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from peft import PeftModel
from peft.tuners.lora import LoraConfig, LoraLayer
from torch import nn

from ..registry.context import RunContext, plain_name
from ..registry.errors import CompatibilityError, RecipeError

_ZERO_START = (True, "gaussian")  # inits of LoRA that leave the base alone and begin with an update of zero


def check_share(alpha: float) -> None:
    """Refuse a share of the trained weights outside [0, 1].

    Raises:
        RecipeError: it is.
    """
    if not 0 <= alpha <= 1:
        raise RecipeError(f"wise_ft = {alpha:g} is no share of the trained weights", known=["0 to 1"])


def interpolate(model: nn.Module, base: Mapping[str, torch.Tensor], run: RunContext, alpha: float) -> None:
    """Move a trained model towards its base, in place.

    What has no pre-trained value, a fresh head, stays; so do integer buffers. A LoRA update is multiplied by ``alpha``.

    Args:
        model: as exported: plain, or a ``PeftModel``.
        base: the state_dict of the base model.
        run: the run it was trained in.
        alpha: 0 for the pre-trained weights, 1 for the trained ones.

    Raises:
        CompatibilityError: an adapter that is no update to scale, or a run that left every pre-trained weight alone.
    """
    with torch.no_grad():
        moved = isinstance(model, PeftModel) and _scale_update(model, alpha)
        # All names: of tied weights only the first counts as pre-trained, so that they move once.
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for name, value in model.state_dict().items():
            start = base.get(plain_name(name))
            if start is None or not value.is_floating_point() or (name in parameters and not run.is_pretrained(name)):
                continue
            if not torch.equal(value, start.to(value.dtype)):
                exact = torch.promote_types(value.dtype, torch.float32)
                value.copy_(torch.lerp(start.to(exact), value.to(exact), alpha))
                moved = True
    if not moved:
        raise CompatibilityError(
            "wise_ft would do nothing: the run left every pre-trained weight as it was", remedy="leave it out"
        )


def _scale_update(model: PeftModel, alpha: float) -> bool:
    """Multiply the B of every LoRA layer, and with it the update; return that there is one."""
    name = model.active_adapter
    config, layers = model.peft_config[name], [m for m in model.modules() if isinstance(m, LoraLayer)]
    from_zero = isinstance(config, LoraConfig) and config.init_lora_weights in _ZERO_START
    if not from_zero or any(layer.lora_variant for layer in layers):
        raise CompatibilityError(
            f"wise_ft cannot scale this adapter of PEFT type {getattr(config.peft_type, 'value', config.peft_type)}: it is no update that began at zero",
            remedy="add --merge",
        )
    for layer in layers:
        for parameter in layer.lora_B[name].parameters() if name in layer.lora_B else [layer.lora_embedding_B[name]]:
            parameter.mul_(alpha)
    return True
