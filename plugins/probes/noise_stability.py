"""Noise stability: how much noise in one hidden state moves the layers above it (Hua et al. 2021; what LNSR penalises).

For one position, with ``h_b`` the hidden state after layer b and ``f^{b,r}`` the layers b+1 ... r,

    ||f^{b,r}(h_b + eps) - f^{b,r}(h_b)||^2,     eps ~ N(0, sigma^2 I)

averaged over a row's positions that are no pads, then over rows and draws. The noise of a position depends on the draw and on
how many positions of its row come before it, pads not counted: rows share it, so that it does not matter how they are batched.
Shapes: B rows, T positions, D features.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt

from ...registry.context import Measurement, Subject, Support
from ...registry.contracts import Probe
from ...registry.errors import CompatibilityError
from ...registry.hookspecs import hookimpl
from ..perturbation import seed_of
from ..readings import batches_of, over_ranks, reading, valid_positions

if TYPE_CHECKING:
    import torch

_POSITIONS = 4096  # beyond, the noise begins again


class NoiseStability(Probe):
    """Measure what noise in one hidden state does to the layers above."""

    name = "noise_stability"
    summary = "how much noise in one hidden state moves the layers above it"
    reference = "Hua et al. 2021, Noise Stability Regularization for Improving BERT Fine-tuning"
    supports = Support(needs_anatomy=True, several_tasks=True)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of the noise, named as those of regularizer ``lnsr``.

        Attributes:
            layer: b, whose output gets the noise: 0 for the embeddings, 1 for the first layer; default: half of the layers.
            sigma: standard deviation of the noise in each hidden feature.
            relative: take sigma as a share of the hidden state's root mean square at each position.
            draws: how many draws of the noise.
            seed: of the noise; default: the run's.
        """

        layer: Annotated[int, Ge(0)] | None = None
        sigma: Annotated[float, Gt(0)] = 0.01
        relative: bool = False
        draws: Annotated[int, Ge(1)] = 3
        seed: Annotated[int, Ge(0)] | None = None

    config: Config

    def measure(self, subject: Subject) -> Iterable[Measurement]:
        """Yield ``noise_stability`` of every layer r above the noise, and the sum over them; small is stable.

        Raises:
            CompatibilityError: no evaluation set, or ``layer`` leaves none above it.
        """
        import torch

        layers = [layer.name for layer in subject.run.anatomy(subject.model).layers]
        below = len(layers) // 2 if self.config.layer is None else self.config.layer
        if below >= len(layers):
            raise CompatibilityError(
                f"probe 'noise_stability' has no layer above layer={below} in a model of {len(layers)}",
                remedy=f"take a layer from 0 to {len(layers) - 1}",
            )
        upper = layers[below:]
        seed = subject.run.seed if self.config.seed is None else self.config.seed
        device = next(subject.model.parameters()).device
        moved = torch.zeros(len(upper) + 1, dtype=torch.float64, device=device)  # the last counts rows
        clean: dict[int, torch.Tensor] = {}

        def keep(place: int, hidden_BTD: torch.Tensor) -> None:
            clean[place] = hidden_BTD

        def compare(place: int, hidden_BTD: torch.Tensor) -> None:
            valid_BT = valid_positions(batch, hidden_BTD)
            square_BT = (hidden_BTD.double() - clean[place].double()).square().sum(-1).masked_fill(~valid_BT, 0)
            moved[place] += (square_BT.sum(1) / valid_BT.sum(1).clamp(min=1)).sum()

        def disturb(draw: int, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            hidden_BTD = args[0] if args else kwargs["hidden_states"]
            noisy_BTD = hidden_BTD + self._noise(hidden_BTD, valid_positions(batch, hidden_BTD), f"{seed} {draw}")
            return ((noisy_BTD, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": noisy_BTD})

        entry = subject.model.get_submodule(upper[0])
        with torch.no_grad():
            for batch in batches_of(subject, self.name):
                with reading(subject.model, upper, keep):
                    subject.model(**batch)
                for draw in range(self.config.draws):
                    hook = entry.register_forward_pre_hook(partial(disturb, draw), with_kwargs=True)
                    try:
                        with reading(subject.model, upper, compare):
                            subject.model(**batch)
                    finally:
                        hook.remove()
                    moved[-1] += len(clean[0])
        *sums, count = over_ranks(subject, moved).tolist()
        for layer, total in enumerate(sums, start=below + 1):
            yield Measurement(name="noise_stability", value=total / count, where={"layer": layer})
        yield Measurement(name="noise_stability", value=sum(sums) / count)

    def _noise(self, hidden_BTD: torch.Tensor, valid_BT: torch.Tensor, key: str) -> torch.Tensor:
        import torch

        # Drawn on the host, which has the same numbers for every device; always as many, so that width is all they depend on.
        shape = (_POSITIONS, hidden_BTD.shape[-1])
        table = torch.randn(shape, generator=torch.Generator().manual_seed(seed_of(key)))
        order_BT = (valid_BT.cumsum(1) - 1).clamp(min=0) % _POSITIONS
        noise_BTD = self.config.sigma * table.to(hidden_BTD.device)[order_BT]
        if self.config.relative:
            noise_BTD = noise_BTD * hidden_BTD.float().square().mean(-1, keepdim=True).sqrt()
        return noise_BTD.to(hidden_BTD.dtype)


@hookimpl
def tunery_probes() -> list[type[Probe]]:
    """Offer :class:`NoiseStability`."""
    return [NoiseStability]
