"""MHLoss: the worked example, the formula in float64, its heads, files and checkpoints, and what it refuses."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForSequenceClassification

import tunery
from tunery.core.anatomy import find_anatomy
from tunery.core.checkpointing import ADOPTED
from tunery.core.sharding import ModelSharding, adopted_parameters, parameter_counts
from tunery.plugins.regularizers.mhloss import MHLoss, _loss
from tunery.registry.conformance.trials import Trial, tiny_process
from tunery.registry.conformance.workers import STAGES
from tunery.registry.context import Batch, RunContext, Task, TaskKind
from tunery.registry.errors import ArtifactError, CompatibilityError, ConfigError

TASK = Task(name="task", kind=TaskKind.CLASSIFICATION, label_names=("a", "b", "c"))
HEADS = 4


def context(**changes: Any) -> RunContext:
    given: dict[str, Any] = {
        "tasks": (TASK,),
        "seed": 0,
        "sharding": ModelSharding(),
        "pretrained_parameters": frozenset(),
        "logger": logging.getLogger("test"),
        "find_anatomy": find_anatomy,
    }
    return RunContext(**given | changes)


def tiny(model_type: str = "bert", labels: int = 3) -> Any:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    if model_type == "gpt2":
        sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2}
    config = AutoConfig.for_model(
        model_type, **sizes, vocab_size=50, num_labels=labels, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "embd_pdrop", "resid_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config).double()


def tokens() -> dict[str, Tensor]:
    """Six rows of three classes, padded on the right by 0 to 3 tokens."""
    ids = torch.randint(3, 50, (6, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(7) < 7 - torch.tensor([[0], [1], [2], [3], [0], [1]])
    return {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": torch.tensor([0, 1, 2, 0, 1, 2])}


def attached(model: Any, heads: int = HEADS, **options: Any) -> MHLoss:
    regularizer = MHLoss(MHLoss.Config(heads=heads, **options))
    regularizer.attach(model, context())
    return regularizer


def task_loss(regularizer: MHLoss, model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """One training pass as the objective does it."""
    regularizer.begin_step(0)
    regularizer.begin(inputs)
    batch = Batch(inputs=inputs, outputs=model.train()(**inputs), model=model, task=TASK)
    loss = regularizer.task_loss(batch)
    assert loss is not None
    return loss


def test_worked_example() -> None:
    """Two heads on two rows: the mean of their cross-entropies, which is more than that of their mean."""
    logits_HBC = torch.tensor([[[2.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [3.0, 0.0]]])
    labels = torch.tensor([0, 1])
    assert _loss(logits_HBC.transpose(0, 1), labels, TaskKind.CLASSIFICATION).item() == pytest.approx(
        1.045481, abs=1e-6
    )
    assert functional.cross_entropy(logits_HBC.mean(0), labels).item() == pytest.approx(0.813262, abs=1e-6)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "gpt2", "llama"])
def test_loss_is_the_mean_over_single_heads(model_type: str) -> None:
    """Each head put into the model's own layer in turn gives a loss of transformers' own; MHLoss is their mean."""
    model, inputs = tiny(model_type), tokens()
    plain = tiny(model_type)
    regularizer = attached(model)
    found = task_loss(regularizer, model, inputs)
    stacked = dict(regularizer._heads.named_parameters())
    layer = plain.get_submodule(find_anatomy(plain).head)
    losses = []
    for h in range(HEADS):
        with torch.no_grad():
            for name, values in stacked.items():
                getattr(layer, name).copy_(values.unflatten(0, (HEADS, -1))[h])
        losses.append(plain(**inputs).loss)
    torch.testing.assert_close(found, torch.stack(losses).mean(), rtol=1e-7, atol=0)


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        (TaskKind.REGRESSION, torch.tensor([0.5, -1.0])),
        (TaskKind.CLASSIFICATION, torch.tensor([[1.0], [0.0]])),
        (TaskKind.CLASSIFICATION, torch.tensor([0, -100])),
    ],
    ids=["regression", "several labels a row", "a row without a label"],
)
def test_loss_of_other_labels(kind: TaskKind, labels: Tensor) -> None:
    """Regression has squared errors, several labels a row have binary cross-entropy, -100 does not count."""
    logits = torch.randn(2, 5, 1 if labels.is_floating_point() else 3, generator=torch.Generator().manual_seed(0))
    losses = []
    for h in range(5):
        head = logits[:, h]
        if kind is TaskKind.REGRESSION:
            losses.append(functional.mse_loss(head.squeeze(1), labels))
        elif labels.is_floating_point():
            losses.append(functional.binary_cross_entropy_with_logits(head, labels))
        else:
            losses.append(functional.cross_entropy(head, labels))
    torch.testing.assert_close(_loss(logits, labels, kind), torch.stack(losses).mean())


def test_heads_are_drawn_apart() -> None:
    """The first is the model's own, the others have its spread and differ; the run's generator is left alone."""
    model = tiny()
    own = model.classifier.weight.detach().clone()
    before = torch.get_rng_state()
    heads = attached(model, heads=200)._heads
    assert torch.equal(torch.get_rng_state(), before)
    weight = heads.weight.detach().unflatten(0, (200, 3))
    assert torch.equal(weight[0], own)
    assert len({tuple(head.flatten().tolist()) for head in weight}) == 200
    assert weight.std().item() == pytest.approx(model.config.initializer_range, rel=0.05)
    assert heads.bias.abs().max() == 0  # as BERT draws it


def test_one_head_is_not_there() -> None:
    """H = 1 attaches nothing and leaves the task loss alone."""
    model = tiny()
    regularizer = attached(model, heads=1)
    regularizer.begin(tokens())
    assert regularizer.task_loss(Batch(inputs=tokens(), outputs=None, model=model, task=TASK)) is None
    assert isinstance(model.classifier.weight, nn.Parameter) and not adopted_parameters(model)


def test_gradient_of_a_head_has_one_part_in_h() -> None:
    """Alone, a head's gradient would be H times as large, which ``scale_learning_rate`` gives back, and to it alone."""
    found = {}
    for scale in (False, True):
        model = tiny()
        regularizer = attached(model, scale_learning_rate=scale)
        loss = task_loss(regularizer, model, tokens())
        loss.backward()
        found[scale] = (loss.item(), regularizer._heads.weight.grad, model.bert.pooler.dense.weight.grad)
    assert found[True][0] == found[False][0]
    torch.testing.assert_close(found[True][1], HEADS * found[False][1], rtol=1e-12, atol=0)
    torch.testing.assert_close(found[True][2], found[False][2], rtol=1e-12, atol=0)
    plain = tiny()  # its head is the first of the heads
    plain(**tokens()).loss.backward()
    torch.testing.assert_close(found[True][1].unflatten(0, (HEADS, -1))[0], plain.classifier.weight.grad)


def test_detached_it_is_the_mean_head() -> None:
    """Evaluation, which uses the model's own layer, and the model afterwards answer as the mean of the heads."""
    model, inputs = tiny(), tokens()
    regularizer = attached(model)
    task_loss(regularizer, model, inputs).backward()
    heads = {name: value.detach().clone() for name, value in regularizer._heads.named_parameters()}
    regularizer.settle()
    evaluated = model.eval()(**inputs).logits
    with torch.no_grad():
        regularizer._heads.weight.add_(1)
    assert torch.equal(model(**inputs).logits, evaluated)  # until it is settled again
    with torch.no_grad():
        regularizer._heads.bias.add_(2)
    regularizer.detach(model)
    for name, more in (("weight", 1), ("bias", 2)):
        mean = heads[name].unflatten(0, (HEADS, -1)).mean(0) + more
        torch.testing.assert_close(getattr(model.classifier, name).data, mean)
    assert model.classifier.weight.requires_grad


# ---- runs


def test_files_are_plain_and_checkpoints_have_the_heads(tmp_path: Path) -> None:
    """The run's folder has the mean head and nothing else; a checkpoint beside it the heads, in its manifest too."""
    outcome = Trial(strategy="full", regularizers=("mhloss:heads=4",), save=True).run()
    heads = load_file(outcome.folder / "checkpoint-4" / ADOPTED)
    assert {name: tuple(value.shape) for name, value in heads.items()} == {
        "classifier.mhloss_heads.bias": (12,),
        "classifier.mhloss_heads.weight": (12, 16),
    }
    mean = heads["classifier.mhloss_heads.weight"].unflatten(0, (4, -1)).mean(0)
    assert torch.equal(outcome.weights["classifier.weight"], mean)
    assert not (outcome.folder / ADOPTED).exists()
    loaded = tunery.load_run(outcome.folder)
    assert type(loaded.model.classifier) is nn.Linear


def test_best_model_gets_its_heads_back(tmp_path: Path) -> None:
    """``load_best_model_at_end`` brings back heads of the best step, not only the mean that was written then."""
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "learning_rate": 0.3,  # so large that the last step is not the best
    }
    trial = Trial(strategy="full", regularizers=("mhloss:heads=4",), save=True, steps=5, options=options)
    with tiny_process():
        trainer = trial.trainer(tmp_path)
        trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name != "checkpoint-5"
    for name, value in load_file(best / ADOPTED).items():
        assert torch.equal(trainer.model.get_parameter(name), value)
    trainer.detach()
    assert torch.equal(trainer.model.classifier.weight, load_file(best / "model.safetensors")["classifier.weight"])


@pytest.mark.parametrize("regularizers", [(), ("mhloss:heads=3",)], ids=["none", "fewer heads"])
def test_resumes_with_the_same_heads_only(regularizers: tuple[str, ...], tmp_path: Path) -> None:
    """Another number of heads, or none, is refused in one line before anything is loaded."""
    trial = Trial(strategy="full", regularizers=("mhloss:heads=4",), save=True)
    checkpoint = trial.run().folder / "checkpoint-1"
    with tiny_process():
        trainer = trial.but(regularizers=regularizers).trainer(tmp_path)
        with pytest.raises(ArtifactError, match="was trained with other regularizers") as caught:
            trainer.train(resume_from_checkpoint=str(checkpoint))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("strategy", ["lora:r=2", "head"])
@pytest.mark.parametrize("stage", STAGES)
def test_same_files_on_every_stage(strategy: str, stage: str) -> None:
    """An adapter, too, is saved with its head where ZeRO-3 leaves out what is frozen, and equals one process's."""
    trial = Trial(strategy=strategy, regularizers=("mhloss:heads=4",), options={"optim": "sgd", "learning_rate": 0.5})
    found, expected = trial.run(stage), trial.run()
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=1e-4, atol=1e-6)


def test_goes_with_the_other_regularizers() -> None:
    """With MMR and L2-SP the terms add up, in whatever order they were given."""
    chosen = ("mmr", "l2_sp:beta=0.1", "mhloss:heads=4")
    losses = {}
    for regularizers in (chosen, chosen[::-1]):
        outcome = Trial(strategy="full", regularizers=regularizers).run()
        terms = [outcome.logged(f"loss/{name}") for name in ("task", "mmr", "l2_sp")]
        losses[regularizers] = outcome.logged("loss")
        assert [sum(values) for values in zip(*terms, strict=True)] == pytest.approx(losses[regularizers], rel=1e-5)
    assert losses[chosen] == pytest.approx(losses[chosen[::-1]], rel=1e-6)
    alone = Trial(strategy="full", regularizers=("mhloss:heads=4",)).run()
    assert alone.logged("loss")[0] == pytest.approx(outcome.logged("loss/task")[0], rel=1e-6)


def test_heads_count_as_trained(tmp_path: Path) -> None:
    """What is reported as trainable are the heads, of which under ``head`` there is nothing else."""
    model = Trial(strategy="head", regularizers=("mhloss:heads=4",)).trainer(tmp_path).model
    assert parameter_counts(model)["trainable"] == 4 * (16 * 3 + 3)


# ---- what it refuses


def test_refuses_a_frozen_head() -> None:
    """One line says that there is nothing to train."""
    model = tiny()
    model.classifier.requires_grad_(False)
    with pytest.raises(CompatibilityError, match=r"'mhloss' would do nothing: .*'classifier' is frozen"):
        attached(model)


def test_refuses_a_layer_of_another_kind() -> None:
    """A head that is no ``nn.Linear``, as an adapted one, has no mean of its copies."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny(), LoraConfig(target_modules=["classifier"]))
    with pytest.raises(CompatibilityError, match="'mhloss' finds"):
        attached(model)


def test_refuses_label_smoothing(tmp_path: Path) -> None:
    """Smoothing is part of the loss that it replaces."""
    with pytest.raises(CompatibilityError, match="'mhloss' replaces the task loss"):
        Trial(regularizers=("mhloss",), options={"label_smoothing_factor": 0.1}).trainer(tmp_path)


def test_refuses_a_weight() -> None:
    """It is the task loss: weight is 0 or 1."""
    with pytest.raises((ConfigError, ValueError), match="weight"):
        MHLoss.Config(weight=0.5)
