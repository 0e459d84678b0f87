"""The anatomy of every described architecture, checked by what its modules do in a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForNextSentencePrediction,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from tunery.core.anatomy import SPECS, find_anatomy
from tunery.registry.context import Anatomy

HIDDEN, FFN, HEADS, TOKEN = 16, 40, 2, 2
ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert")
GROUPED = ("llama", "mistral", "olmo2", "qwen2", "qwen3")
DECODERS = ("gpt2", *GROUPED)
ARCHITECTURES = (*ENCODERS, *DECODERS, "vit")
ENCODER_CLASSES = (
    AutoModelForSequenceClassification,
    AutoModelForMaskedLM,
    AutoModelForTokenClassification,
    AutoModelForQuestionAnswering,
)
WITH_HEAD = (
    *((name, cls) for name in ENCODERS for cls in ENCODER_CLASSES),
    *((name, cls) for name in DECODERS for cls in (AutoModelForSequenceClassification, AutoModelForCausalLM)),
    ("llama", AutoModelForQuestionAnswering),
    ("gpt2", AutoModelForTokenClassification),
    ("bert", AutoModelForCausalLM),
    ("bert", AutoModelForPreTraining),
    ("bert", AutoModelForNextSentencePrediction),
    ("vit", AutoModelForImageClassification),
)


def tiny_config(name: str, num_labels: int = 3) -> PreTrainedConfig:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    if name == "distilbert":
        sizes = {"dim": HIDDEN, "hidden_dim": FFN, "n_layers": 2, "n_heads": HEADS}
    if name == "gpt2":
        sizes = {"n_embd": HIDDEN, "n_inner": FFN, "n_layer": 2, "n_head": HEADS}
    if name in GROUPED:
        sizes |= {"num_key_value_heads": 1, "head_dim": 12}
    inputs = {"image_size": 8, "patch_size": 4} if name == "vit" else {"vocab_size": 50}
    # Weights far from 0, so that a change anywhere is seen; id 0 only ever pads.
    return AutoConfig.for_model(
        name,
        **sizes,
        **inputs,
        initializer_range=0.5,
        pad_token_id=0,
        num_labels=num_labels,
        bos_token_id=1,
        eos_token_id=2,
    )


def build(name: str, auto: type = AutoModel) -> PreTrainedModel:
    torch.manual_seed(0)
    return auto.from_config(tiny_config(name, 2 if auto is AutoModelForQuestionAnswering else 3)).eval()


def batch(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(1)
    if model.config.model_type == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8)}
    return {"input_ids": torch.randint(3, 50, (2, 6))}


class Call(NamedTuple):
    input: Tensor
    output: Tensor


class Seen(NamedTuple):
    calls: dict[str, Call]
    order: list[str]
    result: Tensor


def run(model: nn.Module, watch: Collection[str], edit: Mapping[str, Callable[[Tensor], Tensor]] | None = None) -> Seen:
    """Run one batch with the outputs of some modules edited; return what others took and gave."""
    modules, seen, handles = dict(model.named_modules()), Seen({}, [], torch.empty(0)), []

    def editing(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        return lambda module, args, output: change(output)

    def watching(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
            seen.order.append(name)
            seen.calls[name] = Call(args[0] if args else kwargs["hidden_states"], output)

        return hook

    for name, change in (edit or {}).items():
        handles.append(modules[name].register_forward_hook(editing(change)))
    for name in dict.fromkeys(watch):
        handles.append(modules[name].register_forward_hook(watching(name), with_kwargs=True))
    with torch.no_grad():
        result = model(**batch(model))[0]
    for handle in handles:
        handle.remove()
    return seen._replace(result=result)


def noise_on_one_token(hidden: Tensor) -> Tensor:
    noise = torch.zeros_like(hidden)
    noise[:, TOKEN] = torch.randn(hidden.shape[-1], generator=torch.Generator().manual_seed(2))
    return hidden + noise


def tokens_that_differ(one: Tensor, other: Tensor) -> list[int]:
    return (one != other).any(-1).any(0).nonzero().flatten().tolist()


def zero(model: nn.Module, *names: str) -> None:
    for name in names:
        for parameter in model.get_submodule(name).parameters():
            nn.init.zeros_(parameter)


def names_in(anatomy: Anatomy) -> list[str]:
    names = [*anatomy.embeddings, *anatomy.final_norms, *([anatomy.head] if anatomy.head else [])]
    for layer in anatomy.layers:
        names += [layer.name, layer.query, layer.key, layer.value, layer.attention_output, layer.ffn_out]
        names += [*layer.ffn_in, *layer.norms]
    return names


def test_every_described_architecture_is_tested() -> None:
    """A description without a model below would be a claim nobody checks."""
    assert set(ARCHITECTURES) == set(SPECS)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layers_are_named_in_the_order_they_run(name: str) -> None:
    """Each layer takes what the one before gave."""
    model = build(name)
    layers = [layer.name for layer in find_anatomy(model).layers]
    seen = run(model, layers)
    assert seen.order == layers and len(layers) == 2
    for one, next_one in pairwise(layers):
        assert seen.calls[next_one].input is seen.calls[one].output


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_attention_projections_do_what_they_are_named_for(name: str) -> None:
    """A query steers its own token only, a key other tokens too, and without values attention is 0."""
    model = build(name)
    heads, groups = HEADS, 1 if name in GROUPED else HEADS
    width = 12 if name in GROUPED else HIDDEN // HEADS
    for layer in find_anatomy(model).layers:
        query, key, value, out = layer.query, layer.key, layer.value, layer.attention_output
        plain = run(model, [query, key, value, out])
        assert plain.calls[out].input.shape[-1] == heads * width and plain.calls[out].output.shape[-1] == HIDDEN

        def attended(module: str, change: Callable[[Tensor], Tensor], out: str = out) -> Tensor:
            return run(model, [out], {module: change}).calls[out].input

        assert not attended(value, torch.zeros_like).any()
        if name == "gpt2":
            assert query == key == value and plain.calls[query].output.shape[-1] == 3 * HIDDEN
            continue
        assert plain.calls[query].output.shape[-1] == heads * width
        assert [plain.calls[part].output.shape[-1] for part in (key, value)] == [groups * width] * 2
        assert attended(key, torch.zeros_like).any()
        assert tokens_that_differ(attended(query, noise_on_one_token), plain.calls[out].input) == [TOKEN]
        assert tokens_that_differ(attended(key, noise_on_one_token), plain.calls[out].input)[-1] > TOKEN


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_mix_through_the_attention_output_only(name: str) -> None:
    """With that projection at 0, a change of one token stays in that token."""
    model = build(name)
    first, second = find_anatomy(model).layers

    def reached() -> list[int]:
        noisy = run(model, [second.name], {first.name: noise_on_one_token})
        return tokens_that_differ(noisy.calls[second.name].output, run(model, [second.name]).calls[second.name].output)

    assert len(reached()) > 1
    zero(model, second.attention_output)
    assert reached() == [TOKEN]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_feed_forward_block_widens_and_narrows(name: str) -> None:
    """Every way in takes the hidden width and gives the intermediate one, the way out the reverse; up scales, gate does not."""
    model = build(name)
    for layer in find_anatomy(model).layers:
        seen = run(model, [*layer.ffn_in, layer.ffn_out])
        calls = [seen.calls[part] for part in (*layer.ffn_in, layer.ffn_out)]
        widths = [(call.input.shape[-1], call.output.shape[-1]) for call in calls]
        assert widths == [(HIDDEN, FFN)] * len(layer.ffn_in) + [(FFN, HIDDEN)]
        assert len(layer.ffn_in) == (2 if name in GROUPED else 1)
        if name in GROUPED:
            gate, up = (run(model, [layer.ffn_out], {part: lambda output: 2 * output}) for part in layer.ffn_in)
            assert torch.equal(up.calls[layer.ffn_out].input, 2 * seen.calls[layer.ffn_out].input)
            assert not torch.equal(gate.calls[layer.ffn_out].input, up.calls[layer.ffn_out].input)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_without_both_outputs_only_the_residual_stream_is_left(name: str) -> None:
    """With the weights and biases of both outputs at 0, a layer hands on its input; BERT's kind normalises it twice."""
    model = build(name)
    for layer in find_anatomy(model).layers:

        def residual(seen: Seen, layer: str = layer.name) -> Tensor:
            hidden = seen.calls[layer].input
            normalised = functional.layer_norm(functional.layer_norm(hidden, [HIDDEN], eps=1e-12), [HIDDEN], eps=1e-12)
            return normalised if name in ENCODERS else hidden

        zero(model, layer.attention_output)
        seen = run(model, [layer.name])
        assert not torch.allclose(seen.calls[layer.name].output, residual(seen), atol=1e-3)
        zero(model, layer.ffn_out)
        seen = run(model, [layer.name])
        torch.testing.assert_close(seen.calls[layer.name].output, residual(seen))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_norms_embeddings_and_conv1d_are_told_by_type(name: str) -> None:
    """All modules of those types are found, and nothing else."""
    model = build(name)
    anatomy = find_anatomy(model)
    norms = {name for name, module in model.named_modules() if "Norm" in type(module).__name__}
    for layer in anatomy.layers:
        assert sorted(layer.norms) == sorted(norm for norm in norms if norm.startswith(f"{layer.name}."))
        assert isinstance(model.get_submodule(layer.ffn_out), Conv1D) == anatomy.conv1d
        norms -= set(layer.norms)
    assert sorted(anatomy.final_norms) == sorted(norms)
    inputs = (nn.Embedding, nn.Conv2d)
    assert set(anatomy.embeddings) == {n for n, module in model.named_modules() if isinstance(module, inputs)}


@pytest.mark.parametrize(("name", "auto"), WITH_HEAD, ids=lambda value: getattr(value, "__name__", value))
def test_head_gives_the_logits(name: str, auto: type) -> None:
    """What the head's final linear layer gives is what the model returns, perhaps of one token or one column."""
    model = build(name, auto)
    anatomy = find_anatomy(model)
    assert set(names_in(anatomy)) <= set(dict(model.named_modules()))
    seen = run(model, [anatomy.head])
    logits = seen.calls[anatomy.head].output
    assert isinstance(model.get_submodule(anatomy.head), nn.Linear)
    assert any(
        part.shape == seen.result.shape and torch.equal(part, seen.result)
        for part in (logits, logits[:, -1], logits[..., 0])
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_backbone_alone_has_no_head(name: str) -> None:
    """A model that predicts nothing has no final linear layer."""
    assert find_anatomy(build(name)).head is None


def test_image_model_without_labels_has_no_head() -> None:
    """transformers puts an nn.Identity where the head would be."""
    model = AutoModelForImageClassification.from_config(tiny_config("vit", num_labels=0))
    assert find_anatomy(model).head is None
