"""SURT, self unsupervised re-training: language modelling on the task's own inputs, then fine-tuning (stability paper, section 3.3).

The training rows are learnt first without their labels: encoders by masked language modelling (Devlin et al. 2019), decoders
by causal language modelling, which is our addition. Only the training split is read. The language-modelling head is dropped
afterwards. It comes from the base model's checkpoint where that holds one. Where it does not, as for sentence encoders saved
without (the quickstart's MiniLM is one), a fresh head is drawn from the run's seed: its output matrix is tied to the input
embeddings, so that only the small transformation in front of it and a bias start untrained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Gt, Lt

from ...registry.context import Stage, Support, TaskKind
from ...registry.contracts import Strategy
from ...registry.errors import CompatibilityError
from ...registry.hookspecs import hookimpl
from ..freezing import train_everything
from ..head_tuning import CacheOptions, HeadTuning, file_features

if TYPE_CHECKING:
    from torch import nn

    from ...registry.context import RunContext


class Surt(Strategy):
    """Re-train the encoder on the training inputs without labels, then fine-tune it, or a head on it.

    The last stage is full fine-tuning or head tuning, not LoRA. Head tuning is that of strategy ``head``: the re-trained
    encoder runs once for each row.
    """

    name = "surt"
    summary = "re-train on the training inputs without labels (MLM or LM), then fine-tune"
    reference = (
        "Fu et al., stability of fine-tuning, section 3.3 (SURT); Devlin et al. 2019 (masked language modelling)"
    )
    supports = Support(tasks=frozenset(TaskKind) - {TaskKind.IMAGE_CLASSIFICATION})

    @dataclass(frozen=True, kw_only=True)
    class Config(CacheOptions):
        """Options of SURT; the paper names no values. Those of the cache matter for head tuning.

        Attributes:
            lm_epochs: passes over the training rows without labels (our choice).
            lm_learning_rate: peak learning rate of the re-training; default: the run's.
            mlm_probability: share of the tokens an encoder has to predict (Devlin et al. 2019, section 3.1).
            tuning: what trains afterwards: everything, or the fresh head on the re-trained and frozen encoder.
        """

        lm_epochs: Annotated[float, Gt(0)] = 3.0
        lm_learning_rate: Annotated[float, Gt(0)] | None = None
        mlm_probability: Annotated[float, Gt(0), Lt(1)] = 0.15
        tuning: Literal["full", "head"] = "full"

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.cache_dir is not None and self.tuning == "full":
                raise ValueError("option cache_dir: with tuning=full no encoder is frozen; set tuning=head")

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._tuning: HeadTuning | None = None

    def prepare(self, model: nn.Module, run: RunContext) -> nn.Module:
        """Set what trains after the re-training.

        Raises:
            CompatibilityError: the model has no language-modelling head, or no fresh head to tune alone.
        """
        _objective(model)
        if self.config.tuning == "head":
            self._tuning = HeadTuning(model, run, self.config, self.name)
        else:
            train_everything(model)
        return model

    def stages(self, model: nn.Module, run: RunContext) -> Sequence[Stage]:
        """Return the re-training, by the objective the model is made for, and the fine-tuning."""
        config = self.config
        retraining = Stage(
            name="retraining",
            objective=_objective(model),
            num_train_epochs=config.lm_epochs,
            learning_rate=config.lm_learning_rate,
            mlm_probability=config.mlm_probability,
        )
        return (retraining, Stage(name="fine_tuning"))

    @contextmanager
    def staged(self, model: nn.Module, run: RunContext, stage: Stage) -> Iterator[nn.Module]:
        """Put a language-modelling head on the model's own backbone; both train, but for what the head does not reach."""
        flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        language_model, reached = _language_model(model, _objective(model), run.revision)
        for name, parameter in language_model.named_parameters():
            parameter.requires_grad_(name in reached and parameter.is_floating_point())
        try:
            with nullcontext() if self._tuning is None else self._tuning.suspended():
                yield language_model
        finally:
            for parameter, flag in flags:
                parameter.requires_grad_(flag)

    def export(self, model: nn.Module, run: RunContext, *, merge: bool = False) -> nn.Module:
        """Return the whole model, with nothing in the encoder's way."""
        if self._tuning is not None:
            self._tuning.end()
            self._tuning = None
        return model


def _objective(model: Any) -> TaskKind:
    """Return what a model of this architecture is pre-trained by.

    Raises:
        CompatibilityError: by neither masked nor causal language modelling.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    config = getattr(model, "config", None)
    if config is not None and not getattr(config, "is_encoder_decoder", False):
        if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
            return TaskKind.MASKED_LM
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            return TaskKind.CAUSAL_LM
    raise CompatibilityError(
        f"strategy 'surt' cannot re-train {type(model).__name__}: it models language neither masked nor causally",
        remedy="use 'full'",
    )


def _language_model(model: Any, objective: TaskKind, revision: str | None) -> tuple[nn.Module, frozenset[str]]:
    """Return the language model around the backbone of ``model``, and the names of what its loss reaches.

    Raises:
        CompatibilityError: its head cannot be made.
    """
    import copy

    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    auto: Any = AutoModelForMaskedLM if objective is TaskKind.MASKED_LM else AutoModelForCausalLM
    if isinstance(model, auto._model_mapping[type(model.config)]):
        return model, frozenset(name for name, _ in model.named_parameters())
    config = copy.deepcopy(model.config)
    source = config._name_or_path
    try:
        language_model = (
            auto.from_pretrained(source, config=config, revision=revision or "main", dtype=model.dtype)
            if source
            else auto.from_config(config, dtype=model.dtype)
        )
    except (OSError, ValueError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CompatibilityError(f"strategy 'surt' cannot load a language-modelling head: {first}") from None
    # The names before the exchange: a pooler that only the task's own model has is not reached.
    reached = frozenset(name for name, _ in language_model.named_parameters())
    setattr(language_model, language_model.base_model_prefix, model.base_model)
    language_model.tie_weights()
    return language_model, reached


@hookimpl
def tunery_strategies() -> list[type[Strategy]]:
    """Offer :class:`Surt`."""
    return [Surt]


@hookimpl
def tunery_run_end(run: RunContext, result: Mapping[str, Any]) -> None:
    """File the features of the run that ends."""
    file_features(run)
