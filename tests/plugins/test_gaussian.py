"""Gaussian noise: Sigma is that of the initialisation, draws are the same for every gamma, only what should moves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import initialization as init

from tunery import Subject, Task, TaskKind, probe_model
from tunery.core.context import make_context
from tunery.core.probing import Snapshot
from tunery.plugins.initialization import initial_distributions
from tunery.plugins.perturbation import GaussianDirection, gaussian_stds, shifted
from tunery.registry.conformance.models import MODELS, base_model
from tunery.registry.errors import CompatibilityError

WIDTH: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
}
TEXT = {"vocab_size": 37, "max_position_embeddings": 16, **WIDTH}
FRESH = {
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)),
    "roberta": lambda: transformers.RobertaModel(transformers.RobertaConfig(initializer_range=0.03, **TEXT)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=37, n_positions=16, n_embd=24, n_layer=3, n_head=2, bos_token_id=0)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=1, **TEXT)),
    "olmo2": lambda: transformers.Olmo2ForCausalLM(transformers.Olmo2Config(num_key_value_heads=1, **TEXT)),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **WIDTH)
    ),
}


@pytest.mark.parametrize("architecture", FRESH)
def test_sigma_is_that_of_fresh_initialisations(architecture: str):
    """Every parameter's standard deviation agrees with the empirical one over 200 initialisations to 3 %."""
    torch.manual_seed(0)
    drawn = initial_distributions(FRESH[architecture]())
    model = FRESH[architecture]()
    sums = {name: torch.zeros(2, dtype=torch.float64) for name, _ in model.named_parameters()}
    counts: dict[str, int] = {}
    for _ in range(200):
        for module in model.modules():
            module._is_hf_initialized = False
        with torch.no_grad():
            model.initialize_weights()
        for name, parameter in model.named_parameters():
            values = parameter.detach().double()
            # the row of a padding token is set to zero afterwards
            values = values if values.dim() < 2 else values.flatten(1)[values.flatten(1).any(1)]
            sums[name] += torch.stack([values.sum(), values.square().sum()])
            counts[name] = counts.get(name, 0) + values.numel()
    for name, (total, squares) in sums.items():
        if counts[name]:
            mean = total.item() / counts[name]
            std = math.sqrt(max(0.0, squares.item() / counts[name] - mean**2))
        else:
            mean = std = 0.0
        assert drawn[name].std == pytest.approx(std, rel=0.03, abs=1e-9), name
        assert drawn[name].mean == pytest.approx(mean, abs=0.03 * max(std, 1e-6)), name


def test_initialisers_that_are_not_normal():
    """Each of torch's initialisers has the standard deviation it draws with."""

    class Odd(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.linear = torch.nn.Linear(100, 300)
            self.plain = torch.nn.Linear(50, 200)
            self.cut = torch.nn.Linear(100, 100, bias=False)
            self.square = torch.nn.Linear(120, 80, bias=False)
            self.thin = torch.nn.Linear(100, 100, bias=False)
            self.scale = torch.nn.Parameter(torch.ones(3))
            self.forgotten = torch.nn.Parameter(torch.ones(3))
            self.post_init()

        def _init_weights(self, module: Any) -> None:
            if module is self:
                init.constant_(self.scale, 2.5)
            elif module is self.linear:
                init.xavier_uniform_(module.weight, gain=2.0)
                init.uniform_(module.bias, -1.0, 3.0)
            elif module is self.cut:
                init.trunc_normal_(module.weight, std=0.5, a=-0.4, b=0.8)
            elif module is self.square:
                init.orthogonal_(module.weight)
            elif module is self.thin:
                init.sparse_(module.weight, 0.3, std=0.1)

    torch.manual_seed(0)
    model = Odd(transformers.PretrainedConfig())
    drawn = initial_distributions(model)
    assert "forgotten" not in drawn
    for name, parameter in model.named_parameters():
        if name != "forgotten":
            assert drawn[name].std == pytest.approx(parameter.std().item(), rel=0.1), name
            assert drawn[name].mean == pytest.approx(parameter.mean().item(), abs=0.2 * drawn[name].std + 1e-9), name


def subject_of(model: Any, task: Task) -> Subject:
    class Arguments:
        seed = 3

    run = make_context(model, Arguments(), [task])
    return Subject(model=model, run=run, reference=Snapshot(model, run.sharding))


LANGUAGE = Task(name="words", kind=TaskKind.CAUSAL_LM)
CLASSES = Task(name="classes", kind=TaskKind.CLASSIFICATION, label_names=("a", "b", "c"))


def moved(subject: Subject, direction: GaussianDirection, amount: float) -> dict[str, torch.Tensor]:
    before = {name: p.detach().clone() for name, p in subject.model.named_parameters()}
    with shifted(subject, direction, amount):
        after = {name: p.detach().double() - before[name].double() for name, p in subject.model.named_parameters()}
    assert all(torch.equal(p, before[name]) for name, p in subject.model.named_parameters())
    return {name: value for name, value in after.items() if value.any()}


def test_gamma_of_a_hundredth_moves_weights_by_a_hundredth_of_their_first_size():
    """gamma = .01 at standard deviation .02 moves weights by 2e-4, and c_proj by less; biases and norms stay."""
    subject = subject_of(FRESH["gpt2"](), LANGUAGE)
    stds = gaussian_stds(subject, "init", "gaussian")
    found = moved(subject, GaussianDirection(std=stds, seed=0), 0.01)
    assert found["transformer.wpe.weight"].std().item() == pytest.approx(2e-4, rel=0.1)
    assert found["transformer.h.0.mlp.c_fc.weight"].std().item() == pytest.approx(2e-4, rel=0.05)
    assert found["transformer.h.0.mlp.c_proj.weight"].std().item() == pytest.approx(2e-4 / math.sqrt(6), rel=0.05)
    assert not any("bias" in name or "ln_" in name for name in found)


def test_every_gamma_gets_the_same_draw_and_every_draw_another():
    """Noise divided by its gamma is one and the same; the next draw has nothing to do with it; parameters differ."""
    subject = subject_of(FRESH["llama"](), LANGUAGE)
    stds = gaussian_stds(subject, "init", "gaussian")
    small, large = (moved(subject, GaussianDirection(std=stds, seed=0, draw=1), gamma) for gamma in (0.5, 8.0))
    other = moved(subject, GaussianDirection(std=stds, seed=0, draw=2), 8.0)
    for name, value in large.items():
        assert torch.allclose(value / 8, small[name] / 0.5, atol=1e-6)
        assert torch.corrcoef(torch.stack([value.flatten(), other[name].flatten()]))[0, 1].abs() < 0.2
    first, second = (large[f"model.layers.{layer}.mlp.up_proj.weight"].flatten() for layer in (0, 1))
    assert torch.corrcoef(torch.stack([first, second]))[0, 1].abs() < 0.2


def test_tied_weights_move_once():
    """GPT-2's head is its embedding: one draw, of one standard deviation."""
    model = FRESH["gpt2"]()
    subject = subject_of(model, LANGUAGE)
    found = moved(subject, GaussianDirection(std=gaussian_stds(subject, "init", "gaussian"), seed=0), 1.0)
    assert found["transformer.wte.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_fresh_head_and_an_adapter_stay_and_the_weights_below_get_the_noise_they_would_get_alone():
    """What has no pre-trained value gets no noise; an adapter does not change the noise of the rest."""
    config = transformers.BertConfig(**TEXT, num_labels=3)
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    plain = subject_of(model, CLASSES)
    alone = moved(plain, GaussianDirection(std=gaussian_stds(plain, "init", "gaussian"), seed=0), 1.0)
    assert not any("classifier" in name for name in alone)
    wrapped = get_peft_model(
        model, LoraConfig(task_type="SEQ_CLS", target_modules=["query"], modules_to_save=["classifier"])
    )
    subject = subject_of(wrapped, CLASSES)
    subject = Subject(model=wrapped, run=plain.run, reference=subject.reference)
    found = moved(subject, GaussianDirection(std=gaussian_stds(subject, "init", "gaussian"), seed=0), 1.0)
    assert len(found) == len(alone)
    assert not any("lora" in name or "classifier" in name for name in found)
    query = "bert.encoder.layer.0.attention.self.query"
    assert torch.equal(found[f"base_model.model.{query}.base_layer.weight"], alone[f"{query}.weight"])


def test_layer_rms_also_moves_what_began_as_a_constant():
    """A norm that began at 1 gets noise of standard deviation 1; a bias that began at 0 none."""
    subject = subject_of(FRESH["gpt2"](), LANGUAGE)
    stds = gaussian_stds(subject, "layer_rms", "gaussian")
    assert stds["transformer.ln_f.weight"] == 1.0
    assert stds["transformer.wte.weight"] == pytest.approx(0.02)
    assert "transformer.ln_f.bias" not in stds


@pytest.fixture(scope="module")
def llama() -> Any:
    return MODELS["llama_causal_lm"].load(base_model("llama_causal_lm", False))


def test_rows_and_the_single_number(llama: Any):
    """The weights as they are once, every gamma and draw once; the sensitivity is the mean rise at the largest gamma."""
    rows: Any = MODELS["llama_causal_lm"].rows(6)
    found = probe_model(llama, "gaussian:gammas=[0.5,0.1],draws=2,seed=5", rows, task=LANGUAGE)
    assert found == probe_model(llama, "gaussian:gammas=[0.5,0.1],draws=2,seed=5", rows, task=LANGUAGE)
    *measured, sensitivity = found
    points = [m for m in measured if "draw" in m.where]
    assert {m.name for m in points} == {"loss", "perplexity"}
    value = {(m.name, m.where["gamma"], m.where["draw"]): m.value for m in points}
    assert len(value) == len(points)
    where = [(0.0, 0), (0.1, 0), (0.1, 1), (0.5, 0), (0.5, 1)]
    assert [key[1:] for key in value if key[0] == "loss"] == where
    for gamma, draw in where:
        assert value["perplexity", gamma, draw] == pytest.approx(math.exp(value["loss", gamma, draw]))
    with torch.no_grad():
        batch = transformers.default_data_collator(rows)
        assert value["loss", 0.0, 0] == pytest.approx(llama(**batch).loss.item())
    base = value["perplexity", 0.0, 0]
    rises = [value["perplexity", 0.5, draw] - base for draw in (0, 1)]
    assert rises[0] != rises[1]
    assert (sensitivity.name, sensitivity.where) == ("sensitivity", {})
    assert sensitivity.value == pytest.approx(sum(rises) / 2)
    changes = {(m.name, m.where["gamma"]): m.value for m in measured if "draw" not in m.where}
    assert len(changes) == len(measured) - len(points) == 4
    for (name, gamma), change in changes.items():
        metric = name.removesuffix("_change")
        mean = (value[metric, gamma, 0] + value[metric, gamma, 1]) / 2
        assert change == pytest.approx(mean - value[metric, 0.0, 0])


def test_classifiers_keep_their_own_metrics():
    """Every metric of the evaluation is there, timing is not; the sensitivity is the loss's."""
    tiny = MODELS["bert_classifier"]
    model = tiny.load(base_model("bert_classifier", False))
    task = Task(name="t", kind=TaskKind.CLASSIFICATION, label_names=("a", "b", "c"), metrics=("accuracy",))
    found = probe_model(model, "gaussian:gammas=[0.5],draws=1", tiny.rows(6), task=task)
    assert {m.name for m in found} == {"loss", "accuracy", "loss_change", "accuracy_change", "sensitivity"}
    before, after = (m.value for m in found if m.name == "accuracy")
    assert next(m.value for m in found if m.name == "accuracy_change") == after - before != 0
    assert found[-1].unit == "nat"


@pytest.mark.parametrize(
    ("dtype", "lost"), [(torch.bfloat16, "0.0039"), (torch.float16, "0.00049"), (torch.float32, "")]
)
def test_weights_that_round_noise_off_are_named(dtype: torch.dtype, lost: str, caplog: pytest.LogCaptureFixture):
    """Once, with the share of a weight that is lost; nothing of float32."""
    subject = subject_of(FRESH["gpt2"]().to(dtype), LANGUAGE)
    gaussian_stds(subject, "init", "gaussian")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == bool(lost)
    assert all(f"{dtype} weights round off noise below {lost} of a weight" in line for line in said)
    if lost:
        weight = torch.ones(1, dtype=dtype)
        assert torch.equal(weight + 0.9 * float(lost), weight) and not torch.equal(
            weight + 1.1 * 2 * float(lost), weight
        )


def test_what_cannot_be_probed_is_refused_in_a_line(llama: Any):
    """No evaluation set; a model that does not say how it was initialised."""
    with pytest.raises(CompatibilityError, match=r"probe 'gaussian' has no evaluation set.*eval_dataset"):
        probe_model(llama, "gaussian", task=LANGUAGE)
    with pytest.raises(CompatibilityError, match="nothing says how Linear was initialised"):
        initial_distributions(torch.nn.Linear(2, 2))
