"""MMR: the worked example, the formula against numpy, gradients, two ranks, real heads, and what it refuses."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tunery.core.sharding import ModelSharding
from tunery.plugins.regularizers.mmr import MMR
from tunery.registry.context import Anatomy, Batch, RunContext, Task, TaskKind
from tunery.registry.errors import CompatibilityError

# transformers and PEFT are imported where they are used: the two processes of the last test need neither.

EXAMPLE = [[1.0, 0.0], [3.0, 0.0], [0.0, 2.0]]  # with classes (+, +, -)
EXAMPLE_GRADIENT = [[-0.0241221, 0.0241221], [-0.0241221, 0.0241221], [0.0482441, -0.0482441]]
TASK = Task(name="task", kind=TaskKind.CLASSIFICATION, label_names=("a", "b", "c"))


class Toy(nn.Module):
    """A linear encoder and head; with ``encoder`` left out, the inputs are the features."""

    def __init__(self, width: int = 2, classes: int = 3, encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_labels=classes, pad_token_id=None)
        self.encoder = encoder or nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.encoder(features))


def context(task: Task = TASK, pretrained: Iterable[str] = ()) -> RunContext:
    return RunContext(
        tasks=(task,),
        seed=0,
        sharding=ModelSharding(),
        pretrained_parameters=frozenset(pretrained),
        logger=logging.getLogger("test"),
        find_anatomy=anatomy,
    )


def anatomy(model: nn.Module) -> Anatomy:
    if isinstance(model, Toy):
        return Anatomy(model_type="toy", layers=(), embeddings=(), final_norms=(), head="head")
    from tunery.core.anatomy import find_anatomy

    return find_anatomy(model)


def attached(model: nn.Module) -> MMR:
    regularizer = MMR(MMR.Config())
    regularizer.attach(model, context())
    return regularizer


def penalty(regularizer: MMR, model: nn.Module, inputs: dict[str, Any]) -> Tensor | None:
    """One forward pass as the objective does it."""
    regularizer.begin(inputs)
    outputs = model(**{key: value for key, value in inputs.items() if key != "labels"})
    return regularizer.penalty(Batch(inputs=inputs, outputs=outputs, model=model, task=TASK))


def of_features(features: Tensor, labels: Sequence[int]) -> Tensor | None:
    """The penalty of features that enter the head as they are."""
    width = features.shape[1]
    model = Toy(width, encoder=nn.Identity()).to(features.dtype)
    model.before = nn.Linear(1, 1)  # something that trains
    return penalty(attached(model), model, {"features": features, "labels": torch.tensor(labels)})


def formula(features: Any, labels: Sequence[int]) -> float:
    """The definition in float64, one pair of classes after the other."""
    rows = [np.asarray(row, dtype=np.float64) for row in features]
    means = [np.mean([r for r, x in zip(rows, labels, strict=True) if x == c], axis=0) for c in sorted({*labels})]
    return float(np.mean([1 / (1 + np.sqrt(((a - b) ** 2).sum())) for a, b in combinations(means, 2)]))


def test_worked_example() -> None:
    """Two classes give eq. 8 and its gradient, whatever two of the three classes they are."""
    for plus, minus in ((0, 1), (2, 0), (1, 2)):
        features = torch.tensor(EXAMPLE, dtype=torch.float64, requires_grad=True)
        value = of_features(features, [plus, plus, minus])
        value.backward()
        assert value.item() == pytest.approx(0.2612039, abs=1e-7)
        torch.testing.assert_close(features.grad, torch.tensor(EXAMPLE_GRADIENT).double(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("labels", [[0, 1, 2, 0, 1, 2, 2], [0, 0, 2, 0, 0, 2, 2]], ids=["all", "one class lacks rows"])
def test_mean_over_pairs_of_classes(labels: list[int]) -> None:
    """Three classes give the mean over their pairs; a class without rows skips its pairs."""
    features = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert of_features(features, labels).item() == pytest.approx(formula(features, labels), rel=1e-12)


def test_gradient_is_that_of_finite_differences() -> None:
    """Autograd through three classes agrees with finite differences in float64."""
    features = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: of_features(x, [0, 1, 2, 0, 1, 2, 2]), features)


def test_rows_without_a_class_do_not_count() -> None:
    """A row labelled -100 changes neither value nor gradient."""
    features = torch.tensor([*EXAMPLE, [9.0, 9.0]], requires_grad=True)
    value = of_features(features, [0, 0, 1, -100])
    value.backward()
    assert value.item() == pytest.approx(0.2612039, abs=1e-6)
    torch.testing.assert_close(features.grad, torch.tensor([*EXAMPLE_GRADIENT, [0.0, 0.0]]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("labels", [[1, 1, 1], [-100, -100, 1], [-100, -100, -100]])
def test_no_pair_no_penalty(labels: list[int]) -> None:
    """Rows of fewer than two classes leave the loss alone."""
    assert of_features(torch.tensor(EXAMPLE), labels) is None


def test_coincident_means_have_a_gradient() -> None:
    """Where two means coincide R is 1 and its gradient is 0, not NaN; another pair still pulls."""
    features = torch.ones(4, 2, requires_grad=True)
    value = of_features(features, [0, 0, 1, 1])
    value.backward()
    assert value.item() == 1.0
    assert torch.equal(features.grad, torch.zeros(4, 2))
    features = torch.tensor([[1.0, 1.0], [1.0, 1.0], [3.0, 1.0]], requires_grad=True)
    of_features(features, [0, 1, 2]).backward()
    assert torch.isfinite(features.grad).all() and features.grad[2].norm() > 0


def test_half_precision_features_are_averaged_in_float32() -> None:
    """bfloat16 features give the float32 value of the same numbers."""
    features = torch.randn(32, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = [row % 3 for row in range(32)]
    value = of_features(features, labels)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(formula(features.double(), labels), rel=1e-5)


def test_inert_outside_a_training_pass() -> None:
    """Evaluation, and a pass re-run while the gradient is taken, neither keep nor replace features."""
    model = Toy()
    regularizer = attached(model)
    inputs = {"features": torch.tensor(EXAMPLE), "labels": torch.tensor([0, 0, 1])}
    expected = penalty(regularizer, model, inputs)
    regularizer.begin(inputs)
    with torch.no_grad():
        model(torch.zeros(3, 2))
    outputs = model(inputs["features"])
    model(torch.zeros(3, 2))
    assert regularizer.penalty(Batch(inputs=inputs, outputs=outputs, model=model, task=TASK)) == expected
    model(torch.zeros(3, 2))
    assert regularizer._features is None


# ---- real models


def tiny(model_type: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    if model_type == "gpt2":
        sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2}
    config = AutoConfig.for_model(
        model_type, **sizes, vocab_size=50, num_labels=3, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config).eval()


def tokens() -> dict[str, Tensor]:
    """Six rows of three classes, padded on the right by 0 to 3 tokens."""
    ids = torch.randint(3, 50, (6, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(7) < 7 - torch.tensor([[0], [1], [2], [3], [0], [1]])
    return {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": torch.tensor([0, 1, 2, 0, 1, 2])}


@pytest.mark.parametrize("model_type", ["bert", "roberta", "gpt2", "llama"])
def test_features_are_what_the_last_layer_classifies(model_type: str) -> None:
    """The class means are those of the vectors the model's logits are a linear function of."""
    model, inputs = tiny(model_type), tokens()
    value = penalty(attached(model), model, inputs)
    states = model(**inputs, output_hidden_states=True).hidden_states[-1]
    if model_type == "bert":
        features, last = model.bert.pooler(states), model.classifier
    elif model_type == "roberta":
        features, last = torch.tanh(model.classifier.dense(states[:, 0])), model.classifier.out_proj
    else:
        features, last = states[torch.arange(6), inputs["attention_mask"].sum(1) - 1], model.score
    torch.testing.assert_close(last(features), model(**inputs).logits)
    assert value.item() == pytest.approx(formula(features.detach(), inputs["labels"].tolist()), rel=1e-5)


def test_pulls_an_adapter_through_a_copied_head() -> None:
    """Under LoRA, with the head a module PEFT copied, the gradient reaches the adapter and not the head."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny("bert"), LoraConfig(target_modules=["query"], modules_to_save=["classifier"]))
    penalty(attached(model), model, tokens()).backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.norm() > 0}
    assert moved and all("lora_B" in name for name in moved)  # A's gradient is 0 while B is 0


# ---- what it refuses


def head_tuned(model_type: str) -> tuple[nn.Module, RunContext, MMR]:
    """A model with a frozen encoder, as strategy ``head`` leaves it."""
    from tunery.core.recipe import choose

    model = tiny(model_type)
    run = context(pretrained=[name for name, _ in model.named_parameters() if not name.startswith("classifier")])
    recipe = choose("head", ["mmr"])
    return recipe.strategy.prepare(model, run), run, recipe.regularizers[0]


def test_refuses_a_frozen_encoder() -> None:
    """With nothing trainable before the head's last layer R has no gradient, and one line says so."""
    model, run, regularizer = head_tuned("bert")
    with pytest.raises(CompatibilityError, match=r"'mmr' would do nothing: every parameter before .* frozen") as caught:
        regularizer.attach(model, run)
    assert "\n" not in str(caught.value)


def test_takes_a_head_with_more_to_train() -> None:
    """RoBERTa's head has a layer before its last one: under a frozen encoder R trains that one, and nothing else."""
    model, run, regularizer = head_tuned("roberta")
    regularizer.attach(model, run)
    penalty(regularizer, model, tokens()).backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.norm() > 0}
    assert moved == {"classifier.dense.weight", "classifier.dense.bias"}


@pytest.mark.parametrize("kind", [TaskKind.REGRESSION, TaskKind.CAUSAL_LM, TaskKind.MASKED_LM, TaskKind.OTHER])
def test_refuses_tasks_without_classes(kind: TaskKind) -> None:
    """Regression and language modelling stop a run before it begins."""
    from tunery.core.recipe import choose

    with pytest.raises(CompatibilityError, match="'mmr' does not take task kind"):
        choose(None, ["mmr"]).check(tiny("bert"), context(Task(name="task", kind=kind)))


def test_refuses_several_labels_a_row() -> None:
    """Multi-label targets are no classes."""
    model = Toy()
    inputs = {"features": torch.tensor(EXAMPLE), "labels": torch.ones(3, 3)}
    with pytest.raises(CompatibilityError, match="'mmr' takes one class a row"):
        penalty(attached(model), model, inputs)


def test_refuses_a_head_that_does_not_run() -> None:
    """A forward pass that goes around the head is an error, not a penalty left out."""
    model = Toy()
    regularizer = attached(model)
    model.head = nn.Linear(2, 3)
    with pytest.raises(CompatibilityError, match="'mmr' saw nothing enter the head"):
        penalty(regularizer, model, {"features": torch.tensor(EXAMPLE), "labels": torch.tensor([0, 0, 1])})


# ---- two processes: this file is also the program each of them runs

# Labels of rank 0 and rank 1, one micro-batch after the other; ranks may have unequal numbers of rows.
STEPS: list[tuple[list[int], list[int]]] = [
    ([0, 1, 2, 0], [1, 2, 0, 0]),
    ([0, 1, 2], [2]),
    ([0, 0], [0, 0]),  # no pair on either rank
    ([1, 1], [2, 2, 2]),  # no pair on one rank alone
    ([0, 1], [0, 0]),
]


def toy_and_rows(step: int) -> tuple[Toy, Tensor, list[int]]:
    torch.manual_seed(step)
    labels = [*STEPS[step][0], *STEPS[step][1]]
    return Toy(3), torch.randn(len(labels), 3), labels


def answer(step: int, rows: slice, share: float, wrap: Any = lambda model: model) -> dict[str, Any] | None:
    """Value and encoder gradient of one step on some of its rows, with the factor the objective puts on the penalty."""
    model, features, labels = toy_and_rows(step)
    regularizer, wrapped = attached(model), wrap(model)
    inputs = {"features": features[rows], "labels": torch.tensor(labels[rows])}
    regularizer.begin(inputs)
    logits = wrapped(inputs["features"])
    value = regularizer.penalty(Batch(inputs=inputs, outputs=logits, model=wrapped, task=TASK))
    if value is None:
        return None
    (0.0 * logits.sum() + value * share).backward()  # DDP averages when every parameter has a gradient
    return {"value": value.item(), "gradient": [p.grad.tolist() for p in model.encoder.parameters()]}


def rank_main(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    answers = []
    for step, (first, second) in enumerate(STEPS):
        rows = slice(0, len(first)) if rank == 0 else slice(len(first), None)
        share = 2 * len((first, second)[rank]) / len(first + second)
        answers.append(answer(step, rows, share, nn.parallel.DistributedDataParallel))
    (folder / f"{rank}.json").write_text(json.dumps(answers), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    """Value and gradient, averaged by DDP, are those of one process with all rows, however classes and rows are spread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)], env=environment) for rank in range(2)]
    try:
        assert [process.wait(timeout=300) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    expected = [answer(step, slice(None), 1.0) for step in range(len(STEPS))]
    assert [found is None for found in expected] == [False, False, True, False, False]
    for rank in range(2):
        assert_same(json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")), expected)


def assert_same(found: Iterable[Any], expected: Iterable[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            assert one["value"] == pytest.approx(other["value"], rel=1e-6)
            for gradient, same in zip(one["gradient"], other["gradient"], strict=True):
                assert np.asarray(gradient) == pytest.approx(np.asarray(same), rel=1e-5, abs=1e-7)


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), Path(sys.argv[2]))
