"""Messages keep types and shapes, and what is none is refused without being unpickled."""

from __future__ import annotations

import pickle

import pytest
import torch
from safetensors.torch import save

from tunery.core.federated.payload import Payload, grouped
from tunery.registry.errors import FederationError


def test_round_trip():
    """Tensors of any type, also views and empty ones, and scalars arrive as they were."""
    arrays = {
        "adapter/half": torch.randn(3, 2).to(torch.bfloat16),
        "adapter/view": torch.arange(6.0).reshape(2, 3).T,
        "indices/none": torch.empty(0, dtype=torch.int32),
        "statistics/double": torch.tensor([1 / 3], dtype=torch.float64),
        "frozen/scalar": torch.tensor(7),
    }
    scalars = {"rows": 3, "loss": 0.1, "version": "a:1", "statistics": True}
    found = Payload.from_bytes(Payload(arrays, scalars).to_bytes())
    assert found.scalars == scalars
    assert found.arrays.keys() == arrays.keys()
    for name, value in arrays.items():
        assert found.arrays[name].dtype == value.dtype and torch.equal(found.arrays[name], value)
    assert found.group("adapter").keys() == {"half", "view"}
    assert found.nbytes("adapter") == 6 * 2 + 6 * 4
    assert Payload.from_bytes(Payload().to_bytes()) == Payload()


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 40,
        pickle.dumps(Bomb()),
        save({"a": torch.ones(2)}),
        save({"a": torch.ones(2)}, metadata={"scalars": "[1]"}),
        save({"a": torch.ones(2)}, metadata={"scalars": '{"a": {"b": 1}}'}),
        Payload(grouped("adapter", {"a": torch.ones(9)})).to_bytes()[:-3],
    ],
)
def test_what_is_none_is_refused(data: bytes):
    """Anything else is one line."""
    with pytest.raises(FederationError, match="a message") as caught:
        Payload.from_bytes(data)
    assert "\n" not in str(caught.value)
