"""L2-SP against the formula in double precision."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import default_data_collator

from tunery.core.sharding import ModelSharding
from tunery.core.updates import Updates
from tunery.plugins import pull
from tunery.plugins.regularizers.l2_sp import L2SP
from tunery.registry.conformance.gradients import gradients
from tunery.registry.conformance.models import MODELS, base_model
from tunery.registry.conformance.trials import ONE, Trial
from tunery.registry.conformance.workers import STAGES
from tunery.registry.errors import CompatibilityError

ALPHA, BETA, FACTOR = 0.5, 0.1, 3.0
OLD, NEW = 5 * 6 + 6, 6 * 3 + 3  # weights of the two layers
TOLERANCES = {
    torch.float32: {"rtol": 1e-6, "atol": 1e-6},
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-6},
}
NORMALISERS = {"sum_half": (0.5, 0.5), "sum": (1, 1), "mean": (1 / OLD, 1 / NEW)}


def run_of(is_pretrained, optimizer="adamw_torch"):
    """What ``attach`` reads of a run in a process alone."""
    return SimpleNamespace(sharding=ModelSharding(), is_pretrained=is_pretrained, optimizer=optimizer)


@pytest.fixture(params=[(2**22, 2**22), (2**22, 0), (7, 0)], ids=["kept", "whole", "pieces"])
def pieces(request, monkeypatch):
    """Small weights, whose w - w0 is kept; big ones; and big ones in pieces of 7."""
    piece, small = request.param
    monkeypatch.setattr(pull, "_PIECE", piece)
    monkeypatch.setattr(pull, "_SMALL", small)


@pytest.fixture(params=NORMALISERS)
def trained(request, pieces):
    """A pre-trained layer and a new one, both moved since the penalty was attached."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
    regularizer = L2SP(L2SP.Config(alpha=ALPHA, beta=BETA, form=request.param))
    start = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
    run = run_of(lambda name: name.startswith("0."))
    regularizer.attach(model, run)
    with torch.no_grad():
        for name in start:
            model.get_parameter(name).add_(torch.randn(model.get_parameter(name).shape))
    return model, regularizer, start


def test_value_and_gradient(trained):
    """Half, whole or mean of alpha (w - w0)^2 and beta w^2, and its derivative on top of the task's."""
    model, regularizer, start = trained
    old, new = NORMALISERS[regularizer.config.form]
    inputs = torch.randn(4, 5)
    regularizer.begin({})
    task = model(inputs).square().mean()
    penalty = regularizer.penalty(None)
    (task + FACTOR * penalty).backward()
    found = {name: model.get_parameter(name).grad.double() for name in start}
    regularizer.detach(model)
    model.zero_grad()
    model(inputs).square().mean().backward()
    expected = 0.0
    for name, first in start.items():
        weight = model.get_parameter(name).detach().double()
        strength, offset = (ALPHA * old, weight - first) if name.startswith("0.") else (BETA * new, weight)
        expected += strength * offset.square().sum().item()
        pulled = model.get_parameter(name).grad.double() + FACTOR * 2 * strength * offset
        torch.testing.assert_close(found[name], pulled, rtol=1e-6, atol=1e-6)
    assert penalty.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("moved", [[], [3], [0, 39], list(range(40))], ids=len)
def test_rows_that_have_not_moved_keep_their_gradient(moved, dtype, monkeypatch):
    """Of an embedding, to the bit; those that moved have the formula's, whether a few did or all."""
    monkeypatch.setattr(pull, "_SMALL", 0)
    monkeypatch.setattr(pull, "_MANY_ROWS", 1)
    monkeypatch.setattr(pull, "_PIECE", 50)
    torch.manual_seed(0)
    model = nn.Embedding(40, 6, dtype=dtype)
    first = model.weight.detach().clone()
    regularizer = L2SP(L2SP.Config(alpha=ALPHA))
    regularizer.attach(model, run_of(lambda name: True))
    with torch.no_grad():
        model.weight[moved] += torch.randn(len(moved), 6, dtype=dtype)
    ids = torch.tensor([[1, 3, 7, 39]])
    regularizer.begin({})
    (model(ids).square().sum() + FACTOR * (penalty := regularizer.penalty(None))).backward()
    found = model.weight.grad
    offset = model.weight.detach().double() - first.double()
    regularizer.detach(model)
    model.zero_grad()
    model(ids).square().sum().backward()
    task = model.weight.grad
    torch.testing.assert_close(found.double(), task.double() + FACTOR * ALPHA * offset, **TOLERANCES[dtype])
    rest = torch.tensor([row not in moved for row in range(40)])
    assert torch.equal(found[rest], task[rest])
    assert penalty.item() == pytest.approx(ALPHA / 2 * offset.square().sum().item(), rel=1e-6)


def test_layer_wise_optimizer_takes_the_pulled_gradient():
    """One that steps and drops each gradient inside backward, as GaLore's layer-wise forms do, finds the penalty's in it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
    regularizer = L2SP(L2SP.Config(alpha=ALPHA, beta=BETA))
    regularizer.attach(model, run_of(lambda name: False, optimizer="galore_adamw_layerwise"))
    taken = {}

    def take(weight):
        taken[weight], weight.grad = weight.grad, None

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(take)
    inputs = torch.randn(4, 5)
    regularizer.begin({})
    (model(inputs).square().mean() + FACTOR * regularizer.penalty(None)).backward()
    task = torch.autograd.grad(model(inputs).square().mean(), list(model.parameters()))
    for weight, gradient in zip(model.parameters(), task, strict=True):
        torch.testing.assert_close(taken[weight], gradient + FACTOR * BETA * weight)


def test_only_the_step_that_was_begun_is_pulled(trained):
    """A probe's backward pass, or any other one after the step's, has the gradient of its own loss."""
    model, regularizer, start = trained
    inputs = torch.randn(4, 5)
    regularizer.begin({})
    (model(inputs).square().mean() + regularizer.penalty(None)).backward()
    model.zero_grad()
    model(inputs).square().mean().backward()
    found = {name: model.get_parameter(name).grad for name in start}
    regularizer.detach(model)
    model.zero_grad()
    model(inputs).square().mean().backward()
    assert all(torch.equal(model.get_parameter(name).grad, value) for name, value in found.items())


@pytest.mark.parametrize(
    ("form", "alpha", "beta", "value"), [("sum_half", 0.1, 0.01, 0.295), ("mean", 1, 0, 2.5), ("sum", 1, 0, 5)]
)
def test_worked_example(form, alpha, beta, value):
    """Pre-trained weights moved from 0 to (1, 2), and a new one of 3."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        model[0].weight.zero_()
    regularizer = L2SP(L2SP.Config(alpha=alpha, beta=beta, form=form))
    run = run_of(lambda name: name.startswith("0."))
    regularizer.attach(model, run)
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 2.0]]))
        model[1].weight.fill_(3)
    regularizer.begin({})
    model(torch.ones(1, 2))
    assert regularizer.penalty(None).item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("stage", [ONE, *STAGES])
def test_decoupled_pull_is_priorwd(stage):
    """Four steps of AdamW with w -= lr wd (w - w0) before each, by hand, on one process, DDP and every ZeRO stage."""
    rate, alpha, beta = 0.01, 20.0, 10.0
    trial = Trial(
        strategy="full",
        regularizers=(f"l2_sp:alpha={alpha},beta={beta},form=decoupled",),
        rows=8,
        options={"learning_rate": rate, "lr_scheduler_type": "linear", "max_grad_norm": 0.0, "adam_epsilon": 1e-3},
    )
    tiny = MODELS["bert_classifier"]
    model = tiny.load(base_model("bert_classifier", dropout=False)).train()
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, eps=1e-3)
    batch = default_data_collator(tiny.rows(8))
    for step in range(trial.steps):
        optimizer.param_groups[0]["lr"] = now = rate * (1 - step / trial.steps)
        model(**batch).loss.backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.startswith("classifier"):
                    parameter -= now * beta * parameter
                else:
                    parameter -= now * alpha * (parameter - start[name])
        optimizer.step()
        optimizer.zero_grad()
    found = trial.run(stage).weights
    for name, parameter in model.named_parameters():
        moved, expected = found[name] - start[name], parameter.detach() - start[name]
        torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("form", NORMALISERS)
@pytest.mark.parametrize("stage", [ONE, "zero3"])
def test_scope_of_weights_leaves_out_biases_and_norms(form, stage):
    """The formula over parameters of two dimensions: what the second step logs is that of the first step's weights."""
    plugin = f"l2_sp:alpha={ALPHA},beta={BETA},form={form},scope=weights"
    trial = gradients(Trial(strategy="full", regularizers=(plugin,), steps=1))
    start = MODELS[trial.model].load(base_model(trial.model, trial.dropout)).state_dict()
    after = {name: value.double() for name, value in trial.run(stage).weights.items() if value.dim() > 1}
    new = after.pop("classifier.weight")
    old = torch.cat([(value - start[name]).flatten() for name, value in after.items()])
    first, second = (1 / old.numel(), 1 / new.numel()) if form == "mean" else NORMALISERS[form]
    expected = ALPHA * first * old.square().sum() + BETA * second * new.square().sum()
    assert trial.but(steps=2).run(stage).logged("loss/l2_sp")[1] == pytest.approx(expected.item(), rel=1e-5)


def test_decoupled_pull_is_weighed_and_adds_no_loss():
    """``weight`` multiplies both strengths; the logged term is zero."""
    trial = Trial(strategy="full", regularizers=("l2_sp:alpha=2,beta=2,weight=3,form=decoupled",))
    other = trial.but(regularizers=("l2_sp:alpha=6,beta=6,form=decoupled",))
    for name, value in trial.run().weights.items():
        torch.testing.assert_close(value, other.run().weights[name])
    assert set(trial.run().logged("loss/l2_sp")) == {0.0}


def test_refuses_deepspeeds_own_optimizer():
    """Where DeepSpeed is to make the optimizer there is nothing to come before."""
    with pytest.raises(CompatibilityError, match="'l2_sp' needs torch's optimizer"):
        Updates().hook(object(), [L2SP(L2SP.Config())])


def test_a_decoupled_pull_refuses_layer_wise_optimizers():
    """They have no one step to come before."""
    run = run_of(lambda name: True, optimizer="apollo_adamw_layerwise")
    with pytest.raises(CompatibilityError, match="decoupled acts right before a step, and 'apollo_adamw_layerwise'"):
        L2SP(L2SP.Config(form="decoupled")).attach(nn.Linear(2, 1), run)


@pytest.mark.parametrize(("alpha", "beta", "trains"), [(0, 0, "01"), (1, 0, "1"), (0, 1, "0"), (1, 1, "")])
def test_refuses_to_do_nothing(alpha, beta, trains):
    """One line says so where nothing that trains has a strength: alpha alone under a frozen encoder, for example."""
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    for index, layer in enumerate(model):
        layer.requires_grad_(str(index) in trains)
    run = run_of(lambda name: name.startswith("0."))
    with pytest.raises(CompatibilityError, match="'l2_sp' would do nothing") as caught:
        L2SP(L2SP.Config(alpha=alpha, beta=beta)).attach(model, run)
    assert "\n" not in str(caught.value)


def test_a_long_weight_keeps_its_digits():
    """Float32 sums over millions of squares agree with double precision to six digits."""
    torch.manual_seed(0)
    module = nn.ParameterDict({"weight": torch.randn(3_000_000), "anchor": torch.randn(3_000_000)})
    for name in ("anchor", None):
        offset = module.weight.double() - (0 if name is None else module.anchor.double())
        with torch.no_grad():
            found = pull.Pull(module, "weight", name, 1.0).value().item()
        assert found == pytest.approx(offset.square().sum().item(), rel=1e-6)


@pytest.mark.parametrize("peft_type", ["IA3", "VERA", "LOKR"])
@pytest.mark.parametrize("where", [ONE, "zero3"])
def test_weights_that_peft_keeps_in_containers_count(peft_type, where, tmp_path):
    """A parameter in a ParameterDict, which never runs itself, is pulled as any other: the first step's penalty has them all."""
    if where not in (ONE, *STAGES):
        pytest.skip("needs DeepSpeed")
    trial = Trial(strategy=f"peft:peft_type={peft_type}", regularizers=("l2_sp:beta=0.5",), steps=2)
    model = trial.trainer(tmp_path / "look").model
    expected = 0.25 * sum(p.detach().double().square().sum().item() for p in model.parameters() if p.requires_grad)
    assert trial.run(where).logged("loss/l2_sp")[0] == pytest.approx(expected, rel=1e-5)
    assert trial.run(where).logged("grad_norm") == pytest.approx(trial.run().logged("grad_norm"), rel=1e-4)
