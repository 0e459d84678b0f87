"""Multi-LoRA as a PEFT method: ``get_peft_model(model, MultiLoraConfig(tasks=...))`` works without a Trainer of tunery.

PEFT has no public way to register a method from outside; a plain string key in its tables is all it looks up. One
adapter holds all tasks: A once, B_i and head_i per task, in one ``adapter_model.safetensors``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner, check_target_module_exists
from peft.utils import INCLUDE_LINEAR_LAYERS_SHORTHAND
from torch import nn

from ....registry.errors import CompatibilityError, DataError
from .config import PEFT_TYPE, MultiLoraConfig
from .forward import JointForward
from .heads import TaskHeads, find_heads, fresh_heads
from .last_token import LastTokenReader, add_classifier, give_labels, models_language
from .layers import ADAPTABLE, MultiLoraLayer, adaptable, features, is_within, numel, values_of
from .routing import Router


class MultiLoraModel(BaseTuner):
    """The tuner: adapts modules, gives every task its head, sends rows their way and computes the tasks' losses.

    The base model is called with ``task_ids``, integers of shape (rows,), beside its usual inputs, or :meth:`set_task`
    or :meth:`task` chose a task for all rows. With ``labels``, ``outputs.loss`` is the sum of the tasks' mean losses;
    while training, ``outputs.task_losses`` holds them one by one, shape (tasks,). How labels and logits lie where some tasks
    model language and others do not is said in ``losses.py`` and ``forward.py``.

    Attributes:
        tasks: the tasks, in the order of their numbers.
        router: says which row belongs to which.
        split: whether a batch of unequal rows may run without its padding, or in pieces, where that is faster; outputs in
            pieces hold logits alone, and who asks for hidden states or attentions gets the batch run as a whole.
    """

    prefix = "lora_"
    tuner_layer_cls = MultiLoraLayer
    target_module_mapping: dict[str, list[str]] = {}  # noqa: RUF012  # PEFT's own declaration

    router: Router
    reader: LastTokenReader | None  # where the base model's own head models language and other tasks classify

    # ---- building

    def _pre_injection_hook(self, model: nn.Module, config: Any, adapter_name: str) -> None:
        self.tasks = config.parsed()
        self.router = Router([task.name for task in self.tasks])
        self.split = True
        self.reader = None
        # PEFT writes sets and tuples in any order, and the file should say what was chosen.
        config.heads = self._heads(model, config.heads)
        self.adaptable = adaptable(model, config.heads or ())

    def _heads(self, model: Any, asked: Sequence[str] | None) -> list[str] | None:
        """Return the names of the modules that tasks get a copy of, after adding the one that a language model lacks."""
        words = [task for task in self.tasks if task.kind.is_language_modelling]
        if words and not models_language(model):
            raise CompatibilityError(
                f"task {words[0].name!r} models language and {type(model).__name__} has no head for it",
                remedy="load a decoder with AutoModelForCausalLM",
            )
        if len(words) == len(self.tasks):
            return None
        if not models_language(model):
            return find_heads(model, asked)
        name = add_classifier(model)
        if asked and list(asked) != [name]:
            raise CompatibilityError(f"heads={list(asked)} of a language model", known=[name])
        return [name]

    def _check_new_adapter_config(self, config: Any) -> None:
        if len(self.peft_config) > 1:
            raise CompatibilityError("a second Multi-LoRA adapter in one model", remedy="add a task to the first one")

    def _prepare_adapter_config(self, peft_config: Any, model_config: Any) -> Any:
        model: Any = self.model
        targets, names = peft_config.target_modules, [name for name, _ in model.named_modules()]
        if not targets:
            raise CompatibilityError("MultiLoraConfig without target_modules", known=self._known())
        if targets == INCLUDE_LINEAR_LAYERS_SHORTHAND:
            output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
            linear = [name for name in self.adaptable if model.get_submodule(name) is not output]
            one = dataclasses.replace(peft_config, target_modules=linear)
            peft_config.target_modules = [name for name in linear if self._check_target_module_exists(one, name)]
            return peft_config
        for target in [targets] if isinstance(targets, str) else targets:
            one = dataclasses.replace(peft_config, target_modules=target if isinstance(targets, str) else [target])
            if not any(self._check_target_module_exists(one, name) for name in names):
                where = f" outside {', '.join(peft_config.heads)}" if peft_config.heads else ""
                raise CompatibilityError(f"target_modules: no module {target!r}{where}", known=self._known())
        return peft_config

    @staticmethod
    def _check_target_module_exists(peft_config: Any, key: str) -> Any:
        """Leave heads alone, as PEFT does what is in ``modules_to_save``."""
        return not is_within(key, peft_config.heads or ()) and check_target_module_exists(peft_config, key)

    def _known(self) -> list[str]:
        return sorted({name.rsplit(".", 1)[-1] for name in self.adaptable})

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        if current_key not in self.adaptable:
            shared = isinstance(target, ADAPTABLE)
            reason = "whose weight is another module's too" if shared else f"a {type(target).__name__}"
            raise CompatibilityError(f"multi_lora cannot adapt {current_key!r}, {reason}", known=self._known())
        if peft_config.r > min(features(target)):
            raise CompatibilityError(
                f"r={peft_config.r} is more than module {current_key!r} has: {min(features(target))}",
                remedy="choose a smaller r",
            )
        adapted = MultiLoraLayer(
            target,
            current_key,
            self.router,
            r=peft_config.r,
            alpha=peft_config.lora_alpha,
            dropout=peft_config.lora_dropout,
            gaussian=peft_config.init == "gaussian",
            frozen=peft_config.frozen,
            trains={entry["name"]: not entry.get("frozen") for entry in peft_config.tasks},
        )
        setattr(parent, target_name, adapted)

    def _post_injection_hook(self, model: nn.Module, config: Any, adapter_name: str) -> None:
        if isinstance(config.target_modules, set):  # PEFT's own, shortened; its order changes from run to run
            config.target_modules = sorted(config.target_modules)
        heads = config.heads or []
        wrappers = {name: TaskHeads(model.get_submodule(name), name, self.router) for name in heads}
        own = [pair for pair in zip(self.tasks, config.tasks, strict=True) if not pair[0].kind.is_language_modelling]
        for index, (task, entry) in enumerate(own):
            for name, head in fresh_heads(model, heads, task.num_labels, index == 0).items():
                wrappers[name].put(task.name, head, trains=not entry.get("frozen"))
        for name, wrapper in wrappers.items():
            wrapper.base_layer.requires_grad_(False)
            model.set_submodule(name, wrapper)
            if config.inference_mode:
                wrapper.set_adapter(adapter_name, inference_mode=True)
        if wrappers and models_language(model):
            self.reader = LastTokenReader(model, wrappers[heads[0]], self.tasks)
        # Attributes of the instance, not hooks: a hook could not run the model in pieces.
        model.forward = JointForward(self)
        if hasattr(model, "generate"):
            model.__dict__["generate"] = self.generate

    # ---- choosing, adding, dropping tasks

    @property
    def _config(self) -> MultiLoraConfig:
        (config,) = self.peft_config.values()
        assert isinstance(config, MultiLoraConfig)
        return config

    def set_task(self, name: str | None) -> None:
        """Choose the task of rows that come without ``task_ids``; ``None`` for none.

        Raises:
            DataError: there is no such task.
        """
        if name is not None:
            self.router.number(name)
        self.router.active = name

    @contextmanager
    def task(self, name: str) -> Iterator[None]:
        """Inside, rows that come without ``task_ids`` belong to task ``name``.

        Raises:
            DataError: there is no such task.
        """
        before = self.router.active
        self.set_task(name)
        try:
            yield
        finally:
            self.router.active = before

    def generate(self, *args: Any, task_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Generate as the base model does, each prompt with its own task's update, however many beams it has.

        Args:
            args: of the base model's ``generate``, and likewise ``kwargs``.
            task_ids: integers of shape (prompts,), each prompt's position among the tasks; default: the chosen task.

        Raises:
            DataError: a prompt of an unknown task or of one that models no language, or ``task_ids`` that do not say one for
                each prompt.
        """
        base: Any = type(self.model)
        prompts = next((len(value) for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), 1)
        with self.router.generating(task_ids, prompts):
            asked = [self.router.active] if task_ids is None else [self.router.tasks[number] for number in task_ids]
            for task in self.tasks:
                if task.name in asked and not task.kind.is_language_modelling:
                    writing = [other.name for other in self.tasks if other.kind.is_language_modelling]
                    raise DataError(f"task {task.name!r} is a {task.kind.value} and writes no text", known=writing)
            return base.generate(self.model, *args, **kwargs)

    def keep_tasks(self, names: Mapping[str, str]) -> None:
        """Keep these tasks, in this order, under these new names, and forget the others.

        Raises:
            DataError: an unknown task, none at all, or two of one new name.
        """
        numbers = [self.router.number(name) for name in names]
        config = self._config
        entries = [{**config.tasks[number], "name": new} for number, new in zip(numbers, names.values(), strict=True)]
        type(config)(**{**config.to_dict(), "tasks": entries})  # refuses what cannot be
        for module in self.model.modules():
            if isinstance(module, MultiLoraLayer):
                own = module.per_task
                kept = {new: (own.of(old), old in own._parameters) for old, new in names.items()}
                for old in self.router.tasks:
                    own.drop(old)
                for new, (value, trains) in kept.items():
                    own.put(new, value.detach(), trains)
            elif isinstance(module, TaskHeads):
                heads = {new: module.heads[old] for old, new in names.items() if old in module.heads}
                module.heads.clear()
                module.heads.update(heads)
        config.tasks = entries
        self.tasks[:] = config.parsed()
        active = self.router.active
        self.router.tasks[:] = [task.name for task in self.tasks]
        self.router.active = names.get(active or "") or (self.router.tasks[0] if len(self.tasks) == 1 else None)
        self.router.groups = None

    def parameter_counts(self) -> dict[str, int]:
        """Count numbers four ways.

        Returns:
            ``trains``: with a gradient; ``stored``: in the adapter's file, A and heads included; ``paper``: A + k B, as the
            paper's tables count; ``loras``: what k separate LoRAs of this rank hold, k (A + B).
        """
        layers = [module for module in self.model.modules() if isinstance(module, MultiLoraLayer)]
        heads = [module for module in self.model.modules() if isinstance(module, TaskHeads)]
        shared = sum(layer.shared.numel() for layer in layers)
        own = sum(numel(value) for layer in layers for value in values_of(layer.per_task))
        return {
            "trains": sum(numel(parameter) for parameter in self.parameters() if parameter.requires_grad),
            "stored": shared + own + sum(numel(value) for head in heads for value in values_of(head.heads)),
            "paper": shared + own,
            "loras": len(self.tasks) * shared + own,
        }

    # ---- leaving

    def plain(self, name: str, merge: bool) -> Any:
        """Take the adapter off and return the base model with one task's head, ``merge``d with its update or not.

        Raises:
            DataError: there is no such task.
        """
        task = self.tasks[self.router.number(name)]
        del self.model.forward
        self.model.__dict__.pop("generate", None)
        if hasattr(self.model, "peft_config"):
            del self.model.peft_config
        for path, module in list(self.model.named_modules()):
            if isinstance(module, MultiLoraLayer) or (isinstance(module, TaskHeads) and self.reader is None):
                self.model.set_submodule(path, module.plain(name, merge))
        left = self.model if self.reader is None else self.reader.leave(task)
        give_labels(left.config, task)
        return left

    def _unload_and_optionally_merge(self, merge: bool = True, *_args: Any, **_kwargs: Any) -> Any:
        if self.router.active is None:
            raise DataError("which task's model?", known=self.router.tasks, remedy="choose one with set_task")
        return self.plain(self.router.active, merge)

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        return key  # one adapter, whose name is in no key; a task may be called what PEFT calls adapters


def of(model: Any) -> MultiLoraModel:
    """Return the tuner of a ``PeftModel`` that was made with :class:`MultiLoraConfig`."""
    tuner = model.base_model
    assert isinstance(tuner, MultiLoraModel)
    return tuner


PEFT_TYPE_TO_TUNER_MAPPING[PEFT_TYPE] = MultiLoraModel  # type: ignore[index]
PEFT_TYPE_TO_PREFIX_MAPPING[PEFT_TYPE] = MultiLoraModel.prefix  # type: ignore[index]
