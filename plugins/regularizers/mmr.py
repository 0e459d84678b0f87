"""MMR, maximal margin regularizer: R = 1 / (1 + ||mu_+ - mu_-||), loss + alpha R (Fu et al., stability paper, eq. 8 and 9).

With more than two classes R is the mean over the pairs of classes that have rows. The classes' means are those of one
micro-batch over all ranks: rows of other micro-batches of the same optimizer step are not there yet when it is run.

Shapes: B rows of this rank, C classes, D width of the features, P classes that have rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from ...registry.context import Support, TaskKind
from ...registry.contracts import Regularizer
from ...registry.errors import CompatibilityError
from ...registry.hookspecs import hookimpl
from ..features import pooled

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from ...registry.context import Batch, RunContext

_IGNORED = -100


class MMR(Regularizer):
    """Push the classes' mean features apart; a feature is what enters the head's final linear layer."""

    name = "mmr"
    summary = "push the mean features of the classes apart"
    reference = "Fu et al., stability of fine-tuning, section 3.1, eq. 8 and 9 (max margin regularizer)"
    supports = Support(
        tasks=frozenset({TaskKind.CLASSIFICATION, TaskKind.IMAGE_CLASSIFICATION}),
        needs_anatomy=True,
    )
    batch_wise = True

    @dataclass(frozen=True, kw_only=True)
    class Config(Regularizer.Config):
        """Options of MMR.

        Attributes:
            weight: the paper's alpha, factor of R, which lies between 0 and 1. The paper gives no value; 1 is ours.
            stratified: order the training rows such that every micro-batch has rows of every class.
        """

        weight: Annotated[float, Ge(0)] = 1.0
        stratified: bool = False

    config: Config

    @property
    def stratified(self) -> bool:
        """What the option says."""
        return self.config.stratified

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._hook: RemovableHandle | None = None
        self._waiting = False
        self._features: torch.Tensor | None = None
        self._num_labels = 0
        self._pad_token_id: int | None = None
        self._world_size = 1

    def attach(self, model: nn.Module, run: RunContext) -> None:
        """Watch what enters the head's final linear layer.

        Raises:
            CompatibilityError: the model has no head, or nothing that trains comes before it: R would have no gradient.
        """
        head_name = run.anatomy(model).head
        if head_name is None:
            raise CompatibilityError(f"regularizer 'mmr' finds no head in {type(model).__name__}")
        head = model.get_submodule(head_name)
        own = {id(parameter) for parameter in head.parameters()}
        if not any(parameter.requires_grad and id(parameter) not in own for parameter in model.parameters()):
            raise CompatibilityError(
                f"regularizer 'mmr' would do nothing: every parameter before the head's last layer {head_name!r} is frozen",
                remedy="leave it out or train more than the head",
            )
        config: Any = model.config
        self._num_labels = config.num_labels
        self._pad_token_id = getattr(config, "pad_token_id", None)  # images have no pads
        self._world_size = run.sharding.world_size
        self._hook = head.register_forward_pre_hook(self._before_head)

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Expect the features of one micro-batch."""
        self._waiting, self._features = True, None

    def _before_head(self, _head: nn.Module, args: tuple[Any, ...]) -> None:
        import torch

        if self._waiting and torch.is_grad_enabled():
            self._waiting, self._features = False, args[0]

    def penalty(self, batch: Batch) -> torch.Tensor | None:
        """Return R, in (0, 1] and the same on every rank; ``None`` where fewer than two classes have rows on all ranks.

        Raises:
            CompatibilityError: the labels are not one class a row.
        """
        import torch

        features, self._waiting, self._features = self._features, False, None
        if features is None:
            raise CompatibilityError("regularizer 'mmr' saw nothing enter the head", remedy="leave it out")
        features_BD = pooled(features, batch.inputs, self._pad_token_id)
        features_BD = features_BD.to(torch.promote_types(features_BD.dtype, torch.float32))
        sums_CD, counts_C = self._over_ranks(features_BD, self._classes(batch, len(features_BD)))
        present_P = counts_C.nonzero().squeeze(-1)
        if len(present_P) < 2:
            return None
        means_PD = sums_CD[present_P] / counts_C[present_P, None]
        first, second = torch.triu_indices(len(present_P), len(present_P), offset=1, device=means_PD.device)
        # vector_norm's gradient at 0 is 0: where two means coincide no direction is better than another.
        distances = torch.linalg.vector_norm(means_PD[first] - means_PD[second], dim=-1)
        penalty: torch.Tensor = (1 / (1 + distances)).mean()
        return penalty

    def _classes(self, batch: Batch, rows: int) -> torch.Tensor:
        """Return each row's class, C for rows without one."""
        labels: torch.Tensor | None = batch.inputs.get("labels")
        if labels is None or labels.numel() != rows or labels.is_floating_point():
            raise CompatibilityError("regularizer 'mmr' takes one class a row", remedy="leave it out")
        classes_B = labels.reshape(-1)
        return classes_B.masked_fill(classes_B == _IGNORED, self._num_labels)

    def _over_ranks(self, features_BD: torch.Tensor, classes_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return every class's sum of features (C, D) and number of rows (C,) over all ranks."""
        import torch

        member_BC = torch.nn.functional.one_hot(classes_B, self._num_labels + 1).to(features_BD.dtype)
        ones_B1 = torch.ones_like(features_BD[:, :1])
        own = member_BC.T @ torch.cat([features_BD, ones_B1], dim=1)
        total = own.detach().clone()
        if self._world_size > 1:
            # Every rank comes here with every micro-batch, whatever classes it has: nobody waits for ever.
            torch.distributed.all_reduce(total)
        # Of S = sum_k S_k a rank differentiates its own S_k alone. The objective multiplies R on rank k by its share of
        # the n rows, s_k = W n_k / n, and DDP and DeepSpeed average the gradients of W ranks. With n / n_k put on S_k,
        # (1 / W) sum_k s_k (n / n_k) dR/dS dS_k = dR/dS dS: the gradient one process has, also with unequal n_k.
        scale = total[:, -1].sum() / len(features_BD)
        summed = total + scale * (own - own.detach())
        return summed[:-1, :-1], total[:-1, -1]

    def detach(self, model: nn.Module) -> None:
        """Remove the hook."""
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._features, self._waiting = None, None, False


@hookimpl
def tunery_regularizers() -> list[type[Regularizer]]:
    """Offer :class:`MMR`."""
    return [MMR]
