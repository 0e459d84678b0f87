"""Offsite-Tuning against the paper's counts and choice of layers, and plain PEFT on the full model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file

import tunery
from tunery.core.context import infer_task, make_context
from tunery.core.finished import _Bare
from tunery.core.recipe import choose
from tunery.plugins.strategies.offsite import Offsite, choose_uniformly
from tunery.registry.conformance.models import LENGTH, MODELS, VOCABULARY
from tunery.registry.conformance.trials import Trial
from tunery.registry.errors import CompatibilityError, TuneryError

DEEP = MODELS["deep_bert_classifier"]
WIDTH = {"hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 32}
BUILT = {
    "bert": (transformers.BertConfig(vocab_size=VOCABULARY, **WIDTH), "SequenceClassification"),
    "llama": (
        transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, pad_token_id=0, **WIDTH),
        "CausalLM",
    ),
    "qwen2": (
        transformers.Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=1, pad_token_id=0, **WIDTH),
        "CausalLM",
    ),
    "gpt2": (
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=6, n_head=2, bos_token_id=0, eos_token_id=0
        ),
        "CausalLM",
    ),
    "vit": (transformers.ViTConfig(image_size=8, patch_size=4, **WIDTH), "ImageClassification"),
}


def build(kind: str) -> Any:
    """Return a model of six layers, the same bits every time."""
    config, head = BUILT[kind]
    torch.manual_seed(0)
    return getattr(transformers, f"AutoModelFor{head}").from_config(type(config)(**config.to_dict())).eval()


def answers(model: Any, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if kind == "vit":
        given = {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    else:
        given = {"input_ids": torch.randint(1, VOCABULARY, (2, 7), generator=generator)}
    with torch.no_grad():
        found: torch.Tensor = model.eval()(**given).logits
    return found


def prepared(kind: str, **options: Any) -> tuple[Offsite, Any, Any]:
    """Return a strategy, the stand-in and its run."""
    model = build(kind)
    run = make_context(model, _Bare(seed=7), [infer_task(model)])
    strategy = Offsite(Offsite.Config(**({"adapter_layers": (1, 2), "emulator_layers": 2, "r": 2} | options)))
    return strategy, strategy.prepare(model, run), run


def moved(model: Any) -> Any:
    """Give what trains values that matter."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    ("count", "keep", "chosen"),
    [
        (8, 3, [0, 4, 7]),
        (6, 3, [0, 2, 5]),
        (8, 8, list(range(8))),
        (8, 2, [0, 7]),
        (8, 1, [3]),
        (1, 1, [0]),
        (8, 0, []),
    ],
)
def test_layers_are_chosen_uniformly(count: int, keep: int, chosen: list[int]) -> None:
    """The paper's 8 -> 3 keeps 0, 4 and 7; halves go to the even number; one layer is the middle one."""
    assert choose_uniformly(count, keep) == chosen


def test_counts_of_bert_base() -> None:
    """FedOT has 49,615,104 transformer parameters, or 47.32 times 2^20; r=24 on four layers' projections is as many numbers as r=8 on twelve's."""
    with torch.device("meta"):
        model = transformers.BertForSequenceClassification(transformers.BertConfig())
    run = make_context(model, _Bare(seed=7), [infer_task(model)])
    proxy: Any = Offsite(Offsite.Config()).prepare(model, run)
    named = [(name, value.numel()) for name, value in proxy.named_parameters() if ".encoder.layer." in name]
    size = sum(size for name, size in named if "lora_" not in name)
    assert size == 49_615_104 and f"{size / 2**20:.2f}" == "47.32"
    assert sum(size for name, size in named if "lora_" in name) == 12 * 4 * 2 * 8 * 768 == 589_824


@pytest.mark.parametrize("tune", ["lora", "layers"])
@pytest.mark.parametrize("kind", BUILT)
def test_untrained_and_plugged_back_it_changes_nothing(kind: str, tune: str) -> None:
    """The full model answers to the bit as it did, with the plug and in place; and the stand-in answers otherwise."""
    expected = answers(build(kind), kind)
    strategy, proxy, run = prepared(kind, tune=tune)
    narrow = answers(proxy, kind)
    assert not torch.allclose(narrow, expected, atol=1e-6)
    torch.testing.assert_close(answers(strategy.plug_in(build(kind), proxy, run), kind), expected, rtol=0, atol=0)
    with strategy.whole(proxy, run):
        torch.testing.assert_close(answers(proxy, kind), expected, rtol=0, atol=0)
    torch.testing.assert_close(answers(proxy, kind), narrow, rtol=0, atol=0)


@pytest.mark.parametrize("tune", ["lora", "layers"])
@pytest.mark.parametrize("kind", BUILT)
def test_an_adapter_of_the_stand_in_loads_in_plain_peft_on_the_full_model(kind: str, tune: str, tmp_path: Path) -> None:
    """The plug, the export in place and plain PEFT from the exported files agree; the layers have the model's numbers."""
    strategy, proxy, run = prepared(kind, tune=tune)
    moved(proxy)
    untrained = answers(build(kind), kind)
    full = strategy.plug_in(build(kind), proxy, run)
    again = strategy.plug_in(full, proxy, run)
    assert again is full
    expected = answers(full, kind)
    assert not torch.allclose(expected, untrained, atol=1e-3)
    exported: Any = strategy.export(proxy, run)
    torch.testing.assert_close(answers(exported, kind), expected, rtol=0, atol=1e-6)
    exported.save_pretrained(tmp_path)
    plain = PeftModel.from_pretrained(build(kind), str(tmp_path))
    torch.testing.assert_close(answers(plain, kind), expected, rtol=0, atol=1e-6)
    assert exported.get_base_model().config.num_hidden_layers == 6


def test_as_many_layers_as_there_are_is_the_full_model() -> None:
    """Nothing left out: the same bits."""
    _, proxy, _ = prepared("bert", emulator_layers=3)
    torch.testing.assert_close(answers(proxy, "bert"), answers(build("bert"), "bert"), rtol=0, atol=0)


@pytest.mark.parametrize("tune", ["lora", "layers"])
def test_only_the_ends_and_the_head_train(tune: str) -> None:
    """Layers 0, 3 and 4 of the stand-in are 0, 4 and 5 of the model; the emulator between them is frozen."""
    _, proxy, _ = prepared("bert", tune=tune)
    trained = [name for name, parameter in proxy.named_parameters() if parameter.requires_grad]
    layers = {name.split(".layer.")[1][0] for name in trained if ".layer." in name}
    assert layers == {"0", "3", "4"}
    assert all(".layer." in name or "classifier" in name for name in trained)
    assert all(("lora_" in name) is (tune == "lora") for name in trained if ".layer." in name)


@pytest.mark.parametrize("tune", ["lora", "layers"])
def test_a_twin_that_shares_the_tensors_stays_the_model(tune: str) -> None:
    """Taught by it and trained, the stand-in leaves the twin's answers as they were: one owner of the weights suffices."""
    model = build("bert")
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, memo=shared)
    run = make_context(model, _Bare(seed=7), [infer_task(model)])
    strategy = Offsite(Offsite.Config(adapter_layers=(1, 2), emulator_layers=2, tune=tune, distill_steps=2))
    proxy = strategy.prepare(model, run)
    strategy.distill(twin, proxy, [{"input_ids": torch.arange(1, 15).view(2, 7)}], run)
    moved(proxy)
    torch.testing.assert_close(answers(twin, "bert"), answers(build("bert"), "bert"), rtol=0, atol=0)
    again = answers(strategy.plug_in(build("bert"), proxy, run), "bert")
    torch.testing.assert_close(answers(strategy.plug_in(twin, proxy, run), "bert"), again, rtol=0, atol=0)


def test_a_decoder_goes_on_writing_with_its_cache() -> None:
    """The stand-in's layers are numbered through: with keys and values kept it generates what it does without."""
    _, proxy, _ = prepared("llama")
    asked = torch.tensor([[3, 4, 5]])
    given = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(asked)}
    found = proxy.eval().generate(input_ids=asked, use_cache=True, **given)
    assert torch.equal(found, proxy.generate(input_ids=asked, use_cache=False, **given))


@pytest.mark.parametrize("apart", [True, False])
def test_distilling_brings_the_emulator_closer_and_changes_it_alone(apart: bool) -> None:
    """First loss from the hidden states that transformers returns; the ends, the head and the teacher keep their bits."""
    strategy, proxy, run = prepared("bert", distill_steps=8, learning_rate=1e-4, warmup_ratio=0.0)
    full = build("bert")
    batch = {"input_ids": torch.arange(1, 15).view(2, 7)}
    with torch.no_grad():
        aim = full(**batch, output_hidden_states=True).hidden_states[4]
        found = proxy.eval()(**batch, output_hidden_states=True).hidden_states[3]
    before = {name: value.clone() for name, value in proxy.state_dict().items()}
    teacher = {name: value.clone() for name, value in full.state_dict().items()}
    for module in proxy.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    measured = strategy.distill(full if apart else None, proxy, [batch], run)
    expected = (((aim - found) / aim.square().mean().sqrt()) ** 2).mean()
    assert measured["alignment_loss_first"] == pytest.approx(expected.item(), rel=1e-5)
    assert measured["alignment_loss"] < measured["alignment_loss_first"]
    changed = {name for name, value in proxy.state_dict().items() if not torch.equal(value, before[name])}
    assert changed <= set(strategy.stored(proxy, run))
    assert len(changed) > 20
    assert all(torch.equal(value, teacher[name]) for name, value in full.state_dict().items())
    torch.testing.assert_close(answers(strategy.plug_in(full, proxy, run), "bert"), answers(build("bert"), "bert"))


def test_a_run_stores_the_emulator_it_distilled(tmp_path: Path) -> None:
    """And the exported adapter has nothing of it."""
    strategy = "offsite:adapter_layers=[1,1],emulator_layers=2,r=2,distill_steps=2"
    outcome = Trial(model="deep_bert_classifier", strategy=strategy, steps=2).run()
    stored = load_file(outcome.folder / "strategy.safetensors")
    assert {name.split(".layer.")[1][0] for name in stored} == {"1", "2"}
    folder = tunery.export_run(outcome.folder, tmp_path / "adapter")
    layers = {
        name.split(".layer.")[1][0] for name in load_file(folder / "adapter_model.safetensors") if ".layer." in name
    }
    assert layers == {"0", "4"}
    assert not (folder / "strategy.safetensors").exists()


def test_the_layers_between_join_a_stand_in_of_less_precision() -> None:
    """A stand-in in bfloat16 answers as the full model in bfloat16 does."""
    strategy, proxy, run = prepared("bert")
    with strategy.whole(proxy.to(torch.bfloat16), run) as full:
        found = answers(full, "bert")
    torch.testing.assert_close(found, answers(build("bert").to(torch.bfloat16), "bert"))


def test_an_emulator_of_no_layers_cannot_be_distilled() -> None:
    """It has nothing to learn; the steps would be left out without a word."""
    with pytest.raises(TuneryError, match="distill_steps: an emulator of no layers has nothing to learn"):
        choose("offsite:emulator_layers=0,distill_steps=5")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("adapter_layers=[2,2],emulator_layers=2", "asks for 2 + 2 + 2 layers of 5"),
        ("adapter_layers=[0,0]", "has no adapter layers to train"),
    ],
)
def test_what_cannot_be_cut_is_one_line(options: str, says: str, tmp_path: Path) -> None:
    """More layers than there are, or nothing that trains."""
    with pytest.raises(CompatibilityError) as caught:
        Trial(model="deep_bert_classifier", strategy=f"offsite:{options}").trainer(tmp_path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
