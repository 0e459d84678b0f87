"""Alignment of the proxy sub-model against the paper's formulas in float64, autograd, and counts taken by hand."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import tunery
from tunery.core.context import infer_task, make_context
from tunery.core.finished import _Bare
from tunery.core.weights import load_stored
from tunery.plugins.distillation import state_distance
from tunery.plugins.strategies.proxy_sub_fm import ProxySubFm
from tunery.plugins.strategies.proxy_sub_fm.alignment import (
    distillation_loss,
    idle_masks,
    weight_distance,
    weight_product,
)
from tunery.plugins.strategies.proxy_sub_fm.neurons import Block, find_blocks, most
from tunery.registry.conformance.models import MODELS, base_model
from tunery.registry.conformance.traces import anatomy_of
from tunery.registry.conformance.trials import Trial
from tunery.registry.errors import ArtifactError

KIND = "bert_classifier"
TINY = MODELS[KIND]
ALIGNED = Trial(strategy="proxy_sub_fm:ratio=0.5,retained=[0],r=2,distill_steps=3", save=True, steps=2)


def batches(kind: str = KIND, count: int = 4) -> list[dict[str, torch.Tensor]]:
    rows = MODELS[kind].rows(4 * count)
    return [transformers.default_data_collator(rows[at : at + 4]) for at in range(0, len(rows), 4)]


def prepared(kind: str = KIND, **options: Any) -> tuple[ProxySubFm, Any, Any, Any]:
    """Return a strategy, the full model, its sub-model and their run."""
    base = base_model(kind, dropout=False)
    model = MODELS[kind].load(base)
    run = make_context(model, _Bare(seed=7), [infer_task(model)])
    given = {"retained": (0,), "ratio": 0.5, "dropout": 0.0, "learning_rate": 1e-2, "warmup_ratio": 0.0}
    strategy = ProxySubFm(ProxySubFm.Config(**(given | options)))
    torch.manual_seed(0)
    proxy = strategy.prepare(model, run)
    return strategy, MODELS[kind].load(base), proxy, run


def block_of(width: int, conv1d: bool = False, seed: int = 0) -> Block:
    torch.manual_seed(seed)
    first, second = torch.nn.Linear(3, width).double(), torch.nn.Linear(width, 3).double()
    if conv1d:
        first.weight.data, second.weight.data = first.weight.data.T.contiguous(), second.weight.data.T.contiguous()
    return Block(layer=0, enter=(first,), leave=second, conv1d=conv1d)


# ---- eq. 13


def test_distance_of_the_example() -> None:
    """O = [[1, 2], [3, 4]] and one entry off by 2: 4 / 4 / 7.5 normalised, and 4 for its one row in the paper's form."""
    taught = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    found = taught + torch.tensor([[[0.0, 2.0], [0.0, 0.0]]])
    real = torch.ones(1, 2, dtype=torch.bool)
    assert float(state_distance(found, taught, real, "normalised")) == pytest.approx(0.13333, abs=1e-5)
    assert float(state_distance(found, taught, real, "paper")) == 4.0


@pytest.mark.parametrize("objective", ["paper", "normalised"])
def test_loss_is_equation_13_over_real_tokens(objective: str) -> None:
    """In float64 from the formula: a mean over layers, pads left out."""
    generator = torch.Generator().manual_seed(0)
    mine, aims = ([torch.randn(2, 3, 4, generator=generator).double() for _ in range(2)] for _ in range(2))
    products, targets = ([torch.randn(4, 4, generator=generator).double() for _ in range(2)] for _ in range(2))
    real = torch.tensor([[True, True, False], [True, False, False]])
    expected = 0.0
    for layer in range(2):
        rows = [(mine[layer][row] - aims[layer][row])[real[row]] for row in range(2)]
        weights = products[layer] - targets[layer]
        if objective == "paper":
            expected += sum(float((row**2).sum()) for row in rows) / 2 + 0.3 * float((weights**2).sum())
        else:
            flat, aim = torch.cat(rows), aims[layer][real]
            expected += float(((flat / aim.square().mean().sqrt()) ** 2).mean())
            expected += 0.3 * float(((weights / targets[layer].square().mean().sqrt()) ** 2).mean())
    found = distillation_loss(mine, aims, real, products, targets, objective, 0.3)
    assert float(found) == pytest.approx(expected / 2, rel=1e-6)


@pytest.mark.parametrize("conv1d", [False, True])
@pytest.mark.parametrize("objective", ["paper", "normalised"])
def test_the_weight_term_has_its_gradient(objective: str, conv1d: bool) -> None:
    """Non-zero for both weights, equal to the closed form 2 W2'(P' - P) and 2 (P' - P) W1' in float64, and gradcheck agrees."""
    narrow, whole = block_of(2, conv1d), block_of(5, conv1d, seed=1)
    taught = weight_product(whole).detach()
    loss = weight_distance(weight_product(narrow), taught, objective)
    enter, leave = narrow.enter[0].weight, narrow.leave.weight
    found = torch.autograd.grad(loss, [enter, leave])
    first, second = (enter.T, leave.T) if conv1d else (enter, leave)
    error = 2 * (second @ first - taught).detach()
    scale = 1.0 if objective == "paper" else 1 / (9 * taught.square().mean())
    expected = [second.T @ error * scale, error @ first.T * scale]
    for gradient, closed in zip(found, expected, strict=True):
        assert float(gradient.abs().max()) > 1e-3
        torch.testing.assert_close(gradient, closed.T if conv1d else closed, rtol=1e-12, atol=1e-12)

    def of(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return weight_distance((first @ second).T if conv1d else second @ first, taught, objective)

    assert torch.autograd.gradcheck(of, (enter.detach().requires_grad_(), leave.detach().requires_grad_()))


def test_a_gated_block_has_the_product_of_down_and_up() -> None:
    """The gate is left out."""
    _, full, _, run = prepared("llama_causal_lm")
    block = find_blocks(full, run)[1]
    mlp = full.model.layers[1].mlp
    torch.testing.assert_close(weight_product(block), mlp.down_proj.weight @ mlp.up_proj.weight)


# ---- before tuning


@pytest.mark.parametrize("kind", [KIND, "gpt2_causal_lm", "llama_causal_lm", "vit_classifier"])
def test_distilling_lowers_the_loss_and_changes_narrow_blocks_alone(kind: str) -> None:
    """Adapter, head, attention, norms and whole layers keep their bits, and so does the teacher; flags and modes are back."""
    strategy, full, proxy, run = prepared(kind, distill_steps=8)
    before = {name: value.clone() for name, value in proxy.state_dict().items()}
    flags = [parameter.requires_grad for parameter in proxy.parameters()]
    teacher = {name: value.clone() for name, value in full.state_dict().items()}
    measured = strategy.distill(full, proxy, batches(kind, 2), run)
    moved = {name for name, value in proxy.state_dict().items() if not torch.equal(value, before[name])}
    assert measured["alignment_steps"] == 8
    assert measured["alignment_loss"] < measured["alignment_loss_first"]
    assert moved == set(strategy.stored(proxy, run))
    assert flags == [parameter.requires_grad for parameter in proxy.parameters()]
    assert all(torch.equal(value, teacher[name]) for name, value in full.state_dict().items())


def test_the_model_made_whole_teaches_what_the_model_itself_does() -> None:
    """One owner, who has no second model, gets the same sub-model to the bit."""
    results = []
    for apart in (True, False):
        strategy, full, proxy, run = prepared(distill_steps=3)
        strategy.distill(full if apart else None, proxy, batches(), run)
        results.append(proxy.state_dict())
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_a_twin_that_shares_the_tensors_stays_the_model() -> None:
    """Taught by it, realigned with it and plugged into it: one owner of the weights suffices."""
    model = TINY.load(base_model(KIND, dropout=False))
    expected = TINY.logits(model)
    twin = copy.deepcopy(model, memo={id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    run = make_context(model, _Bare(seed=7), [infer_task(model)])
    strategy = ProxySubFm(ProxySubFm.Config(retained=(0,), distill_steps=2, learning_rate=1e-2))
    proxy = strategy.prepare(model, run)
    strategy.distill(twin, proxy, batches(), run)
    torch.testing.assert_close(TINY.logits(twin), expected, rtol=0, atol=0)
    full = strategy.plug_in(twin, proxy, run)
    before = proxy.state_dict()["base_model.model.bert.encoder.layer.1.output.dense.weight"].clone()
    strategy.realign(full, proxy, strategy.statistics(proxy, batches(), run), batches(), run)
    assert not torch.equal(proxy.state_dict()["base_model.model.bert.encoder.layer.1.output.dense.weight"], before)
    torch.testing.assert_close(TINY.logits(full), expected, rtol=0, atol=0)


def test_first_loss_is_equation_13_of_the_two_models() -> None:
    """From the hidden states that transformers itself returns."""
    strategy, full, proxy, run = prepared(distill_steps=1, mu=0.5)
    batch = batches(count=1)[0]
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    with torch.no_grad():
        aims = full.eval()(**inputs, output_hidden_states=True).hidden_states[2]
        mine = proxy.eval()(**inputs, output_hidden_states=True).hidden_states[2]
    difference = (aims - mine) * inputs["attention_mask"][:, :, None]
    products = [
        layer.output.dense.weight @ layer.intermediate.dense.weight
        for layer in (full.bert.encoder.layer[1], proxy.get_base_model().bert.encoder.layer[1])
    ]
    expected = difference.square().sum() / 4 + 0.5 * (products[0] - products[1]).square().sum()
    measured = strategy.distill(full, proxy, [batch], run)
    assert measured["alignment_loss_first"] == pytest.approx(expected.item(), rel=1e-5)


def test_nothing_is_distilled_unless_asked_or_where_nothing_was_removed(caplog: pytest.LogCaptureFixture) -> None:
    """No steps, or ratio 0, which is said."""
    for options in ({"distill_steps": 0}, {"distill_steps": 3, "ratio": 0.0}):
        strategy, full, proxy, run = prepared(**options)
        assert strategy.distill(full, proxy, batches(), run) == {}
    assert strategy.statistics(proxy, batches(), run) == {}
    assert [record.message for record in caplog.records] == [
        "nothing was removed: distill_steps has nothing to bring closer"
    ]


def test_a_run_stores_what_it_aligned(tmp_path: Path) -> None:
    """Checkpoints and the run hold the narrow blocks; loaded back they are there; the exported adapter has none of them."""
    outcome = ALIGNED.run()
    stored = load_file(outcome.folder / "strategy.safetensors")
    assert {name.split(".layer.")[1] for name in stored} == {
        "1.intermediate.dense.weight",
        "1.intermediate.dense.bias",
        "1.output.dense.weight",
        "1.output.dense.bias",
    }
    again = load_file(outcome.folder / "checkpoint-1" / "strategy.safetensors")
    live = dict(tunery.load_run(outcome.folder).model.named_parameters())
    for name, value in stored.items():
        assert torch.equal(value, again[name])
        assert torch.equal(value, live[name])
    fresh = dict(prepared()[2].named_parameters())
    assert any(not torch.equal(value, fresh[name]) for name, value in stored.items())
    assert not (tunery.export_run(outcome.folder, tmp_path / "adapter") / "strategy.safetensors").exists()


def test_resuming_does_not_align_again(tmp_path: Path) -> None:
    """The stored neurons are taken over from the checkpoint."""
    trainer = ALIGNED.trainer(tmp_path)
    trainer.train(resume_from_checkpoint=str(ALIGNED.run().folder / "checkpoint-1"))
    assert trainer.alignment == {}
    stored = load_file(ALIGNED.run().folder / "strategy.safetensors")
    live = dict(trainer.model.named_parameters())
    assert all(torch.equal(value, live[name]) for name, value in stored.items())


def test_regularizers_are_off_while_a_run_aligns(tmp_path: Path) -> None:
    """No hook of one is on the model then, and it is back for training."""
    trainer = ALIGNED.but(regularizers=("lnsr:sigma=0.5,layer=0",)).trainer(tmp_path)
    strategy, seen = trainer.recipe.strategy, []

    def hooks() -> int:
        return sum(count for _, _, count in anatomy_of(trainer.model)["hooks"])

    class Spy(type(strategy)):
        def distill(self, *given: Any) -> Any:
            seen.append(hooks())
            return super().distill(*given)

    attached = hooks()
    strategy.__class__ = Spy
    trainer.train()
    assert attached > seen[0] == sum(count for _, _, count in anatomy_of(prepared()[2])["hooks"])
    assert hooks() == attached
    assert trainer.alignment["alignment_steps"] == 3


def test_rows_that_come_later_are_not_aligned_on(tmp_path: Path) -> None:
    """A federation hands clients' rows to a Trainer built without any, and aligns on rows of its own."""
    rows = TINY.rows(8)
    args = tunery.TrainingArguments(
        output_dir=str(tmp_path),
        strategy=ALIGNED.strategy,
        use_cpu=True,
        report_to="none",
        max_steps=1,
        disable_tqdm=True,
    )
    trainer = tunery.Trainer(model=TINY.load(base_model(KIND, dropout=False)), args=args)
    trainer.train_dataset = rows
    trainer.train()
    assert trainer.alignment == {}


def test_a_file_of_another_sub_model_is_refused(tmp_path: Path) -> None:
    """Stored neurons that do not fit are one line."""
    folder = shutil.copytree(ALIGNED.run().folder, tmp_path / "run")
    trainer = Trial(strategy="proxy_sub_fm:ratio=0.75,retained=[0],r=2").trainer(tmp_path / "other")
    with pytest.raises(ArtifactError, match="does not fit") as caught:
        load_stored(trainer.model, folder)
    assert "\n" not in str(caught.value)
    with pytest.raises(ArtifactError, match="lacks"):
        load_stored(torch.nn.Linear(1, 1), folder)


# ---- during tuning


@pytest.mark.parametrize("threshold", [0.0, 0.05])
def test_idle_neurons_are_counted_over_real_tokens(threshold: float) -> None:
    """Eq. 14 by hand, from the block's own input; counts of two clients add up to those of both."""
    strategy, _, proxy, run = prepared(apoz_threshold=threshold)
    layer = proxy.get_base_model().bert.encoder.layer[1]
    with torch.no_grad():
        layer.intermediate.dense.bias[:3] = -20.0  # erf-GELU gives exactly zero there
    given = batches()
    told = strategy.statistics(proxy, given, run)
    zeros, tokens = torch.zeros(16, dtype=torch.float64), 0
    seen: list[torch.Tensor] = []
    hook = layer.output.dense.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    for batch in given:
        with torch.no_grad():
            proxy.eval()(**{key: value for key, value in batch.items() if key != "labels"})
        for row, length in zip(seen.pop(), batch["attention_mask"].sum(1).tolist(), strict=True):
            zeros += (row[:length].abs() <= threshold).sum(0)
            tokens += length
    hook.remove()
    assert told["zeros.1"].dtype == told["tokens"].dtype == torch.float64
    torch.testing.assert_close(told["zeros.1"], zeros, rtol=0, atol=0)
    assert told["tokens"] == tokens
    assert (zeros[:3] == tokens).all() and (threshold or zeros[3:].sum() == 0)
    halves = [strategy.statistics(proxy, half, run) for half in (given[:1], given[1:])]
    assert all(torch.equal(halves[0][name] + halves[1][name], value) for name, value in told.items())


def test_idle_neurons_are_exactly_zero_behind_relu() -> None:
    """With ReLU every negative input counts as idle (eq. 14 as it stands), without a threshold."""
    strategy, _, proxy, run = prepared()
    layer = proxy.get_base_model().bert.encoder.layer[1]
    layer.intermediate.intermediate_act_fn = torch.nn.ReLU()
    given, negative = batches(), torch.zeros(16, dtype=torch.float64)
    seen: list[torch.Tensor] = []
    hook = layer.intermediate.dense.register_forward_hook(lambda _module, _args, output: seen.append(output))
    told = strategy.statistics(proxy, given, run)
    hook.remove()
    for before, batch in zip(seen, given, strict=True):
        negative += (before <= 0)[batch["attention_mask"].bool()].sum(0)
    assert torch.equal(told["zeros.1"], negative) and 0 < negative.sum() < 16 * told["tokens"]


def test_the_most_idle_share_is_chosen_and_ties_go_to_the_first() -> None:
    """Rates, not counts of one client; two of four."""
    block = block_of(4)
    statistics = {"zeros.0": torch.tensor([1.0, 5.0, 1.0, 0.0]).double(), "tokens": torch.tensor(10.0).double()}
    rows, bias, columns, out_bias = idle_masks(block, statistics, 0.5)
    assert rows.flatten().tolist() == bias.tolist() == columns.flatten().tolist() == [True, True, False, False]
    assert not out_bias.any()


def test_realigning_changes_the_idle_neurons_alone() -> None:
    """Rows, biases and columns of half of the kept neurons change; every other bit of the sub-model stays, weight decay or not."""
    strategy, full, proxy, run = prepared(share=0.25, realign_steps=3, weight_decay=0.5)
    torch.manual_seed(3)
    for parameter in proxy.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.1)
    full = strategy.plug_in(full, proxy, run)
    before = {name: value.clone() for name, value in proxy.state_dict().items()}
    counts = torch.arange(16).double()
    measured = strategy.realign(full, proxy, {"zeros.1": counts, "tokens": torch.tensor(20.0)}, batches(), run)
    assert measured["alignment_steps"] == 3
    idle = most(counts, 4).tolist()
    rest = [number for number in range(16) if number not in idle]
    after = proxy.state_dict()
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    layer = "base_model.model.bert.encoder.layer.1."
    enter, bias, leave = (
        f"{layer}{n}" for n in ("intermediate.dense.weight", "intermediate.dense.bias", "output.dense.weight")
    )
    assert moved == {enter, bias, leave}
    assert torch.equal(after[enter][rest], before[enter][rest]) and torch.equal(after[bias][rest], before[bias][rest])
    assert torch.equal(after[leave][:, rest], before[leave][:, rest])
    changed = sum(int((after[name] != before[name]).sum()) for name in moved)
    assert 0.9 * strategy.realigned(proxy, run) < changed <= strategy.realigned(proxy, run) == 4 * (16 + 1 + 16)
    assert (after[enter][idle] != before[enter][idle]).any(1).all()
    assert (after[leave][:, idle] != before[leave][:, idle]).any(0).all()


def test_realigning_without_statistics_does_nothing() -> None:
    """Nobody said which neurons are idle."""
    strategy, full, proxy, run = prepared()
    assert strategy.realign(full, proxy, {}, batches(), run) == {}


def test_realigning_is_due_as_configured() -> None:
    """Every t rounds; never where nothing was removed."""
    for options, every in (({}, 10), ({"realign_every": 0}, 0), ({"ratio": 0.0}, 0)):
        assert ProxySubFm(ProxySubFm.Config(**options)).realign_every == every
