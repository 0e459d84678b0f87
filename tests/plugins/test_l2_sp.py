"""L2-SP against the formula in double precision."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tunery.core.sharding import ModelSharding
from tunery.plugins.regularizers import l2_sp
from tunery.plugins.regularizers.l2_sp import L2SP

ALPHA, BETA, FACTOR = 0.5, 0.1, 3.0


@pytest.fixture(params=[2**22, 7], ids=["whole", "pieces"])
def trained(request, monkeypatch):
    """A pre-trained layer and a new one, both moved since the penalty was attached; weights whole or in pieces of 7."""
    monkeypatch.setattr(l2_sp, "_PIECE", request.param)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
    regularizer = L2SP(L2SP.Config(alpha=ALPHA, beta=BETA))
    start = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
    run = SimpleNamespace(sharding=ModelSharding(), is_pretrained=lambda name: name.startswith("0."))
    regularizer.attach(model, run)
    with torch.no_grad():
        for name in start:
            model.get_parameter(name).add_(torch.randn(model.get_parameter(name).shape))
    return model, regularizer, start


def test_value_and_gradient(trained):
    """(alpha/2) sum (w - w0)^2 + (beta/2) sum w^2, and its derivative on top of the task's."""
    model, regularizer, start = trained
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
    for name, old in start.items():
        weight = model.get_parameter(name).detach().double()
        strength, offset = (ALPHA, weight - old) if name.startswith("0.") else (BETA, weight)
        expected += 0.5 * strength * offset.square().sum().item()
        pulled = model.get_parameter(name).grad.double() + FACTOR * strength * offset
        torch.testing.assert_close(found[name], pulled, rtol=1e-6, atol=1e-6)
    assert penalty.item() == pytest.approx(expected, rel=1e-6)


def test_a_long_weight_keeps_its_digits():
    """Float32 sums over millions of squares agree with double precision to six digits."""
    torch.manual_seed(0)
    weight, anchor = torch.randn(3_000_000), torch.randn(3_000_000)
    for w0 in (anchor, None):
        offset = weight.double() - (0 if w0 is None else w0.double())
        assert sum(l2_sp._squares(weight, w0)).item() == pytest.approx(offset.square().sum().item(), rel=1e-6)
