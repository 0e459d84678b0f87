"""With a strategy whose stand-in is smaller than the model: who gets what of it when, and what comes back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, BertConfig, BertModel, set_seed

from tunery.core.data import encode, load_tasks
from tunery.core.federated.arguments import build_federated_options
from tunery.core.federated.payload import Payload
from tunery.core.federated.run import assemble, in_process
from tunery.core.federated.server import Server
from tunery.core.finished import export_run, load_run
from tunery.core.models import load_processor
from tunery.core.probe_points import probe_run
from tunery.registry.errors import RecipeError

KEYS = {"strategy": "half_width:every=2", "server_fraction": 0.25, "num_rounds": 5, "client_fraction": 0.5}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]


class Watched:
    """An engine that keeps what the server sent, by node."""

    def __init__(self, federation: Any, options: Any) -> None:
        self.engine = in_process(federation, options)
        self.at_once = 1
        self.resident = federation.resident
        self.sent: list[tuple[str, Payload]] = []

    def nodes(self):
        return self.engine.nodes()

    def exchange(self, op, requests, timeout):
        if op == "train":
            self.sent += requests.items()
        return self.engine.exchange(op, requests, timeout)

    def close(self):
        self.engine.close()


@pytest.fixture(scope="module")
def watched(half_width, run_federation, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Watched]:
    folder = tmp_path_factory.mktemp("proxy") / "run"
    engines: list[Watched] = []
    result = run_federation(folder, lambda *parts: engines.append(Watched(*parts)) or engines[0], **KEYS)
    return folder, result, engines[0]


def test_aligned_before_and_during(watched: tuple[Path, Any, Watched]):
    """Before the first round on the server's rows, and after every second one but the last on what its clients told."""
    folder, result, _ = watched
    assert result["distilled"] == {"rows": 11.0}
    rows = rows_of(folder)
    assert ["aligned" in row for row in rows] == [False, True, False, True, False]
    assert all((row["bytes"].get("up_statistics", 0) > 0) == ("aligned" in row) for row in rows)
    assert all(row["aligned"]["tokens"] > row["rows"] for row in rows if "aligned" in row)


def test_aligned_with_the_mean_adapter_in_both(half_width, watched: tuple[Path, Any, Watched]):
    """Stand-in and model have the adapter that the next round begins with, not the last client's."""
    _, _, engine = watched
    for number in (0, 1):
        _, following = engine.sent[6 * (number + 1)]  # three clients a round, aligned after every second
        for name, value in following.group("adapter").items():
            assert all(torch.equal(value, one) for one in half_width.aligned_with[number][name])


def test_what_of_the_stand_in_travels(watched: tuple[Path, Any, Watched]):
    """All of it to a node that has nothing, changed rows to one that lacks these, nothing to one that is up to date."""
    _, _, engine = watched
    whole = sum(value.nbytes for value in engine.resident.frozen().values())
    rows = 2 * 2 * 16 * 4 + 2 * 2 * 4  # two layers, two rows of sixteen numbers in each, and the rows' numbers
    has: dict[str, int] = {}
    for number, (node, message) in enumerate(engine.sent):
        version = int(str(message.scalars["version"]).split(":")[1])
        size = message.nbytes("frozen") + message.nbytes("indices")
        assert version == number // 3 // 2
        assert size == (whole if node not in has else rows if has[node] < version else 0)
        has[node] = version
    assert {message.nbytes("indices") > 0 for _, message in engine.sent} == {True, False}


def test_what_travels_is_what_the_server_has(half_width, run_federation, watched: Any, tmp_path: Path):
    """Clients on models of their own, which get the stand-in by message alone, come to the same bits."""
    from tunery.core.federated.run import assemble

    def apart(federation: Any, options: Any) -> Any:
        engine = in_process(federation, options)
        for worker in engine.workers.values():
            worker._resident = assemble(options).resident
            with torch.no_grad():
                for value in worker._resident.frozen().values():
                    value.zero_()
        return engine

    run_federation(tmp_path / "run", apart, **KEYS)
    for name in ("adapter.safetensors", "stand_in.safetensors"):
        one, other = (load_file(folder / "rounds" / "round-00005" / name) for folder in (watched[0], tmp_path / "run"))
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_client_of_another_version_is_left_out(half_width, run_federation, tmp_path: Path):
    """One that lost its stand-in says so, is left out of that round, and gets all of it the next time."""
    forgot: list[str] = []

    class Forgetful(Watched):
        def exchange(self, op, requests, timeout):
            if op == "train" and "client-0" in requests and requests["client-0"].scalars["from_version"] and not forgot:
                self.engine.workers["client-0"].version = ""
                forgot.append("client-0")
            return super().exchange(op, requests, timeout)

    engines: list[Watched] = []
    keys = {**KEYS, "client_fraction": 1.0, "num_clients": 2}
    run_federation(tmp_path / "run", lambda *parts: engines.append(Forgetful(*parts)) or engines[0], **keys)
    rows = rows_of(tmp_path / "run")
    assert rows[1]["left_out"] == {"client-0": "failed with FederationError"}
    assert all(row["left_out"] == {} for row in (rows[0], *rows[2:]))
    whole = sum(value.nbytes for value in engines[0].resident.frozen().values())
    sizes = [message.nbytes("frozen") for node, message in engines[0].sent if node == "client-0"]
    assert sizes.count(whole) == 2 and len(sizes) == 3  # it rested for two rounds


def test_a_server_without_rows_is_told(half_width, run_federation, tmp_path: Path):
    """The strategy asks for the server's rows, and there are none."""
    with pytest.raises(RecipeError, match="give server_data or server_fraction"):
        run_federation(tmp_path / "run", **{**KEYS, "server_fraction": 0.0})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"server_fraction": 0.0}, "give server_data or server_fraction"),
        ({"clip_norm": 1.0, "noise_multiplier": 0.1}, "give statistics_clip_norm"),
    ],
)
def test_refused_before_the_stand_in_is_distilled(
    changes: dict[str, Any], words: str, run_federation, given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What alignments during tuning need is looked for before anything is computed."""
    monkeypatch.setattr(Server, "distill", lambda *_: pytest.fail("distilled"))
    keys = {"strategy": "proxy_sub_fm:r=2,ratio=0.5,retained=[0],realign_every=2", "server_fraction": 0.2, **changes}
    with pytest.raises(RecipeError, match=words):
        run_federation(tmp_path / "run", **keys)
    if "clip_norm" not in changes:  # never aligned: no rows needed
        assert assemble(build_federated_options(given(tmp_path, **keys, num_rounds=2))).server_rows is None


def test_server_data_from_a_file(half_width, run_federation, tmp_path: Path):
    """Rows of the server's own, without labels, from a file; with noise, statistics need a clip norm of their own."""
    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps({"text": "a b c"}) + "\n" for _ in range(7)), encoding="utf-8")
    keys = {**KEYS, "server_fraction": 0.0, "server_data": str(own), "num_rounds": 1}
    assert run_federation(tmp_path / "run", **keys)["distilled"] == {"rows": 7.0}
    assert run_federation(tmp_path / "few", **keys, max_server_samples=5)["distilled"] == {"rows": 5.0}
    with pytest.raises(RecipeError, match="give statistics_clip_norm"):
        run_federation(tmp_path / "noise", **keys, clip_norm=1.0, noise_multiplier=0.1)


def test_aligned_on_text_that_the_strategy_names(run_federation, tmp_path: Path):
    """A file of the server's, read and tokenized by the strategy; the server needs no rows then."""
    (tmp_path / "own.txt").write_text("a b c d\n" * 9, encoding="utf-8")
    own = f"distill_steps=2,data={tmp_path / 'own.txt'},length=8"
    strategy = f"proxy_sub_fm:r=2,ratio=0.5,retained=[0],realign_every=0,{own}"
    result = run_federation(tmp_path / "run", strategy=strategy, num_rounds=1, client_fraction=0.2)
    assert result["distilled"]["alignment_steps"] == 2


def test_what_the_stand_in_keeps_is_in_memory_once(given, tmp_path: Path):
    """Beside the whole model the stand-in has its narrow blocks, its adapter and its head, and shares the rest."""
    keys = {"strategy": "proxy_sub_fm:r=2,ratio=0.5,retained=[0]", "server_fraction": 0.2}
    made = assemble(build_federated_options(given(tmp_path / "run", **keys)))
    whole = {value.data_ptr() for value in made.full.state_dict().values()}
    named = made.resident.model.state_dict()
    own = {name for name, value in named.items() if value.data_ptr() not in whole}
    narrow = {name for name in own if ".layer.1." in name and "attention" not in name}
    assert {name.rpartition("layer.1.")[2] for name in narrow} == {
        "intermediate.dense.weight",
        "intermediate.dense.bias",
        "output.dense.weight",
        "output.dense.bias",
    }
    assert all("lora" in name or "classifier.modules_to_save" in name for name in own - narrow)


@pytest.fixture(scope="module")
def deep_base(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with four layers, so that there is a middle to leave out, and weights so large that it is missed."""
    folder = tmp_path_factory.mktemp("deep") / "base"
    shutil.copytree(tiny.base, folder)
    set_seed(0)
    BertModel(BertConfig.from_pretrained(tiny.base, num_hidden_layers=4, initializer_range=0.5)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "strategy",
    [
        "offsite:adapter_layers=[1,1],emulator_layers=1,r=2,distill_steps=2",
        "proxy_sub_fm:r=2,ratio=0.5,retained=[0],distill_steps=2,realign_every=1,realign_steps=2",
    ],
)
def test_scored_in_the_full_model(strategy: str, deep_base: Path, run_federation, given, tmp_path: Path):
    """The result's metrics are those of the exported adapter in plain PEFT on the base model, over the validation rows."""
    keys = {"strategy": strategy, "model_name_or_path": str(deep_base), "server_fraction": 0.2, "num_rounds": 2}
    result = run_federation(tmp_path / "run", **keys, learning_rate=0.05)
    options = build_federated_options(given(tmp_path / "run", **keys)).run
    (data,) = load_tasks(options.data, seed=options.training.seed)
    encoded = encode(data, load_processor(str(deep_base), data.task))
    base = AutoModelForSequenceClassification.from_pretrained(deep_base)
    plain = PeftModel.from_pretrained(base, export_run(tmp_path / "run", tmp_path / "out")).eval()
    batch = encoded.data_collator([encoded.validation[index] for index in range(len(encoded.validation))])
    with torch.no_grad():
        found = plain(**batch)
    assert found.loss.item() == pytest.approx(result["metrics"]["loss"], abs=1e-5)
    right = (found.logits.argmax(-1) == batch["labels"]).float().mean().item()
    assert right == pytest.approx(result["metrics"]["accuracy"], abs=1e-6)


@pytest.mark.parametrize("distill_steps", [0, 1])
def test_a_stand_in_aligned_during_tuning_loads_back(distill_steps: int, run_federation, tmp_path: Path):
    """``load_run`` has the bits that the last round had, also where nothing was aligned before the first (the paper's _D)."""
    aligning = f"distill_steps={distill_steps},realign_every=1,realign_steps=2"
    keys = {"strategy": f"proxy_sub_fm:r=2,ratio=0.5,retained=[0],{aligning}", "server_fraction": 0.2, "num_rounds": 2}
    run_federation(tmp_path / "run", **keys)
    found = load_run(tmp_path / "run").model.state_dict()
    kept = load_file(tmp_path / "run" / "rounds" / "round-00002" / "stand_in.safetensors")
    assert all(torch.equal(found[name], value) for name, value in kept.items())


def test_a_federation_is_probed_like_any_run(run_federation, tmp_path: Path):
    """The finished folder will do, and knows the rows it was evaluated on."""
    keys = {"strategy": "proxy_sub_fm:r=2,ratio=0.5,retained=[0],realign_every=0", "num_rounds": 1}
    run_federation(tmp_path / "run", **keys)
    measured = {row["name"]: row["value"] for row in probe_run("gradient_gap", tmp_path / "run") if "layer" not in row}
    assert measured["gap"] > 0 and measured["ratio"] == pytest.approx(measured["gap"] / measured["gradient"])
