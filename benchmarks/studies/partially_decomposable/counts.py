"""Tables 1 and 2: how many numbers k tasks on one frozen A take, counted three ways, against k LoRAs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..report import Finding

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Shape = tuple[int, int]  # outputs d, inputs m
KS = (1, 2, 3, 4, 8, 16, 32, 64)
MODELS: dict[str, tuple[Sequence[Shape], int]] = {
    "RoBERTa-base, query and value, r=8": ([(768, 768)] * 24, 8),
    "GPT-2 medium, query and value, r=4": (
        [(1024, 1024)] * 48,
        4,
    ),  # as in LoRA's code, which cuts c_attn into its parts
    "GPT-2 medium, c_attn, r=4": ([(3072, 1024)] * 24, 4),
}


def trained(k: int, shapes: Sequence[Shape], r: int) -> int:
    """Return how many numbers train, heads aside: k B."""
    return k * r * sum(outputs for outputs, _ in shapes)


def stored(k: int, shapes: Sequence[Shape], r: int) -> int:
    """Return A + k B: what is stored, heads aside, and what the paper's tables call trainable."""
    return r * sum(inputs for _, inputs in shapes) + trained(k, shapes, r)


def loras(k: int, shapes: Sequence[Shape], r: int) -> int:
    """Return what k LoRAs train and store, heads aside: k (A + B)."""
    return k * r * sum(outputs + inputs for outputs, inputs in shapes)


def limit(shapes: Sequence[Shape], frozen: str = "a") -> float:
    """Return what the share of k LoRAs tends to as k grows: d / (d + m), B's, or with B frozen and shared m / (d + m), A's."""
    own = sum(outputs if frozen == "a" else inputs for outputs, inputs in shapes)
    return own / sum(outputs + inputs for outputs, inputs in shapes)


def finding() -> Finding:
    """Count for k = 1 to 64."""
    rows = [
        (
            name,
            k,
            trained(k, shapes, r),
            stored(k, shapes, r),
            loras(k, shapes, r),
            _ratio(k, shapes, r),
            limit(shapes),
            limit(shapes, "b"),
        )
        for name, (shapes, r) in MODELS.items()
        for k in KS
    ]
    (shapes, r), (cut, rank), (whole, _) = MODELS.values()
    return Finding(
        name="counts",
        title="Tables 1 and 2: numbers of k tasks on one frozen A, and of k LoRAs; heads aside",
        columns=(
            "model",
            "k",
            "train: k B",
            "stored, the paper's count: A + k B",
            "k LoRAs",
            "ratio",
            "its limit",
            "its limit, B frozen",
        ),
        rows=rows,
        verdict=f"Table 1's 1.3M and 2.4M are {stored(8, shapes, r):,} and {loras(8, shapes, r):,} at k = 8: the paper "
        f"counts the frozen A among the trainable; {trained(8, shapes, r):,} train. Table 2's 0.7M and 1.1M are "
        f"{stored(3, cut, rank):,} and {loras(3, cut, rank):,} at k = 3, cut off and not rounded; on c_attn whole it "
        f"would be {stored(3, whole, rank):,} and {loras(3, whole, rank):,}.",
        draw=_draw,
    )


def _ratio(k: int, shapes: Sequence[Shape], r: int) -> float:
    return stored(k, shapes, r) / loras(k, shapes, r)


def _draw(axes: Axes) -> None:
    for number, (name, (shapes, r)) in enumerate(MODELS.items()):
        axes.plot(KS, [_ratio(k, shapes, r) for k in KS], "o-", color=f"C{number}", label=name)
        axes.axhline(limit(shapes), ls=":", color=f"C{number}")
    axes.set(xscale="log", xlabel="tasks k", ylabel="(A + k B) / k (A + B)")
