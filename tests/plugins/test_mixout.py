"""MixOut: the worked example, gradients against autograd of the formula, its masks, what it keeps, mixes and refuses."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from tunery.core.recipe import choose
from tunery.core.sharding import ModelSharding
from tunery.plugins.regularizers.mixout import MixOut
from tunery.registry.conformance.trials import Trial, held
from tunery.registry.conformance.workers import STAGES, on_stage
from tunery.registry.context import RunContext, Task, TaskKind
from tunery.registry.errors import CompatibilityError, ConfigError

LAYERS = {
    "linear": lambda: nn.Linear(8, 5),
    "no bias": lambda: nn.Linear(8, 5, bias=False),
    "conv1d": lambda: Conv1D(5, 8),
}


class OtherRank(ModelSharding):
    """What the second rank of two sees."""

    rank = 1


def context(model: nn.Module, **changes: Any) -> RunContext:
    run = RunContext(
        tasks=(Task(name="task", kind=TaskKind.CLASSIFICATION),),
        seed=0,
        sharding=ModelSharding(),
        pretrained_parameters=frozenset(name for name, _ in model.named_parameters()),
        logger=logging.getLogger("tunery"),
        find_anatomy=lambda model: pytest.fail("MixOut needs no anatomy"),
    )
    return replace(run, **changes)


def attached(model: nn.Module, run: RunContext | None = None, **options: Any) -> MixOut:
    regularizer = MixOut(MixOut.Config(**options))
    regularizer.attach(model, run or context(model))
    model.train()
    return regularizer


def moved(layer: nn.Module, **options: Any) -> tuple[nn.Sequential, MixOut, Tensor]:
    """Attach MixOut to one layer, then move every weight; return the pre-trained weight too."""
    target = layer.weight.detach().clone()
    model = nn.Sequential(layer)
    regularizer = attached(model, **options)
    with torch.no_grad():
        layer.weight.add_(1 + torch.rand_like(layer.weight))
    return model, regularizer, target


def effective(layer: nn.Module) -> Tensor:
    """Return the weight a layer multiplies by, (out, in), as its answers to unit vectors show it."""
    features = layer.nx if isinstance(layer, Conv1D) else layer.in_features
    with torch.no_grad():
        unit = torch.eye(features, dtype=layer.weight.dtype)
        return (layer(unit) - layer(0 * unit)).t()


def stored(weight: Tensor, layer: nn.Module) -> Tensor:
    """Return an (out, in) weight as the layer stores it, or the other way round."""
    return weight.t() if isinstance(layer, Conv1D) else weight


def test_worked_example() -> None:
    """T, W, p = 0.5 and mask (1, 1, 0) give the forward and the gradient that can be checked by hand."""
    layer = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[10.0, 20, 30], [40, 50, 60]]))
    regularizer = attached(nn.Sequential(layer), p=0.5)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2, 3], [4, 5, 6]]))
    for step in range(100):
        regularizer.begin_step(step)
        mixed = layer(torch.eye(3)).t()
        if mixed.tolist() == [[-8, -16, 30], [-32, -40, 60]]:
            break
    else:
        pytest.fail("no step drew the mask (1, 1, 0)")
    mixed.sum().backward()
    assert layer.weight.grad.tolist() == [[2, 2, 0], [2, 2, 0]]


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("mask", ["column", "element"])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.999])
def test_gradients_are_those_of_the_formula(kind: str, mask: str, p: float) -> None:
    """Loss and every gradient equal those of autograd on the formula, in float64, for three-dimensional inputs."""
    torch.manual_seed(0)
    model, regularizer, target = moved(LAYERS[kind]().double(), p=p, mask=mask)
    layer = model[0]
    regularizer.begin_step(3)
    m = stored(effective(layer), layer).sub(target).abs() > 0.5  # weights moved by at least 1
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 3, 5, dtype=torch.float64)

    loss = (layer(x).tanh() * weights).sum()
    inputs = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    found = torch.autograd.grad(loss, inputs)

    mixed = ((~m) * target + m * layer.weight - p * target) / (1 - p)
    bias = 0 if layer.bias is None else layer.bias
    expected = ((x @ stored(mixed, layer).t() + bias).tanh() * weights).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(found, torch.autograd.grad(expected, inputs), rtol=1e-10, atol=1e-12)
    if p in (0.5, 0.9):
        assert 0 < m.sum() < m.numel()
    assert (found[1][~m] == 0).all()


@pytest.mark.parametrize("mask", ["column", "element"])
@pytest.mark.parametrize("p", [0.5, 0.9])
def test_is_the_trained_weight_in_expectation(mask: str, p: float) -> None:
    """The mean of W~ over many masks is W, within 4 standard errors of each element."""
    torch.manual_seed(0)
    model, regularizer, target = moved(nn.Linear(6, 4).double(), p=p, mask=mask)
    weight, draws, total = model[0].weight.detach(), 3000, torch.zeros(4, 6, dtype=torch.float64)
    for step in range(draws):
        regularizer.begin_step(step)
        total += effective(model[0])
    error = (weight - target).abs() * (p / (1 - p) / draws) ** 0.5
    assert ((total / draws - weight).abs() <= 4 * error).all()


def test_an_input_feature_shares_its_bit() -> None:
    """With a column mask the output rows agree on what is mixed, with an element mask they do not."""
    for kind in ("linear", "conv1d"):
        for mask, shared in (("column", True), ("element", False)):
            model, regularizer, target = moved(LAYERS[kind](), p=0.5, mask=mask)
            regularizer.begin_step(1)
            m = (effective(model[0]) - stored(target, model[0])).abs() > 0.5
            assert bool((m == m[0]).all()) is shared
            assert 0 < m.sum() < m.numel()


def test_one_mask_a_step() -> None:
    """Micro-batches and ranks of a step share its mask, two runs of one seed too; steps, layers and seeds do not."""

    def masks(seed: int = 0, step: int = 5, passes: int = 1, sharding: Any = None, **options: Any) -> list[list[bool]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 2), nn.Linear(32, 2))
        run = context(model, seed=seed, sharding=sharding or ModelSharding())
        regularizer = attached(model, run, p=0.5, **options)
        with torch.no_grad():
            model[0].weight.add_(1)
            model[1].weight.add_(1)
        regularizer.begin_step(step)
        for _ in range(passes):
            regularizer.begin({})
        return [(effective(layer) > layer.weight)[0].tolist() for layer in model]

    def differ(*drawn: list[list[bool]]) -> bool:
        return len({str(one) for one in drawn}) == len(drawn)

    assert masks() == masks() == masks(passes=2) == masks(sharding=OtherRank())
    assert differ(masks(), masks(step=6), masks(seed=1), masks()[::-1])
    every = {"every": "forward"}
    assert masks(**every) == masks(**every)
    assert differ(
        masks(**every), masks(passes=2, **every), masks(sharding=OtherRank(), **every), masks(step=6, **every)
    )


@pytest.mark.parametrize("mask", ["column", "element"])
def test_draws_nothing_from_the_global_generator(mask: str) -> None:
    """Dropout is the same with MixOut as without."""
    model, regularizer, _ = moved(nn.Linear(8, 5), mask=mask)
    before = torch.get_rng_state()
    regularizer.begin_step(0)
    model(torch.ones(2, 8)).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("every", ["step", "forward"])
def test_a_rerun_has_the_same_mask(use_reentrant: bool, every: str) -> None:
    """Activation checkpointing, either kind, changes no bit of the gradients."""
    torch.manual_seed(0)
    model, regularizer, _ = moved(nn.Linear(8, 8), p=0.5, every=every)
    layer, x = model[0], torch.randn(4, 8, requires_grad=True)
    found = []
    for rerun in (False, True):
        regularizer.begin_step(2)
        regularizer.begin({})
        layer.weight.grad = x.grad = None
        answer = checkpoint(model, x, use_reentrant=use_reentrant) if rerun else model(x)
        answer.square().sum().backward()
        found.append((x.grad, layer.weight.grad))
    for plain, rerun_gradient in zip(*found, strict=True):
        assert torch.equal(plain, rerun_gradient)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("mask", ["column", "element"])
def test_keeps_no_mixed_weight(kind: str, mask: str) -> None:
    """What waits for the backward pass is the input and the two weights there are anyway."""
    model, regularizer, _ = moved(LAYERS[kind](), mask=mask)
    regularizer.begin_step(0)
    x = torch.randn(4, 8, requires_grad=True)
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        answer = model(x)
    known = {tensor.data_ptr() for tensor in (x, *model.parameters())}
    assert {tensor.data_ptr() for tensor in kept} <= known
    node = answer.grad_fn
    assert not [value for value in vars(node).values() if isinstance(value, Tensor)]


def test_evaluation_is_plain() -> None:
    """In eval mode the layer answers with W, to the bit; off at p = 0 also in training."""
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    model, regularizer, _ = moved(nn.Linear(8, 5))
    regularizer.begin_step(0)
    expected = nn.functional.linear(x, model[0].weight, model[0].bias)
    assert not torch.equal(model(x), expected)
    assert torch.equal(model.eval()(x), expected)
    model, _, _ = moved(nn.Linear(8, 5), p=0.0)
    assert list(dict(model.named_parameters())) == ["0.weight", "0.bias"]


def test_files_know_nothing_of_it() -> None:
    """The state_dict has the keys it had and the trained weight; it loads into the attached model and the plain one."""
    model, _, _ = moved(nn.Linear(8, 5))
    state = model.state_dict()
    assert list(state) == ["0.weight", "0.bias"]
    assert torch.equal(state["0.weight"], model[0].weight)
    model.load_state_dict(state)
    nn.Sequential(nn.Linear(8, 5)).load_state_dict(state)


@pytest.mark.skipif("zero3" not in STAGES, reason="needs DeepSpeed")
@pytest.mark.parametrize("arguments_first", [True, False])
def test_target_is_sharded_with_its_layer(arguments_first: bool, tmp_path: Path) -> None:
    """Under ZeRO-3 a rank of two keeps half of each pre-trained weight, whenever the model itself was sharded."""
    trial = Trial(strategy="full", regularizers=("mixout",), steps=1, arguments_first=arguments_first)
    found = on_stage("zero3", held, trial.job("zero3", tmp_path), "mixout_target")
    assert len(found) == 13  # six of each layer, and the pooler's
    assert all(kept == (whole + 1) // 2 for kept, whole in found)


def test_detach_leaves_nothing() -> None:
    """Detached, the layer is as it was, and may be given MixOut again."""
    layer = nn.Linear(8, 5)
    before = sorted(vars(layer))
    model, regularizer, _ = moved(layer)
    regularizer.detach(model)
    assert sorted(vars(layer)) == before
    assert list(dict(model.named_parameters())) == ["0.weight", "0.bias"]
    regularizer.attach(model, context(model))
    assert len(list(model.parameters())) == 3


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 4, "n_layer": 1, "n_head": 2}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0))


def test_tied_weights_stay_tied() -> None:
    """An output layer tied to the embeddings is mixed where it multiplies, the look-up is not, and both train one weight."""
    model = tiny_gpt2()
    keys = list(model.state_dict())
    regularizer = attached(model, p=0.5)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert list(model.state_dict()) == keys
    target = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    regularizer.begin_step(0)
    tokens = torch.arange(5)
    assert torch.equal(model.transformer.wte(tokens), model.lm_head.weight[:5])
    mixed = effective(model.lm_head)
    kept = (mixed - target).abs() > 0.5
    torch.testing.assert_close(mixed, torch.where(kept, target + 2, target))
    assert 0 < kept.sum() < kept.numel()
    gradient = torch.autograd.grad(model(tokens[None]).logits.square().sum(), model.lm_head.weight)[0]
    assert (gradient[:5] != 0).all(), "the look-up's gradient reaches every feature"


def mixed_names(model: nn.Module) -> list[str]:
    return [
        name.removesuffix(".mixout_target") for name, _ in model.named_parameters() if name.endswith("mixout_target")
    ]


def test_mixes_every_linear_layer_and_nothing_else() -> None:
    """Conv1D and Linear are mixed; norms, embeddings, frozen layers and fresh heads are not."""
    model = tiny_gpt2()
    block = "transformer.h.0."
    projections = [block + name for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    attached(model)
    assert mixed_names(model) == [*projections, "lm_head"]

    model = tiny_gpt2()
    model.transformer.h[0].mlp.requires_grad_(False)
    fresh = context(model).pretrained_parameters - {"transformer.h.0.attn.c_attn.weight"}
    attached(model, context(model, pretrained_parameters=fresh))
    assert mixed_names(model) == [block + "attn.c_proj", "lm_head"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (("c_attn",), ["attn.c_attn"]),
        (("attn.c_proj", "c_fc"), ["attn.c_proj", "mlp.c_fc"]),
        ((r".*\.mlp\..*",), ["mlp.c_fc", "mlp.c_proj"]),
        ((r".*h\.0(?!.*c_proj).*",), ["attn.c_attn", "mlp.c_fc"]),
    ],
)
def test_target_modules_narrow_it(patterns: tuple[str, ...], expected: list[str]) -> None:
    """An entry is the last parts of a name, as in PEFT, or a regular expression for all of it."""
    model = tiny_gpt2()
    attached(model, target_modules=patterns)
    assert mixed_names(model) == [f"transformer.h.0.{name}" for name in expected]


def test_says_what_it_cannot_mix(caplog: pytest.LogCaptureFixture) -> None:
    """One line each: nothing that trains, adapters alone, a target nobody has; a layer of another class is named."""
    run = context(tiny_gpt2())
    frozen = tiny_gpt2().requires_grad_(False)
    lora = get_peft_model(tiny_gpt2(), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    for model in (frozen, lora):
        with pytest.raises(
            CompatibilityError, match=r"^regularizer 'mixout' finds no linear layer.*use strategy 'full'$"
        ):
            attached(model, run)
    with pytest.raises(
        CompatibilityError, match=r"no target module 'query' to mix; known: c_attn, c_fc, c_proj, lm_head$"
    ):
        attached(tiny_gpt2(), target_modules=("c_attn", "query"))

    class Doubling(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = nn.Sequential(Doubling(2, 2), nn.Linear(2, 2))
    attached(model)
    assert mixed_names(model) == ["1"]
    assert "mixout leaves 0 alone: a Doubling" in caplog.text


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ("mixout:p=1", "option p = 1"),
        ("mixout:weight=0.5", "option weight = 0.5: there is no penalty to weigh, use p; allowed: 0, 1"),
        ("mixout:mask=row", "'column' or 'element'"),
        ("mixout:target_modules=['(']", "is no regular expression"),
    ],
)
def test_refuses_options_in_one_line(selection: str, message: str) -> None:
    """A value out of range names plugin and option."""
    with pytest.raises(ConfigError) as caught:
        choose(regularizers=selection)
    assert message in str(caught.value)
    assert "'mixout'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weight_zero_leaves_it_out() -> None:
    """As for every regularizer, a zero weight is the same as not choosing it."""
    assert choose(regularizers="mixout").regularizers
    assert not choose(regularizers="mixout:weight=0").regularizers


@pytest.mark.parametrize("mask", ["column", "element"])
@pytest.mark.parametrize("kind", LAYERS)
def test_half_precision(kind: str, mask: str) -> None:
    """Under bf16 autocast, and with bf16 weights, gradients have the weights' type and are those of float32, rounded."""
    torch.manual_seed(0)
    model, regularizer, _ = moved(LAYERS[kind](), p=0.5, mask=mask)
    regularizer.begin_step(0)
    x = torch.randn(16, 8)
    model(x).square().mean().backward()
    expected = model[0].weight.grad.clone()

    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        answer = model(x)
        assert answer.dtype is torch.bfloat16
        loss = answer.float().square().mean()
    loss.backward()
    assert model[0].weight.grad.dtype is torch.float32
    torch.testing.assert_close(model[0].weight.grad, expected, rtol=0.05, atol=0.05 * expected.abs().max().item())

    model.bfloat16().zero_grad()
    model(x.bfloat16()).float().square().mean().backward()
    found = model[0].weight.grad
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.1, atol=0.1 * expected.abs().max().item())
