"""The proxy sub-model against the paper's numbers, plain PEFT on the full model, and the feed-forward sum over kept neurons."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel

import tunery
from tunery.core.context import infer_task, make_context
from tunery.core.federated.cost import multiplications
from tunery.core.finished import _Bare
from tunery.plugins.strategies.proxy_sub_fm import ProxySubFm
from tunery.plugins.strategies.proxy_sub_fm.neurons import Block, find_blocks, most, saliency
from tunery.registry.conformance.models import LENGTH, MODELS, VOCABULARY, base_model
from tunery.registry.conformance.trials import Trial
from tunery.registry.errors import CompatibilityError, ConfigError, TuneryError

TINY = MODELS["bert_classifier"]
KINDS = ("bert_classifier", "llama_causal_lm", "gpt2_causal_lm", "vit_classifier")
WIDTH = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
FURTHER = {
    "roberta": transformers.RobertaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH + 2, **WIDTH),
    "qwen2": transformers.Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=1, pad_token_id=0, **WIDTH),
    "olmo2": transformers.Olmo2Config(vocab_size=VOCABULARY, pad_token_id=0, **WIDTH),
}


def context(model: Any) -> Any:
    return make_context(model, _Bare(seed=7), [infer_task(model)])


def strategy(**options: Any) -> ProxySubFm:
    return ProxySubFm(ProxySubFm.Config(**options))


def prepared(kind: str = "bert_classifier", **options: Any) -> tuple[ProxySubFm, Any, Any]:
    """Return a strategy, the sub-model of a tiny model without dropout, and its run."""
    model = MODELS[kind].load(base_model(kind, dropout=False))
    run, chosen = context(model), strategy(retained=(0,), **options)
    return chosen, chosen.prepare(model, run), run


def moved(model: Any) -> Any:
    """Give an adapter values that matter."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.1)
    return model


def linear_block(enter: list[list[float]], leave: list[list[float]], conv1d: bool = False) -> Block:
    first, second = torch.nn.Linear(2, 4), torch.nn.Linear(4, 2)
    first.weight.data, second.weight.data = torch.tensor(enter), torch.tensor(leave)
    if conv1d:
        first.weight.data, second.weight.data = first.weight.data.T, second.weight.data.T
    return Block(layer=0, enter=(first,), leave=second, conv1d=conv1d)


@pytest.mark.parametrize("conv1d", [False, True])
def test_saliency_of_the_example(conv1d: bool) -> None:
    """Eq. 8 on four neurons: 5, sqrt(5), 2, sqrt(1/2); the first two are kept."""
    block = linear_block(
        [[3.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.5]], [[0.0, 2.0, 1.0, 0.0], [4.0, 0.0, 1.0, 0.5]], conv1d
    )
    values = saliency(block)
    torch.testing.assert_close(values, torch.tensor([25, 5, 4, 0.5], dtype=torch.float64).sqrt())
    assert most(values, 2).tolist() == [0, 1]


def test_kept_neurons_stand_in_their_old_order_and_ties_go_to_the_first() -> None:
    """Whatever the order of their saliency."""
    assert most(torch.tensor([1.0, 5.0, 3.0, 9.0]), 3).tolist() == [1, 2, 3]
    assert most(torch.tensor([1.0, 2.0, 2.0, 2.0]), 2).tolist() == [1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_narrow_block_is_the_sum_over_the_kept_neurons(kind: str) -> None:
    """Eq. 7: what a narrow block answers is what the whole one answers with the other neurons' activations at zero."""
    chosen, proxy, run = prepared(kind, ratio=0.75)
    narrow = find_blocks(proxy, run)[1]
    width = 64 if kind == "gpt2_causal_lm" else 32
    assert narrow.width == width // 4
    states = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    layer = proxy.get_submodule(run.anatomy(proxy).layers[1].name)
    found = feed_forward(layer, narrow, states)
    with chosen.whole(proxy, run):
        block = find_blocks(proxy, run)[1]
        assert block.width == width
        keep = torch.zeros(width)
        keep[most(saliency(block), width // 4)] = 1.0
        hook = block.leave.register_forward_pre_hook(lambda _module, args: (args[0] * keep,))
        expected = feed_forward(layer, block, states)
        hook.remove()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def feed_forward(layer: Any, block: Block, states: torch.Tensor) -> torch.Tensor:
    """Return what the block gives, wherever the architecture keeps its activation."""
    if hasattr(layer, "mlp"):
        return layer.mlp(states)
    return block.leave(layer.intermediate(states))


@pytest.mark.parametrize("kind", KINDS)
def test_ratio_zero_is_the_full_model_bit_for_bit(kind: str) -> None:
    """Same parameters, same answers."""
    base = MODELS[kind].load(base_model(kind, dropout=False))
    expected = MODELS[kind].logits(base)
    _, proxy, _ = prepared(kind, ratio=0.0)
    torch.testing.assert_close(MODELS[kind].logits(proxy), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_untrained_adapter_plugged_back_changes_nothing(kind: str) -> None:
    """The full model answers to the bit as it did, with the plug and in place; and the sub-model answers otherwise."""
    tiny = MODELS[kind]
    expected = tiny.logits(tiny.load(base_model(kind, dropout=False)))
    chosen, proxy, run = prepared(kind)
    assert not torch.equal(tiny.logits(proxy), expected)
    full = chosen.plug_in(tiny.load(base_model(kind, dropout=False)), proxy, run)
    torch.testing.assert_close(tiny.logits(full), expected, rtol=0, atol=0)
    narrow = tiny.logits(proxy)
    with chosen.whole(proxy, run):
        torch.testing.assert_close(tiny.logits(proxy), expected, rtol=0, atol=0)
    torch.testing.assert_close(tiny.logits(proxy), narrow, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_the_sub_model_loads_in_plain_peft_on_the_full_model(kind: str, tmp_path: Path) -> None:
    """What the sub-model saves is a plain adapter, and gives the logits of the plug."""
    chosen, proxy, run = prepared(kind, r=2)
    moved(proxy).save_pretrained(tmp_path)
    plain = PeftModel.from_pretrained(MODELS[kind].load(base_model(kind, dropout=False)), str(tmp_path))
    full = chosen.plug_in(MODELS[kind].load(base_model(kind, dropout=False)), proxy, run)
    expected = MODELS[kind].logits(full)
    torch.testing.assert_close(MODELS[kind].logits(plain), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(MODELS[kind].logits(proxy), expected, atol=1e-3)


def test_a_second_plug_brings_the_first_up_to_date() -> None:
    """The full model that was returned before takes the new adapter and head, in place."""
    chosen, proxy, run = prepared()
    full = chosen.plug_in(TINY.load(base_model("bert_classifier", dropout=False)), proxy, run)
    again = chosen.plug_in(full, moved(proxy), run)
    fresh = chosen.plug_in(TINY.load(base_model("bert_classifier", dropout=False)), proxy, run)
    assert again is full
    torch.testing.assert_close(TINY.logits(again), TINY.logits(fresh), rtol=0, atol=0)


@pytest.mark.parametrize("name", FURTHER)
def test_further_architectures(name: str) -> None:
    """RoBERTa, Qwen-2 and OLMo-2 lose neurons in the middle layer, LoRA is on four projections of each layer, and plugged back
    untrained it changes no bit of the model.
    """
    torch.manual_seed(0)
    auto = transformers.AutoModelForSequenceClassification
    if name == "olmo2":
        auto = transformers.AutoModelForCausalLM
    model = auto.from_config(FURTHER[name]).eval()
    rows = torch.ones(2, 5, dtype=torch.long)
    full, expected = copy.deepcopy(model), model(input_ids=rows).logits
    run, chosen = context(model), strategy(ratio=0.5)
    proxy = chosen.prepare(model, run).eval()
    assert [block.width for block in find_blocks(proxy, run)] == [32, 16, 32]
    adapted = [name for name, module in proxy.named_modules() if hasattr(module, "lora_A") and len(module.lora_A)]
    assert len(adapted) == 4 * 3
    assert not torch.equal(proxy(input_ids=rows).logits, expected)
    assert torch.equal(chosen.plug_in(full, proxy, run).eval()(input_ids=rows).logits, expected)


@pytest.mark.parametrize(("kind", "each"), [("bert_classifier", 4), ("vit_classifier", 4), ("gpt2_causal_lm", 2)])
def test_adapted_modules_of_a_layer(kind: str, each: int) -> None:
    """Query, key, value and output; GPT-2 has the first three in one."""
    _, proxy, run = prepared(kind)
    adapted = [name for name, module in proxy.named_modules() if hasattr(module, "lora_A") and len(module.lora_A)]
    assert len(adapted) == each * len(run.anatomy(proxy).layers)


def test_trains_lora_and_the_fresh_head_alone() -> None:
    """Attention, norms, embeddings and the narrow blocks are frozen."""
    _, proxy, _ = prepared()
    trained = {name for name, parameter in proxy.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name or "classifier" in name for name in trained)
    assert len([name for name in trained if "lora_A" in name]) == 4 * 2


def bert_base(**device: Any) -> Any:
    config = transformers.BertConfig()
    with torch.device(device.get("device", "cpu")):
        return transformers.BertForSequenceClassification(config)


def encoder_size(proxy: Any) -> int:
    return sum(
        parameter.numel()
        for name, parameter in proxy.named_parameters()
        if ".encoder.layer." in name and "lora_" not in name
    )


def test_counts_of_bert_base() -> None:
    """85,054,464 transformer parameters of BERT-base become 49,641,984, or 81.11 and 47.34 times 2^20: a token takes 0.58 of
    the multiplications by weights, and 128 tokens with their attention 0.59 of all. The shapes alone are built.
    """
    counted = []
    for ratio, size, printed in ((0.0, 85_054_464, "81.11"), (0.75, 49_641_984, "47.34")):
        model = bert_base(device="meta")
        run = context(model)
        proxy = strategy(ratio=ratio).prepare(model, run)
        assert encoder_size(proxy) == size and f"{size / 2**20:.2f}" == printed
        counted.append(multiplications(proxy, run, 128))
    assert f"{49_641_984 / 85_054_464:.2f} {counted[1] / counted[0]:.2f}" == "0.58 0.59"


@pytest.mark.slow
def test_counts_of_bert_base_with_weights() -> None:
    """The same with real matrices, which are really smaller."""
    model = bert_base()
    assert encoder_size(strategy().prepare(model, context(model))) == 49_641_984


def test_exports_the_full_model_merged(tmp_path: Path) -> None:
    """Merged, a run leaves a plain model of the base model's shapes, with its width in the config."""
    outcome = Trial(strategy="proxy_sub_fm:retained=[0],r=2").run()
    folder = tunery.export_run(outcome.folder, tmp_path / "merged", merge=True)
    model = TINY.load(folder)
    base = TINY.load(base_model("bert_classifier", dropout=False))
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in base.state_dict().items()}
    name = "bert.encoder.layer.1.intermediate.dense.weight"
    assert torch.equal(model.state_dict()[name], base.state_dict()[name])
    assert model.config.intermediate_size == 32


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("ratio=0.99,retained=[0]", "leaves layer 1 none of its 32 neurons"),
        ("ratio=0.5", "retains all 2 layers and would remove nothing"),
        ("retained=[2]", "retain layer 2 of 2"),
    ],
)
def test_what_cannot_be_narrowed_is_one_line(options: str, says: str, tmp_path: Path) -> None:
    """A ratio that empties a layer, or one that has no layer to act on."""
    with pytest.raises(CompatibilityError, match=says) as caught:
        Trial(strategy=f"proxy_sub_fm:{options}").trainer(tmp_path)
    assert "\n" not in str(caught.value)


def test_everything_removed_is_out_of_range(tmp_path: Path) -> None:
    """ratio=1 is refused by its bounds."""
    with pytest.raises(ConfigError, match="ratio"):
        Trial(strategy="proxy_sub_fm:ratio=1").trainer(tmp_path)


def test_unknown_architecture_is_one_line(tmp_path: Path) -> None:
    """Electra is none that tunery describes."""
    config = transformers.ElectraConfig(vocab_size=VOCABULARY, embedding_size=16, **WIDTH)
    model = transformers.ElectraForSequenceClassification(config)
    args = tunery.TrainingArguments(output_dir=str(tmp_path), strategy="proxy_sub_fm", use_cpu=True, report_to="none")
    with pytest.raises(TuneryError, match="electra") as caught:
        tunery.Trainer(model=model, args=args)
    assert "\n" not in str(caught.value)
