"""Where a model keeps its layers, attention, feed-forward block, norms, embeddings and head, by module name.

Only names and module objects are looked at, never a weight's value or shape, so the answer is the same under ZeRO-3.
:data:`SPECS` describes the architectures tunery knows, as transformers 5.17 and later name their parts; a plugin
describes another one through the hook ``tunery_anatomies``.

Under PEFT the names are those of the wrapped model. A projection that carries an adapter keeps its own name; a module
that PEFT copied (``modules_to_save``) is named by the copy in use, for example
``base_model.model.classifier.modules_to_save.default``: that one runs, trains and owns the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import transformers
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel

from ..registry.context import Anatomy, AnatomySpec, Layer, Task
from ..registry.errors import AnatomyError

_BERT = AnatomySpec(
    layers="encoder.layer",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    attention_output="attention.output.dense",
    ffn_in=("intermediate.dense",),
    ffn_out="output.dense",
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
    embeddings=(
        "embeddings.word_embeddings",
        "embeddings.position_embeddings",
        "embeddings.token_type_embeddings",
    ),
    final_norms=("embeddings.LayerNorm",),
    head=("classifier", "cls.predictions.decoder", "cls.seq_relationship", "qa_outputs"),
)
_ROBERTA = replace(_BERT, head=("classifier.out_proj", "classifier", "lm_head.decoder", "qa_outputs"))
_DISTILBERT = AnatomySpec(
    layers="transformer.layer",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    attention_output="attention.out_lin",
    ffn_in=("ffn.lin1",),
    ffn_out="ffn.lin2",
    norms=("sa_layer_norm", "output_layer_norm"),
    embeddings=("embeddings.word_embeddings", "embeddings.position_embeddings"),
    final_norms=("embeddings.LayerNorm",),
    head=("classifier", "vocab_projector", "qa_outputs"),
)
_GPT2 = AnatomySpec(
    layers="h",
    query="attn.c_attn",
    key="attn.c_attn",
    value="attn.c_attn",
    attention_output="attn.c_proj",
    ffn_in=("mlp.c_fc",),
    ffn_out="mlp.c_proj",
    norms=("ln_1", "ln_2"),
    embeddings=("wte", "wpe"),
    final_norms=("ln_f",),
    conv1d=True,
)
_LLAMA = AnatomySpec(
    layers="layers",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    attention_output="self_attn.o_proj",
    ffn_in=("mlp.gate_proj", "mlp.up_proj"),
    ffn_out="mlp.down_proj",
    norms=("input_layernorm", "post_attention_layernorm"),
    embeddings=("embed_tokens",),
    final_norms=("norm",),
)
_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_VIT = AnatomySpec(
    layers="layers",
    query="attention.q_proj",
    key="attention.k_proj",
    value="attention.v_proj",
    attention_output="attention.o_proj",
    ffn_in=("mlp.fc1",),
    ffn_out="mlp.fc2",
    norms=("layernorm_before", "layernorm_after"),
    embeddings=("embeddings.patch_embeddings.projection",),
    final_norms=("layernorm",),
)

SPECS: Mapping[str, AnatomySpec] = {
    "bert": _BERT,
    "camembert": _ROBERTA,
    "distilbert": _DISTILBERT,
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "olmo2": replace(_LLAMA, norms=("post_attention_layernorm", "post_feedforward_layernorm", *_QK_NORMS)),
    "qwen2": _LLAMA,
    "qwen3": replace(_LLAMA, norms=(*_LLAMA.norms, *_QK_NORMS)),
    "roberta": _ROBERTA,
    "vit": _VIT,
    "xlm-roberta": _ROBERTA,
}


def find_anatomy(model: nn.Module, extra: Mapping[str, AnatomySpec] | None = None) -> Anatomy:
    """Return where ``model`` keeps its parts.

    Args:
        model: a ``PreTrainedModel``, or a module around one: a ``PeftModel``, DDP. Names are those of ``model`` itself.
        extra: descriptions of further architectures by ``config.model_type``, from plugins.

    Returns:
        Names, each of which ``model.named_modules()`` has.

    Raises:
        AnatomyError: nobody described this architecture, the model lacks a part that its description names, or
            ``extra`` describes an architecture that tunery describes itself.
    """
    extra = extra or {}
    if taken := sorted(SPECS.keys() & extra.keys()):
        raise AnatomyError(
            f"tunery_anatomies describes {', '.join(map(repr, taken))}, which tunery describes itself",
            remedy="remove it from the plugin, or disable the plugin with TUNERY_DISABLE_PLUGINS",
        )
    pretrained = _pretrained(model)
    model_type = pretrained.config.model_type
    spec = SPECS.get(model_type) or extra.get(model_type)
    if spec is None:
        raise AnatomyError(
            f"{type(pretrained).__name__} is a {model_type!r} model, and nobody told tunery where it keeps its parts",
            known=sorted({*SPECS, *extra}),
            remedy="a plugin can describe it through the hook tunery_anatomies",
        )
    parts = _Parts(model, pretrained)
    backbone = pretrained.base_model
    return Anatomy(
        model_type=model_type,
        layers=tuple(parts.layer(layer, spec) for layer in parts.layers(backbone, spec)),
        embeddings=parts.names(backbone, spec.embeddings, "embeddings"),
        final_norms=parts.names(backbone, spec.final_norms, "final_norms"),
        head=parts.head(spec),
        conv1d=spec.conv1d,
    )


def new_parameters(model: nn.Module, task: Task) -> frozenset[str]:
    """Return the names of the parameters that come with the task: those without a pre-trained value.

    These are the parameters outside the pre-trained backbone (``base_model``), unless the model's head is a
    language-modelling one, which is pre-trained with it. Weights tied to the backbone's are the backbone's. Works for
    every transformers model, described or not; adapters inside the backbone are not looked for.

    Args:
        model: a ``PreTrainedModel``, or a module around one.
        task: what the model is trained for.

    Returns:
        Names out of ``model.named_parameters()``; empty for language modelling and for a backbone alone.

    Raises:
        AnatomyError: there is no ``PreTrainedModel`` in ``model``.
    """
    pretrained = _pretrained(model)
    # A task of kind OTHER can train a language model too (preference optimisation does): the model tells.
    output_embeddings = pretrained.get_output_embeddings()  # type: ignore[no-untyped-call]  # transformers' own method
    if task.kind.is_language_modelling or output_embeddings is not None:
        return frozenset()
    return outside_backbone(model)


def _pretrained(model: nn.Module) -> PreTrainedModel:
    """Return the outermost transformers model in ``model``; modules are listed from the outside in."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise AnatomyError(
        f"{type(model).__name__} holds no transformers model",
        remedy="pass a transformers.PreTrainedModel, or a peft.PeftModel around one",
    )


def outside_backbone(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that are none of the backbone's, tied ones included.

    Raises:
        AnatomyError: there is no ``PreTrainedModel`` in ``model``.
    """
    # Identity, not name: a tied weight has a name on both sides, and named_parameters() keeps only the first.
    backbone = {id(parameter) for parameter in _pretrained(model).base_model.parameters()}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) not in backbone)


def _in_use(module: nn.Module) -> nn.Module:
    """Return the module that runs: PEFT keeps the original beside one trained copy per adapter."""
    if not isinstance(module, ModulesToSaveWrapper):
        return module
    active = module.active_adapters
    if module.disable_adapters or not active or any(adapter not in module.modules_to_save for adapter in active):
        return cast(nn.Module, module.original_module)
    return module.modules_to_save[active[0]]


def _follow(module: nn.Module, path: str) -> nn.Module | None:
    """Return the sub-module at the dotted ``path``, through PEFT's wrappers; ``None`` if there is none."""
    for attribute in path.split("."):
        child = getattr(module, attribute, None)
        if not isinstance(child, nn.Module):
            return None
        module = _in_use(child)
    return module


class _Parts:
    """Finds the parts of one model and gives them the names they have in ``model``."""

    def __init__(self, model: nn.Module, pretrained: PreTrainedModel) -> None:
        self.pretrained = pretrained
        self.name_of: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}

    def name(self, root: nn.Module, path: str, part: str) -> str:
        module = _follow(root, path)
        if module is None or module not in self.name_of:
            raise self._missing(part, f"no module {path!r} in {self.name_of[root] or type(root).__name__}")
        return self.name_of[module]

    def names(self, root: nn.Module, paths: tuple[str, ...], part: str) -> tuple[str, ...]:
        return tuple(self.name(root, path, part) for path in paths)

    def layers(self, backbone: nn.Module, spec: AnatomySpec) -> list[nn.Module]:
        found = _follow(backbone, spec.layers)
        if not isinstance(found, nn.ModuleList):
            raise self._missing("layers", f"no ModuleList {spec.layers!r} in the backbone {type(backbone).__name__}")
        return [_in_use(layer) for layer in found]

    def layer(self, layer: nn.Module, spec: AnatomySpec) -> Layer:
        return Layer(
            name=self.name_of[layer],
            query=self.name(layer, spec.query, "query"),
            key=self.name(layer, spec.key, "key"),
            value=self.name(layer, spec.value, "value"),
            attention_output=self.name(layer, spec.attention_output, "attention_output"),
            ffn_in=self.names(layer, spec.ffn_in, "ffn_in"),
            ffn_out=self.name(layer, spec.ffn_out, "ffn_out"),
            norms=self.names(layer, spec.norms, "norms"),
        )

    def head(self, spec: AnatomySpec) -> str | None:
        for path in spec.head:
            module = _follow(self.pretrained, path)
            # RoBERTa's `classifier` is a small network for some tasks and the linear layer itself for others.
            if module is not None and module in self.name_of and hasattr(module, "weight"):
                return self.name_of[module]
        if outside_backbone(self.pretrained):
            raise AnatomyError(
                f"{type(self.pretrained).__name__} has a head whose final linear layer has none of the usual names",
                known=spec.head,
                remedy="give the layer one of these names",
            )
        return None

    def _missing(self, part: str, reason: str) -> AnatomyError:
        model_type = self.pretrained.config.model_type
        return AnatomyError(
            f"{type(self.pretrained).__name__} does not keep its {part} where {model_type!r} models do: {reason}",
            owner=f"transformers {transformers.__version__}",
            remedy="use the model as transformers 5.17 or later builds it"
            if model_type in SPECS
            else "mend the description that a plugin returns from tunery_anatomies",
        )
