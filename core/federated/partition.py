"""Which client has which rows: at random, or label-skewed by a Dirichlet distribution; and the picture of it.

Dirichlet (Hsu, Qi and Brown 2019, Measuring the Effects of Non-Identical Data Distribution, section 3): a client draws its mix of
labels q ~ Dir(alpha p), p being the labels' shares in all rows, and then its rows by q, without replacement; a label that is
used up leaves the rest of q. Every client has as many rows as the others, give or take one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...registry.errors import DataError

Indices = np.ndarray[Any, np.dtype[np.int64]]
_STREAM = 1  # keeps these draws apart from other uses of the run's seed


def partition(
    size: int, labels: Sequence[int] | None, *, num_clients: int, how: str, alpha: float, seed: int
) -> list[Indices]:
    """Deal ``size`` rows out to clients; the same arguments give the same rows.

    Args:
        size: number of rows.
        labels: the class number of each row, shape (size,); needed for ``"dirichlet"`` only.
        num_clients: number of clients.
        how: ``"iid"`` or ``"dirichlet"``.
        alpha: concentration of the Dirichlet distribution; small means clients of few labels each.
        seed: what the draws depend on.

    Returns:
        The row numbers of each client, ascending.

    Raises:
        DataError: more clients than rows, an ``alpha`` that is not above 0, or rows without classes.
    """
    if num_clients > size:
        raise DataError(
            f"num_clients={num_clients} is more than the {size} training rows", remedy="a client needs at least one"
        )
    if how == "dirichlet" and not alpha > 0:
        raise DataError(f"alpha={alpha}: a Dirichlet distribution needs a concentration above 0")
    random = np.random.default_rng([seed, _STREAM])
    sizes = [len(part) for part in np.array_split(np.arange(size), num_clients)]
    if how == "iid":
        parts = np.split(random.permutation(size), np.cumsum(sizes)[:-1])
        return [np.sort(part) for part in parts]
    if labels is None:
        raise DataError("partition=dirichlet needs rows with classes", remedy="use partition=iid")
    return _dirichlet(np.asarray(labels), sizes, alpha, random)


def _dirichlet(labels: Indices, sizes: Sequence[int], alpha: float, random: np.random.Generator) -> list[Indices]:
    classes, counts = np.unique(labels, return_counts=True)
    pools = [random.permutation(np.flatnonzero(labels == label)) for label in classes]
    used = np.zeros(len(classes), dtype=int)
    parts = []
    for size in sizes:
        mix = random.dirichlet(alpha * counts / counts.sum())
        rows: list[Indices] = []
        while missing := size - sum(map(len, rows)):
            left = counts - used
            share = np.where(left > 0, mix, 0.0)
            if not share.sum() > 0:  # all that this client asked for is used up
                share = left.astype(float)
            taken = np.minimum(random.multinomial(missing, share / share.sum()), left)
            rows += [pool[start : start + n] for pool, start, n in zip(pools, used, taken, strict=True)]
            used = used + taken
        parts.append(np.sort(np.concatenate(rows)))
    return parts


def label_counts(parts: Sequence[Indices], labels: Sequence[int], num_labels: int) -> Indices:
    """Return how many rows of each label each client has, shape (clients, labels)."""
    values = np.asarray(labels)
    return np.stack([np.bincount(values[part], minlength=num_labels) for part in parts])


def plot_partition(counts: Indices, names: Sequence[str], path: Path, title: str) -> None:
    """Draw one bar for each client, its labels in colours (as Fig. 4 of the Federated Proxy Fine-Tuning paper).

    Args:
        counts: rows of each label each client has, shape (clients, labels).
        names: the labels' names.
        path: the PNG to write, under a temporary name first.
        title: what was dealt out, and how.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    clients, labels = counts.shape
    colours = colormaps["tab10" if labels <= 10 else "turbo"]
    below = np.zeros(clients)
    for label in range(labels):
        colour = colours(label if labels <= 10 else label / (labels - 1))
        axes.bar(range(clients), counts[:, label], 1.0, bottom=below, color=colour, label=names[label])
        below = below + counts[:, label]
    axes.set(xlabel="client", ylabel="rows", title=title, xlim=(-0.5, clients - 0.5))
    if labels <= 10:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, dpi=150, format="png")
    temporary.replace(path)
