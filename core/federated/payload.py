"""What travels between server and clients: named tensors and named scalars, as safetensors bytes. Nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from ...registry.errors import FederationError

Scalar: TypeAlias = "int | float | str | bool"
_SCALARS = "scalars"
_LENGTH = 8  # a safetensors file begins with the length of its JSON header, little-endian


@dataclass(frozen=True)
class Payload:
    """One message.

    Attributes:
        arrays: tensors of any type and shape, named ``group/name``.
        scalars: everything else there is to say.
    """

    arrays: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)

    def group(self, name: str) -> dict[str, torch.Tensor]:
        """Return the tensors of one group, without its name."""
        start = f"{name}/"
        return {key.removeprefix(start): value for key, value in self.arrays.items() if key.startswith(start)}

    def nbytes(self, name: str) -> int:
        """Return how many bytes the tensors of one group hold."""
        return sum(value.nbytes for value in self.group(name).values())

    def to_bytes(self) -> bytes:
        """Return the message as it travels."""
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.arrays.items()}
        return save(tensors, metadata={_SCALARS: json.dumps(dict(self.scalars), sort_keys=True)})

    @classmethod
    def from_bytes(cls, data: bytes) -> Payload:
        """Read a message.

        Raises:
            FederationError: these bytes are none.
        """
        try:
            arrays = load(data)
            length = int.from_bytes(data[:_LENGTH], "little")
            header = json.loads(data[_LENGTH : _LENGTH + length])
            scalars = json.loads(header["__metadata__"][_SCALARS])
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise FederationError(f"a message that is no payload: {type(error).__name__}") from None
        if not isinstance(scalars, dict) or not all(isinstance(v, int | float | str) for v in scalars.values()):
            raise FederationError("a message whose scalars are none")
        return cls(arrays, scalars)


def grouped(name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors under the names they have in a group."""
    return {f"{name}/{key}": value for key, value in tensors.items()}
