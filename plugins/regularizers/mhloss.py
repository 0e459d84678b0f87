"""MHLoss, multi-head loss: L = (1 / (n H)) sum_h sum_i l(head_h(x_i)) (Fu et al., stability paper, eq. 10).

A head here is the final linear layer alone, weight and bias, so that the mean of the H heads is one linear layer: evaluation,
files and exports have that mean in the model's own layer. All H are one (H C, D) product. The first head is the model's own
layer as it was drawn; the others are drawn as the model draws it. The H heads train beside the model and are saved with
checkpoints alone.

Shapes: B rows, T positions, D features that enter the layer, H heads, C labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge

from ...registry.context import Support, TaskKind
from ...registry.contracts import Regularizer
from ...registry.errors import CompatibilityError
from ...registry.hookspecs import hookimpl
from ..features import pooled

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ...registry.context import Batch, RunContext

_HEADS = "mhloss_heads"
_SCALE_FREE = ("ada", "rmsprop", "lion", "lamb", "muon")  # Adam, Adagrad, Adafactor, ...


class MHLoss(Regularizer):
    """Train H heads in place of one and keep their mean.

    The training loss is the mean of the heads' losses, at least the loss of their mean. Each head's gradient carries 1/H.
    Weight decay reaches every head. Outputs seen in training, as by other regularizers, are the mean head's.
    """

    name = "mhloss"
    summary = "train many copies of the head's final layer, keep their mean"
    reference = "Fu et al., stability of fine-tuning, section 3.2, eq. 10 (multi-head loss)"
    supports = Support(
        tasks=frozenset({TaskKind.CLASSIFICATION, TaskKind.REGRESSION, TaskKind.IMAGE_CLASSIFICATION}),
        needs_anatomy=True,
    )
    off: ClassVar[dict[str, Any]] = {"heads": 1}

    @dataclass(frozen=True, kw_only=True)
    class Config(Regularizer.Config):
        """Options of MHLoss.

        Attributes:
            weight: 0 leaves MHLoss out; else 1: it is the task loss itself, there is nothing to weigh.
            heads: H, the number of heads (the paper's main experiments have 50); 1 leaves MHLoss out.
            scale_learning_rate: let every head learn H times as fast, by its gradient, so that under SGD it moves as a
                single head does; refused under Adam and its kin, whose steps do not depend on a gradient's scale. Clipping
                sees the scaled gradients.
        """

        heads: Annotated[int, Ge(1)] = 50
        scale_learning_rate: bool = False

        def __post_init__(self) -> None:
            if self.weight not in (0, 1):
                raise ValueError(f"option weight = {self.weight}: it is the task loss itself; allowed: 0, 1")

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._head: Any = None
        self._heads: Any = None
        self._waiting = False
        self._logits: torch.Tensor | None = None
        self._trained = False

    def attach(self, model: nn.Module, run: RunContext) -> None:
        """Put H heads beside the head's final linear layer, whose own weights are their mean from now on.

        Raises:
            CompatibilityError: the model has no such layer of its own kind, or it is frozen; ``scale_learning_rate`` under an
                optimizer that it does nothing for.
        """
        if self.config.heads == 1:
            return
        if self.config.scale_learning_rate and any(kin in run.optimizer for kin in _SCALE_FREE):
            raise CompatibilityError(
                f"regularizer 'mhloss': scale_learning_rate would do nothing under optimizer {run.optimizer!r}, whose steps "
                "do not depend on a gradient's scale",
                remedy="leave it out or use optim: sgd",
            )
        from torch import nn

        head_name = run.anatomy(model).head
        head: Any = None if head_name is None else model.get_submodule(head_name)
        if type(head) is not nn.Linear:
            kind = "no final linear layer" if head is None else f"a {type(head).__name__} for its final layer"
            raise CompatibilityError(f"regularizer 'mhloss' finds {kind} in {type(model).__name__}")
        if not head.weight.requires_grad:
            raise CompatibilityError(
                f"regularizer 'mhloss' would do nothing: the head's last layer {head_name!r} is frozen",
                remedy="leave it out or train the head",
            )
        self._run, self._head = run, head
        self._pad_token_id = getattr(model.config, "pad_token_id", None)
        self._heads = _heads_class()(head, model, self.config, run)
        self._own = dict(head.named_parameters(recurse=False))
        for name, parameter in self._own.items():
            # A buffer is saved whole on every ZeRO stage, also where PEFT leaves out frozen parameters, and no optimizer
            # or communication waits for its gradient.
            with run.sharding.gathered([parameter]):
                value = parameter.detach().clone()
            delattr(head, name)
            head.register_buffer(name, value)
        run.sharding.adopt(head, _HEADS, self._heads)
        vars(head)["forward"] = partial(self._forward, head)

    def _forward(self, head: nn.Module, x: torch.Tensor) -> torch.Tensor:
        import torch

        if not head.training:
            return type(head).forward(head, x)  # type: ignore[no-any-return]
        logits = self._heads(x)
        if self._waiting and torch.is_grad_enabled():
            self._waiting, self._logits = False, logits
        return logits.unflatten(-1, (self.config.heads, -1)).mean(-2)  # type: ignore[no-any-return]

    def begin_step(self, step: int) -> None:
        """Take note that the heads are going to move."""
        self._trained = True

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Expect the logits of one micro-batch."""
        self._waiting, self._logits = self._heads is not None, None

    def task_loss(self, batch: Batch) -> torch.Tensor | None:
        """Return the mean over heads and rows of the task's loss; ``None`` with one head.

        Raises:
            CompatibilityError: the forward pass did not come by the head, or there are no labels.
        """
        if self._heads is None:
            return None
        logits, self._waiting, self._logits = self._logits, False, None
        labels = batch.inputs.get("labels")
        if logits is None or labels is None:
            missing = "labels" if logits is not None else "output of the head"
            raise CompatibilityError(f"regularizer 'mhloss' finds no {missing} in training", remedy="leave it out")
        logits_BL = pooled(logits, batch.inputs, self._pad_token_id)
        logits_BHC = logits_BL.reshape(len(logits_BL), self.config.heads, -1)
        # ZeRO-3 expects the backward pass of every module to begin at its output.
        through_output: torch.Tensor = 0 * batch.outputs["logits"].sum()
        return _loss(logits_BHC, labels.to(logits.device), batch.task.kind) + through_output

    def settle(self) -> None:
        """Write the mean of the heads into the model's own layer."""
        if self._heads is None:
            return
        stacked = dict(self._heads.named_parameters())
        with self._run.sharding.gathered(stacked.values()):
            for name, heads in stacked.items():
                mean = heads.detach().unflatten(0, (self.config.heads, -1)).mean(0)
                getattr(self._head, name).copy_(mean)

    def detach(self, model: nn.Module) -> None:
        """Give the model its own layer back: trained, it is the mean of the heads, else as it was."""
        if self._heads is None:
            return
        if self._trained:
            self.settle()
        del vars(self._head)["forward"]
        delattr(self._head, _HEADS)
        for name, parameter in self._own.items():
            value = getattr(self._head, name)
            delattr(self._head, name)
            with self._run.sharding.written([parameter]):
                parameter.data.copy_(value)
            self._head.register_parameter(name, parameter)
        self._head, self._heads, self._own, self._trained = None, None, {}, False


def _loss(logits_BHC: torch.Tensor, labels: torch.Tensor, kind: TaskKind) -> torch.Tensor:
    """Return the mean over rows and heads of the loss that transformers gives this kind of task."""
    import torch
    from torch.nn import functional

    logits_BHC = logits_BHC.to(torch.promote_types(logits_BHC.dtype, torch.float32))
    if kind is TaskKind.REGRESSION or labels.is_floating_point():
        targets = labels.to(logits_BHC.dtype).reshape(len(labels), 1, -1).expand_as(logits_BHC)
        if kind is TaskKind.REGRESSION:
            return functional.mse_loss(logits_BHC, targets)
        return functional.binary_cross_entropy_with_logits(logits_BHC, targets)  # several labels a row
    classes = labels.reshape(-1, 1).expand(logits_BHC.shape[:2])
    return functional.cross_entropy(logits_BHC.flatten(0, 1), classes.flatten())


@cache
def _heads_class() -> Any:
    import torch
    from torch import nn
    from torch.nn import functional
    from transformers import PreTrainedModel

    class Heads(nn.Module):
        """H linear layers as one: (..., D) -> (..., H C), head by head. The first is ``head``, the others are drawn."""

        bias: nn.Parameter | None

        def __init__(self, head: nn.Linear, model: nn.Module, config: MHLoss.Config, run: RunContext) -> None:
            super().__init__()
            self.speed = config.heads if config.scale_learning_rate else 1
            owner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
            own = dict(head.named_parameters(recurse=False))
            with run.sharding.gathered(own.values()), torch.random.fork_rng(), torch.no_grad():
                torch.manual_seed(run.seed)  # apart from the run's own generator, which draws what it draws without
                drawn = []
                for _ in range(config.heads - 1):
                    fresh = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None)
                    if owner is not None:
                        owner._init_weights(fresh)  # type: ignore[no-untyped-call]
                    drawn.append(dict(fresh.named_parameters()))
                for name, parameter in own.items():
                    copies = [parameter.detach(), *(copy[name].detach().to(parameter) for copy in drawn)]
                    self.register_parameter(name, nn.Parameter(torch.cat(copies)))
            if "bias" not in own:
                self.register_parameter("bias", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(x, self._faster(self.weight), self._faster(self.bias))

        def _faster(self, parameter: Any) -> Any:
            if parameter is None or self.speed == 1:
                return parameter
            # The value is the parameter's to the bit, the gradient is multiplied.
            return parameter + (self.speed - 1) * (parameter - parameter.detach())

    return Heads


@hookimpl
def tunery_regularizers() -> list[type[Regularizer]]:
    """Offer :class:`MHLoss`."""
    return [MHLoss]
