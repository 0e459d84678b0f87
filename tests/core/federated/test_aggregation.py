"""The mean of replies is the formula's, and a reply that does not fit says why."""

from __future__ import annotations

import math

import pytest
import torch

from tunery.core.federated.aggregation import Mean
from tunery.core.federated.payload import Payload

LIKE = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}


def reply(seed: int, rows: int = 3, statistics: bool = False, **scalars) -> Payload:
    generator = torch.Generator().manual_seed(seed)
    arrays = {
        f"adapter/{name}": torch.randn(value.shape, generator=generator).to(value.dtype) for name, value in LIKE.items()
    }
    if statistics:
        arrays["statistics/n"] = torch.randn(5, generator=generator, dtype=torch.float64)
    return Payload(arrays, {"rows": rows, "loss": 1.0 * seed, "seconds": 0.1, "version": "v", **scalars})


@pytest.mark.parametrize("uniform", [False, True])
def test_weighted_mean(uniform: bool):
    """sum_k n_k theta_k / sum_k n_k in float64, or the plain mean; statistics are summed as they are."""
    mean = Mean(LIKE, "v", statistics_like={"n": torch.zeros(5).double()}, uniform=uniform)
    replies = [reply(seed, rows=rows, statistics=True) for seed, rows in ((1, 1), (2, 10), (3, 5))]
    assert [mean.add(one) for one in replies] == [None] * 3
    weights = torch.tensor([1.0, 1.0, 1.0] if uniform else [1.0, 10.0, 5.0], dtype=torch.float64)
    for name, like in LIKE.items():
        stacked = torch.stack([one.arrays[f"adapter/{name}"].double() for one in replies])
        expected = torch.einsum("k,k...->...", weights / weights.sum(), stacked)
        assert mean.result()[name].dtype == like.dtype
        torch.testing.assert_close(mean.result()[name], expected.to(like.dtype), rtol=1e-6, atol=1e-7)
    assert torch.equal(mean.statistics["n"], sum(one.arrays["statistics/n"] for one in replies))
    assert (mean.count, mean.rows, mean.loss) == (3, 16, 1 * 1 + 2 * 10 + 3 * 5)


def changed(**arrays) -> Payload:
    good = reply(1)
    return Payload({**good.arrays, **arrays}, good.scalars)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (None, "no reply in time"),
        (Payload(scalars={"error": "ValueError"}), "failed with ValueError"),
        (reply(1, version="w"), "trained version 'w' instead of 'v'"),
        (reply(1, rows=0), "says rows=0"),
        (reply(1, loss=math.nan), "loss=nan"),
        (reply(1, loss="low"), "loss='low'"),
        (reply(1, rows=10**400), "says rows=1000"),
        (reply(1, seconds="long"), "seconds='long'"),
        (reply(1, seconds=math.inf), "seconds=inf"),
        (Payload(reply(1).arrays, {"rows": 1, "loss": 1.0, "version": "v"}), "says seconds=None"),
        (changed(**{"adapter/a": torch.full((2, 3), math.nan)}), "'a' holds numbers that are not finite"),
        (changed(**{"adapter/b": torch.full((4,), math.inf).bfloat16()}), "'b' holds numbers that are not finite"),
        (changed(**{"adapter/a": torch.zeros(3, 2)}), "'a' is float32 (3, 2) instead of float32 (2, 3)"),
        (changed(**{"adapter/a": torch.zeros(2, 3).double()}), "'a' is float64"),
        (changed(**{"adapter/c": torch.zeros(1)}), "an adapter with 'c' that nobody asked for"),
        (Payload({"adapter/a": torch.zeros(2, 3)}, reply(1).scalars), "an adapter without 'b'"),
        (changed(**{"statistics/n": torch.zeros(5).double()}), "statistics with 'n' that nobody asked for"),
    ],
)
def test_what_does_not_fit_is_left_out(bad: Payload | None, reason: str):
    """The reason is one line, and the mean is as if the reply had not come."""
    mean = Mean(LIKE, "v", statistics_like={}, uniform=False)
    mean.add(reply(2))
    before = mean.result()
    found = mean.add(bad)
    assert found is not None and reason in found and "\n" not in found
    assert mean.count == 1
    assert all(torch.equal(before[name], value) for name, value in mean.result().items())


@pytest.mark.parametrize(
    ("statistics", "reason"),
    [
        ({"n": torch.zeros(6).double()}, "'n' is float64 (6,) instead of float64 (5,)"),
        ({"n": torch.zeros(5)}, "'n' is float32 (5,) instead of float64 (5,)"),
        ({"n": torch.full((5,), math.inf).double()}, "'n' holds numbers that are not finite"),
        ({"m": torch.zeros(5).double()}, "statistics with 'm' that nobody asked for"),
        ({}, "statistics without 'n'"),
    ],
)
def test_statistics_must_be_as_the_server_knows_them(statistics: dict[str, torch.Tensor], reason: str):
    """Whose come first does not matter: what they look like is not learnt from a reply."""
    mean = Mean(LIKE, "v", statistics_like={"n": torch.zeros(5).double()}, uniform=False)
    first = {f"statistics/{name}": value for name, value in statistics.items()}
    assert mean.add(Payload({**reply(1).arrays, **first}, reply(1).scalars)) == reason
    assert mean.add(reply(2, statistics=True)) is None
    assert torch.equal(mean.statistics["n"], reply(2, statistics=True).arrays["statistics/n"])
