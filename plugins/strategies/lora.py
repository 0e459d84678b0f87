"""LoRA: h = W0 x + (alpha / r) B A x with A (r, in) random and B (out, r) zero (Hu et al. 2022, eq. 3), by PEFT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

from annotated_types import Ge, Gt, Lt

from ...registry.contracts import Strategy
from ...registry.hookspecs import hookimpl
from ..adapters import export_adapter, query_and_value, task_fields

if TYPE_CHECKING:
    from torch import nn

    from ...registry.context import RunContext


class Lora(Strategy):
    """Train low-rank updates of chosen projections and the fresh head; the artefact is a PEFT LoRA folder."""

    name = "lora"
    summary = "train low-rank updates of the attention projections, and the head"
    reference = "Hu et al. 2022, LoRA, eq. 3 and section 4.2"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of LoRA.

        Attributes:
            r: rank of the update (PEFT ``r``).
            alpha: the update is scaled by alpha / r (PEFT ``lora_alpha``).
            dropout: probability of zeroing an element of x before A, in training (PEFT ``lora_dropout``).
            target_modules: last parts of module names to adapt; default: the attention's query and value projections.
            use_rslora: scale by alpha / sqrt(r) instead (Kalajdzievski 2023).
        """

        r: Annotated[int, Ge(1)] = 8
        alpha: Annotated[float, Gt(0)] = 16
        dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
        target_modules: tuple[str, ...] | None = None
        use_rslora: bool = False

    config: Config

    def prepare(self, model: nn.Module, run: RunContext) -> nn.Module:
        """Return a ``PeftModel`` whose output equals the base model's, since B starts at zero.

        Raises:
            AnatomyError: no ``target_modules`` given and the architecture is unknown.
        """
        from peft import LoraConfig, get_peft_model

        targets = list(self.config.target_modules or query_and_value(model, run))
        config: Any = LoraConfig(
            r=self.config.r,
            lora_alpha=self.config.alpha,  # type: ignore[arg-type]  # PEFT divides it; any number does
            lora_dropout=self.config.dropout,
            target_modules=targets,
            fan_in_fan_out=_any_conv1d(model, targets),
            use_rslora=self.config.use_rslora,
            **task_fields(model, run),
        )
        adapted: nn.Module = get_peft_model(cast(Any, model), config)
        return adapted

    def export(self, model: nn.Module, run: RunContext, *, merge: bool = False) -> nn.Module:
        """Return the ``PeftModel``, or with ``merge`` the plain model with W0 + (alpha / r) B A."""
        return export_adapter(model, merge=merge)


def _any_conv1d(model: nn.Module, targets: list[str]) -> bool:
    """Whether the targets are transformers' ``Conv1D``, whose weight is (in, out)."""
    from transformers.pytorch_utils import Conv1D

    return any(isinstance(m, Conv1D) and name.rsplit(".", 1)[-1] in targets for name, m in model.named_modules())


@hookimpl
def tunery_strategies() -> list[type[Strategy]]:
    """Offer :class:`Lora`."""
    return [Lora]
