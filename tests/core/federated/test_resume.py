"""A federation that is killed at any moment and resumed ends, to the bit, like one that was not."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
from safetensors.torch import load_file

from tunery.core.federated.checkpoint import RoundLog
from tunery.registry.errors import ArtifactError

KEYS: dict[str, Any] = {
    "strategy": "proxy_sub_fm:r=2,ratio=0.5,retained=[0],distill_steps=2,realign_every=2,realign_steps=3",
    "server_fraction": 0.2,
    "num_clients": 4,
    "num_rounds": 4,
    "eval_every": 1,
    "probes": ["gradient_gap:batches=1"],
}


def bits(path: Path) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in load_file(path).items()}


def traces(run: Path) -> dict[str, Any]:
    """Return what must not depend on interruptions: weights, rows without clocks and what was sent twice, metrics."""
    (last,) = (run / "rounds").iterdir()
    rows = [json.loads(line) for line in (run / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows:
        del row["seconds"], row["client_seconds"], row["bytes"]["down_stand_in"]
    return {
        "adapter": bits(run / "adapter_model.safetensors"),
        "checkpoint": [bits(last / f"{name}.safetensors") for name in ("adapter", "stand_in", "changes")],
        "rows": rows,
        "metrics": json.loads((run / "result.json").read_text(encoding="utf-8"))["metrics"],
    }


@dataclass
class Recorder:
    """Copies a run's folder before every change Python makes to it: what a kill at that moment would leave on disk."""

    folder: Path
    images: Path
    active: bool = False
    taken: list[Path] = field(default_factory=list)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Watch one audit event."""
        if not self.active or event not in ("os.rename", "os.remove", "os.mkdir", "os.link", "shutil.rmtree", "open"):
            return
        path = arguments[0]
        if not isinstance(path, str | os.PathLike) or not str(path).startswith(str(self.folder)):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        self.active = False
        if self.folder.exists():
            image = self.images / f"{len(self.taken):03}"
            shutil.copytree(self.folder, image)
            self.taken.append(image)
        self.active = True


@pytest.fixture(scope="module")
def unbroken(run_federation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    root = tmp_path_factory.mktemp("unbroken")
    recorder = Recorder(root / "run", root / "images")
    sys.addaudithook(recorder)
    recorder.active = True
    run_federation(recorder.folder, **KEYS)
    recorder.active = False
    yield recorder
    shutil.rmtree(recorder.images)


def moments(images: list[Path]) -> list[Path]:
    """Return images to resume from: two checkpoints at once, a row without its checkpoint, amid the writing, at random."""
    double = [image for image in images if len(list(image.glob("rounds/round-*"))) == 2]
    ahead = [
        image
        for image in images
        if (image / "rounds.jsonl").is_file()
        and len((image / "rounds.jsonl").read_text().splitlines())
        > max((int(path.name[6:]) for path in image.glob("rounds/round-*")), default=0)
    ]
    writing = [image for image in images if list(image.glob("rounds/.round-*/*"))]
    assert len(images) > 30 and len(double) >= 3 and len(ahead) >= 4 and len(writing) >= 8
    return [double[1], ahead[0], writing[-1], *random.Random(0).sample(images, 2)]


@pytest.mark.parametrize("moment", range(5))
def test_resume_from_any_moment(moment: int, unbroken: Recorder, run_federation, tmp_path: Path):
    """Resumed from what a kill leaves, it ends with the unbroken run's weights, rows and metrics."""
    run = Path(shutil.copytree(moments(unbroken.taken)[moment], tmp_path / "run"))
    run_federation(run, **KEYS, resume_from_checkpoint="last")
    assert traces(run) == traces(unbroken.folder)


def test_damaged_checkpoints_are_refused(unbroken: Recorder, run_federation, tmp_path: Path):
    """A checkpoint with a file cut short is one line, and nothing is trained."""
    run = Path(shutil.copytree(unbroken.folder, tmp_path / "run"))
    (adapter,) = run.glob("rounds/round-*/adapter.safetensors")
    adapter.write_bytes(adapter.read_bytes()[:-5])
    with pytest.raises(ArtifactError, match="it is damaged") as caught:
        run_federation(run, **KEYS, resume_from_checkpoint="last")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "".join(text.splitlines(keepends=True)[:-1]),
        lambda text: text.replace("\n", "\n[1]\n", 1),
        lambda text: text.replace('"round": 2', '"round": 3'),
        lambda text: None,
    ],
)
def test_damaged_logs_are_refused(damage: Callable[[str], str | None], unbroken: Recorder, tmp_path: Path):
    """One that is cut short, not all rows, of other rounds or gone is one line, and is left as it is."""
    path, text = tmp_path / "rounds.jsonl", damage((unbroken.folder / "rounds.jsonl").read_text(encoding="utf-8"))
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ArtifactError, match="it is damaged") as caught:
        RoundLog(path).rewind(4)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert (path.read_text(encoding="utf-8") if path.exists() else None) == text


@pytest.mark.parametrize("text", ["{}", "[1]", '{"done": 4}'])
def test_a_damaged_state_is_refused(text: str, unbroken: Recorder, run_federation, tmp_path: Path):
    """A state that lacks what it should hold is one line."""
    run = Path(shutil.copytree(unbroken.folder, tmp_path / "run"))
    (path,) = run.glob("rounds/round-*/state.json")
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"state\.json.*it is damaged") as caught:
        run_federation(run, **KEYS, resume_from_checkpoint="last")
    assert "\n" not in str(caught.value)


# ---- real processes, really killed

SERVER = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)
from tunery.core.console import calm
calm()
from tunery.core.federated.arguments import build_federated_options
from tunery.core.federated.run import federate
import tunery.core.finished, peft.tuners.lora, matplotlib.figure, scipy.stats, sklearn.metrics
print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if not child:
        federate(build_federated_options(json.loads(line)))
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Nursery:
    """A process that has everything imported and makes one child for each federation, so that each begins at once."""

    def __init__(self, folder: Path) -> None:
        self.log = (folder / "log").open("w", encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=folder,
        )
        assert self.read() == "ready"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self, keys: dict[str, Any], meanwhile: Callable[[int], None]) -> int:
        """Start a federation, do something with its process, and return how it ended."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(keys) + "\n")
        self.process.stdin.flush()
        meanwhile(int(self.read()))
        return os.waitstatus_to_exitcode(int(self.read()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self.process.stdin is not None
        self.process.communicate()  # its input ends, and so does it
        self.log.close()


@pytest.mark.slow
def test_kill_9_at_twenty_moments(given, tmp_path: Path):
    """``kill -9`` at twenty random moments, resumed every time: the bits of a run that was left alone."""
    keys = {**KEYS, "num_rounds": 24, "eval_every": 4}
    pick = random.Random(0)
    with Nursery(tmp_path) as nursery:
        assert nursery.run(given(tmp_path / "unbroken", **keys), lambda child: None) == 0
        run = tmp_path / "run"
        kills = 0
        resumed = given(run, **keys, resume_from_checkpoint="last")
        while kills < 20:
            began = max((int(path.name[6:]) for path in run.glob("rounds/round-*")), default=0)

            def kill(child: int, began: int = began) -> None:
                # one round on at most, so that there is something left to kill; a moment of any part of it
                deadline = time.monotonic() + 60
                while time.monotonic() < deadline and not list(run.glob(f"rounds/round-{began + 1:05d}")):
                    if pick.random() < 0.002:
                        break
                    time.sleep(0.002)
                time.sleep(pick.uniform(0, 0.05))
                os.kill(child, signal.SIGKILL)

            assert nursery.run(resumed, kill) == -signal.SIGKILL
            kills += 1
        assert nursery.run(resumed, lambda child: None) == 0
    assert traces(run) == traces(tmp_path / "unbroken")
