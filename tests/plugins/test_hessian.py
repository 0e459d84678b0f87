"""Curvature: worked numbers, the exact Hessian of a small net, what differs in method or batching and must not in value."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import default_data_collator

from tunery import Measurement, Subject, Task, TaskKind
from tunery.core.anatomy import find_anatomy
from tunery.core.context import make_context
from tunery.core.probing import Snapshot, measure
from tunery.core.sharding import ModelSharding
from tunery.plugins.perturbation import GaussianDirection, standard_normal
from tunery.plugins.probes.hessian import Hessian
from tunery.plugins.probes.interpolation import Interpolation
from tunery.registry.conformance.models import MODELS, base_model
from tunery.registry.context import RunContext
from tunery.registry.errors import CompatibilityError

MATRIX = [[1.0, 2.0], [2.0, 1.0]]


class Quadratic(nn.Module):
    """1/2 w'Hw + c'w, and parameters it does not depend on."""

    def __init__(self, matrix: Any, linear: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.tensor(matrix, dtype=torch.float64))
        self.linear = linear
        self.weight = nn.Parameter(torch.arange(1.0, len(matrix) + 1, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(1, dtype=torch.float64), requires_grad=False)

    def forward(self, labels: torch.Tensor) -> Any:
        loss = self.weight @ self.matrix @ self.weight / 2 * self.frozen.square().squeeze()
        return SimpleNamespace(loss=loss + self.linear * self.weight.sum())


class Net(nn.Module):
    """A classifier with one hidden layer of tanh."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return SimpleNamespace(loss=functional.cross_entropy(self.layers(x), labels))


def subject_of(model: nn.Module, batches: Iterable[Mapping[str, Any]], kind: TaskKind = TaskKind.OTHER) -> Subject:
    run = RunContext(
        tasks=(Task(name="task", kind=kind),),
        seed=11,
        sharding=ModelSharding(),
        pretrained_parameters=frozenset(),
        logger=logging.getLogger("tests"),
        find_anatomy=find_anatomy,
    )
    return Subject(model=model, run=run, reference=Snapshot(model, run.sharding), batches=lambda: batches)


def quadratic(linear: float = 0.0) -> Subject:
    return subject_of(Quadratic(MATRIX, linear), [{"labels": torch.zeros(1)}])


def measured(subject: Subject, **options: Any) -> list[Measurement]:
    return measure(Hessian(Hessian.Config(**options)), subject)


def value_of(name: str, measurements: list[Measurement]) -> float:
    return next(m.value for m in measurements if m.name == name and not m.where)


def samples(measurements: list[Measurement]) -> list[float]:
    return [m.value for m in measurements if m.name == "trace" and m.where]


def rows(count: int = 7) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(count, 3, generator=generator, dtype=torch.float64),
        "labels": torch.randint(3, (count,), generator=generator),
    }


def exact_hessian(net: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    names = [name for name, _ in net.named_parameters()]
    shapes = [p.shape for p in net.parameters()]
    sizes = [p.numel() for p in net.parameters()]

    def loss(flat: torch.Tensor) -> torch.Tensor:
        parts = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        answer = torch.func.functional_call(net, dict(zip(names, parts, strict=True)), kwargs=batch)
        return answer.loss

    return torch.autograd.functional.hessian(loss, torch.cat([p.detach().flatten() for p in net.parameters()]))


@pytest.mark.parametrize("method", ["auto", "exact", "finite_difference"])
def test_the_worked_example(method: str):
    """[[1, 2], [2, 1]] draws 6 and -2, has trace 2 and the eigenvalues 3 and -1; what the loss does not know is flat."""
    found = measured(quadratic(linear=0.7), draws=40, method=method, tolerance=1e-12, iterations=60)
    drawn = samples(found)
    assert {round(value, 6) for value in drawn} == {6.0, -2.0}
    assert value_of("trace", found) == pytest.approx(sum(drawn) / 40)
    spread = math.sqrt(sum((value - sum(drawn) / 40) ** 2 for value in drawn) / 39 / 40)
    assert value_of("trace_standard_error", found) == pytest.approx(spread)
    assert abs(value_of("trace", found) - 2) < 3 * spread
    assert value_of("top_eigenvalue", found) == pytest.approx(3, abs=1e-5)
    used = "exact" if method == "auto" else method
    assert {m.where["method"] for m in found if m.where} == {used}


def test_trace_and_eigenvalue_of_a_small_net():
    """Within three standard errors of the exact Hessian's trace, and at its largest eigenvalue."""
    net, batch = Net(), rows()
    hessian = exact_hessian(net, batch)
    found = measured(subject_of(net, [batch]), draws=60, iterations=500, tolerance=1e-10)
    error = value_of("trace_standard_error", found)
    assert abs(value_of("trace", found) - hessian.trace().item()) < 3 * error
    assert error < 0.3 * hessian.trace().item()
    eigenvalues = torch.linalg.eigvalsh(hessian)
    assert value_of("top_eigenvalue", found) == pytest.approx(eigenvalues[eigenvalues.abs().argmax()].item(), rel=1e-4)


def test_forward_only_is_proposition_d1():
    """On a quadratic each draw is z'Hz whatever the gradient, so that their mean is the trace; no gradient is taken."""
    subject = quadratic(linear=5.0)
    subject.model.requires_grad_(True)
    found = measured(subject, draws=400, method="forward", seed=4)
    matrix, drawn = torch.tensor(MATRIX, dtype=torch.float64), samples(found)
    for draw in (0, 399):
        z = GaussianDirection(std={"weight": 1.0}, seed=4, draw=draw).of("weight", subject.model.weight)
        frozen = GaussianDirection(std={"frozen": 1.0}, seed=4, draw=draw).of("frozen", subject.model.frozen)
        assert z.std() > 0
        assert frozen.shape == (1,)
    subject.model.frozen.requires_grad_(False)
    drawn = samples(measured(subject, draws=400, method="forward", seed=4))
    expected = []
    for draw in range(400):
        z = GaussianDirection(std={"weight": 1.0}, seed=4, draw=draw).of("weight", subject.model.weight)
        expected.append((z @ matrix @ z).item())
    assert drawn == pytest.approx(expected, rel=1e-6, abs=1e-6)
    mean = sum(drawn) / 400
    assert abs(mean - 2) < 3 * math.sqrt(sum((value - mean) ** 2 for value in drawn) / 399 / 400)
    assert not any(m.name == "top_eigenvalue" for m in found)


@pytest.mark.parametrize(
    ("zero_stage", "attention", "method"),
    [
        (0, "sdpa", "exact"),
        (2, "eager", "exact"),
        (3, "sdpa", "finite_difference"),
        (0, "flash_attention_2", "finite_difference"),
        (2, "kernels-community/vllm-flash-attn3", "finite_difference"),
    ],
)
def test_auto_differentiates_twice_where_that_can_be_done(zero_stage: int, attention: str, method: str):
    """Not under ZeRO-3, nor through a fused kernel that has no second derivative; the rows say how it was."""
    subject = quadratic()
    subject.model.config = SimpleNamespace(_attn_implementation=attention)
    subject.run.sharding.zero_stage = zero_stage
    found = measured(subject, draws=2, iterations=0)
    assert {m.where["method"] for m in found if m.where} == {method}


def test_how_rows_are_batched_does_not_matter():
    """Batches of five and two rows give what one of seven gives."""
    batch = rows()
    parts = [{key: value[:5] for key, value in batch.items()}, {key: value[5:] for key, value in batch.items()}]
    whole, split = (measured(subject_of(Net(), batches), draws=3) for batches in ([batch], parts))
    assert [m.value for m in split] == pytest.approx([m.value for m in whole], rel=1e-9)


def test_tokens_are_what_a_language_models_loss_is_a_mean_of():
    """Batches whose rows have different numbers of tokens give what one batch gives."""
    tiny = MODELS["llama_causal_lm"]
    found = []
    for sizes in ((8,), (1, 2, 5)):
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        batches = [default_data_collator(tiny.rows(8)[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
        subject = subject_of(tiny.load(base_model("llama_causal_lm", False)).double(), batches, tiny.kind)
        found.append([m.value for m in measured(subject, draws=2, iterations=1)])
    assert found[1] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.parametrize("name", ["bert_classifier", "llama_causal_lm"])
def test_fused_attention_is_differentiated_twice(name: str):
    """A transformer with torch's fused attention has the curvature it has with plain attention, and by differences."""
    tiny = MODELS[name]
    found = {}
    for attention, method in (("sdpa", "exact"), ("eager", "exact"), ("sdpa", "finite_difference")):
        model = tiny.load(base_model(name, False))
        model.set_attn_implementation(attention)
        halves = [default_data_collator(tiny.rows(8)[i : i + 4]) for i in (0, 4)]
        subject = subject_of(model, halves, tiny.kind)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        found[attention, method] = [m.value for m in measured(subject, draws=2, iterations=3, method=method)]
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert all(p.requires_grad and p.grad is None for p in model.parameters())
    expected = found["eager", "exact"]
    assert found["sdpa", "exact"] == pytest.approx(expected, rel=1e-3)
    assert found["sdpa", "finite_difference"] == pytest.approx(expected, rel=2e-2)


def test_what_cannot_be_measured_is_refused_in_a_line():
    """No evaluation set, no labels, nothing that trains, an operation without second derivative."""
    subject = quadratic()
    bare = Subject(model=subject.model, run=subject.run, reference=subject.reference)
    with pytest.raises(CompatibilityError, match="'hessian' has no evaluation set"):
        measured(bare)
    with pytest.raises(CompatibilityError, match="finds no labels among x"):
        measured(subject_of(Net(), [{"x": torch.zeros(1, 3)}]))

    class Stubborn(Quadratic):
        def forward(self, labels: torch.Tensor) -> Any:
            x = self.weight.float().view(1, 1, 2, 1).repeat(1, 1, 1, 8)
            fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[0]
            return SimpleNamespace(loss=fused.square().sum())

    subject = subject_of(Stubborn(MATRIX), [{"labels": torch.zeros(1)}])
    with pytest.raises(CompatibilityError, match=r"differentiate this model twice.*finite_difference"):
        measured(subject)
    assert math.isfinite(value_of("trace", measured(subject, method="finite_difference")))
    with pytest.raises(CompatibilityError, match=r"differences of gradients in torch\.bfloat16"):
        measured(subject_of(Net().bfloat16(), [rows()]), method="finite_difference")
    subject.model.requires_grad_(False)
    with pytest.raises(CompatibilityError, match="no parameter that trains"):
        measured(subject)


# ---- interpolation


def line(subject: Subject, **options: Any) -> tuple[dict[str, dict[float, float]], list[Measurement]]:
    found = measure(Interpolation(Interpolation.Config(**options)), subject)
    curves: dict[str, dict[float, float]] = {"loss": {}, "quadratic": {}}
    for m in found:
        if m.where:
            curves[m.name][m.where["lambda"]] = m.value
    return curves, found


def test_fine_tuning_direction_of_a_quadratic():
    """lambda = -1 is where training began, 0 where it is; the parabola of a quadratic is the loss itself."""
    subject = quadratic(linear=0.5)
    start = subject.model(torch.zeros(1)).loss.item()
    with torch.no_grad():
        subject.model.weight.add_(torch.tensor([0.3, -0.7], dtype=torch.float64))
    now = subject.model(torch.zeros(1)).loss.item()
    curves, found = line(subject, direction="fine_tuning", lambdas=(-1.0, 0.0, 0.4, 2.0))
    assert curves["loss"][-1.0] == pytest.approx(start)
    assert curves["loss"][0.0] == pytest.approx(now)
    assert curves["quadratic"] == pytest.approx(curves["loss"])
    step, matrix = torch.tensor([0.3, -0.7], dtype=torch.float64), subject.model.matrix
    gradient = matrix @ subject.model.weight.detach() + 0.5
    assert value_of("slope", found) == pytest.approx((gradient @ step).item())
    assert value_of("curvature", found) == pytest.approx((step @ matrix @ step).item())


@pytest.mark.parametrize("method", ["exact", "finite_difference"])
def test_parabola_touches_the_loss_along_noise(method: str):
    """Near the weights the parabola's error falls with the third power of lambda, of frozen weights too."""
    tiny = MODELS["gpt2_causal_lm"]
    torch.manual_seed(0)
    model = tiny.load(base_model("gpt2_causal_lm", False)).double()
    model.requires_grad_(False)
    task = Task(name="words", kind=TaskKind.CAUSAL_LM)
    run = make_context(model, SimpleNamespace(seed=2), [task])
    batch = default_data_collator(tiny.rows(6))
    subject = Subject(model=model, run=run, reference=Snapshot(model, run.sharding), batches=lambda: [batch])
    curves, _ = line(subject, lambdas=(0.0, 0.02, 0.04, 0.08), method=method)
    assert curves["quadratic"][0.0] == pytest.approx(curves["loss"][0.0])
    errors = [abs(curves["quadratic"][point] - curves["loss"][point]) for point in (0.04, 0.08)]
    assert errors[1] / errors[0] == pytest.approx(8, rel=0.35)
    assert errors[1] < 0.1 * abs(curves["loss"][0.08] - curves["loss"][0.0])
    assert not any(p.requires_grad for p in model.parameters())


def test_random_numbers_do_not_depend_on_the_generator_of_the_run():
    """The same key gives the same numbers, another key others, and torch's own generator stays where it is."""
    parameter = nn.Parameter(torch.zeros(50))
    before = torch.get_rng_state()
    first = standard_normal(parameter, "a")
    assert torch.equal(first, standard_normal(parameter, "a"))
    assert not torch.equal(first, standard_normal(parameter, "b"))
    assert torch.equal(before, torch.get_rng_state())
