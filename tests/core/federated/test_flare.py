"""Federations over NVFLARE: kits and their policies, and one of real processes on this machine, over mutual TLS."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tunery.core.federated.site
from tunery.core.federated.arguments import read_federated_options
from tunery.core.federated.engine import InProcess
from tunery.core.federated.flare import launch
from tunery.core.federated.flare.provision import CONTROLLER, EXECUTOR, Project, own_state, provision, read_project
from tunery.core.federated.run import federate
from tunery.core.federated.site import site_worker
from tunery.core.models import load_model
from tunery.registry.errors import RecipeError

SITES = ("site-1", "site-2")
TIMEOUT = 20  # seconds of a round that a site is killed in, half way through a training without end


def test_projects_that_cannot_be_read(tmp_path: Path, cli: Any):
    """A missing file, a wrong key or value, and a wrong command line are one line each."""
    project = tmp_path / "project.yaml"
    for text, words in (
        ("name: x\nhost: h\nsites: []\nadmin: a@b", "sites"),
        ("name: x\nhost: h\nsites: [a]\nadmin: nobody", "admin"),
        ("name: x\nhost: h\nsites: [a]\nadmin: a@b\nport: 0", "port"),
        ("name: x\nhost: h\nsites: [a]\nadmin: a@b\nprot: 1", "prot"),
        ("name: x\nhost: h\nsites: [../a]\nadmin: a@b", "sites"),
        ("a: [", "not YAML"),
    ):
        project.write_text(text, encoding="utf-8")
        with pytest.raises(RecipeError, match=words) as caught:
            read_project(project)
        assert "\n" not in str(caught.value)
    with pytest.raises(RecipeError, match="cannot read"):
        read_project(tmp_path / "nowhere.yaml")
    wrong = cli("federate", "server", tmp_path)
    assert wrong.code == 2 and "tunery federate server KIT RECIPE" in wrong.err
    assert cli("federate", "submit", tmp_path).err.count("\n") == 1


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("nvflare", reason="needs tunery[federated]")
    folder = tmp_path_factory.mktemp("project") / "kits"
    made = provision(Project(name="test", host="localhost", port=18102, sites=list(SITES), admin="a@b.org"), folder)
    assert {kit.name for kit in made} == {"server", "admin", *SITES}
    return folder


def test_kits_are_tight(kits: Path):
    """A party has its own key and nobody else's; a site runs one class, no foreign code and no shell commands."""
    keys = [path.read_bytes() for path in kits.rglob("*.key")]
    assert len(keys) == len(set(keys)) == 4
    assert not list(kits.rglob("*cert.json"))  # the root key is gone
    for name, allowed in (("server", CONTROLLER), *((site, EXECUTOR) for site in SITES)):
        resources = json.loads((kits / name / "local" / "resources.json").read_text(encoding="utf-8"))
        assert resources["class_allow_list"] == [allowed]
        assert resources["class_list_enforcement_mode"] == "enforce"
        policy = json.loads((kits / name / "local" / "authorization.json").read_text(encoding="utf-8"))["permissions"]
        assert policy.keys() == {"project_admin"}
        assert policy["project_admin"]["byoc"] == policy["project_admin"]["shell_commands"] == "none"
    server = json.loads((kits / "server" / "local" / "resources.json").read_text(encoding="utf-8"))
    assert server["servers"][0]["heart_beat_timeout"] == 120


def test_a_server_keeps_its_state_in_its_own_kit(kits: Path, tmp_path: Path):
    """Jobs and snapshots of two servers on one machine have nothing in common; whose kit moved takes the new place."""
    for place in ("here", "there"):
        kit = shutil.copytree(kits / "server", tmp_path / place)
        own_state(kit)
        resources = json.loads((kit / "local" / "resources.json").read_text(encoding="utf-8"))
        (jobs,) = (item["args"]["uri_root"] for item in resources["components"] if item["id"] == "job_manager")
        snapshots = resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"]
        assert (jobs, snapshots) == (str(kit / "state" / "jobs"), str(kit / "state" / "snapshots"))
        assert resources["class_allow_list"] == [CONTROLLER]


def test_a_recipe_is_taken_whole_or_not_at_all(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A copy that breaks off leaves the recipe a site was started with; a whole one takes its place, and nothing beside it."""
    kit, recipe = tmp_path / "kit", tmp_path / "site.yaml"
    for folder in ("startup", "local"):
        (kit / folder).mkdir(parents=True)
    (kit / "startup" / "fed_client.json").write_text('{"client": {"fqsn": "north"}}', encoding="utf-8")
    taken = kit / "local" / "tunery.yaml"
    taken.write_text("old: recipe", encoding="utf-8")
    recipe.write_text(json.dumps(tiny.given(save_strategy=None, output_dir=str(tmp_path))), encoding="utf-8")
    started: list[list[str]] = []
    monkeypatch.setattr(launch, "need_flare", lambda: None)
    monkeypatch.setattr(os, "execv", lambda program, command: started.append(command))

    def breaks_off(source: Path, target: Path) -> None:
        target.write_text(source.read_text(encoding="utf-8")[:20], encoding="utf-8")
        raise OSError("no space left")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr(shutil, "copyfile", breaks_off)
        launch.run_site(kit, recipe)
    assert taken.read_text(encoding="utf-8") == "old: recipe" and not started
    probed = tmp_path / "probed.yaml"
    probed.write_text(
        json.dumps({**json.loads(recipe.read_text(encoding="utf-8")), "probes": ["apoz"]}), encoding="utf-8"
    )
    with pytest.raises(RecipeError, match="name them in the server's"):
        launch.run_site(kit, probed)
    assert taken.read_text(encoding="utf-8") == "old: recipe" and not started
    launch.run_site(kit, recipe)
    assert taken.read_text(encoding="utf-8") == recipe.read_text(encoding="utf-8")
    assert [path.name for path in taken.parent.iterdir()] == ["tunery.yaml"]
    assert "uid=north" in started[0] and str(kit) in started[0]


@pytest.fixture
def parties(tiny: Any, tmp_path: Path) -> dict[str, Path]:
    """Rows and a recipe for each site and the server; the sites have no row in common."""
    rows = tiny.rows.read_text(encoding="utf-8").splitlines()
    shares = {"site-1": rows[:16], "site-2": rows[16:36], "server": rows[36:]}
    keys = tiny.given(
        strategy="proxy_sub_fm:r=2,ratio=0.5,retained=[0],distill_steps=3,realign_every=2,realign_steps=3",
        max_steps=None,
        save_strategy=None,
        report_to=None,
        client_fraction=1.0,
        num_rounds=3,
        round_timeout=200,
    )
    recipes = {}
    for name, share in shares.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(share) + "\n", encoding="utf-8")
        own = {"train_file": str(tmp_path / f"{name}.jsonl"), "output_dir": str(tmp_path / name)}
        if name == "server":
            own |= {"validation_file": own["train_file"], "server_data": own["train_file"]}
        recipes[name] = tmp_path / f"{name}.yaml"
        recipes[name].write_text(json.dumps({**keys, **own}), encoding="utf-8")
        endless = {"num_rounds": 3, "round_timeout": TIMEOUT, "num_train_epochs": 100_000}
        endless |= {"output_dir": str(tmp_path / "endless")} if name == "server" else {}
        (tmp_path / f"endless-{name}.yaml").write_text(json.dumps({**keys, **own, **endless}), encoding="utf-8")
    return recipes


def in_this_process(parties: dict[str, Path], folder: Path) -> dict[str, Any]:
    """Run the same parties with the engine that needs no other process."""
    options = read_federated_options(parties["server"], ["--output_dir", str(folder)])
    workers = {site: site_worker(site, read_federated_options(parties[site], [])) for site in SITES}
    return federate(options, lambda *_: InProcess(workers), simulated=False)


def test_sites_bring_their_own_rows(parties: dict[str, Path], tmp_path: Path):
    """Without dealing rows out: the rounds count the sites' rows, all of them; other labels are refused."""
    result = in_this_process(parties, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["rows"] for row in rows] == [36, 36, 36]
    assert (result["clients"], result["rounds"]) == (2, 3)
    keys = json.loads(parties["site-2"].read_text(encoding="utf-8"))
    path = Path(keys["train_file"])
    path.write_text(path.read_text(encoding="utf-8").replace('"no"', '"nope"'), encoding="utf-8")
    in_this_process(parties, tmp_path / "other")
    rows = [json.loads(line) for line in (tmp_path / "other" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows[0]["left_out"] == {"site-2": "failed with FederationError"}
    assert all(row["clients"] == ["site-1"] for row in rows)


@pytest.mark.parametrize("key", ["validation_file", "train_file"])
def test_a_servers_one_file_evaluates(key: str, parties: dict[str, Path], tmp_path: Path):
    """All of its rows, whichever of the two keys names it."""
    keys = json.loads(parties["server"].read_text(encoding="utf-8")) | {"num_rounds": 1}
    file = keys.pop("train_file")
    del keys["validation_file"]
    parties["server"].write_text(json.dumps(keys | {key: file}), encoding="utf-8")
    result = in_this_process(parties, tmp_path / "run")
    assert result["examples"]["validation"] == len(Path(file).read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("regularizer", ["l2_sp:alpha=10", "mixout:p=0.5"])
def test_what_a_site_without_weights_is_pulled_to(
    regularizer: str, tiny: Any, parties: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Sites that have nothing of the model but its config train, and end like sites that have all of it, also who joins later."""
    bare = shutil.copytree(tiny.base, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    strategy = "offsite:adapter_layers=[1,0],emulator_layers=1,tune=layers"
    for name, path in parties.items():
        keys = json.loads(path.read_text(encoding="utf-8")) | {"strategy": strategy, "regularizers": [regularizer]}
        keys |= {"client_fraction": 0.5, "num_rounds": 4} | (
            {} if name == "server" else {"model_name_or_path": str(bare)}
        )
        path.write_text(json.dumps(keys), encoding="utf-8")
    in_this_process(parties, tmp_path / "without")
    for site in SITES:
        path = parties[site]
        path.write_text(path.read_text(encoding="utf-8").replace(str(bare), str(tiny.base)), encoding="utf-8")
    monkeypatch.setattr(tunery.core.federated.site, "empty_model", load_model)
    in_this_process(parties, tmp_path / "with")
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("without", "with"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    rows = [json.loads(line) for line in (tmp_path / "with" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    came = [row["clients"][0] for row in rows]
    assert set(came) == set(SITES)  # so one of them joined after the other had trained


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_real_server_and_sites(kits: Path, parties: dict[str, Path], tmp_path: Path):
    """Three rounds with an alignment, the server killed after the first, end with the in-process adapter; strangers, foreign
    code and a killed site do no harm.
    """
    shutil.copytree(kits, tmp_path / "kits")
    alone = ["unshare", "-rnp", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], check=False, capture_output=True).returncode:
        alone = []  # this machine allows no network of its own
        with socket.socket() as taken:
            assert taken.connect_ex(("127.0.0.1", 18102)) != 0
    driver = Path(__file__).with_name("flare_driver.py")
    ran = subprocess.run(
        [*alone, sys.executable, str(driver), str(tmp_path), "18102"],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        timeout=1000,
    )
    logs = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "kits").glob("*.log"))
    assert ran.returncode == 0, ran.stderr[-3000:] + logs[-9000:]
    said = json.loads(ran.stdout.splitlines()[-1])
    assert (said["without certificate"], said["with certificate"]) == ("closed", "open")
    assert said["rounds"] == "completed", logs[-9000:]
    assert said["done when killed"] in (1, 2), said
    assert said["brings code"] != "completed" and said["names another class"] != "completed"
    sites = "".join((tmp_path / "kits" / f"{site}.log").read_text(encoding="utf-8") for site in SITES)
    assert "NPTrainer' at config path" in sites and "is not in allow_list" in sites
    assert "site-1: NVFLARE_ERROR: BYOC not permitted" in logs, (said, logs[-9000:])
    assert "foreign code ran" not in logs + sites

    in_this_process(parties, tmp_path / "here")
    for name in ("adapter_model", "strategy"):
        there, here = (load_file(tmp_path / run / f"{name}.safetensors") for run in ("server", "here"))
        assert there.keys() == here.keys()
        for key, value in here.items():
            torch.testing.assert_close(there[key], value, rtol=0, atol=1e-6)

    rows = [json.loads(line) for line in (tmp_path / "endless" / "rounds.jsonl").read_text().splitlines()]
    assert said["done when the site was killed"] == 0 and len(rows) == 3
    assert rows[0]["left_out"] == {"site-2": "no reply in time"}
    assert TIMEOUT <= rows[0]["seconds"] < 2 * TIMEOUT
    assert all(row["clients"] == ["site-1"] for row in rows)
