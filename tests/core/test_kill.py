"""A run that is killed at any moment and resumed ends, to the bit, like one that was not."""

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
import torch
import yaml
from safetensors.torch import load_file

from tunery.core.artifacts import last_checkpoint, read_manifest
from tunery.core.options import build_options
from tunery.core.run import train

STEPS, EVERY = 12, 3


def given(tiny: Any, output_dir: Path, **changes: Any) -> dict[str, Any]:
    """Return a recipe with what carries state over a checkpoint: dropout, momentum, a decaying rate, shuffling, penalty, probe."""
    keys: dict[str, Any] = {
        "output_dir": str(output_dir),
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": EVERY,
        "eval_strategy": "steps",
        "eval_steps": EVERY,
        "logging_steps": EVERY,
        "save_total_limit": 2,
        "gradient_accumulation_steps": 2,
        "regularizers": ["l2_sp:alpha=0.01"],
        "probes": ["weight_distance"],
    }
    return tiny.given(**keys | changes)


def traces(run: Path) -> dict[str, Any]:
    """Return what must not depend on interruptions: weights, measurements, the log without its clocks, the metrics."""
    clocks = ("runtime", "per_second")
    history = json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    return {
        "weights": {key: value.numpy().tobytes() for key, value in load_file(run / "model.safetensors").items()},
        "measurements": (run / "measurements.jsonl").read_text(encoding="utf-8"),
        "log": [
            {key: value for key, value in row.items() if not key.endswith(clocks)}
            for row in history
            if "train_runtime" not in row
        ],
        "metrics": result["metrics"],
    }


def assert_same(run: Path, unbroken: Path) -> None:
    """Compare two finished runs, weights first."""
    found, expected = traces(run), traces(unbroken)
    for key, value in expected.items():
        assert found[key] == value, key
    assert last_checkpoint(run).name == last_checkpoint(unbroken).name
    assert not (run / ".saving").exists()


# ---- every state a run's folder goes through


@dataclass
class Recorder:
    """Copies a run's folder before every change Python makes to it: what a kill at that moment would leave on disk."""

    folder: Path
    images: Path
    active: bool = False
    taken: list[Path] = field(default_factory=list)

    CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Watch one audit event."""
        if not self.active or not (event in self.CHANGES or event == "open"):
            return
        path = arguments[0]
        if not isinstance(path, str | os.PathLike) or not str(path).startswith(str(self.folder)):
            return
        writes = event != "open" or (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if writes:
            self.active = False
            image = self.images / f"{len(self.taken):03}"
            if self.folder.exists():
                shutil.copytree(self.folder, image)
                self.taken.append(image)
            self.active = True


@pytest.fixture(scope="module")
def unbroken(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    """A run from beginning to end, and an image of its folder before every change."""
    root = tmp_path_factory.mktemp("unbroken")
    recorder = Recorder(root / "run", root / "images")
    sys.addaudithook(recorder)
    recorder.active = True
    train(build_options(given(tiny, recorder.folder)))
    recorder.active = False
    yield recorder
    shutil.rmtree(recorder.images)


def test_no_moment_leaves_half_a_checkpoint(unbroken: Recorder):
    """At every moment the newest checkpoint that counts is complete: weights, optimizer, schedule, RNG, state, manifest."""
    seen = set()
    for image in unbroken.taken:
        newest = last_checkpoint(image)
        if newest is None:
            continue
        seen.add(newest.name)
        read_manifest(newest)
        step = int(newest.name.removeprefix("checkpoint-"))
        state = json.loads((newest / "trainer_state.json").read_text(encoding="utf-8"))
        assert state["global_step"] == step
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            torch.load(newest / name, weights_only=name != "rng_state.pth")
    assert seen == {f"checkpoint-{step}" for step in range(EVERY, STEPS + 1, EVERY)}


def test_images_show_the_writing_of_checkpoints(unbroken: Recorder):
    """The images reach into the writing itself: without this the test above would prove little."""
    halves = [image for image in unbroken.taken if list(image.glob(".saving/checkpoint-*/.writing-*"))]
    unsealed = [image for image in unbroken.taken if list(image.glob(".saving/checkpoint-*/optimizer.pt"))]
    assert len(halves) >= STEPS // EVERY
    assert len(unsealed) >= STEPS // EVERY
    assert len(unbroken.taken) > 50


def moments(images: list[Path]) -> list[Path]:
    """Return images to resume from: amid the first and the last checkpoint's writing, at the end, and at random."""
    saving = [image for image in images if list(image.glob(".saving/checkpoint-*/*"))]
    final = [image for image in images if (image / f"checkpoint-{STEPS}").is_dir()]
    return [saving[1], saving[-1], final[1], images[-1], *random.Random(0).sample(images, 2)]


@pytest.mark.parametrize("moment", range(6))
def test_resume_from_any_moment(moment: int, unbroken: Recorder, tiny: Any, tmp_path: Path):
    """Resumed from what a kill leaves, the run ends with the unbroken run's weights, measurements, log and metrics."""
    run = Path(shutil.copytree(moments(unbroken.taken)[moment], tmp_path / "run"))
    train(build_options(given(tiny, run, resume_from_checkpoint="last")))
    assert_same(run, unbroken.folder)


def test_half_a_checkpoint_is_not_picked_up(unbroken: Recorder, tiny: Any, tmp_path: Path):
    """A checkpoint without a manifest and one still being written do not count, however new they are."""
    run = Path(shutil.copytree(unbroken.folder, tmp_path / "run"))
    for name, left in ((f"checkpoint-{STEPS}", "manifest"), (".saving/checkpoint-99", "nothing")):
        shutil.copytree(run / "checkpoint-9", run / name, dirs_exist_ok=True)
        (run / name / "tunery.json").unlink()
        if left == "nothing":
            (run / name / "model.safetensors").write_bytes(b"half of it")
    assert last_checkpoint(run) == run / "checkpoint-9"
    train(build_options(given(tiny, run, resume_from_checkpoint=True)))
    assert_same(run, unbroken.folder)


def test_resume_from_a_named_checkpoint(unbroken: Recorder, tiny: Any, tmp_path: Path):
    """Going back to an older checkpoint by its path drops what was measured since, and ends the same."""
    run = Path(shutil.copytree(unbroken.folder, tmp_path / "run"))
    train(build_options(given(tiny, run, resume_from_checkpoint=str(run / "checkpoint-9"))))
    assert_same(run, unbroken.folder)


def test_resume_without_a_checkpoint_begins_anew(unbroken: Recorder, tiny: Any, tmp_path: Path):
    """The bare flag before the first checkpoint starts the run from the beginning."""
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(unbroken.folder / "measurements.jsonl", run)
    train(build_options(given(tiny, run, resume_from_checkpoint="last")))
    assert_same(run, unbroken.folder)


# ---- real processes, really killed


class Victim:
    """One ``tunery train --resume_from_checkpoint`` in a process of its own, to be killed."""

    def __init__(self, recipe: Path, run: Path) -> None:
        self.run = run
        self.log = recipe.with_name(f"{run.name}.log")
        command = [sys.executable, "-m", "tunery", "train", str(recipe), "--output_dir", str(run)]
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen([*command, "--resume_from_checkpoint"], stdout=log, stderr=log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Kill with no chance to clean up."""
        self.process.kill()
        self.process.wait()

    def wait_for(self, condition: Callable[[], bool], seconds: float = 0.001) -> bool:
        """Look again and again; return whether ``condition`` came true while the process lived."""
        while self.process.poll() is None:
            if condition():
                return True
            time.sleep(seconds)
        return False

    def reaches(self, step: int) -> bool:
        """Whether it wrote the checkpoint of ``step`` or a later one."""
        return self.wait_for(lambda: newest_step(self.run) >= step)

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written now; the process is left stopped if so."""
        if not (self.run / ".saving").exists():
            return False
        self.process.send_signal(signal.SIGSTOP)
        if list((self.run / ".saving").glob("checkpoint-*/*")):
            return True
        self.process.send_signal(signal.SIGCONT)
        return False


def newest_step(run: Path) -> int:
    """Return the step of the newest checkpoint folder, 0 without one."""
    return max((int(path.name.removeprefix("checkpoint-")) for path in run.glob("checkpoint-*")), default=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kill_9_at_ten_moments(tiny: Any, tmp_path: Path):
    """``kill -9`` in start-up, amid training, amid the writing of checkpoints and at the end; resumed every time."""
    steps, every = 60, 3
    recipe = tmp_path / "recipe.yaml"
    keys = given(tiny, tmp_path / "unused", max_steps=steps, save_steps=every, eval_steps=every, logging_steps=every)
    recipe.write_text(yaml.safe_dump(keys), encoding="utf-8")
    unbroken, run = tmp_path / "unbroken", tmp_path / "run"
    with Victim(recipe, unbroken) as straight:
        assert straight.process.wait() == 0, straight.log.read_text(encoding="utf-8")

    pick = random.Random(0)
    targets = sorted(pick.sample(range(every, steps - 2 * every, every), 7))
    kinds = pick.sample(["saving"] * 4 + ["training"] * 3, 7)
    kills = [("start", 0), *zip(kinds, targets, strict=True), ("saving", steps - 2 * every), ("end", steps)]
    assert len(kills) == 10
    amid_saving = 0
    for kind, step in kills:
        with Victim(recipe, run) as victim:
            if kind == "start":
                time.sleep(pick.uniform(0, 3))
            else:
                assert victim.reaches(step), victim.log.read_text(encoding="utf-8")
            if kind == "saving":
                amid_saving += victim.wait_for(victim.is_saving, seconds=0.0002)
            elif kind == "training":
                time.sleep(pick.uniform(0, 0.1))
            elif kind == "end":
                victim.wait_for((run / "trainer_state.json").exists)
        assert victim.process.returncode == -signal.SIGKILL, (kind, step)
        whole = last_checkpoint(run)
        assert whole is None or read_manifest(whole)
    assert amid_saving >= 2, "hardly a kill fell into the writing of a checkpoint"
    with Victim(recipe, run) as last:
        assert last.process.wait() == 0, last.log.read_text(encoding="utf-8")
    assert_same(run, unbroken)
