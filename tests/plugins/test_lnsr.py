"""LNSR: the worked example, linear layers in closed form, one dropout in both branches, pads, gradients, noise, refusals."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from tunery.core.anatomy import find_anatomy
from tunery.core.sharding import ModelSharding
from tunery.plugins.regularizers import lnsr
from tunery.plugins.regularizers.lnsr import Lnsr
from tunery.registry.context import Anatomy, Batch, Layer, RunContext, Task, TaskKind
from tunery.registry.errors import CompatibilityError

TASK = Task(name="task", kind=TaskKind.CLASSIFICATION, label_names=("a", "b"))
WIDTH = 4
VOCABULARY = 50


class Block(nn.Module):
    """A layer of a toy: what ``inner`` does, called as some transformers layers are, by keyword."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.inputs: list[Tensor] = []

    def forward(self, hidden_states: Tensor, scale: float = 1.0) -> tuple[Tensor, None]:
        self.inputs.append(hidden_states.detach())
        return scale * self.inner(hidden_states), None


class Toy(nn.Module):
    """Embeddings and layers, nothing else."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        width = next(p for module in inner for p in module.parameters()).shape[-1]
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(module) for module in inner)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden, _ = layer(hidden_states=hidden, scale=1.0)
        return hidden


def anatomy(model: nn.Module) -> Anatomy:
    if not isinstance(model, Toy):
        return find_anatomy(model)
    parts = {"query": "", "key": "", "value": "", "attention_output": "", "ffn_in": (), "ffn_out": "", "norms": ()}
    layers = tuple(Layer(name=f"layers.{index}", **parts) for index in range(len(model.layers)))
    return Anatomy(model_type="toy", layers=layers, embeddings=("embed",), final_norms=(), head=None)


def attached(model: nn.Module, **options: Any) -> Lnsr:
    regularizer = Lnsr(Lnsr.Config(**options))
    run = RunContext(
        tasks=(TASK,),
        seed=3,
        sharding=ModelSharding(),
        pretrained_parameters=frozenset(),
        logger=logging.getLogger("test"),
        find_anatomy=anatomy,
    )
    regularizer.attach(model, run)
    return regularizer


def penalty(regularizer: Lnsr, model: nn.Module, inputs: Mapping[str, Any], step: int = 0) -> Tensor:
    regularizer.begin(inputs)
    outputs = model(**inputs)
    value = regularizer.penalty(Batch(inputs=inputs, outputs=outputs, model=model, task=TASK, step=step))
    assert value is not None
    return value


def linear(weight: Tensor) -> nn.Linear:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    module.weight.data = weight.clone()
    return module


def rows(count: int = 3, length: int = 5, pads: int = 0) -> dict[str, Tensor]:
    """Rows of unequal numbers of tokens, ``pads`` more at their end."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (count, length), generator=generator)
    mask = (torch.arange(length) < torch.tensor([length, 2, 3])[:count, None]).long()
    return {
        "input_ids": nn.functional.pad(ids * mask, (0, pads)),
        "attention_mask": nn.functional.pad(mask, (0, pads)),
    }


def bert(dropout: float = 0.0, layers: int = 3) -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForSequenceClassification(config).train()


def fixed_noise(monkeypatch: pytest.MonkeyPatch, values: Tensor) -> None:
    """Let every position have the same standard normal numbers."""
    monkeypatch.setattr(lnsr, "_normal", lambda window, width, seed: values.expand(*window.shape, width))


# ---- the value


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 0.40), ("mean", 0.20)])
def test_worked_example(monkeypatch: pytest.MonkeyPatch, reduction: str, expected: float) -> None:
    """f = diag(2, 3) and eps = (.1, -.2): 0.40, and 0.20 as a mean over features."""
    fixed_noise(monkeypatch, torch.tensor([0.1, -0.2]))
    model = Toy(linear(torch.eye(2)), linear(torch.diag(torch.tensor([2.0, 3.0]))))
    value = penalty(attached(model, sigma=1.0, reduction=reduction), model, rows())
    assert value.item() == pytest.approx(expected, abs=1e-6)


def test_relative_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 percent of the norm along (1, -1) at (3, 4) is (0.17678, -0.17678)."""
    fixed_noise(monkeypatch, torch.tensor([1.0, -1.0]))
    model = Toy(linear(torch.eye(2)), linear(torch.eye(2)))
    model.embed.weight.data[:] = torch.tensor([3.0, 4.0])
    penalty(attached(model, sigma=0.05, relative=True), model, rows())
    clean, noisy = model.layers[1].inputs
    torch.testing.assert_close(noisy - clean, torch.tensor([0.17678, -0.17678]).expand_as(clean), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("layers", "counted"), [("all", (2, 3)), ("last", (3,)), ((2,), (2,))])
def test_linear_layers(layers: Any, counted: tuple[int, ...]) -> None:
    """For linear layers it is the squared norm of W_r ... W_b+1 eps, averaged over tokens, then over rows."""
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3)]
    model = Toy(*map(linear, weights)).double()
    inputs = rows()
    value = penalty(attached(model, layer=1, sigma=0.3, layers=layers), model, inputs)
    clean, noisy = model.layers[1].inputs
    moves = {2: (noisy - clean) @ weights[1].T}
    moves[3] = moves[2] @ weights[2].T
    expected = 0.0
    for number in counted:
        for row, mask in zip(moves[number], inputs["attention_mask"].bool(), strict=True):
            expected += row[mask].square().sum(-1).mean().item() / len(clean)
    assert value.item() == pytest.approx(expected, rel=1e-12)


def test_gradient_against_finite_differences() -> None:
    """Gradients in the layers below and above the noise, and in the embeddings, are those of the penalty."""
    torch.manual_seed(0)
    model = Toy(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))).double()
    regularizer, inputs = attached(model, layer=1, sigma=0.5), rows()
    penalty(regularizer, model, inputs).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        direction = torch.randn_like(parameter)
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * 1e-6)
            ends.append(penalty(regularizer, model, inputs).item())
            with torch.no_grad():
                parameter.sub_(direction, alpha=sign * 1e-6)
        slope = (ends[0] - ends[1]) / 2e-6
        assert (parameter.grad * direction).sum().item() == pytest.approx(slope, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("layer", [0, 1])
def test_pads_do_not_matter(layer: int) -> None:
    """Rows padded further, or one by one without any pad, have the same penalty."""
    model = bert()
    regularizer, inputs = attached(model, layer=layer, sigma=0.1), rows()
    value = penalty(regularizer, model, inputs).item()
    assert penalty(regularizer, model, rows(pads=3)).item() == pytest.approx(value, abs=1e-6)
    alone = []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        row = {"input_ids": ids[mask.bool()][None], "attention_mask": mask[mask.bool()][None]}
        alone.append(penalty(regularizer, model, row).item())
    assert sum(alone) / len(alone) == pytest.approx(value, abs=1e-6)


# ---- the two branches


def test_without_noise_it_is_zero_with_dropout_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both branches drop the same: noise of zero moves no hidden state by a bit."""
    fixed_noise(monkeypatch, torch.zeros(16))
    model = bert(dropout=0.3)
    assert penalty(attached(model, sigma=1.0), model, rows()).item() == 0.0


def test_sigma_zero_attaches_nothing() -> None:
    """Switched off, it neither hooks a layer nor adds a penalty."""
    model = bert(dropout=0.3)
    regularizer = attached(model, sigma=0.0)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    regularizer.begin(rows())
    assert regularizer.penalty(Batch(inputs=rows(), outputs=model(**rows()), model=model, task=TASK)) is None


def test_training_goes_on_as_without_it() -> None:
    """Outputs have the same bits, and the next random number is the same."""
    seen = []
    for options in ({"sigma": 0.0}, {"sigma": 0.1}):
        model = bert(dropout=0.3)
        regularizer, inputs = attached(model, **options), rows()
        torch.manual_seed(5)
        regularizer.begin(inputs)
        outputs = model(**inputs, labels=torch.tensor([0, 1, 0]))
        regularizer.penalty(Batch(inputs=inputs, outputs=outputs, model=model, task=TASK))
        seen.append((outputs.loss.item(), torch.rand(()).item()))
    assert seen[0] == seen[1]


def test_runs_the_layers_above_alone() -> None:
    """Layers up to the noise run once, those from there to the last that counts twice."""
    model = bert(layers=5)
    calls = [0] * 5
    for index, layer in enumerate(model.bert.encoder.layer):
        layer.register_forward_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    penalty(attached(model, layer=2, layers=(3, 4)), model, rows())
    assert calls == [1, 1, 2, 2, 1]


def test_default_layer_is_half_way() -> None:
    """Without ``layer`` the upper half of the layers runs twice."""
    model = Toy(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    penalty(attached(model), model, rows())
    assert [len(layer.inputs) for layer in model.layers] == [1, 1, 2, 2]


def test_same_precision_in_both_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast the noisy branch rounds as the clean one did, though it runs outside the model's forward."""
    fixed_noise(monkeypatch, torch.zeros(16))
    model, inputs = bert(), rows()
    regularizer = attached(model)
    regularizer.begin(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(**inputs)
    value = regularizer.penalty(Batch(inputs=inputs, outputs=outputs, model=model, task=TASK))
    assert value is not None and value.item() == 0.0


def test_activation_checkpointing_changes_nothing() -> None:
    """Layers that run again in the backward pass give the same penalty and gradients, dropout on."""
    found = []
    for checkpointing in (False, True):
        model = bert(dropout=0.3)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(5)
        value = penalty(attached(model, layer=0, sigma=0.1), model, rows())
        value.backward()
        weight = model.bert.encoder.layer[1].output.dense.weight
        assert weight.grad is not None
        found.append((value.detach(), weight.grad))
    torch.testing.assert_close(found[1], found[0])


def test_keeps_nothing() -> None:
    """After the penalty is gone so are hidden states; without ``begin``, as in evaluation, none are kept."""
    model = bert()
    regularizer = attached(model)
    kept: list[weakref.ref[Tensor]] = []
    model.bert.encoder.layer[1].register_forward_hook(lambda _module, _args, output: kept.append(weakref.ref(output)))
    penalty(regularizer, model, rows())
    model.eval()(**rows())
    gc.collect()
    assert len(kept) == 3
    assert [ref() for ref in kept] == [None] * 3
    assert regularizer.penalty(Batch(inputs=rows(), outputs=None, model=model, task=TASK)) is None


# ---- the noise


def noise(model: Toy, inputs: Mapping[str, Any], step: int = 0, **options: Any) -> Tensor:
    """Return what a position of a valid token got: (tokens, width)."""
    for layer in model.layers:
        layer.inputs.clear()
    regularizer = attached(model, **options)
    penalty(regularizer, model, inputs, step)
    regularizer.detach(model)
    clean, noisy = model.layers[1].inputs
    return (noisy - clean)[inputs["attention_mask"].bool()]


def wide_toy(width: int = 64) -> Toy:
    torch.manual_seed(0)
    return Toy(nn.Linear(width, width, dtype=torch.float64), nn.Linear(width, width, dtype=torch.float64)).double()


def test_noise_is_normal_and_uncorrelated() -> None:
    """It has mean 0 and standard deviation sigma, and its vectors are as orthogonal as independent ones are."""
    ids = torch.randint(1, VOCABULARY, (16, 12), generator=torch.Generator().manual_seed(0))
    eps = noise(wide_toy(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, sigma=0.2)
    assert eps.mean().abs() < 0.2 * 4 / eps.numel() ** 0.5
    assert eps.std().item() == pytest.approx(0.2, rel=0.03)
    cosines = torch.corrcoef(eps)[*torch.triu_indices(len(eps), len(eps), 1)]
    assert cosines.std().item() == pytest.approx(64**-0.5, rel=0.1)


def test_noise_is_new_for_every_step_and_row() -> None:
    """It is drawn from seed, step and row: the same again for the same ones, another one otherwise."""
    model, inputs = wide_toy(), rows()
    eps = noise(model, inputs, step=4)
    assert torch.equal(noise(model, inputs, step=4), eps)
    assert (noise(model, inputs, step=5) - eps).abs().min() > 0
    assert torch.unique(eps.round(decimals=9), dim=0).shape == eps.shape
    other = {**inputs, "input_ids": torch.where(inputs["input_ids"] == 0, 0, inputs["input_ids"] % 49 + 1)}
    assert torch.unique(torch.cat([eps, noise(model, other, step=4)]).round(decimals=9), dim=0).shape[0] == 2 * len(eps)


def test_noise_is_the_same_on_either_side_of_pads() -> None:
    """A row padded on its left has the noise of one padded on its right."""
    model, inputs = wide_toy(), rows()
    eps = noise(model, inputs)
    left = {key: torch.stack([row.flip(0) for row in value]) for key, value in inputs.items()}
    for ids, mask in zip(left["input_ids"], left["attention_mask"], strict=True):
        ids[mask.bool()] = ids[mask.bool()].flip(0)
    torch.testing.assert_close(noise(model, left), eps, rtol=0, atol=1e-12)


def test_noise_of_rows_of_pixels() -> None:
    """Images have no mask and no tokens: their noise depends on their pixels."""
    pixels = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    everywhere = torch.ones(2, 5, dtype=torch.bool)
    both = lnsr._windows(pixels, everywhere)
    assert torch.equal(both[1:], lnsr._windows(pixels[1:], everywhere[1:]))
    assert both.unique().numel() == both.numel()
    assert (lnsr._windows(pixels + 1e-6, everywhere) != both).all()


# ---- refusals


def frozen() -> nn.Module:
    model = bert()
    model.bert.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (bert, {"layer": 3}, "no layer above layer=3 in a model of 3; take a layer from 0 to 2"),
        (bert, {"layer": 1, "layers": (1, 3, 9)}, "cannot count layers 1, 9; known: 2, 3"),
        (frozen, {}, "finds no layer that trains"),
    ],
)
def test_refuses_when_attached(model: Any, options: dict[str, Any], message: str) -> None:
    """Layers the model lacks, and an encoder that is frozen, are refused in one line."""
    with pytest.raises(CompatibilityError, match=message) as caught:
        attached(model(), **options)
    assert "'lnsr'" in str(caught.value) and "\n" not in str(caught.value)


def test_refuses_a_key_value_cache() -> None:
    """A layer that ran twice on one cache would see itself."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            pad_token_id=0,
        )
    ).train()
    regularizer = attached(model)
    with pytest.raises(CompatibilityError, match="use_cache=False"):
        penalty(regularizer, model, rows())
    assert penalty(regularizer, model, {**rows(), "use_cache": False}) > 0


def test_refuses_what_it_cannot_see() -> None:
    """A forward pass without gradients, a mask of another shape and a batch without token ids are refused in one line."""
    model, inputs = bert(), rows()
    regularizer = attached(model)
    with pytest.raises(CompatibilityError, match="no forward pass with gradients"), torch.no_grad():
        penalty(regularizer, model, inputs)
    mask = inputs["attention_mask"]
    for changed, message in (
        ({**inputs, "attention_mask": mask[:, None, None]}, r"cannot tell pads: attention_mask \(3, 1, 1, 5\)"),
        ({"inputs_embeds": torch.randn(3, 5, 16), "attention_mask": mask}, "finds no input_ids with 3 rows"),
    ):
        regularizer.begin(changed)
        model(**(inputs if "input_ids" in changed else changed))
        with pytest.raises(CompatibilityError, match=message):
            regularizer.penalty(Batch(inputs=changed, outputs=None, model=model, task=TASK))
