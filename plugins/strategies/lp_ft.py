"""LP-FT: the head alone on the frozen encoder, then every parameter from there (Kumar et al. 2022, section 3.4).

Linear probing first means that full fine-tuning begins with a head that fits, so that it distorts the features less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt

from ...registry.context import Stage, Support, TaskKind
from ...registry.contracts import Strategy
from ...registry.hookspecs import hookimpl
from ..freezing import keep_eval, train_everything, train_head_alone
from ..head_tuning import CacheOptions, HeadTuning

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from ...registry.context import RunContext


class LpFt(Strategy):
    """Train the fresh head on features of the frozen encoder in eval mode, then everything with the run's own arguments.

    The last stage is full fine-tuning, not LoRA. The first one runs the encoder once for each row, as strategy ``head`` does.
    """

    name = "lp_ft"
    summary = "train the head on the frozen encoder first, then every parameter"
    reference = "Kumar et al. 2022, Fine-Tuning can Distort Pretrained Features, section 3.4"
    supports = Support(
        tasks=frozenset({TaskKind.CLASSIFICATION, TaskKind.REGRESSION, TaskKind.IMAGE_CLASSIFICATION, TaskKind.OTHER}),
        excludes={"mhloss": "it starts from heads of its own, and the stage that trains the head would be for nothing"},
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(CacheOptions):
        """Options of LP-FT; those of the cache are of the first stage.

        Attributes:
            head_epochs: passes over the training rows in the first stage (our choice; the paper solves a logistic
                regression to the end).
            head_learning_rate: peak learning rate of the first stage; default: the run's. A head alone bears, and needs, a
                larger one than full fine-tuning does.
            eval_mode: also fine-tune in eval mode: no dropout, fixed statistics (the paper's variant for models whose
                normalisation keeps running statistics).
        """

        head_epochs: Annotated[float, Gt(0)] = 3.0
        head_learning_rate: Annotated[float, Gt(0)] | None = None
        eval_mode: bool = False

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._hook: RemovableHandle | None = None

    def prepare(self, model: nn.Module, run: RunContext) -> nn.Module:
        """Let everything train, once it is clear that there is a fresh head for the first stage.

        Raises:
            CompatibilityError: the model has no fresh head to begin with.
        """
        train_head_alone(model, run, self.name).remove()
        train_everything(model)
        if self.config.eval_mode:
            self._hook = keep_eval(model, model.children())
        return model

    def stages(self, model: nn.Module, run: RunContext) -> Sequence[Stage]:
        """Return the head alone, then everything."""
        config = self.config
        head = Stage(name="head", num_train_epochs=config.head_epochs, learning_rate=config.head_learning_rate)
        return (head, Stage(name="everything"))

    @contextmanager
    def staged(self, model: nn.Module, run: RunContext, stage: Stage) -> Iterator[nn.Module]:
        """Freeze the encoder and keep it in eval mode."""
        tuning = HeadTuning(model, run, self.config, self.name)
        try:
            yield model
        finally:
            tuning.end()
            train_everything(model)

    def export(self, model: nn.Module, run: RunContext, *, merge: bool = False) -> nn.Module:
        """Return the whole model, its hook removed."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        return model


@hookimpl
def tunery_strategies() -> list[type[Strategy]]:
    """Offer :class:`LpFt`."""
    return [LpFt]
