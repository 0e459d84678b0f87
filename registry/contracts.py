"""The three kinds of plugin. Each docstring states its laws; ``tunery.registry.conformance`` checks every one of them.

Laws of every plugin: the same seed twice gives bit-identical weights on CPU; an unknown config key, a wrong type or a
value out of range is a one-line error that names the plugin, the field, what was given and what is allowed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge

from .context import Stage, Support
from .errors import CompatibilityError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .context import Batch, Measurement, RunContext, Subject, Task


class Plugin(ABC):
    """What all three kinds have in common.

    Attributes:
        name: lower_snake_case; what a user types.
        summary: one line.
        reference: paper and equation, or the document the method comes from.
        Config: frozen, keyword-only dataclass; every field documented with its unit and source.
        supports: what the plugin works with.
    """

    kind: ClassVar[str]
    name: ClassVar[str]
    summary: ClassVar[str]
    reference: ClassVar[str]
    supports: ClassVar[Support] = Support()

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """No options."""

    def __init__(self, config: Any) -> None:
        self.config = config


class Strategy(Plugin):
    """What trains, and what the trained artefact is.

    One that trains several tasks at once (``supports.several_tasks``) prepares a model that takes ``task_ids``, each row's
    position among the run's tasks, in every call (of a ``PeftModel`` also its base model, which ``generate`` calls), and
    whose outputs hold, while training, ``task_losses``: every task's mean loss over its own rows, shape (tasks,). Where some
    of the tasks model language, the label of another task's row stands in the first position of its labels, -100 behind it,
    and so do the row's logits in the outputs of an evaluation.

    Laws: after :meth:`prepare` the output for an evaluation batch equals the base model's wherever ``identity_start``
    promises it; exactly the parameters that then require a gradient, or that :meth:`stored` names, change, no other; save,
    load, evaluate is bit-identical; :meth:`export` gives logits within 1e-5 of the trained model's; a run killed after any
    step of any stage and resumed ends with the weights of one that was not. With several stages, what a stage before the
    last trains may change as well.
    """

    kind: ClassVar[str] = "strategy"
    identity_start: ClassVar[bool] = True

    @abstractmethod
    def prepare(self, model: nn.Module, run: RunContext) -> nn.Module:
        """Return the model to train, its ``requires_grad`` flags set. Called once, before anything is sharded or wrapped.

        The result is a ``transformers.PreTrainedModel`` or a ``peft.PeftModel``, the two that save to files others read.
        """

    def stages(self, model: nn.Module, run: RunContext) -> Sequence[Stage]:
        """Return what is trained one after the other; the last stage is the run itself and only has a name.

        Args:
            model: what :meth:`prepare` returned.
            run: the run it belongs to.
        """
        return (Stage(name="fine_tuning"),)

    def staged(self, model: nn.Module, run: RunContext, stage: Stage) -> AbstractContextManager[nn.Module]:
        """Return a context with the module that ``stage`` trains, its ``requires_grad`` flags set.

        Entered for every stage but the last. The module is ``model`` or shares with it the parameters that later stages go
        on with; it is a ``PreTrainedModel`` or a ``PeftModel``. On exit everything but the values of parameters and buffers
        is as :meth:`prepare` left it. A finished stage is entered again when a run resumes, to take over what it learnt.

        Args:
            model: what :meth:`prepare` returned; sharded or not, trained by the stages before.
            run: the run it belongs to.
            stage: one of :meth:`stages`.
        """
        return nullcontext(model)

    def export(self, model: nn.Module, run: RunContext, *, merge: bool = False) -> nn.Module:
        """Return the deployable model: what ``from_pretrained`` loads where tunery is not installed.

        Args:
            model: what :meth:`prepare` returned, trained.
            run: the run it belongs to; of several tasks, it holds the one to export.
            merge: fold an adapter into its base model instead of keeping it apart.
        """
        return model

    def stored(self, model: nn.Module, run: RunContext) -> Sequence[str]:
        """Return the names of frozen parameters that a run's files must hold beside an adapter; none for most.

        They are what :meth:`prepare` does not make of the base model again. Written to ``strategy.safetensors`` of every
        checkpoint and of the run, and read back before anything is sharded.

        Args:
            model: what :meth:`prepare` returned.
            run: the run it belongs to.
        """
        return ()

    def builds_on(self) -> str | None:
        """Return the folder of the run whose weights this one begins with; its base model has to be the same."""
        return None

    def tasks(self, run: RunContext) -> tuple[Task, ...]:
        """Return the tasks of the artefact: those of the run first, in their order, then any it held before."""
        return run.tasks

    def gradient_groups(self, model: nn.Module, run: RunContext) -> Sequence[Sequence[nn.Parameter]]:
        """Return the parameters whose gradients are clipped together, and rest where they are zero; none for all at once."""
        return ()

    def counts(self, model: nn.Module) -> Mapping[str, int]:
        """Return further counts of parameters for a run's result, by name; none for most.

        ``paper``: what the method's paper counts, where that is not what trains.

        Args:
            model: what :meth:`prepare` returned, trained; sharded or not.
        """
        return {}

    def keep_tasks(self, model: nn.Module, names: Mapping[str, str]) -> None:
        """Keep the tasks that ``names`` lists, under the names it gives them, and forget the others.

        Raises:
            CompatibilityError: the strategy does not hold tasks apart.
        """
        raise CompatibilityError(f"strategy {self.name!r} holds no tasks that could be dropped or renamed")


class Regularizer(Plugin):
    """What the loss adds, or the weights do, while training.

    Laws: attach then detach leaves state_dict keys, classes and evaluation output unchanged; gradients agree for
    (batch 8), (2 x accumulation 4) unless ``batch_wise``, (2 ranks x 4) and every ZeRO stage; the off value of its
    strength (``off``) is bit-identical to not having it.

    Attributes:
        off: config values that switch the method off, for the law above.
        batch_wise: whether it looks at relations between the rows of a micro-batch, all ranks' together, so that
            accumulation changes it. A mean over rows does not.
    """

    kind: ClassVar[str] = "regularizer"
    off: ClassVar[dict[str, Any]] = {"weight": 0.0}
    batch_wise: ClassVar[bool] = False

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options every regularizer has.

        Attributes:
            weight: factor of the penalty in the loss; 0 leaves it out.
        """

        weight: Annotated[float, Ge(0)] = 1.0

    @property
    def stratified(self) -> bool:
        """Whether every micro-batch, all ranks' together, should have rows of every class, as far as there are enough."""
        return False

    @abstractmethod
    def attach(self, model: nn.Module, run: RunContext) -> None:
        """Prepare the model, before it is sharded or wrapped. Work inside modules' forward, so ZeRO-3 sees it too."""

    def begin_step(self, step: int) -> None:
        """Get ready for the micro-batches of one optimizer step; ``step`` are done: the same on every rank, and resumed."""

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Get ready for the forward pass of one training micro-batch. A re-run in the backward pass comes without it."""

    def task_loss(self, batch: Batch) -> torch.Tensor | None:
        """Return a scalar that replaces the task loss (mean over the micro-batch), or ``None`` to leave it."""
        return None

    def before_update(self, learning_rate: Callable[[nn.Parameter], float]) -> None:
        """Change weights directly, after the gradients are there and right before the optimizer uses them.

        Called once an optimizer step on every rank. Write into ``Sharding.updated``, which is what the optimizer goes on from.

        Args:
            learning_rate: of a parameter, at this step.
        """

    def settle(self) -> None:
        """Write into the model's own weights what they stand for, if training state lives elsewhere (``Sharding.adopt``).

        Called on every rank before the model is evaluated, measured or saved; training goes on afterwards.
        """

    def penalty(self, batch: Batch) -> torch.Tensor | None:
        """Return the unweighted penalty, a scalar averaged over the micro-batch, or ``None``. Called once a forward pass.

        The objective multiplies by ``config.weight`` and keeps it exact under accumulation and over ranks.
        """
        return None

    @abstractmethod
    def detach(self, model: nn.Module) -> None:
        """Make the model plain again: same classes, same state_dict keys."""


class Probe(Plugin):
    """What is measured about the weights.

    Laws: parameters, buffers, gradients, optimizer state, train/eval mode and RNG state are bit-identical afterwards,
    also when it raises; the same seed gives the same measurement on any number of ranks, within float tolerance. Under
    ZeRO-3 this leaves out an error inside the model's own forward pass, which DeepSpeed's record of it does not survive.
    """

    kind: ClassVar[str] = "probe"

    @abstractmethod
    def measure(self, subject: Subject) -> Iterable[Measurement]:
        """Measure ``subject``. Called on every rank; rank 0's measurements are kept."""


KINDS: dict[str, type[Plugin]] = {cls.kind: cls for cls in (Strategy, Regularizer, Probe)}
