"""One run is the same run on one process, under DDP and under ZeRO-1, 2 and 3, however its batches are split."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.nn import functional

from tunery.registry.conformance.gradients import RATE, assert_same_gradients, assert_same_moves, gradients, moves
from tunery.registry.conformance.models import MODELS, base_model
from tunery.registry.conformance.trials import ONE, Trial, tiny_process
from tunery.registry.conformance.workers import STAGES, on_stage

MODELS_TO_TRY = ("bert_classifier", "llama_causal_lm")
ZERO3 = pytest.mark.skipif("zero3" not in STAGES, reason="DeepSpeed does not run on this platform")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        ("full", "bert_classifier"),
        ("full", "llama_causal_lm"),
        ("head", "bert_classifier"),
        ("lora", "bert_classifier"),
        ("lora", "llama_causal_lm"),
    ],
)
def test_twenty_losses_and_gradient_norms_are_those_of_one_process(strategy: str, model: str, stage: str) -> None:
    """Unclipped and clipped alike: a gradient norm inflated by the world size would show (transformers#47688)."""
    trial = Trial(model=model, strategy=strategy, steps=20)
    for key in ("loss", "grad_norm"):
        found = trial.run(stage).logged(key)
        assert len(found) == 20
        assert found == pytest.approx(trial.run().logged(key), rel=1e-5), key


@ZERO3
def test_needs_no_compiler_on_cpu() -> None:
    """DeepSpeed is not left to build an op that training never calls."""
    Trial().run("zero2")
    assert on_stage("zero2", eval, "__import__('deepspeed').comm.comm.cdb.shm_comm_op is None")


@pytest.mark.parametrize("model", MODELS_TO_TRY)
@pytest.mark.parametrize("accumulation", [2, 4])
@pytest.mark.parametrize("where", [ONE, *STAGES])
def test_gradients_do_not_depend_on_the_split(model: str, accumulation: int, where: str) -> None:
    """8 rows at once, in micro-batches, and on two ranks; each row has another number of valid tokens."""
    trial = gradients(Trial(model=model, steps=3))
    assert_same_gradients(trial.but(accumulation=accumulation), where, trial)


@pytest.mark.parametrize("model", MODELS_TO_TRY)
@pytest.mark.parametrize("where", STAGES)
def test_gradients_do_not_depend_on_the_number_of_ranks(model: str, where: str) -> None:
    """(2 ranks x 4) gives the gradients of (8)."""
    trial = gradients(Trial(model=model, steps=3))
    assert_same_gradients(trial, where, trial)


def exact_gradients(model: str, rows: int) -> dict[str, torch.Tensor]:
    """The gradient of the mean loss over all valid labels of the first rows, in float64 and by hand."""
    tiny = MODELS[model]
    exact = tiny.load(base_model(model, dropout=False)).double().eval()
    batch = transformers.default_data_collator(tiny.rows(rows))
    labels = batch.pop("labels")
    logits = exact(**batch).logits
    if model == "llama_causal_lm":
        labels, logits = labels[:, 1:], logits[:, :-1]
    total = functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="sum")
    (total / labels.ne(-100).sum()).backward()
    return {name: parameter.grad for name, parameter in exact.named_parameters()}


@pytest.mark.parametrize("model", MODELS_TO_TRY)
@pytest.mark.parametrize(
    ("rows", "batch", "accumulation"), [(8, 8, 1), (8, 8, 4), (10, 12, 3)], ids=["whole", "accumulated", "short-last"]
)
def test_gradient_is_the_exact_one(model: str, rows: int, batch: int, accumulation: int) -> None:
    """One step moves the weights by the float64 gradient of the whole batch, also where the last micro-batch is short."""
    trial = gradients(Trial(model=model, steps=1, rows=rows, batch=batch, accumulation=accumulation))
    expected = {name: -RATE * gradient for name, gradient in exact_gradients(model, rows).items()}
    assert_same_moves(moves(trial), expected)


@pytest.mark.parametrize("model", MODELS_TO_TRY)
@pytest.mark.parametrize("stage", STAGES)
def test_gradient_is_the_exact_one_with_unequal_ranks(model: str, stage: str) -> None:
    """Rank 0 has 4 rows of the step and rank 1 has 3: every row counts the same."""
    options = {"accelerator_config": {"even_batches": False}}
    trial = gradients(Trial(model=model, steps=1, rows=7, options=options))
    expected = {name: -RATE * gradient for name, gradient in exact_gradients(model, 7).items()}
    assert_same_moves(moves(trial, stage), expected)


@pytest.mark.parametrize("model", MODELS_TO_TRY)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_without_plugins_it_is_the_trainer_of_transformers(model: str, accumulation: int, tmp_path) -> None:
    """Same losses and same bits, dropout on, once a classifier's loss is kept from being inflated (transformers#47688)."""
    trial = Trial(model=model, dropout=True, accumulation=accumulation)
    arguments = trial.job(ONE, tmp_path).arguments()
    for ours in ("strategy", "regularizers", "probes"):
        del arguments[ours]
    plain = MODELS[model].load(base_model(model, dropout=True))
    if model == "bert_classifier":
        plain.accepts_loss_kwargs = False
    with tiny_process():
        trainer = transformers.Trainer(
            model=plain, args=transformers.TrainingArguments(**arguments), train_dataset=MODELS[model].rows(trial.rows)
        )
        trainer.train()
    outcome = trial.run()
    assert [row["loss"] for row in trainer.state.log_history if "loss" in row] == outcome.logged("loss")
    for name, value in outcome.weights.items():
        assert torch.equal(plain.state_dict()[name], value), name


@ZERO3
@pytest.mark.parametrize("strategy", ["full", "lora"])
def test_zero3_takes_a_model_that_was_loaded_whole(strategy: str) -> None:
    """Loaded before or after the training arguments, the same weights come out."""
    trial = Trial(strategy=strategy, regularizers=("l2_sp",), probes=("weight_distance",))
    sharded, whole = trial.run("zero3"), trial.but(arguments_first=False).run("zero3")
    assert sharded.bits == whole.bits
    assert sharded.measurements == whole.measurements


@pytest.mark.parametrize("where", [ONE, *STAGES])
def test_resumes_a_model_whose_own_checkpoint_has_other_names(where: str) -> None:
    """BERT's checkpoints call a norm's weight gamma; resumed, the trained norms are there and not the first ones."""
    trial = Trial(model="old_bert_classifier", strategy="full", dropout=True, steps=3, save=True)
    assert trial.run(where, resume=2).bits == trial.run(where).bits
    assert trial.run(where).bits == trial.but(model="bert_classifier").run(where).bits
