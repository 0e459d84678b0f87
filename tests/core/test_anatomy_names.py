"""What the anatomy makes of wrapped, sharded, changed and unknown models, and which parameters come with the task."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertModel,
    BertPreTrainedModel,
    PreTrainedConfig,
    PreTrainedModel,
)

from tunery.core.anatomy import SPECS, find_anatomy, new_parameters
from tunery.registry.context import Anatomy, Task, TaskKind
from tunery.registry.errors import AnatomyError

# peft 0.21 reads a property that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

CLASSES = {
    TaskKind.CLASSIFICATION: AutoModelForSequenceClassification,
    TaskKind.REGRESSION: AutoModelForSequenceClassification,
    TaskKind.IMAGE_CLASSIFICATION: AutoModelForImageClassification,
    TaskKind.CAUSAL_LM: AutoModelForCausalLM,
    TaskKind.MASKED_LM: AutoModelForMaskedLM,
    TaskKind.OTHER: AutoModelForTokenClassification,
}
ELECTRA = replace(SPECS["bert"], embeddings=("embeddings.word_embeddings",), head=("classifier.out_proj",))
PROJECTIONS = (
    r".*\.(query|key|value|dense|[qkv]_lin|out_lin|lin[12]|c_attn|c_proj|c_fc|[qkvo]_proj|(gate|up|down)_proj|fc[12])"
)


def task(kind: TaskKind) -> Task:
    return Task(name="t", kind=kind)


def tiny_config(name: str) -> PreTrainedConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    if name == "distilbert":
        sizes = {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2}
    inputs = {"image_size": 8, "patch_size": 4} if name == "vit" else {"vocab_size": 50, "pad_token_id": 0}
    return AutoConfig.for_model(name, **sizes, **inputs)


def build(name: str, kind: TaskKind = TaskKind.CLASSIFICATION) -> PreTrainedModel:
    torch.manual_seed(0)
    return CLASSES[kind].from_config(tiny_config(name)).eval()


def names_in(anatomy: Anatomy) -> list[str]:
    """Every name but the head's."""
    names = [*anatomy.embeddings, *anatomy.final_norms]
    for layer in anatomy.layers:
        names += [layer.name, layer.query, layer.key, layer.value, layer.attention_output]
        names += [*layer.ffn_in, layer.ffn_out, *layer.norms]
    return names


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "gpt2", "qwen3", "vit"])
def test_lora_layers_keep_their_names(name: str) -> None:
    """The names are the bare model's behind PEFT's prefix, and they are the layers that carry the adapter."""
    kind = TaskKind.IMAGE_CLASSIFICATION if name == "vit" else TaskKind.CLASSIFICATION
    bare = find_anatomy(build(name, kind))
    model = get_peft_model(build(name, kind), LoraConfig(target_modules=PROJECTIONS, fan_in_fan_out=name == "gpt2"))
    wrapped = find_anatomy(model)
    assert names_in(wrapped) == [f"base_model.model.{name}" for name in names_in(bare)]
    modules = dict(model.named_modules())
    for layer in wrapped.layers:
        for part in (layer.query, layer.key, layer.value, layer.attention_output, *layer.ffn_in, layer.ffn_out):
            assert isinstance(modules[part], BaseTunerLayer)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "llama"])
def test_peft_head_is_the_copy_that_runs(name: str) -> None:
    """The module named gives the logits and trains; with adapters off it is the original one."""
    model = get_peft_model(build(name), LoraConfig(task_type="SEQ_CLS", target_modules=PROJECTIONS))
    trained = find_anatomy(model).head
    with model.disable_adapter():
        original = find_anatomy(model).head
    assert dict(model.named_parameters())[f"{trained}.weight"].requires_grad
    assert trained == original.replace("original_module", "modules_to_save.default") != original

    def logits_of(head: str) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        handle = model.get_submodule(head).register_forward_hook(lambda module, args, output: seen.append(output))
        result = model(input_ids=torch.tensor([[3, 4, 5]])).logits
        handle.remove()
        return [result, *(output.reshape(-1, result.shape[-1])[-1:] for output in seen)]

    result, output = logits_of(trained)
    assert torch.equal(result, output)
    assert len(logits_of(original)) == 1
    with model.disable_adapter():
        assert len(logits_of(original)) == 2 and len(logits_of(trained)) == 1


def test_copied_parts_inside_the_backbone_are_named_by_the_copy() -> None:
    """PEFT can copy any module to train it whole; its parts are found inside the copy in use."""
    config = LoraConfig(target_modules=["query"], modules_to_save=["intermediate", "word_embeddings"])
    model = get_peft_model(build("bert"), config)
    anatomy = find_anatomy(model)
    layer = "base_model.model.bert.encoder.layer.1"
    assert anatomy.layers[1].ffn_in == (f"{layer}.intermediate.modules_to_save.default.dense",)
    assert anatomy.embeddings[0].endswith("word_embeddings.modules_to_save.default")
    assert {*names_in(anatomy), anatomy.head} <= set(dict(model.named_modules()))
    model = get_peft_model(build("bert"), LoraConfig(target_modules=r".*1\..*\.query", modules_to_save=["layer.0"]))
    first, second = find_anatomy(model).layers
    assert first.name == "base_model.model.bert.encoder.layer.0.modules_to_save.default"
    assert (first.ffn_out, second.name) == (f"{first.name}.output.dense", layer)


def test_adapter_on_the_head_and_prompt_tuning() -> None:
    """A head with LoRA keeps its name; prompt tuning wraps the model without a tuner between."""
    lora = get_peft_model(build("bert"), LoraConfig(target_modules=["classifier"]))
    assert find_anatomy(lora).head == "base_model.model.classifier"
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    anatomy = find_anatomy(get_peft_model(build("gpt2", TaskKind.CAUSAL_LM), config))
    assert (anatomy.head, anatomy.layers[1].name) == ("base_model.lm_head", "base_model.transformer.h.1")


def test_names_are_those_of_the_module_that_was_passed() -> None:
    """A wrapper such as DDP puts its own prefix before every name."""
    wrapper = nn.Sequential(build("llama"))
    anatomy = find_anatomy(wrapper)
    assert (anatomy.head, anatomy.layers[0].ffn_out) == ("0.score", "0.model.layers.0.mlp.down_proj")
    assert new_parameters(wrapper, task(TaskKind.CLASSIFICATION)) == {"0.score.weight"}


@pytest.mark.parametrize("name", ["roberta", "llama", "distilbert"])
def test_sharded_parameters_change_nothing(name: str) -> None:
    """Under ZeRO-3 every parameter has shape (0,)."""
    model = build(name)
    whole = find_anatomy(model), new_parameters(model, task(TaskKind.CLASSIFICATION))
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    assert (find_anatomy(model), new_parameters(model, task(TaskKind.CLASSIFICATION))) == whole


def rename(module: nn.Module, name: str) -> None:
    module._modules["moved"] = module._modules.pop(name)


@pytest.mark.parametrize(
    ("part", "path"),
    [
        ("layers", "encoder.layer"),
        ("query", "encoder.layer.1.attention.self.query"),
        ("attention_output", "encoder.layer.1.attention.output.dense"),
        ("ffn_in", "encoder.layer.0.intermediate"),
        ("ffn_out", "encoder.layer.0.output.dense"),
        ("norms", "encoder.layer.0.attention.output.LayerNorm"),
        ("embeddings", "embeddings.word_embeddings"),
        ("final_norms", "embeddings.LayerNorm"),
    ],
)
def test_changed_architecture_is_refused(part: str, path: str) -> None:
    """A part that a version of transformers keeps elsewhere is named, in one line."""
    model = build("bert")
    owner, _, old = path.rpartition(".")
    rename(model.bert.get_submodule(owner), old)
    with pytest.raises(
        AnatomyError, match=rf"does not keep its {part} where 'bert' models do: no .*transformers"
    ) as error:
        find_anatomy(model)
    assert "\n" not in str(error.value)


def test_renamed_head_is_refused() -> None:
    """A head that is there and not found is no missing head."""
    model = build("bert")
    rename(model, "classifier")
    with pytest.raises(AnatomyError, match=r"none of the usual names; known: classifier, cls.predictions.decoder"):
        find_anatomy(model)


def test_network_is_no_final_linear_layer() -> None:
    """RoBERTa's `classifier` is a small network: when its last layer is not found, it is not taken for it."""
    model = build("roberta")
    rename(model.classifier, "out_proj")
    with pytest.raises(AnatomyError, match=r"none of the usual names; known: classifier.out_proj, classifier"):
        find_anatomy(model)


def test_unknown_architecture_is_refused_and_a_plugin_can_teach_it() -> None:
    """The error lists what is known and names the hook; with a description the parts are found."""
    model = build("electra")
    with pytest.raises(AnatomyError, match=r"'electra'.*known: bert, .*xlm-roberta; .*tunery_anatomies"):
        find_anatomy(model, {"deberta-v2": ELECTRA})
    with pytest.raises(AnatomyError, match=r"no module 'lin' in electra.encoder.layer.0; .*mend the description"):
        find_anatomy(model, {"electra": replace(ELECTRA, ffn_out="lin")})
    anatomy = find_anatomy(model, {"electra": ELECTRA})
    assert (anatomy.head, anatomy.layers[1].name) == ("classifier.out_proj", "electra.encoder.layer.1")


def test_plugin_does_not_replace_a_description() -> None:
    """Two descriptions of one architecture are an error, whatever the model."""
    with pytest.raises(AnatomyError, match="describes 'bert', which tunery describes itself"):
        find_anatomy(build("llama"), {"electra": ELECTRA, "bert": ELECTRA})


def test_other_modules_are_refused() -> None:
    """Without a transformers model there is nothing to name."""
    for ask in (find_anatomy, lambda model: new_parameters(model, task(TaskKind.CLASSIFICATION))):
        with pytest.raises(AnatomyError, match="Linear holds no transformers model"):
            ask(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, TaskKind.CLASSIFICATION) for name in sorted(SPECS.keys() - {"vit"})),
        *((name, TaskKind.CLASSIFICATION) for name in ("electra", "albert", "modernbert")),
        *((name, TaskKind.OTHER) for name in ("bert", "roberta")),
        ("vit", TaskKind.IMAGE_CLASSIFICATION),
        ("bert", TaskKind.REGRESSION),
    ],
)
def test_new_parameters_are_those_a_backbone_checkpoint_lacks(name: str, kind: TaskKind, tmp_path: Path) -> None:
    """transformers itself reports the same names missing when it loads the backbone alone into the task's class."""
    AutoModel.from_config(tiny_config(name)).save_pretrained(tmp_path)
    model, loading = CLASSES[kind].from_pretrained(tmp_path, output_loading_info=True)
    assert new_parameters(model, task(kind)) == set(loading["missing_keys"]) != set()


@pytest.mark.parametrize(("name", "kind"), [("gpt2", TaskKind.CAUSAL_LM), ("roberta", TaskKind.MASKED_LM)])
def test_language_modelling_heads_are_not_new(name: str, kind: TaskKind) -> None:
    """They come with the pre-trained model, also in a task that is no language modelling by name."""
    model = build(name, kind)
    assert new_parameters(model, task(kind)) == new_parameters(model, task(TaskKind.OTHER)) == frozenset()


def test_backbone_alone_has_no_new_parameters() -> None:
    """Everything a bare backbone has is pre-trained."""
    assert new_parameters(AutoModel.from_config(tiny_config("bert")), task(TaskKind.CLASSIFICATION)) == frozenset()


def test_new_parameters_of_a_peft_model_include_both_heads() -> None:
    """PEFT keeps the first head beside the one it trains; neither has a pre-trained value."""
    model = get_peft_model(build("bert"), LoraConfig(task_type="SEQ_CLS"))
    heads = ("original_module", "modules_to_save.default")
    assert new_parameters(model, task(TaskKind.CLASSIFICATION)) == {
        f"base_model.model.classifier.{head}.{part}" for head in heads for part in ("weight", "bias")
    }


class TiedClassifier(BertPreTrainedModel):
    """Scores words by the input embeddings; the head is registered before the backbone, so it gives the name."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.classifier = nn.Linear(config.hidden_size, config.vocab_size)
        self.bert = BertModel(config)
        self.classifier.weight = self.bert.embeddings.word_embeddings.weight


def test_tied_weights_belong_to_the_backbone() -> None:
    """A head's weight that is the embeddings' own has a pre-trained value, its bias has none."""
    model = TiedClassifier(tiny_config("bert"))
    assert "classifier.weight" in dict(model.named_parameters())
    assert new_parameters(model, task(TaskKind.CLASSIFICATION)) == {"classifier.bias"}
