"""The quantity a suite sweeps: which of a cell's own keys or options it is, so that a report draws its results against it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator

from ..registry.selection import Selection, parse_selections

_OPTION = re.compile(r"[a-z][a-z0-9_]*(:[A-Za-z_][A-Za-z0-9_]*)?")


class Axis(BaseModel):
    """What a suite's methods differ in.

    Attributes:
        name: what the axis is called, with its unit.
        field: a key of the cells' recipes, such as ``learning_rate``, or an option of a strategy or regularizer, such as
            ``mhloss:heads``. A method whose recipe does not say it is not on the axis.
        scale: ``log`` where ratios count.
        complement: of a share, what it leaves: x = 1 - value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    field: str
    scale: Literal["linear", "log"] = "linear"
    complement: bool = False

    @field_validator("field")
    @classmethod
    def _is_field(cls, value: str) -> str:
        if not _OPTION.fullmatch(value):
            raise ValueError("a key of recipes, or PLUGIN:OPTION")
        return value

    @property
    def key(self) -> str | None:
        """The key of recipes that it is; ``None`` of a plugin's option."""
        return None if ":" in self.field else self.field

    def value(self, recipe: Mapping[str, Any]) -> float | None:
        """Return where a cell with this recipe stands; ``None`` where it says no number.

        Raises:
            SelectionError: a strategy or regularizers that cannot be read.
        """
        plugin, _, name = self.field.rpartition(":")
        options = [recipe] if not plugin else [item.options for item in _selections(recipe) if item.name == plugin]
        found = options[0].get(name) if options else None
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            return None
        return round(1 - found, 12) if self.complement else float(found)

    def line(self, recipe: Mapping[str, Any]) -> str:
        """Return what else the cell's method is: its strategy and regularizers without the swept option."""
        plugin, _, name = self.field.rpartition(":")
        rest = [
            Selection(item.name, {k: v for k, v in item.options.items() if (item.name, k) != (plugin, name)})
            for item in _selections(recipe)
        ]
        return " + ".join(map(str, rest))


def _selections(recipe: Mapping[str, Any]) -> tuple[Selection, ...]:
    """Return the strategy and the regularizers."""
    strategy = parse_selections(recipe.get("strategy"), "strategy")
    return (*strategy, *parse_selections(recipe.get("regularizers"), "regularizer"))
