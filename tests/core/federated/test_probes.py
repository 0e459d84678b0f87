"""Probes named in a federation: what they are handed, when they measure, and that nothing else changes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tunery.core.federated.arguments import build_federated_options
from tunery.core.federated.rounds import Rounds
from tunery.core.federated.run import assemble
from tunery.core.federated.server import Server
from tunery.core.federated.show import show_federation
from tunery.core.federated.site import site_worker
from tunery.core.probe_points import probe_run
from tunery.registry.catalog import Origin
from tunery.registry.context import Measurement, Subject, Support
from tunery.registry.contracts import Probe
from tunery.registry.errors import CompatibilityError, RecipeError, TuneryError
from tunery.registry.loading import load_plugins

STRATEGY = "proxy_sub_fm:r=2,ratio=0.5,retained=[0],realign_every=2,realign_steps=2"
KEYS = {"strategy": STRATEGY, "server_fraction": 0.2, "num_rounds": 4, "eval_every": 0, "learning_rate": 0.05}
PROBES = ["gradient_gap", "seen", "seen_beside"]


class Seen(Probe):
    """The loss and the size of what it is handed, and the loss over its batches."""

    name = "seen"
    summary = "what a probe sees"
    reference = "none"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """none."""

    def measure(self, subject: Subject) -> Iterator[Measurement]:
        assert subject.evaluate is not None and subject.batches is not None
        batches = list(subject.batches())
        losses = [subject.model(**batch).loss.item() * len(batch["labels"]) for batch in batches]
        yield Measurement(name="loss", value=subject.evaluate()["eval_loss"])
        yield Measurement(name="batches", value=sum(losses) / sum(len(batch["labels"]) for batch in batches))
        pieces = list(subject.reference.pieces())
        assert len(pieces) == sum(parameter.requires_grad for parameter in subject.model.parameters())
        moved = [
            (parameter.detach().flatten() - start).double().square().sum().item() for _, parameter, start in pieces
        ]
        yield Measurement(name="moved", value=sum(moved) ** 0.5)
        yield Measurement(name="step", value=float(subject.step))
        yield Measurement(name="whole", value=float(subject.whole is not None))
        if subject.whole is not None:
            with subject.whole():
                yield Measurement(name="loss_whole", value=subject.evaluate()["eval_loss"])


class SeenBeside(Seen):
    """The same, of a stand-in."""

    name = "seen_beside"
    supports = Support(needs_stand_in=True)


class Parts(Probe):
    """One value that belongs to a layer, and none that does not."""

    name = "parts"
    summary = "a layer's"
    reference = "none"
    supports = Support(excludes={"mixout": "it says so"})

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """none."""

    def measure(self, subject: Subject) -> Iterator[Measurement]:
        yield Measurement(name="value", value=1.0, where={"layer": 0})


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    catalog = load_plugins().catalog
    for probe in (Seen, SeenBeside, Parts):
        catalog.add(probe, Origin(distribution="tests", version="0", module=__name__, file=__file__))
    yield
    for probe in (Seen, SeenBeside, Parts):
        del catalog.entries["probe", probe.name]


@pytest.fixture(scope="module")
def probed(run_federation, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("probed") / "run"
    return folder, run_federation(folder, **KEYS, probe_every=3, probes=PROBES)


def measured(result: dict[str, Any], probe: str, name: str) -> dict[tuple[int, str], float]:
    """Return one overall value by round and moment."""
    rows = [row for row in result["probes"] if row["probe"] == probe and row["name"] == name and "layer" not in row]
    return {(row["round"], row["moment"]): row["value"] for row in rows}


def test_when_they_measure(probed: tuple[Path, dict[str, Any]]):
    """Before the first round, on both sides of the alignment after the second, after the third and the last."""
    folder, result = probed
    moments = [(0, "begin"), (2, "before_alignment"), (2, "round"), (3, "round"), (4, "round")]
    for probe, name in (("gradient_gap", "ratio"), ("seen", "loss"), ("seen_beside", "loss")):
        assert list(measured(result, probe, name)) == moments
    assert [value for value in measured(result, "seen", "step").values()] == [0, 2, 2, 3, 4]
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [{row["moment"] for row in each.get("probes", ())} for each in rows] == [
        set(),
        {"before_alignment", "round"},
        {"round"},
        {"round"},
    ]
    assert json.loads((folder / "result.json").read_text(encoding="utf-8"))["probes"] == result["probes"]
    assert [one["name"] for one in result["plugins"]] == ["proxy_sub_fm", *PROBES]


def test_what_they_are_handed(probed: tuple[Path, dict[str, Any]]):
    """The full model with the adapter, which the result is about; the stand-in, and how to make it that, on request."""
    _, result = probed
    last = (4, "round")
    assert measured(result, "seen", "loss")[last] == result["metrics"]["loss"]
    assert measured(result, "seen_beside", "loss_whole")[last] == pytest.approx(result["metrics"]["loss"], rel=1e-6)
    for probe in ("seen", "seen_beside"):
        assert measured(result, probe, "batches") == pytest.approx(measured(result, probe, "loss"), rel=1e-5)
    assert set(measured(result, "seen", "whole").values()) == {0.0}
    assert set(measured(result, "seen_beside", "whole").values()) == {1.0}
    full, standing_in = measured(result, "seen", "loss"), measured(result, "seen_beside", "loss")
    assert all(full[moment] != standing_in[moment] for moment in full)
    assert full[2, "before_alignment"] == full[2, "round"]  # an alignment changes the stand-in alone
    assert standing_in[2, "before_alignment"] != standing_in[2, "round"]


def test_the_gradient_gap_is_that_of_the_finished_run(probed: tuple[Path, dict[str, Any]]):
    """What the last round measured is what ``tunery probe`` measures of the folder; an alignment moved it."""
    folder, result = probed
    found = {row["name"]: row["value"] for row in probe_run("gradient_gap", folder) if "layer" not in row}
    ours = {name: measured(result, "gradient_gap", name) for name in found}
    assert {name: values[4, "round"] for name, values in ours.items()} == pytest.approx(found, rel=1e-4)
    assert ours["gap"][2, "before_alignment"] != ours["gap"][2, "round"]
    assert {row["layer"] for row in result["probes"] if "layer" in row} == {0, 1}


def test_distances_are_from_the_first_adapter(probed: tuple[Path, dict[str, Any]], given, tmp_path: Path):
    """In either model, as between the saved adapter and the one that the seed draws."""
    folder, result = probed
    first = assemble(build_federated_options(given(tmp_path, **KEYS))).resident.state()
    last = load_file(folder / "rounds" / "round-00004" / "adapter.safetensors")
    distance = sum(float((last[name] - first[name]).double().square().sum()) for name in last) ** 0.5
    for probe in ("seen", "seen_beside"):
        values = measured(result, probe, "moved")
        assert values[0, "begin"] == 0.0
        assert values[4, "round"] == pytest.approx(distance, rel=1e-5)


def test_rounds_are_what_they_are_without(probed: tuple[Path, dict[str, Any]], run_federation, tmp_path: Path):
    """The same bits, losses and metrics."""
    folder, result = probed
    plain = run_federation(tmp_path / "run", **KEYS)
    assert "probes" not in plain and plain["metrics"] == result["metrics"]
    for name in ("adapter", "stand_in"):
        one, other = (
            load_file(place / "rounds" / "round-00004" / f"{name}.safetensors") for place in (folder, tmp_path / "run")
        )
        assert all(one[key].equal(other[key]) for key in one)


def test_resumed_they_measure_the_same(
    probed: tuple[Path, dict[str, Any]], run_federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Stopped in the third round and resumed: what was measured before is kept, and what follows has the same start."""
    go_on = Rounds._round

    def stops(self: Rounds, number: int, *rest: Any) -> Any:
        if number == 2:
            raise KeyboardInterrupt
        return go_on(self, number, *rest)

    keys = {**KEYS, "probe_every": 3, "probes": PROBES}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Rounds, "_round", stops)
        run_federation(tmp_path / "run", **keys)
    assert run_federation(tmp_path / "run", **keys, resume_from_checkpoint="last")["probes"] == probed[1]["probes"]


def test_resumed_where_there_were_none(run_federation, tmp_path: Path):
    """Begun without probes, by a version that knew none, and gone on with: they measure from there."""
    keys = {**KEYS, "strategy": "lora:r=2", "num_rounds": 2, "server_fraction": 0}

    def last(rounds: Rounds, number: int, *rest: Any) -> Any:
        if number == 1:
            raise KeyboardInterrupt
        return go_on(rounds, number, *rest)

    go_on = Rounds._round
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Rounds, "_round", last)
        run_federation(tmp_path / "run", **keys)
    (state,) = (tmp_path / "run" / "rounds").glob("*/state.json")
    kept = json.loads(state.read_text(encoding="utf-8"))
    del kept["probed"]
    state.write_text(json.dumps(kept), encoding="utf-8")
    result = run_federation(tmp_path / "run", **keys, probes=["seen"], resume_from_checkpoint="last")
    assert list(measured(result, "seen", "loss")) == [(2, "round")]


def test_picture_and_table(probed: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]):
    """A panel for each probe below the curve; a table with a line for each moment."""
    folder, result = probed
    _, height = struct.unpack(">II", (folder / "rounds.png").read_bytes()[16:24])
    assert height == pytest.approx(150 * (4.2 + 2.4 * len(PROBES)), abs=2)
    show_federation(result, folder)
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index("gradient_gap") :][:10]
    assert "ratio" in table[2] and "before alignment" in "".join(table)
    value = measured(result, "gradient_gap", "ratio")[2, "before_alignment"]
    assert f"{value:.6g}" in next(line for line in table if "before alignment" in line)


def test_of_the_model_itself(run_federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A strategy without a stand-in: the model that trains, where eval_every says. Parts are written, and not shown."""
    result = run_federation(tmp_path / "run", strategy="lora:r=2", probes=["seen", "parts"], num_rounds=2, eval_every=1)
    losses = measured(result, "seen", "loss")
    assert list(losses) == [(0, "begin"), (1, "round"), (2, "round")]
    assert losses[2, "round"] == result["metrics"]["loss"]
    assert [row["round"] for row in result["probes"] if row["probe"] == "parts"] == [0, 1, 2]
    show_federation(result, tmp_path / "run")
    printed = capsys.readouterr().out.splitlines()
    assert "seen" in printed and "parts" not in printed


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"strategy": "lora:r=2", "probes": ["gradient_gap"]}, CompatibilityError, "trains the model itself"),
        ({"strategy": "half_width", "probes": ["gradient_gap"]}, CompatibilityError, "keeps nothing of the model"),
        ({"probes": ["gradient_gap"], "probe_moments": ["end"]}, RecipeError, "rounds are probed: probe_every"),
        (
            {"strategy": "full", "regularizers": ["mixout"], "probes": ["parts"]},
            CompatibilityError,
            "not go with 'mixout'",
        ),
        ({"probes": ["class_perplexity"]}, CompatibilityError, "does not take task kind"),
    ],
)
def test_refused(
    changes: dict[str, Any],
    error: type[TuneryError],
    words: str,
    half_width,
    run_federation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """In one line, before any client trains."""
    monkeypatch.setattr(Server, "request", lambda *_: pytest.fail("trained"))
    with pytest.raises(error, match=words) as caught:
        run_federation(tmp_path / "run", **{**KEYS, **changes})
    assert "\n" not in str(caught.value)


def test_a_site_measures_nothing(given, tmp_path: Path):
    """Its recipe is refused, before anything is loaded."""
    options = build_federated_options(given(tmp_path, **KEYS, probes=["gradient_gap"], model_name_or_path="nowhere"))
    with pytest.raises(RecipeError, match="name them in the server's"):
        site_worker("north", options)
