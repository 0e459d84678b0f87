"""Parameter access in one process: companions that nobody sees, perturbations that leave no trace. Stages have tests of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForSequenceClassification

from tunery.core.sharding import (
    ModelSharding,
    adopted_parameters,
    companion_names,
    is_sharded,
    parameter_counts,
)


class Net(nn.Module):
    """Two layers, a buffer that is saved and one that is not, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.second.weight
        self.register_buffer("saved", torch.arange(3.0))
        self.register_buffer("unsaved", torch.arange(2.0), persistent=False)
        self.first.bias.requires_grad_(False)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def sharding() -> ModelSharding:
    return ModelSharding()


def bits(model: nn.Module) -> dict[str, bytes]:
    """Return every parameter and buffer as bytes."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().numpy().tobytes() for name, tensor in tensors}


def test_alone(sharding: ModelSharding, net: Net):
    """One process is rank 0 of one, without a ZeRO stage, and its piece is everything."""
    assert (sharding.zero_stage, sharding.rank, sharding.world_size) == (0, 0, 1)
    assert not is_sharded(net.first.weight)
    piece = sharding.local(net.first.weight)
    assert torch.equal(piece, net.first.weight.flatten())
    assert piece.data_ptr() == net.first.weight.data_ptr()
    assert not piece.requires_grad
    full = torch.arange(12).reshape(4, 3)
    assert torch.equal(sharding.local_of(net.first.weight, full), torch.arange(12))
    values = torch.tensor([1.0, 2.0])
    assert torch.equal(sharding.sum_shards(values), values)


def test_gathered_and_written(sharding: ModelSharding, net: Net):
    """Inside, parameters have their shape; what is written stays."""
    with sharding.gathered(net.parameters()):
        assert net.first.weight.shape == (4, 3)
    with sharding.written([net.first.weight]), torch.no_grad():
        net.first.weight.fill_(7.0)
    assert torch.equal(net.first.weight, torch.full((4, 3), 7.0))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_perturbed_gives_back_every_bit(fails: bool, dtype: torch.dtype, sharding: ModelSharding, net: Net):
    """Whatever is done to the parameters inside, also when it ends in an error, no bit of them has changed."""
    net.to(dtype)
    with torch.no_grad():
        net.first.weight[0] = torch.tensor([float("nan"), -0.0, float("inf")])
    before = {name: value.view(torch.uint8).clone() for name, value in raw(net)}
    with (
        pytest.raises(ZeroDivisionError) if fails else nullcontext(),
        sharding.perturbed(net.parameters()),
        torch.no_grad(),
    ):
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter))
        assert not torch.equal(net.second.weight.flatten().view(torch.uint8), before["second.weight"])
        if fails:
            raise ZeroDivisionError
    assert all(torch.equal(value.view(torch.uint8), before[name]) for name, value in raw(net))
    assert net.tied.weight is net.second.weight


def raw(net: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.detach().flatten()) for name, parameter in net.named_parameters()]


def test_perturbed_takes_a_generator(sharding: ModelSharding, net: Net):
    """The parameters may come from a generator, which is used up once."""
    before = bits(net)
    with sharding.perturbed(parameter for parameter in net.parameters()), torch.no_grad():
        net.first.weight.zero_()
    assert bits(net) == before


# ---- companions


@pytest.fixture
def accompanied(sharding: ModelSharding, net: Net) -> Net:
    """A net with a companion beside its first weight, and the one beside its first bias."""
    sharding.companion(net.first, "anchor", like="weight")
    sharding.companion(net.first, "other_anchor", like="bias", value=torch.zeros(4))
    return net


def test_companion_is_a_frozen_copy(accompanied: Net, net: Net):
    """It holds a copy, or the value given, and does not train; a later step of the original does not reach it."""
    first = accompanied.first
    assert torch.equal(first.anchor, first.weight)
    assert torch.equal(first.other_anchor, torch.zeros(4))
    assert not first.anchor.requires_grad
    with torch.no_grad():
        first.weight.add_(1)
    assert not torch.equal(first.anchor, first.weight)


def test_companion_is_in_no_state_dict(accompanied: Net):
    """No state_dict has it, at any level, and none needs it."""
    plain = Net()
    assert accompanied.state_dict().keys() == plain.state_dict().keys()
    assert accompanied.first.state_dict().keys() == plain.first.state_dict().keys()
    assert nn.ModuleList([accompanied]).state_dict(prefix="x.").keys() == {f"x.0.{key}" for key in plain.state_dict()}
    kept = accompanied.first.anchor.clone()
    assert accompanied.load_state_dict(plain.state_dict()).missing_keys == []
    assert torch.equal(accompanied.first.weight, plain.first.weight)
    assert torch.equal(accompanied.first.anchor, kept)
    assert companion_names(accompanied) == {"first.anchor", "first.other_anchor"}


def test_companion_hides_nothing_else(accompanied: Net):
    """A key that is really missing is still reported, also one of the same module."""
    state = accompanied.state_dict()
    del state["first.weight"], state["second.bias"]
    assert accompanied.load_state_dict(state, strict=False).missing_keys == ["first.weight", "second.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict"):
        accompanied.load_state_dict(state)


def test_companions_do_not_count(accompanied: Net):
    """They are no part of the model."""
    assert parameter_counts(accompanied) == parameter_counts(Net())


def test_removing_restores(accompanied: Net, sharding: ModelSharding):
    """After the last one is gone the module is as it was: parameters, keys, attributes, hooks."""
    plain = Net()
    sharding.remove_companion(accompanied.first, "anchor")
    assert companion_names(accompanied) == {"first.other_anchor"}
    assert "first.other_anchor" not in accompanied.state_dict()
    sharding.remove_companion(accompanied.first, "other_anchor")
    assert [name for name, _ in accompanied.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert vars(accompanied.first).keys() == vars(plain.first).keys()
    for hooks in ("_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"):
        assert not getattr(accompanied.first, hooks)


def test_companion_comes_back(accompanied: Net, sharding: ModelSharding):
    """After removal the same name can be given again, and is hidden again."""
    for name in ("anchor", "other_anchor"):
        sharding.remove_companion(accompanied.first, name)
    sharding.companion(accompanied.first, "anchor", like="bias")
    assert companion_names(accompanied) == {"first.anchor"}
    assert accompanied.state_dict().keys() == Net().state_dict().keys()


def test_companions_survive_a_copy(accompanied: Net):
    """A deep copy of an accompanied model hides its companions too."""
    twin = copy.deepcopy(accompanied)
    assert twin.state_dict().keys() == Net().state_dict().keys()


def test_companions_are_in_no_file(tiny: Any, sharding: ModelSharding, tmp_path: Path):
    """``save_pretrained`` writes no companion, and the file loads into a model without one."""
    model = AutoModelForSequenceClassification.from_pretrained(tiny.base)
    plain = set(model.state_dict())
    for module in model.modules():
        if isinstance(module, nn.Linear):
            sharding.companion(module, "anchor", like="weight")
    model.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == plain
    again, report = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(again.classifier.weight, model.classifier.weight)


# ---- adopted modules


@pytest.fixture
def adopted(sharding: ModelSharding, net: Net) -> Net:
    """A net whose first layer has adopted a small network that trains."""
    sharding.adopt(net.first, "own", nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1, bias=False)))
    return net


def test_adopted_trains_and_is_in_no_state_dict(adopted: Net):
    """Its parameters are the model's, and no state_dict has or misses them; a really missing key is still reported."""
    names = {"first.own.0.weight", "first.own.0.bias", "first.own.1.weight"}
    assert adopted_parameters(adopted).keys() == names
    assert names <= {name for name, parameter in adopted.named_parameters() if parameter.requires_grad}
    assert adopted.state_dict().keys() == Net().state_dict().keys()
    assert adopted.load_state_dict(Net().state_dict()).missing_keys == []
    state = Net().state_dict()
    del state["first.weight"], state["second.bias"]
    for model, prefix in ((adopted, ""), (nn.ModuleList([adopted]), "0.")):
        result = model.load_state_dict({prefix + key: value for key, value in state.items()}, strict=False)
        assert result.missing_keys == [f"{prefix}first.weight", f"{prefix}second.bias"]


def test_adopted_counts(adopted: Net):
    """It trains, so it counts; a companion does not."""
    assert parameter_counts(adopted)["trainable"] == parameter_counts(Net())["trainable"] + 4 * 2 + 2 + 2


def test_adopted_goes_again(adopted: Net):
    """Deleted, nothing of it stays."""
    plain = Net()
    del adopted.first.own
    assert [name for name, _ in adopted.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert vars(adopted.first).keys() == vars(plain.first).keys()


# ---- counting


def test_parameter_counts(net: Net):
    """Tied weights count once, frozen ones in the total, buffers never."""
    assert parameter_counts(net) == {"trainable": 12 + 16 + 4, "total": 12 + 4 + 16 + 4}


@pytest.mark.parametrize("make", [lambda: ModelSharding(), lambda: ModelSharding(2)])
def test_sum_shards_does_not_change_its_argument(make: Callable[[], ModelSharding]):
    """Without ZeRO-3 every rank has the whole, so there is nothing to sum."""
    values = torch.ones(3)
    assert torch.equal(make().sum_shards(values), torch.ones(3))
    assert torch.equal(values, torch.ones(3))
