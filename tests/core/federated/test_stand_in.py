"""What changed of a stand-in is found, told in few numbers, and written where it belongs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tunery.core.federated.payload import Payload
from tunery.core.federated.stand_in import Change, everything, find_changes, merge, pack, unpack
from tunery.registry.errors import FederationError


def copies(state):
    return {name: value.clone() for name, value in state.items()}


def test_the_dimension_with_the_fewest_numbers():
    """Rows of one weight, columns of the other, a scalar whole, and nothing of what stayed."""
    before = {"in": torch.zeros(8, 3), "out": torch.zeros(3, 8), "bias": torch.zeros(3), "one": torch.tensor(0)}
    after = copies({**before, "same": torch.ones(2)})
    before["same"] = torch.ones(2)
    after["in"][[2, 5]] = 1.0
    after["out"][:, [2, 5]] = 1.0
    after["bias"][1] = 1.0
    after["one"] += 1
    found = find_changes(before, after)
    assert found.keys() == {"in", "out", "bias", "one"}
    assert (found["in"].dim, found["in"].indices.tolist()) == (0, [2, 5])
    assert (found["out"].dim, found["out"].indices.tolist()) == (1, [2, 5])
    assert (found["bias"].dim, found["bias"].indices.tolist()) == (0, [1])
    assert found["one"].dim == -1
    assert sum(value.numel() for key, value in pack(after, found).items() if key.startswith("frozen")) == 6 + 6 + 1 + 1


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_changes_over_any_versions_arrive(data):
    """A node that lacks the last k versions is brought up to date bit for bit."""
    state = {"a": torch.zeros(3, 4), "b": torch.zeros(2, 3, 2), "c": torch.zeros(5)}
    history, seen = [], [copies(state)]
    for version in range(1, data.draw(st.integers(1, 4)) + 1):
        for value in state.values():
            flat = value.reshape(-1)
            where = data.draw(st.lists(st.integers(0, flat.numel() - 1), max_size=4))
            flat[where] = float(version)
        history.append(find_changes(seen[-1], state))
        seen.append(copies(state))
    start = data.draw(st.integers(0, len(history)))
    node = copies(seen[start])
    message = Payload.from_bytes(Payload(pack(state, merge(history[start:]))).to_bytes())
    unpack(node, message)
    assert all(torch.equal(node[name], state[name]) for name in state)
    fresh = {name: torch.full_like(value, 9.0) for name, value in state.items()}
    unpack(fresh, Payload(pack(state, everything(state))))
    assert all(torch.equal(fresh[name], state[name]) for name in state)


@pytest.mark.parametrize("name", ["b", "a"])
def test_another_model_is_refused(name: str):
    """An unknown tensor, or one of another shape, is one line."""
    message = Payload(pack({name: torch.ones(3, 2)}, {name: Change(0, torch.tensor([1], dtype=torch.int32))}))
    with pytest.raises(FederationError, match=f"'{name}' of the stand-in does not fit"):
        unpack({"a": torch.zeros(3, 4)}, message)
