"""One federation from beginning to end: what it computes, what it leaves, what a client sends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel, set_seed

from tunery.core.data import encode, load_tasks
from tunery.core.federated.arguments import build_federated_options
from tunery.core.federated.payload import Payload
from tunery.core.federated.run import assemble, in_process
from tunery.core.finished import export_run, load_run
from tunery.registry.errors import CompatibilityError, DataError, FederationError, RecipeError, TuneryError


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def ran(run_federation, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ran") / "run"
    return folder, run_federation(folder, partition="dirichlet", regularizers=["l2_sp"])


def test_what_it_leaves(ran: tuple[Path, dict[str, Any]]):
    """A folder like any run's, with a row and its traffic for each round, a picture of them and one of the partition."""
    folder, returned = ran
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert result == json.loads(json.dumps(returned))
    rows = rows_of(folder)
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert [row["learning_rate"] for row in rows] == pytest.approx([1e-2, 1e-2 * 2 / 3, 1e-2 / 3])
    assert ["metrics" in row for row in rows] == [False, True, True]
    size = sum(value.nbytes for value in load_file(folder / "rounds" / "round-00003" / "adapter.safetensors").values())
    for row in rows:
        assert len(row["clients"]) == 3 and row["left_out"] == {} and row["attempts"] == 1
        assert row["bytes"] == {
            "down_adapter": 3 * size,
            "up_adapter": 3 * size,
            "down_stand_in": 0,
            "up_statistics": 0,
        }
    assert len({tuple(row["clients"]) for row in rows}) > 1
    measured = result["cost"]["measured"]["adapter_bytes"]
    assert measured == result["cost"]["predicted"]["adapter_bytes"] == 2 * size
    assert result["metrics"] == rows[-1]["metrics"]
    assert set(result["metrics"]) == {"loss", "accuracy", "f1"}
    for picture in ("rounds.png", "partition.png"):
        assert (folder / picture).read_bytes()[:4] == b"\x89PNG"
    assert [path.name for path in (folder / "rounds").iterdir()] == ["round-00003"]


def test_it_loads_and_leaves_like_any_run(ran: tuple[Path, dict[str, Any]], tiny: Any, tmp_path: Path):
    """``load_run`` and ``export`` take the folder, and plain PEFT reads the adapter: the same logits, of the last round."""
    folder, _ = ran
    loaded = load_run(folder)
    inputs = {"input_ids": torch.tensor([[2, 5, 6, 3]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    logits = loaded.model(**inputs).logits
    kept = load_file(folder / "rounds" / "round-00003" / "adapter.safetensors")
    live = dict(loaded.model.named_parameters())
    assert all(torch.equal(live[name], value) for name, value in kept.items())
    set_seed(0)
    base = AutoModelForSequenceClassification.from_pretrained(tiny.base)
    plain = PeftModel.from_pretrained(base, export_run(folder, tmp_path / "out")).eval()
    torch.testing.assert_close(plain(**inputs).logits, logits)


def test_one_step_of_sgd_is_one_on_all_rows(tiny: Any, calm_base: Path, run_federation, tmp_path: Path):
    """When each client takes one SGD step on all its rows, the weighted mean is one step on everybody's rows."""
    keys = {
        "model_name_or_path": str(calm_base),
        "strategy": "full",
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": 64,
        "num_clients": 5,
        "client_fraction": 1.0,
        "num_rounds": 1,
        "seed": 3,
    }
    run_federation(tmp_path / "run", **keys)
    found = load_file(tmp_path / "run" / "model.safetensors")
    options = build_federated_options(tiny.given(max_steps=None, save_strategy=None, report_to=None, **keys)).run
    (data,) = load_tasks(options.data, seed=3)
    from tunery.core.models import load_model, load_processor

    processor = load_processor(str(calm_base), data.task)
    set_seed(3)
    model = load_model(str(calm_base), data.task)
    encoded = encode(data, processor)
    batch = encoded.data_collator([encoded.train[index] for index in range(len(encoded.train))])
    model(**batch).loss.backward()
    for name, value in model.named_parameters():
        gradient = value.grad if value.grad is not None else torch.zeros_like(value)
        torch.testing.assert_close(found[name], value.detach() - 0.1 * gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["full", "head"])
def test_the_same_seed_gives_the_same_bits(strategy: str, run_federation, tmp_path: Path):
    """Twice the same, whatever ran in this process in between; another seed gives other weights."""
    keys = {"strategy": strategy, "num_rounds": 2, "regularizers": ["mhloss:heads=3"] if strategy == "full" else None}
    for name, seed in (("one", 1), ("other", 2), ("again", 1)):
        run_federation(tmp_path / name, seed=seed, **keys)
    one, other, again = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "other", "again"))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("strategy", "regularizer"),
    [
        ("peft:peft_type=VERA,r=4", "lnsr"),
        ("multi_lora:r=2", "mmr"),
        ("lora:r=2", "replay:data={rows},length=8"),
    ],
)
def test_whatever_has_one_stage(strategy: str, regularizer: str, tiny: Any, run_federation, tmp_path: Path):
    """A round of it ends with weights that load back; replay is for what models language."""
    keys = {"strategy": strategy, "regularizers": [regularizer.format(rows=tiny.rows)], "num_rounds": 1}
    if "replay" in regularizer:
        decoder = shutil.copytree(tiny.base, tmp_path / "gpt2", ignore=shutil.ignore_patterns("config.json", "model*"))
        GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=1, n_head=2)).save_pretrained(
            decoder
        )
        keys |= {"model_name_or_path": str(decoder), "task_kind": "causal_lm", "text_columns": ["text"]}
    result = run_federation(tmp_path / "run", **keys, num_clients=2, client_fraction=1.0)
    assert result["left_out"] == {} and result["metrics"]["loss"] > 0
    kept = load_file(tmp_path / "run" / "rounds" / "round-00001" / "adapter.safetensors")
    live = dict(load_run(tmp_path / "run").model.named_parameters())
    assert all(torch.equal(live[name], value) for name, value in kept.items())


def test_a_shared_model_changes_nothing(run_federation, tmp_path: Path, given):
    """Each client on a model of its own, one to a process as it were, gives the bits that one shared model gives."""

    def apart(federation: Any, options: Any) -> Any:
        engine = in_process(federation, options)
        for worker in engine.workers.values():
            worker._resident = assemble(options).resident
        return engine

    keys = {"regularizers": ["mhloss:heads=3", "mixout:p=0.5"], "strategy": "full", "num_rounds": 2, "num_clients": 3}
    run_federation(tmp_path / "shared", **keys)
    run_federation(tmp_path / "apart", apart, **keys)
    shared, other = (load_file(tmp_path / name / "model.safetensors") for name in ("shared", "apart"))
    assert all(torch.equal(shared[name], other[name]) for name in shared)


def test_many_clients_share_one_model(given, tmp_path: Path):
    """However many there are, one model trains for all."""
    federation = assemble(build_federated_options(given(tmp_path, num_clients=40)))
    workers = in_process(federation, build_federated_options(given(tmp_path, num_clients=40))).workers.values()
    assert len(workers) == 40
    assert all(worker._resident is federation.resident for worker in workers)


class Recorded:
    """An engine that keeps every byte clients send."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.at_once = engine.at_once
        self.sent: list[bytes] = []

    def nodes(self):
        return self.engine.nodes()

    def exchange(self, op, requests, timeout):
        replies = self.engine.exchange(op, requests, timeout)
        self.sent += [reply.to_bytes() for reply in replies.values()]
        return replies

    def close(self):
        self.engine.close()


@pytest.mark.parametrize("fails", [False, True])
def test_no_row_label_or_text_leaves_a_client(
    tiny: Any, half_width, run_federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
):
    """Every byte clients send is the adapter, statistics, or one of five scalars; of an error, only its kind."""
    kept: list[Recorded] = []

    def recorded(federation: Any, options: Any) -> Recorded:
        kept.append(Recorded(in_process(federation, options)))
        if fails:
            secret = tiny.rows.read_text(encoding="utf-8").splitlines()[0]
            worker = kept[0].engine.workers["client-0"]
            monkeypatch.setattr(worker._resident, "fit", lambda *_: (_ for _ in ()).throw(ValueError(secret)))
        return kept[0]

    keys = {"strategy": "half_width:every=1", "server_fraction": 0.2, "num_rounds": 2}
    if fails:
        with pytest.raises(FederationError, match="failed with ValueError"):
            run_federation(tmp_path / "run", recorded, **keys)
    else:
        run_federation(tmp_path / "run", recorded, **keys)
    engine = kept[0]
    trained = engine.engine.workers["client-0"]._resident.state()
    texts = [json.loads(line)["text"] for line in tiny.rows.read_text(encoding="utf-8").splitlines()]
    rows = [worker._rows[index] for worker in engine.engine.workers.values() for index in range(len(worker._rows))]
    assert len(engine.sent) > 6
    for data in engine.sent:
        assert not any(text.encode() in data for text in texts)
        for row in rows:
            for size in (torch.int16, torch.int32, torch.int64, torch.float32):
                assert torch.tensor(row["input_ids"], dtype=size).numpy().tobytes() not in data
        message = Payload.from_bytes(data)
        assert message.group("adapter").keys() <= trained.keys()
        assert all(value.shape == trained[name].shape for name, value in message.group("adapter").items())
        assert {name: value.numel() for name, value in message.group("statistics").items()} in ({}, {"tokens": 1})
        assert len(message.arrays) == len(message.group("adapter")) + len(message.group("statistics"))
        assert message.scalars.keys() <= {"rows", "loss", "seconds", "version", "setup", "error"}
        assert message.scalars.get("error") in (None, "ValueError")


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"alpha": 0, "partition": "dirichlet"}, RecipeError, "alpha=0: Input should be greater than 0"),
        ({"num_clients": 500}, DataError, "num_clients=500 is more than the"),
        ({"client_fraction": 1.5}, RecipeError, "client_fraction=1.5"),
        ({"min_clients": 4}, RecipeError, "min_clients=4 is more than the 3 clients of a round"),
        ({"noise_multiplier": 1.0}, RecipeError, "give clip_norm"),
        ({"server_data": "a.jsonl", "server_fraction": 0.1}, RecipeError, "both name the server's rows"),
        ({"server_data": "nowhere.jsonl"}, DataError, "does not exist"),
        ({"lr_scheduler_type": "cosine"}, RecipeError, "learning_rate_decay"),
        ({"strategy": "lp_ft"}, CompatibilityError, "trains in stages"),
        ({"strategy": "lura"}, TuneryError, "did you mean 'lora'"),
        ({"partition": "natural"}, RecipeError, "partition='natural'"),
    ],
)
def test_bad_input_is_one_line(changes: dict[str, Any], kind: type, words: str, run_federation, tmp_path: Path):
    """Nothing is trained, nothing written, and one line says what to do."""
    with pytest.raises(kind, match=words) as caught:
        run_federation(tmp_path / "run", **changes)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "rounds").exists()


def test_two_runs_are_not_mixed(ran: tuple[Path, dict[str, Any]], run_federation):
    """A folder that holds a run is refused, and so is going on with it under other keys."""
    folder, _ = ran
    with pytest.raises(RecipeError, match="holds a run already"):
        run_federation(folder)
    with pytest.raises(RecipeError, match="seed was None when this federation began, now it is 5"):
        run_federation(folder, partition="dirichlet", regularizers=["l2_sp"], seed=5, resume_from_checkpoint="last")


def test_going_on_with_a_finished_run_changes_nothing(ran: tuple[Path, dict[str, Any]], run_federation):
    """It writes the same weights and the same result again."""
    folder, _ = ran
    before = {name: (folder / name).read_bytes() for name in ("adapter_model.safetensors", "rounds.jsonl")}
    run_federation(folder, partition="dirichlet", regularizers=["l2_sp"], resume_from_checkpoint="last")
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_command_line(cli, given, tmp_path: Path):
    """``--dry-run`` prints the cost and writes nothing; a run ends with its result; a wrong flag is one line."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(given(tmp_path / "run")), encoding="utf-8")
    told = cli("federate", recipe, "--dry-run", "--num_clients", "4")
    assert told.code == 0 and "multiplications per client and round" in told.out
    assert list((tmp_path / "run").iterdir()) == []
    wrong = cli("federate", recipe, "--num_clents", "4")
    assert wrong.code == 2 and "did you mean 'num_clients'?" in wrong.err
    assert "--client_fraction" in cli("federate", "--keys").out
    done = cli("federate", recipe, "--num_clients", "4", "--num_rounds", "1")
    assert done.code == 0, done.err
    assert "accuracy" in done.out and "(predicted " in done.out
    assert json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))["clients"] == 4
