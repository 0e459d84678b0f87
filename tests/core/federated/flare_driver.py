"""Runs a federation of real processes on this machine and prints what happened as JSON. Started by test_flare.py, alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tunery.core.federated.flare import launch
from tunery.registry.errors import FederationError

EVIL = "raise SystemExit('foreign code ran')\n"
LIMIT = 300


def wait_for(what: Callable[[], Any], seconds: float = LIMIT) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.2)
    raise TimeoutError(f"waited {seconds} seconds in vain")


def listening(port: int) -> bool:
    with socket.socket() as attempt:
        return attempt.connect_ex(("127.0.0.1", port)) == 0


def answer_without(port: int, kit: Path | None) -> str:
    """Say hello over TLS, with the certificate of a kit or with none, and return what becomes of the connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if kit is not None:
        context.load_cert_chain(kit / "startup" / "client.crt", kit / "startup" / "client.key")
    with socket.create_connection(("127.0.0.1", port), timeout=3) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="localhost") as connection:
                connection.sendall(b"hello\n" * 20)
                return "open" if connection.recv(1) else "closed"
        except TimeoutError:
            return "open"
        except OSError:
            return "closed"


def processes(kit: Path) -> Iterator[int]:
    """Yield this machine's processes that work on a kit."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.startswith(str(kit).encode()) for word in words) and int(folder.name) != os.getpid():
            yield int(folder.name)


def kill(kit: Path) -> None:
    for number in processes(kit):
        os.kill(number, signal.SIGKILL)


def start(part: str, kit: Path, recipe: Path) -> subprocess.Popen[bytes]:
    log = (kit.parent / f"{kit.name}.log").open("ab")
    command = [sys.executable, "-m", "tunery", "federate", part, str(kit), str(recipe)]
    return subprocess.Popen(command, stdout=log, stderr=log)


def submit(kit: Path, job: Path) -> str:
    """Submit a job and return how it ended."""
    user = json.loads((kit / "startup" / "fed_admin.json").read_text(encoding="utf-8"))["admin"]["username"]
    try:
        launch.submit_job(kit, user, job, wait=True)
    except FederationError as error:
        return str(error)
    return "completed"


def foreign(folder: Path, executor: str, with_code: bool) -> Path:
    """Write a job whose part for the sites names another class, and perhaps brings it along; the server's part is ours."""
    name = "brings_code" if with_code else "names_another_class"
    job = launch.write_job(folder, name, sites=2)
    shutil.copytree(job / "app", job / "sites")
    meta = json.loads((job / "meta.json").read_text(encoding="utf-8"))
    meta["deploy_map"] = {"app": ["server"], "sites": ["site-1", "site-2"]}
    (job / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    path = job / "sites" / "config" / "config_fed_client.json"
    path.write_text(path.read_text(encoding="utf-8").replace(launch.EXECUTOR, executor), encoding="utf-8")
    if with_code:
        (job / "sites" / "custom").mkdir()
        (job / "sites" / "custom" / "evil.py").write_text(EVIL, encoding="utf-8")
    return job


def trainings(kit: Path) -> int:
    """Return how often a site was asked to train, as its log says."""
    return (kit.parent / f"{kit.name}.log").read_text(encoding="utf-8").count("name=train,")


def rounds_done(folder: Path) -> int:
    log = folder / "rounds.jsonl"
    return len(log.read_text(encoding="utf-8").splitlines()) if log.is_file() else 0


def main(folder: Path, port: int) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=False, stderr=subprocess.DEVNULL)
    kits = folder / "kits"
    sites = ("site-1", "site-2")
    said: dict[str, Any] = {}
    # The sites have to refuse what they do not want, also where the server's operator would allow it.
    policy = {"format_version": "1.0", "permissions": {"project_admin": "any"}}
    (kits / "server" / "local" / "authorization.json").write_text(json.dumps(policy), encoding="utf-8")
    start("server", kits / "server", folder / "server.yaml")
    wait_for(lambda: listening(port))
    said["without certificate"] = answer_without(port, None)
    said["with certificate"] = answer_without(port, kits / "site-1")
    for site in sites:
        start("site", kits / site, folder / f"{site}.yaml")
    jobs = folder / "jobs"
    user = json.loads((kits / "admin" / "startup" / "fed_admin.json").read_text(encoding="utf-8"))["admin"]["username"]
    launch.submit_job(kits / "admin", user, launch.write_job(jobs, "first", sites=2), wait=False)
    wait_for(lambda: rounds_done(folder / "server") >= 1)
    kill(kits / "server")
    said["done when killed"] = rounds_done(folder / "server")
    wait_for(lambda: not listening(port))
    start("server", kits / "server", folder / "server.yaml")
    wait_for(lambda: listening(port))
    said["rounds"] = submit(kits / "admin", launch.write_job(jobs, "rounds", sites=2))
    said["brings code"] = submit(kits / "admin", foreign(jobs, "evil.Evil", with_code=True))
    said["names another class"] = submit(
        kits / "admin", foreign(jobs, "nvflare.app_common.np.np_trainer.NPTrainer", with_code=False)
    )

    for party in ("server", "site-2"):
        shutil.copy(folder / f"endless-{party}.yaml", kits / party / "local" / "tunery.yaml")
    earlier = trainings(kits / "site-2")
    launch.submit_job(kits / "admin", user, launch.write_job(jobs, "endless", sites=2), wait=False)
    wait_for(lambda: trainings(kits / "site-2") > earlier)
    said["done when the site was killed"] = rounds_done(folder / "endless")
    kill(kits / "site-2")
    wait_for(lambda: (folder / "endless" / "result.json").is_file())
    print(json.dumps(said), flush=True)
    for name in ("server", *sites):
        kill(kits / name)
    os._exit(0)  # the engine's threads would keep this process


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
