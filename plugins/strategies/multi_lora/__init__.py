"""Multi-LoRA: k tasks train together on one frozen A; h = W0 x + (alpha / r) B_i A x, and every task leaves as a plain LoRA.

"Parameter-Efficient Fine-Tuning via Partially Decomposable Loss Analysis and Sharing" (anonymous), section 5 and Algorithm 1.
Read on in ``config.py`` and ``tuner.py`` (the PEFT method), ``layers.py`` (an adapted module), ``heads.py``, ``last_token.py``
(classifiers beside a language-modelling head), ``losses.py``, ``routing.py`` (which row belongs to which task), ``packing.py``
(an encoder's batch without its padding) and ``splitting.py`` (any other model's in pieces of rows of similar length).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from annotated_types import Ge, Gt, Lt, MinLen

from ....registry.context import Support, Task, TaskKind
from ....registry.contracts import Strategy
from ....registry.errors import ArtifactError, CompatibilityError, DataError
from ....registry.hookspecs import hookimpl
from ...adapters import fresh_modules, query_and_value, task_type

if TYPE_CHECKING:
    from torch import nn

    from ....registry.context import RunContext


class MultiLora(Strategy):
    """Train one B (and head) per task on an A that all tasks share and that stays as it was drawn.

    A task ends where it ends alone on the same rows (claim 4.2): after 50 steps to 1e-6 in float64. In float32 rounding is
    left, which AdamW can enlarge where gradients are small: some 1e-7 on tiny models, and 2e-4 is what tests allow.
    """

    name = "multi_lora"
    summary = "train several tasks at once: one frozen LoRA A for all, a B and a head for each"
    reference = "Multi-LoRA, section 5 (frozen input-side A) and Algorithm 1 (init=gaussian, frozen=b)"
    supports = Support(
        tasks=frozenset(
            {TaskKind.CLASSIFICATION, TaskKind.REGRESSION, TaskKind.CAUSAL_LM, TaskKind.IMAGE_CLASSIFICATION}
        ),
        several_tasks=True,
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of Multi-LoRA.

        Attributes:
            r: rank of the update; the paper's NLU runs take 8, its NLG runs 4.
            alpha: the update is scaled by alpha / r; the paper takes 16 (NLU) and 32 (NLG).
            dropout: probability of zeroing an element of x before A, in training; the paper takes 0.1 for NLG.
            target_modules: last parts of module names to adapt; default: the attention's query and value projections. Of
                GPT-2 that is c_attn, one module with the key in it.
            init: how the shared factor is drawn: default (uniform in +-1/sqrt(inputs), section 5) or gaussian (N(0, 1),
                Algorithm 1).
            frozen: the shared factor: a (input side, section 5) or b (output side, Algorithm 1).
            tasks: names of the run's tasks that train; default: all of them.
            add_to: a finished multi_lora run or export: its factor, tasks and heads are taken over as they are, and the
                run's tasks are added to them.
        """

        r: Annotated[int, Ge(1)] = 8
        alpha: Annotated[float, Gt(0)] = 16
        dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
        target_modules: tuple[str, ...] | None = None
        init: Literal["default", "gaussian"] = "default"
        frozen: Literal["a", "b"] = "a"
        tasks: Annotated[tuple[str, ...], MinLen(1)] | None = field(default=None, metadata={"recorded": False})
        add_to: str | None = field(default=None, metadata={"recorded": False})

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._earlier: Any = None  # the MultiLoraConfig of the run that is added to

    def prepare(self, model: nn.Module, run: RunContext) -> nn.Module:
        """Return a ``PeftModel`` whose adapted modules answer as the base model's, since every B_i starts at 0.

        Raises:
            AnatomyError: no ``target_modules`` given and the architecture is unknown.
            CompatibilityError: a module that is not there or cannot be adapted, or a rank that is too large for one.
            DataError: two tasks of one name, or a name in ``tasks`` that the run does not have or that stands there twice.
            ArtifactError: ``add_to`` is no multi_lora run, or one with another r, alpha, init or frozen.
        """
        from peft import get_peft_model

        from .config import MultiLoraConfig, describe
        from .last_token import models_language
        from .tuner import of

        names = [task.name for task in run.tasks]
        trained = self.config.tasks or names
        for name in self.config.tasks or ():
            if name not in names:
                raise DataError(f"tasks={name!r} is none of the run's", known=names)
            if trained.count(name) > 1:
                raise DataError(f"tasks={name!r} twice", known=names)
        targets = query_and_value(model, run) if self.config.target_modules is None else self.config.target_modules
        config = MultiLoraConfig(
            tasks=[describe(task) | ({} if task.name in trained else {"frozen": True}) for task in self.tasks(run)],
            r=self.config.r,
            lora_alpha=self.config.alpha,
            lora_dropout=self.config.dropout,
            target_modules=list(targets),
            heads=fresh_modules(model, run) or None,
            init=self.config.init,
            frozen=self.config.frozen,
        )
        headless = config.heads is None and not models_language(model)
        if len(config.tasks) > 1 and headless and not run.task.kind.is_language_modelling:
            raise CompatibilityError(
                f"{type(model).__name__} has no fresh head to give the tasks", remedy="start from a model without one"
            )
        adapted: nn.Module = get_peft_model(cast(Any, model), cast(Any, config))
        tuner = of(adapted)
        tuner.split = not run.regularizers  # they look at one forward pass a micro-batch
        # Ranks must do the same work; and a penalty on the weights counts every task's in every micro-batch.
        tuner.router.everyone = bool(run.regularizers) or run.sharding.world_size > 1 or run.sharding.zero_stage > 0
        if len(run.tasks) == 1:
            tuner.set_task(run.task.name)
        if self.config.add_to is not None:
            self._take_over(adapted)
        return adapted

    def builds_on(self) -> str | None:
        """Return ``add_to``."""
        return self.config.add_to

    def tasks(self, run: RunContext) -> tuple[Task, ...]:
        """Return the run's tasks, and behind them those of the run that is added to.

        Raises:
            ArtifactError: ``add_to`` is no multi_lora run, or has another r, alpha, init or frozen.
            DataError: it has a task of the run's already.
        """
        if self.config.add_to is None:
            return run.tasks
        from .config import to_task

        earlier = self._read_earlier(Path(self.config.add_to))
        known = [to_task(entry) for entry in earlier.tasks]
        for task in run.tasks:
            if task.name in [other.name for other in known]:
                raise DataError(f"{self.config.add_to} has a task {task.name!r} already", remedy="rename one of them")
        return (*run.tasks, *known)

    def gradient_groups(self, model: nn.Module, run: RunContext) -> Sequence[Sequence[nn.Parameter]]:
        """Return one group per task that trains, so that no task's gradient shortens another's step."""
        from .heads import TaskHeads
        from .layers import TaskMatrices

        groups: dict[str, list[nn.Parameter]] = {}
        for module in model.modules():
            if isinstance(module, TaskMatrices):
                for name, parameter in module.named_parameters():
                    groups.setdefault(name, []).append(parameter)
            elif isinstance(module, TaskHeads):
                for name, head in module.heads.items():
                    groups.setdefault(name, []).extend(head.parameters())
        return [group for group in groups.values() if group]

    def counts(self, model: nn.Module) -> Mapping[str, int]:
        """Return A + k B, heads aside: what the paper's tables call trainable, the frozen A included."""
        from .tuner import of

        return {"paper": of(model).parameter_counts()["paper"]}

    def keep_tasks(self, model: nn.Module, names: Mapping[str, str]) -> None:
        """Keep these tasks under these new names and forget the others; A stays."""
        from .tuner import of

        of(model).keep_tasks(names)

    def export(self, model: nn.Module, run: RunContext, *, merge: bool = False) -> nn.Module:
        """Return one task as a plain PEFT LoRA model with its head in ``modules_to_save``, or merged, as a plain model.

        Raises:
            CompatibilityError: the run has several tasks and none was chosen.
        """
        from peft import LoraConfig, get_peft_model

        from .layers import MultiLoraLayer
        from .tuner import of

        if len(run.tasks) > 1:
            known = [task.name for task in run.tasks]
            raise CompatibilityError("several tasks, and one to export", known=known, remedy="choose it with --task")
        tuner, (config,) = of(model), model.peft_config.values()  # type: ignore[operator]
        layers = [module for module in tuner.modules() if isinstance(module, MultiLoraLayer)]
        factors = {layer.name: [f.detach().clone() for f in layer.factors(run.task.name)] for layer in layers}
        conv1d, heads = layers[0].fan_in_fan_out, None if run.task.kind.is_language_modelling else config.heads
        base = tuner.plain(run.task.name, merge)
        if merge:
            return cast("nn.Module", base)
        lora: Any = get_peft_model(
            base,
            LoraConfig(
                r=config.r,
                lora_alpha=config.lora_alpha,
                lora_dropout=config.lora_dropout,
                target_modules=config.target_modules,
                fan_in_fan_out=conv1d,
                modules_to_save=heads,
                task_type=task_type(run),
                inference_mode=True,
            ),
        )
        saved = lora.peft_config["default"]
        if not isinstance(saved.target_modules, str):
            saved.target_modules = sorted(saved.target_modules)  # PEFT keeps a set, whose order changes from run to run
        for name, (a, b) in factors.items():
            layer = base.get_submodule(name)
            layer.lora_A["default"].weight.data.copy_(a)
            layer.lora_B["default"].weight.data.copy_(b)
        return cast("nn.Module", lora.eval())

    # ---- a run that is added to

    def _read_earlier(self, folder: Path) -> Any:
        from peft import PeftConfig

        from .config import MultiLoraConfig

        if self._earlier is not None:
            return self._earlier
        if not (folder / "adapter_config.json").is_file():
            raise ArtifactError(f"add_to={str(folder)!r} holds no adapter", remedy="name a finished multi_lora run")
        try:
            config = PeftConfig.from_pretrained(str(folder))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(
                f"add_to={str(folder)!r} has an adapter_config.json that cannot be read: {error}"
            ) from None
        if not isinstance(config, MultiLoraConfig):
            raise ArtifactError(f"add_to={str(folder)!r} is of PEFT type {config.peft_type}, not multi_lora")
        for ours, theirs in (("r", "r"), ("alpha", "lora_alpha"), ("init", "init"), ("frozen", "frozen")):
            if getattr(self.config, ours) != getattr(config, theirs):
                raise ArtifactError(
                    f"{folder} was trained with {ours}={getattr(config, theirs)}, not {getattr(self.config, ours)}",
                    remedy=f"add {ours}={getattr(config, theirs)} to the strategy",
                )
        config.tasks = [{key: value for key, value in entry.items() if key != "frozen"} for entry in config.tasks]
        self._earlier = config
        return config

    def _take_over(self, model: nn.Module) -> None:
        """Load the earlier run's values; A is among them, so its tasks go on meaning the same."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = Path(str(self.config.add_to))
        try:
            state = load_file(folder / "adapter_model.safetensors")
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"add_to={str(folder)!r} has weights that cannot be read: {error}") from None
        own = model.state_dict()
        for key, value in state.items():
            if key not in own or own[key].shape != value.shape:
                raise ArtifactError(
                    f"{folder} holds {key!r} {tuple(value.shape)}, which this model lacks",
                    remedy="use the base model and target_modules that run was trained with",
                )
        model.load_state_dict(state, strict=False)


@hookimpl
def tunery_strategies() -> list[type[Strategy]]:
    """Offer :class:`MultiLora`."""
    return [MultiLora]


def __getattr__(name: str) -> Any:
    """Offer the PEFT method's classes, which load torch, without loading it for who only lists plugins."""
    if name in ("MultiLoraConfig", "MultiLoraModel"):
        from . import tuner

        return getattr(tuner, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
