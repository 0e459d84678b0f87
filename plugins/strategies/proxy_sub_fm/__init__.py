"""Proxy sub-model: feed-forward blocks keep their most salient neurons, LoRA trains on attention and is plugged into the model.

Federated Proxy Fine-Tuning (Peng et al. 2024, "FedPFT"; another method goes by that name too). The sub-model has the model's
modules under the model's names, its feed-forward blocks narrower (eq. 7-8), so that an adapter trained on it fits the model
as it stands. It is as useful with one owner and no federation: tune a small stand-in, deploy the adapter on the whole.

``config.intermediate_size`` goes on saying the model's width, since layers now differ in theirs; no file of a run holds the
config of a sub-model. The sub-model is built anew from the base model whenever a run is loaded. What was taken out stays in
host memory, once a process, for :meth:`ProxySubFm.export` and :meth:`ProxySubFm.whole`; those are the base model's own
tensors, not copies, unless they lay elsewhere. Neurons that an alignment has changed are files of the run, beside the
adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from ....registry.context import Support
from ....registry.contracts import Strategy
from ....registry.errors import CompatibilityError
from ....registry.hookspecs import hookimpl
from ....registry.proxy import ProxyStrategy
from ...adapters import add_lora, attention_projections, export_adapter, plug_adapter
from ...texts import DistillationText, TextBatches
from .alignment import Teacher, bring_closer, count_idle, idle_masks
from .neurons import Block, find_blocks, like, most, on_host, saliency, selected, with_parameters

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ....registry.context import RunContext


class ProxySubFm(ProxyStrategy):
    """Train LoRA on the attention of a model with narrower feed-forward blocks; the artefact is an adapter for the model."""

    name = "proxy_sub_fm"
    summary = "train LoRA on a model with fewer feed-forward neurons, plug it into the model itself"
    reference = "Peng et al. 2024, FedPFT: Federated Proxy Fine-Tuning of Foundation Models, sections 3.4 and 3.5"
    supports = Support(needs_anatomy=True)
    identity_start = False

    @dataclass(frozen=True, kw_only=True)
    class Config(DistillationText):
        """Options of the proxy sub-model.

        Attributes:
            ratio: share of the feed-forward neurons that is removed (section 4.1: 3072 -> 768); 0 leaves the model whole.
            retained: numbers of the layers that stay whole, negative ones counted from the last; default: first and last.
            r: rank of the LoRA updates on query, key, value and attention output (the paper's code).
            alpha: the update is scaled by alpha / r (the paper's code).
            dropout: probability of zeroing an element of an adapter's input, in training (the paper's code).
            distill_steps: steps of the alignment before tuning (section 3.5.1), on ``data``, or on the server's rows, or
                with one owner on the run's own training inputs, a global batch a step; 0 leaves it out (the paper's _N, _D).
            realign_every: rounds of a federation between two alignments during tuning (section 3.5.2, the paper's t); 0
                leaves them out (the paper's _N, _B).
            realign_steps: steps of each (our choice; the paper's code takes 0.02 epochs of its corpus).
            share: of the kept neurons, how many of the most idle ones such an alignment changes (the paper's p).
            apoz_threshold: magnitude up to which an activation counts as zero (0: exactly zero, eq. 14). GELU is hardly
                ever exactly zero.
            objective: paper: eq. 13; normalised: both terms as means over the mean square of what is taught (the code).
            mu: factor of the weight term in eq. 13 (the code's documentation; the paper names none).
            learning_rate: peak learning rate of an alignment (the paper's code).
            weight_decay: AdamW's, in an alignment (the paper's code).
            warmup_ratio: share of an alignment's steps with rising learning rate (the paper's code).
            max_grad_norm: an alignment clips its gradient to it (the paper's code).
        """

        ratio: Annotated[float, Ge(0), Lt(1)] = 0.75
        retained: tuple[int, ...] = (0, -1)
        r: Annotated[int, Ge(1)] = 8
        alpha: Annotated[float, Gt(0)] = 48
        dropout: Annotated[float, Ge(0), Lt(1)] = 0.1
        realign_every: Annotated[int, Ge(0)] = 10
        realign_steps: Annotated[int, Ge(1)] = 10
        share: Annotated[float, Gt(0), Le(1)] = 0.5
        apoz_threshold: Annotated[float, Ge(0)] = 0.0
        objective: Literal["paper", "normalised"] = "paper"
        mu: Annotated[float, Ge(0)] = 0.01
        learning_rate: Annotated[float, Gt(0)] = 6e-4
        weight_decay: Annotated[float, Ge(0)] = 0.01
        warmup_ratio: Annotated[float, Ge(0), Le(1)] = 0.06
        max_grad_norm: Annotated[float, Gt(0)] = 1.0

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._originals: dict[int, list[nn.Parameter]] = {}  # by layer, as the base model had them
        self._kept: dict[int, torch.Tensor] = {}  # by layer, the numbers of the neurons that stay
        self.realign_every = self.config.realign_every if self.config.ratio else 0

    def prepare(self, model: nn.Module, run: RunContext) -> nn.Module:
        """Narrow the feed-forward blocks and return a ``PeftModel`` with LoRA on every layer's attention.

        Raises:
            AnatomyError: the architecture is unknown.
            CompatibilityError: a ratio or layers that leave a block empty, or every block whole.
        """
        for block, keep in self._narrowed(model, run):
            with run.sharding.gathered(block.parameters):
                kept = most(saliency(block), keep)
                whole = block.put(selected(block, kept))
                self._kept[block.layer] = kept
                self._originals[block.layer] = [on_host(parameter) for parameter in whole]
        config = self.config
        targets = attention_projections(run.anatomy(model).layers)
        return add_lora(model, run, targets, r=config.r, alpha=config.alpha, dropout=config.dropout)

    def _narrowed(self, model: nn.Module, run: RunContext) -> list[tuple[Block, int]]:
        """Return the blocks that lose neurons, each with how many it keeps."""
        blocks, ratio = find_blocks(model, run), self.config.ratio
        asked = f"strategy {self.name!r}"
        for number in self.config.retained:
            if not -len(blocks) <= number < len(blocks):
                raise CompatibilityError(
                    f"{asked} shall retain layer {number} of {len(blocks)}",
                    remedy="count layers from 0, or back from -1",
                )
        if not ratio:
            return []
        whole = {number % len(blocks) for number in self.config.retained}
        chosen = [(block, block.width - round(ratio * block.width)) for block in blocks if block.layer not in whole]
        if not chosen:
            raise CompatibilityError(
                f"{asked} retains all {len(blocks)} layers and would remove nothing",
                remedy="name fewer layers in retained, or ratio=0",
            )
        for block, keep in chosen:
            if keep < 1:
                raise CompatibilityError(
                    f"{asked} with ratio={ratio} leaves layer {block.layer} none of its {block.width} neurons",
                    remedy="remove fewer",
                )
        return chosen

    def plug_in(self, model: nn.Module, proxy: nn.Module, run: RunContext) -> nn.Module:
        """Return the full model as a ``PeftModel`` with the sub-model's adapter and head."""
        return plug_adapter(model, proxy)

    def stored(self, model: nn.Module, run: RunContext) -> Sequence[str]:
        """Return the names of what an alignment before tuning changes, and of what one during tuning has changed."""
        changed = {
            id(parameter)
            for block in self._narrow(model, run)
            for parameter, plain in zip(block.parameters, self._selected(block), strict=True)
            if self.config.distill_steps or self._differs(parameter, plain, run)
        }
        return [name for name, parameter in model.named_parameters() if id(parameter) in changed]

    def _selected(self, block: Block) -> Iterator[torch.Tensor]:
        """Yield the parameters of a narrow block as the base model has them, in host memory."""
        for whole, (_, _, dim) in zip(self._originals[block.layer], block.parts(), strict=True):
            yield whole.detach() if dim is None else whole.detach().index_select(dim, self._kept[block.layer].cpu())

    @staticmethod
    def _differs(parameter: nn.Parameter, plain: torch.Tensor, run: RunContext) -> bool:
        with run.sharding.gathered([parameter]):
            return bool((parameter.detach().cpu() != plain.to(parameter.dtype)).any())

    @contextmanager
    def whole(self, proxy: nn.Module, run: RunContext) -> Iterator[nn.Module]:
        """Inside, the sub-model's blocks have all their neurons, as the base model has them."""
        with with_parameters(self._whole(proxy, run)):
            yield proxy

    def _narrow(self, model: nn.Module, run: RunContext) -> list[Block]:
        """Return the blocks of the layers that lost neurons, of the sub-model or of the full model."""
        return [block for block in find_blocks(model, run) if block.layer in self._originals]

    def _whole(self, proxy: nn.Module, run: RunContext) -> list[tuple[Block, list[nn.Parameter]]]:
        """Return the narrow blocks, each with the parameters the base model has there, on the block's device."""
        return [
            (block, [like(a, b) for a, b in zip(self._originals[block.layer], block.parameters, strict=True)])
            for block in self._narrow(proxy, run)
        ]

    # ---- alignment

    def distill(
        self, model: nn.Module | None, proxy: nn.Module, batches: Iterable[Mapping[str, Any]], run: RunContext
    ) -> Mapping[str, float]:
        """Minimise eq. 13 over all neurons of the narrow blocks, on ``data`` where it is named; return steps, first and last loss."""
        if not self.config.distill_steps:
            return {}
        if not self._originals:
            run.logger.warning("nothing was removed: distill_steps has nothing to bring closer")
            return {}
        if self.config.data is not None:
            batches = TextBatches(self.config, proxy, run.seed, f"strategy {self.name!r}")
        return self._align(model, proxy, batches, run, self.config.distill_steps)

    def statistics(
        self, proxy: nn.Module, batches: Iterable[Mapping[str, Any]], run: RunContext
    ) -> Mapping[str, torch.Tensor]:
        """Return how often each kept neuron is idle (eq. 14), as counts: ``zeros.<layer>``, (N,), and ``tokens``, ()."""
        blocks = self._narrow(proxy, run)
        return count_idle(proxy, blocks, batches, self.config.apoz_threshold) if blocks else {}

    def realign(
        self,
        model: nn.Module,
        proxy: nn.Module,
        statistics: Mapping[str, torch.Tensor],
        batches: Iterable[Mapping[str, Any]],
        run: RunContext,
    ) -> Mapping[str, float]:
        """Minimise eq. 13 over the most idle share of the kept neurons; return steps, first and last loss."""
        if not statistics:
            run.logger.warning("no client told which neurons are idle: nothing is aligned")
            return {}
        blocks = self._narrow(proxy, run)
        masks = [mask for block in blocks for mask in idle_masks(block, statistics, self.config.share)]
        return self._align(model, proxy, batches, run, self.config.realign_steps, masks)

    def realigned(self, proxy: nn.Module, run: RunContext) -> int:
        """Return how many numbers an alignment during tuning changes: those of the most idle share of the kept neurons."""
        return sum(
            getattr(module, name).numel() // block.width * round(self.config.share * block.width)
            for block in self._narrow(proxy, run)
            for module, name, dim in block.parts()
            if dim is not None
        )

    def _align(
        self,
        model: nn.Module | None,
        proxy: nn.Module,
        batches: Iterable[Mapping[str, Any]],
        run: RunContext,
        steps: int,
        masks: list[torch.Tensor] | None = None,
    ) -> dict[str, float]:
        full, whole = (proxy, self._whole(proxy, run)) if model is None else (model, [])
        teacher = Teacher(full, self._narrow(full, run), whole, run)
        return bring_closer(self.config, teacher, proxy, self._narrow(proxy, run), batches, run, steps, masks)

    def export(self, model: nn.Module, run: RunContext, *, merge: bool = False) -> nn.Module:
        """Return the full model: a ``PeftModel`` with the adapter, or with ``merge`` the plain model it is folded into."""
        for block, parameters in self._whole(model, run):
            block.put(parameters)
        return export_adapter(model, merge=merge)


@hookimpl
def tunery_strategies() -> list[type[Strategy]]:
    """Offer :class:`ProxySubFm`."""
    return [ProxySubFm]
