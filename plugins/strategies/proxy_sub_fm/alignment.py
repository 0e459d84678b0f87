"""Bringing a sub-model closer to the model: the distillation loss (eq. 13) and which neurons are idle (eq. 14).

Shapes: B rows, T tokens, D hidden size, N neurons. Pads count nowhere.

Eq. 13 has ||W1 W2||: the feed-forward block without its non-linearity, as in theorem 2. A gated block has no such product,
since its neurons multiply two projections; its term is that of up and down, the gate left out. The paper's code reads the
weights through ``.data``, which leaves the term without a gradient; here it has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ...distillation import UNSEEN, Schedule, follow, hidden_states, modes_kept, state_distance
from ...readings import valid_positions
from .neurons import Block, most, with_parameters

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ....registry.context import RunContext
    from . import ProxySubFm

TOKENS = "tokens"


def weight_product(block: Block) -> torch.Tensor:
    """Return the product of the block's two weights (W1 W2 of eq. 13), (D, D)."""
    enter, leave = block.enter[-1].weight, block.leave.weight
    product: torch.Tensor = (enter @ leave).T if block.conv1d else leave @ enter
    return product


def weight_distance(product: torch.Tensor, taught: torch.Tensor, objective: str) -> torch.Tensor:
    """Return how far two weight products (D, D) are apart: squared norm, or mean square over that of what is taught."""
    square = (product - taught).square()
    return square.sum() if objective == "paper" else square.mean() / taught.square().mean()


def distillation_loss(
    states: Sequence[torch.Tensor],
    taught_states: Sequence[torch.Tensor],
    real: torch.Tensor,
    products: Sequence[torch.Tensor],
    taught_products: Sequence[torch.Tensor],
    objective: str,
    mu: float,
) -> torch.Tensor:
    """Return eq. 13, a mean over the layers given: distance of outputs plus ``mu`` times that of weight products."""
    import torch

    terms = [state_distance(s, t, real, objective) for s, t in zip(states, taught_states, strict=True)]
    if mu:
        pairs = zip(products, taught_products, strict=True)
        terms += [mu * weight_distance(product, taught, objective) for product, taught in pairs]
    return torch.stack(terms).sum() / len(states)


def count_idle(
    model: nn.Module, blocks: Sequence[Block], batches: Iterable[Mapping[str, Any]], threshold: float
) -> dict[str, torch.Tensor]:
    """Count for every neuron of ``blocks`` the tokens at which its activation is zero (eq. 14), in eval mode.

    Args:
        model: the sub-model.
        blocks: its narrow blocks.
        batches: a client's own rows.
        threshold: what magnitude still counts as zero.

    Returns:
        float64 tensors that add up over clients: the counts of layer i as ``zeros.i``, (N,), and ``tokens``, ().
    """
    import torch

    counts = {f"zeros.{block.layer}": torch.zeros(block.width, dtype=torch.float64) for block in blocks}
    counts[TOKENS] = torch.zeros((), dtype=torch.float64)
    current: Mapping[str, Any] = {}

    def watch(block: Block) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            activation = args[0]  # what leaves by the block's last module: act(x W1), or act(gate) * up
            real = valid_positions(current, activation)
            idle = (activation.abs() <= threshold)[real]
            counts[f"zeros.{block.layer}"] += idle.sum(0).double().cpu()
            if block is blocks[0]:
                counts[TOKENS] += int(real.sum())

        return hook

    with ExitStack() as stack, torch.no_grad(), modes_kept(model):
        model.eval()
        for block in blocks:
            stack.callback(block.leave.register_forward_pre_hook(watch(block)).remove)
        for batch in batches:
            current = batch
            model(**{key: value for key, value in batch.items() if key not in UNSEEN})
    return counts


def idle_masks(block: Block, statistics: Mapping[str, torch.Tensor], share: float) -> list[torch.Tensor]:
    """Return for every parameter of a block which elements belong to its most idle neurons, broadcast to its shape.

    Args:
        block: a narrow block.
        statistics: sums of :func:`count_idle`.
        share: of the neurons (the paper's p); of equally idle ones the first count as more idle.
    """
    import torch

    rates = statistics[f"zeros.{block.layer}"] / statistics[TOKENS].clamp(min=1)
    idle = torch.zeros(block.width, dtype=torch.bool)
    idle[most(rates.cpu(), round(share * block.width))] = True
    masks = []
    for module, name, dim in block.parts():
        parameter = getattr(module, name)
        shape = [1] * parameter.dim()
        if dim is not None:
            shape[dim] = block.width
        mask = idle.view(shape) if dim is not None else torch.zeros(shape, dtype=torch.bool)
        masks.append(mask.to(parameter.device))
    return masks


class Teacher:
    """The full model: a model apart, or the sub-model made whole for as long as it teaches.

    Args:
        full: the model, or the sub-model.
        blocks: those of its blocks that the sub-model has narrow.
        whole: with the sub-model, these blocks with the parameters that make it whole.
        run: the run it belongs to.
    """

    def __init__(
        self,
        full: nn.Module,
        blocks: Sequence[Block],
        whole: Sequence[tuple[Block, Sequence[nn.Parameter]]],
        run: RunContext,
    ) -> None:
        self._full = full
        self._blocks = blocks
        self._whole = whole
        self._layers = _layers(full, blocks, run)

    def products(self) -> list[torch.Tensor]:
        """Return the product of each block's two weights, (D, D)."""
        with with_parameters(self._whole):
            return [weight_product(block).detach() for block in self._blocks]

    def states(self, batch: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return what the layers of the blocks give in eval mode, each (B, T, D)."""
        import torch

        with torch.no_grad(), with_parameters(self._whole), modes_kept(self._full):
            return hidden_states(self._full.eval(), self._layers, batch)


def bring_closer(
    config: ProxySubFm.Config,
    teacher: Teacher,
    proxy: nn.Module,
    blocks: Sequence[Block],
    batches: Iterable[Mapping[str, Any]],
    run: RunContext,
    steps: int,
    masks: Sequence[torch.Tensor] | None,
) -> dict[str, float]:
    """Minimise eq. 13 over the sub-model's narrow blocks; return steps, first and last loss.

    Args:
        config: objective, mu and schedule.
        teacher: the full model.
        proxy: the sub-model.
        blocks: its narrow blocks.
        batches: unlabelled rows.
        run: the run it belongs to.
        steps: how many.
        masks: for each parameter of the blocks, which elements may change; ``None`` for all.
    """
    layers = _layers(proxy, blocks, run)
    products = teacher.products() if config.mu else []

    def loss_of(batch: Mapping[str, Any]) -> torch.Tensor:
        aims = teacher.states(batch)
        proxy.train()
        states = hidden_states(proxy, layers, batch)
        mine = [weight_product(block) for block in blocks] if config.mu else []
        real = valid_positions(batch, states[0])
        return distillation_loss(states, aims, real, mine, products, config.objective, config.mu)

    schedule = Schedule(
        steps=steps,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        warmup_ratio=config.warmup_ratio,
        max_grad_norm=config.max_grad_norm,
        seed=run.seed,
    )
    parameters = [parameter for block in blocks for parameter in block.parameters]
    with modes_kept(proxy), run.sharding.gathered(proxy.parameters()):
        proxy.requires_grad_(False)
        for parameter in parameters:
            parameter.requires_grad_(True)
        return follow(parameters, loss_of, batches, schedule, masks)


def _layers(model: nn.Module, blocks: Sequence[Block], run: RunContext) -> list[str]:
    """Return the names of the layers that ``blocks`` belong to."""
    layers = run.anatomy(model).layers
    return [layers[block.layer].name for block in blocks]
