"""Any method of the PEFT library, by its type name and the fields of its config: ``peft:peft_type=VERA,r=64``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...registry.contracts import Strategy
from ...registry.errors import ConfigError, did_you_mean
from ...registry.hookspecs import hookimpl
from ..adapters import export_adapter, task_fields

if TYPE_CHECKING:
    from torch import nn

    from ...registry.context import RunContext


class Peft(Strategy):
    """Train any adapter PEFT knows; the artefact is the folder PEFT writes."""

    name = "peft"
    summary = "train any PEFT method by its type name and config fields"
    reference = "the PEFT library, https://github.com/huggingface/peft"
    identity_start = False  # prompt and prefix methods change the output from the start

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of the strategy.

        Attributes:
            peft_type: PEFT's name of the method, for example ``VERA``, ``IA3`` or ``DORA``'s ``LORA``; any case.
            fields: every other option goes to that method's config as PEFT spells it.
        """

        peft_type: str
        fields: dict[str, Any] = field(default_factory=dict, metadata={"open": True})

    config: Config

    def prepare(self, model: nn.Module, run: RunContext) -> nn.Module:
        """Return the ``PeftModel`` of the chosen type.

        Raises:
            ConfigError: an unknown type, a field it does not have, or a value it refuses.
        """
        from peft import get_peft_model
        from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

        known = {str(getattr(key, "value", key)): cls for key, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
        asked = self.config.peft_type.upper()
        if asked not in known:
            raise ConfigError(
                f"strategy 'peft': PEFT knows no type {self.config.peft_type!r}",
                known=sorted(known),
                remedy=did_you_mean(asked, known),
            )
        fields = [item.name for item in dataclasses.fields(known[asked]) if item.init]
        for key in self.config.fields:
            if key not in fields:
                raise ConfigError(
                    f"strategy 'peft': {known[asked].__name__} has no field {key!r}",
                    known=sorted(fields),
                    remedy=did_you_mean(key, fields),
                )
        defaults = {key: value for key, value in task_fields(model, run).items() if key in fields}
        try:
            return get_peft_model(model, known[asked](**{**defaults, **self.config.fields}))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"strategy 'peft': {asked}: {error}", remedy="see PEFT's documentation of the type"
            ) from error

    def export(self, model: nn.Module, run: RunContext, *, merge: bool = False) -> nn.Module:
        """Return the ``PeftModel``, or with ``merge`` the plain model where the method can be folded in."""
        return export_adapter(model, merge=merge)


@hookimpl
def tunery_strategies() -> list[type[Strategy]]:
    """Offer :class:`Peft`."""
    return [Peft]
