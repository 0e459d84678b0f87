"""Rows are dealt out once each, evenly, by the seed; label skew follows the Dirichlet distribution."""

from __future__ import annotations

import numpy as np
import pytest

from tunery.core.federated.partition import label_counts, partition, plot_partition
from tunery.registry.errors import DataError

LABELS = np.repeat([0, 1, 2], [600, 300, 100])


@pytest.mark.parametrize("how", ["iid", "dirichlet"])
@pytest.mark.parametrize("num_clients", [1, 7, 1000])
def test_every_row_once(how: str, num_clients: int):
    """Together the clients have every row once, each as many as the others give or take one."""
    parts = partition(1000, LABELS, num_clients=num_clients, how=how, alpha=0.3, seed=0)
    assert len(parts) == num_clients
    assert sorted(np.concatenate(parts).tolist()) == list(range(1000))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1


@pytest.mark.parametrize("how", ["iid", "dirichlet"])
def test_the_seed_decides(how: str):
    """The same seed gives the same parts, another one others."""
    first, again, other = (partition(1000, LABELS, num_clients=10, how=how, alpha=1.0, seed=seed) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_spread_of_the_label_shares():
    """Of Dir(alpha p), one label's share has the variance p (1 - p) / (alpha + 1), and the multinomial draw adds to it."""
    size, rows = 4000, 50
    labels = np.arange(size * rows) % 2
    for alpha in (0.5, 5.0):
        parts = partition(size * rows, labels, num_clients=size, how="dirichlet", alpha=alpha, seed=1)
        share = label_counts(parts, labels, 2)[: size // 2, 1] / rows  # the last clients take what is left
        inherent = 0.25 / (alpha + 1)
        expected = inherent + (0.25 - inherent) / rows
        assert share.mean() == pytest.approx(0.5, abs=0.03)
        assert share.var() == pytest.approx(expected, rel=0.1)


def test_alpha_decides_the_skew():
    """A large alpha is like IID, a small one leaves a client one label."""
    near = label_counts(partition(1000, LABELS, num_clients=10, how="dirichlet", alpha=1e4, seed=0), LABELS, 3)
    assert np.abs(near / near.sum(1, keepdims=True) - [0.6, 0.3, 0.1]).max() < 0.2
    far = label_counts(partition(1000, LABELS, num_clients=10, how="dirichlet", alpha=1e-3, seed=0), LABELS, 3)
    assert np.median(far.max(1) / far.sum(1)) == 1.0


def test_refusals():
    """More clients than rows, an alpha of nothing and rows without classes are one line each."""
    for asked, changes in (
        ("more than the 5 training rows", {"num_clients": 6}),
        ("above 0", {"alpha": 0.0}),
        ("above 0", {"alpha": float("nan")}),
        ("needs rows with classes", {"labels": None}),
    ):
        keys = {"labels": [0, 1, 0, 1, 0], "num_clients": 2, "alpha": 1.0, **changes}
        labels = keys.pop("labels")
        with pytest.raises(DataError, match=asked) as caught:
            partition(5, labels, how="dirichlet", seed=0, **keys)
        assert "\n" not in str(caught.value)


def test_picture(tmp_path):
    """The picture is written whole, for few labels and for many."""
    for labels in (2, 30):
        counts = np.random.default_rng(0).integers(0, 9, (12, labels))
        plot_partition(counts, [f"label {n}" for n in range(labels)], tmp_path / "partition.png", "tiny")
        assert (tmp_path / "partition.png").read_bytes()[:4] == b"\x89PNG"
    assert [path.name for path in tmp_path.iterdir()] == ["partition.png"]
