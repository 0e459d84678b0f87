"""Probes leave no trace, measure at their moments, and their log survives interruptions."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import default_data_collator

from tunery import Trainer, TrainingArguments
from tunery.core.anatomy import find_anatomy
from tunery.core.probing import MeasurementLog, Probing, Snapshot, measure, probe_model, shares, untouched
from tunery.core.sharding import ModelSharding
from tunery.registry.conformance.models import MODELS, base_model
from tunery.registry.conformance.trials import Trial
from tunery.registry.context import Measurement, RunContext, Subject, Task, TaskKind
from tunery.registry.contracts import Probe
from tunery.registry.errors import DataError


class Meddler(Probe):
    """A probe that does to a model whatever a probe may do by accident, and perhaps fails."""

    name = "meddler"
    summary = "meddle"
    reference = "nobody"
    fails = False

    def measure(self, subject: Subject) -> Iterable[Measurement]:
        model = subject.model
        yield Measurement(name="is_training", value=float(model.training))
        yield Measurement(name="draw", value=torch.rand(()).item(), where={"layer": 0})
        with subject.run.sharding.perturbed(model.parameters()), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        model.train()
        model(torch.randn(6, 4)).sum().backward()
        model[0].eval()
        random.random()
        np.random.rand()
        torch.manual_seed(99)
        if self.fails:
            raise ZeroDivisionError
        yield Measurement(name="last", value=1.0)


class Failing(Meddler):
    fails = True


@pytest.fixture
def model() -> nn.Sequential:
    """A net with dropout, running statistics, a gradient, and modules in different modes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    net(torch.randn(6, 4)).sum().backward()
    net[3].weight.grad = None
    net.train()
    net[1].eval()
    return net


@pytest.fixture
def subject(model: nn.Sequential) -> Subject:
    run = RunContext(
        tasks=(Task(name="task", kind=TaskKind.OTHER),),
        seed=11,
        sharding=ModelSharding(),
        pretrained_parameters=frozenset(),
        logger=logging.getLogger("tests"),
        find_anatomy=find_anatomy,
    )
    return Subject(model=model, run=run, reference=Snapshot(model, run.sharding), step=3)


def state_of(model: nn.Sequential) -> dict[str, Any]:
    """Return everything a probe must leave alone, in a form that compares."""
    return {
        "parameters": [parameter.detach().numpy().tobytes() for parameter in model.parameters()],
        "buffers": [buffer.numpy().tobytes() for buffer in model.buffers()],
        "grads": [None if p.grad is None else (id(p.grad), p.grad.numpy().tobytes()) for p in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "flags": [parameter.requires_grad for parameter in model.parameters()],
        "random": random.getstate(),
        "numpy": [np.random.get_state()[1].tobytes(), np.random.get_state()[2:]],
        "torch": torch.get_rng_state().numpy().tobytes(),
    }


@pytest.mark.parametrize("probe", [Meddler, Failing])
def test_a_probe_leaves_no_trace(probe: type[Meddler], subject: Subject):
    """Parameters, buffers, gradients, modes and all three RNG states are as before, also after an error."""
    before = state_of(subject.model)
    with pytest.raises(ZeroDivisionError) if probe.fails else nullcontext():
        measure(probe(None), subject)
    after = state_of(subject.model)
    for key, value in before.items():
        assert after[key] == value, key


def test_gradients_are_out_of_sight_inside(model: nn.Sequential):
    """Inside, no gradient of the run is there to be added to."""
    with untouched(model):
        assert all(parameter.grad is None for parameter in model.parameters())
    assert model[0].weight.grad is not None


def test_a_probe_sees_eval_mode_and_a_fixed_seed(subject: Subject):
    """A probe measures in eval mode, and draws the same numbers whenever it runs."""
    first = measure(Meddler(None), subject)
    torch.manual_seed(12345)
    second = measure(Meddler(None), subject)
    assert [m.value for m in first] == [m.value for m in second]
    assert first[0].value == 0.0
    assert first[1].value == torch.rand((), generator=torch.Generator().manual_seed(11)).item()


# ---- the reference


def test_snapshot_keeps_the_start():
    """It has what trained when it was made, with the live parameter beside it; a frozen parameter is left out."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    snapshot = Snapshot(model, ModelSharding())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    pieces = list(snapshot.pieces())
    assert [name for name, _, _ in pieces] == ["0.weight", "1.weight", "1.bias"]
    for name, live, kept in pieces:
        assert live is model.get_parameter(name)
        assert torch.equal(kept, start[name].flatten())
        assert torch.equal(live, start[name] + 1)


# ---- the log


def rows(log: MeasurementLog) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> MeasurementLog:
    """A log of a run of ten steps: measured at the beginning, twice in between, at the end and once more."""
    made = MeasurementLog(tmp_path / "run")
    for moment, step in (("begin", 0), ("evaluate", 5), ("evaluate", 10), ("end", 10), ("evaluate", 10)):
        measurements = [
            Measurement(name="d", value=step / 3),
            Measurement(name="d", value=1.0, unit="m", where={"layer": 1}),
        ]
        made.append("probe", moment, step, measurements)
    return made


def test_log_rows(log: MeasurementLog):
    """One measurement a line, with its place spread out; the numbers come back exactly."""
    assert rows(log)[2] == {"probe": "probe", "moment": "evaluate", "step": 5, "name": "d", "value": 5 / 3, "unit": ""}
    assert rows(log)[3]["unit"] == "m"
    assert rows(log)[3]["layer"] == 1
    assert len(rows(log)) == 10


@pytest.mark.parametrize(("step", "kept"), [(-1, 0), (0, 2), (4, 2), (5, 4), (10, 6), (99, 6)])
def test_rewind(step: int, kept: int, log: MeasurementLog):
    """What came after the checkpoint goes: later steps, the end of the run, and what was measured after the end."""
    before = rows(log)
    log.rewind(step)
    assert rows(log) == before[:kept]
    assert [path.name for path in log.path.parent.iterdir()] == ["measurements.jsonl"]


@pytest.mark.parametrize(
    "torn", ['{"probe": "probe", "mom', '{"probe": "probe", "moment": "evaluate"}', "\x00\x00", "3", '"text"', "null"]
)
def test_rewind_drops_a_torn_last_line(torn: str, log: MeasurementLog):
    """A line that was not finished goes too, and appending goes on from a whole line."""
    log.rewind(5)
    whole = rows(log)
    with log.path.open("a", encoding="utf-8") as file:
        file.write(torn)
    log.rewind(5)
    log.append("probe", "evaluate", 7, [Measurement(name="d", value=2.0)])
    assert rows(log)[:-1] == whole
    assert rows(log)[-1]["step"] == 7


def test_rewind_without_a_log(tmp_path: Path):
    """No log, nothing to do, nothing made."""
    MeasurementLog(tmp_path / "run").rewind(3)
    assert list(tmp_path.iterdir()) == []


def test_moments(subject: Subject, tmp_path: Path):
    """Probes run at the chosen moments only; overall values are reported by name, every measurement is observed."""
    probing = Probing([Meddler(None)], ["end"], tmp_path)
    reported: list[Any] = []
    observed: list[Measurement] = []
    probing.at("begin", subject, reported.append, observed.append)
    assert (reported, observed) == ([], [])
    assert not probing.log.path.exists()
    probing.at("end", subject, reported.append, observed.append)
    assert reported == [{"probe/meddler/is_training": 0.0, "probe/meddler/last": 1.0}]
    assert [m.name for m in observed] == ["is_training", "draw", "last"]
    assert [(row["probe"], row["moment"], row["step"], row["name"]) for row in rows(probing.log)] == [
        ("meddler", "end", 3, "is_training"),
        ("meddler", "end", 3, "draw"),
        ("meddler", "end", 3, "last"),
    ]


# ---- batches, and a bare model


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 64, 65])
@pytest.mark.parametrize(("batch_size", "ranks"), [(1, 1), (8, 1), (1, 2), (3, 2), (8, 2), (4, 3)])
def test_shares_hold_every_row_once(rows: int, batch_size: int, ranks: int):
    """All ranks together see each row once, in equally many batches, none of them empty or much too large."""
    if rows < ranks:
        with pytest.raises(DataError, match=rf"{rows} rows for {ranks} processes"):
            shares(rows, batch_size, ranks, 0)
        return
    by_rank = [shares(rows, batch_size, ranks, rank) for rank in range(ranks)]
    assert sorted(row for own in by_rank for batch in own for row in batch) == list(range(rows))
    assert len({len(own) for own in by_rank}) == 1
    assert all(1 <= len(batch) <= batch_size + 1 for own in by_rank for batch in own)


@pytest.mark.parametrize("loader", [False, True], ids=["rows", "loader"])
def test_a_bare_model_is_probed_from_python(loader: bool):
    """A model, rows and a probe's name are enough, and the model is as it was."""
    tiny = MODELS["bert_classifier"]
    model = tiny.load(base_model("bert_classifier", True))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_before = torch.get_rng_state()
    rows: Any = tiny.rows(9)
    if loader:
        rows = DataLoader(rows, batch_size=4, collate_fn=default_data_collator)
    measured = probe_model(model.train(), "weight_distance", rows)
    assert measured[0].value == 0.0
    assert model.training
    assert torch.equal(torch.get_rng_state(), random_before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_bare_model_trains_afterwards_as_it_would_have(tmp_path: Path):
    """Neither it nor its config remembers the probe: a Trainer still finds it untouched, and trains it in bfloat16."""
    tiny = MODELS["bert_classifier"]
    model = tiny.load(base_model("bert_classifier", True))
    model.config.use_cache = True
    attributes, config = {id(module): dict(vars(module)) for module in model.modules()}, model.config.to_dict()
    probe_model(model, "gaussian:gammas=[0.1],draws=1", tiny.rows(9))
    assert model.config.to_dict() == config
    for module in model.modules():
        kept = attributes[id(module)]
        assert vars(module).keys() == kept.keys()
        assert all(value is kept[name] for name, value in vars(module).items())

    seen: list[torch.dtype] = []
    layer = model.get_submodule("bert.encoder.layer.0.output.dense")
    layer.register_forward_hook(lambda _module, _given, output: seen.append(output.dtype))
    given = {"max_steps": 1, "bf16": True, "use_cpu": True, "save_strategy": "no", "report_to": "none"}
    arguments = TrainingArguments(output_dir=str(tmp_path), dataloader_pin_memory=False, disable_tqdm=True, **given)
    Trainer(model=model, args=arguments, train_dataset=tiny.rows(9)).train()
    assert set(seen) == {torch.bfloat16}


def test_a_subject_has_the_evaluation_set(tmp_path: Path):
    """Its batches hold every evaluation row once, and their loss is what the evaluation says."""
    trainer = Trial(probes=("weight_distance",)).trainer(tmp_path)
    subject = trainer.subject()
    batches = list(subject.batches())
    assert sum(len(batch["labels"]) for batch in batches) == len(trainer.eval_dataset)
    with torch.no_grad():
        losses = [subject.model.eval()(**batch).loss.item() for batch in batches]
    assert np.mean(losses) == pytest.approx(subject.evaluate()["eval_loss"])
