"""Suites end to end: kill -9 and restart, several workers on one folder, failures, and the command line."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunery.benchmarks import runner
from tunery.benchmarks.cells import State, from_spec, run_cell, state_of
from tunery.benchmarks.inputs import inputs_of
from tunery.benchmarks.regression import write_baseline
from tunery.benchmarks.results import read_results
from tunery.benchmarks.runner import DONE, FAILED, Job, run_jobs
from tunery.registry.errors import TuneryError
from tunery.registry.loading import load_plugins

_warm: list[Any] = []


class Forked:
    """A cell's process, forked from this one, which has everything imported: what ``subprocess.Popen`` is to the runner."""

    def __init__(self, specification: str, note: Path) -> None:
        self.specification, self.note = specification, note
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 9
            try:
                os.setpgid(0, 0)
                code = self._run()
            finally:
                os._exit(code)

    def _run(self) -> int:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        spec = json.loads(self.specification)
        cell = from_spec(spec["cell"])
        result = run_cell(cell, Path(spec["folder"]), spec["inputs"], spec["replaces"])
        if result is None:
            return runner.BUSY
        with self.note.open("a", encoding="utf-8") as file:
            file.write(f"{cell.name}\n")
        return DONE if result["status"] == "done" else FAILED

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@pytest.fixture
def forked(place: Any, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let runners fork instead of starting interpreters; return the file that names every cell that ran to its end."""
    if not _warm:  # everything lazy is imported once
        _warm.append(run(place.cells()[0], place.folder / "warm-up"))
    gc.collect()
    gc.freeze()
    note = place.folder / "completed"
    note.touch()

    def start(job: Job, folder: Path) -> Any:
        spec = {
            "cell": runner.as_spec(job.cell),
            "folder": str(folder),
            "inputs": job.inputs,
            "replaces": job.seen.seal,
        }
        log = runner.log_path(folder, job.cell).open("w", encoding="utf-8")
        return runner._Running(job, Forked(json.dumps(spec), note), log)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "_start", start)
    monkeypatch.setattr(runner, "_RECHECK_SECONDS", 0.2)
    yield note
    gc.unfreeze()


def queue_of(cells: list[Any], folder: Path) -> list[Job]:
    """Return what is not done."""
    catalog = load_plugins().catalog
    jobs = [Job(cell, inputs_of(cell, catalog), State("missing")) for cell in cells]
    for job in jobs:
        job.seen = state_of(folder, job.cell, job.inputs)
    return [job for job in jobs if job.seen.status != "done"]


def work(cells: list[Any], folder: Path, jobs: int = 1) -> Any:
    """Run a suite's cells as ``tunery bench`` does."""
    folder.mkdir(exist_ok=True)
    return run_jobs(queue_of(cells, folder), folder, jobs, lambda *_: None)


def measured(folder: Path) -> Mapping[str, Any]:
    """Return what has to be the same to the bit, by cell."""
    return {
        str(cell.key): (cell.metrics, cell.curve, cell.train_info["train_loss"], cell.inputs)
        for cell in read_results(folder).cells
    }


def kill_group(pid: int) -> None:
    """Kill a worker and the cells it started, as a power cut does."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    found = children.read_text().split() if children.exists() else []
    os.kill(pid, signal.SIGKILL)
    for child in found:
        os.kill(int(child), signal.SIGKILL)
    os.waitpid(pid, 0)


def fork_worker(cells: list[Any], folder: Path) -> int:
    """Start a worker in a process of its own."""
    pid = os.fork()
    if pid == 0:
        code = 9
        try:
            code = len(work(cells, folder).failed)
        finally:
            os._exit(code)
    return pid


def killed_and_restarted(cells: list[Any], folder: Path, moments: int) -> int:
    """Kill a suite's worker at random moments, restarting it each time, then let it end; return how many kills hit."""
    random_seconds, hits = random.Random(4), 0
    for _ in range(moments):
        pid = fork_worker(cells, folder)
        time.sleep(random_seconds.uniform(0.05, 1.5))
        if os.waitpid(pid, os.WNOHANG)[0]:
            break
        kill_group(pid)
        hits += 1
    work(cells, folder)
    return hits


@pytest.mark.parametrize("moments", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_kill_and_restart(place: Any, forked: Path, moments: int):
    """Killed at random moments and restarted: the results of an unbroken run, bit for bit, and no cell completed twice."""
    cells = place.cells(seeds=max(2, moments // 3))[: max(3, moments // 2)]
    work(cells, place.folder / "unbroken")
    forked.write_text("", encoding="utf-8")
    assert killed_and_restarted(cells, place.folder / "broken", moments) >= min(moments, 3)
    assert measured(place.folder / "broken") == measured(place.folder / "unbroken")
    completed = forked.read_text(encoding="utf-8").split()
    assert len(set(completed)) == len(completed)
    left = list((place.folder / "broken" / ".work").iterdir())
    assert not [path for path in left if path.is_dir()]
    # A worker killed between its result and the end of its claim leaves the claim: of a cell that is done, nobody asks for it.
    assert {path.stem for path in left if path.suffix == ".claim"} <= {cell.name for cell in cells}


def test_two_workers_share_the_cells(place: Any, forked: Path):
    """Each cell is done once, by one or the other; both end when all are done; the bits are those of one worker."""
    cells = place.cells()[:4]
    together = place.folder / "together"
    together.mkdir()
    pids = [fork_worker(cells, together) for _ in range(2)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    completed = forked.read_text(encoding="utf-8").split()
    assert sorted(completed) == sorted(cell.name for cell in cells)
    work(cells, place.folder / "alone")
    work(cells, place.folder / "two-jobs", jobs=2)
    assert measured(together) == measured(place.folder / "alone") == measured(place.folder / "two-jobs")


def test_a_failing_cell_stops_no_other(place: Any, forked: Path):
    """It is recorded with its error and tried again by the next call, and the rest is done."""
    methods = {"full": {"strategy": "full"}, "broken": {"strategy": "full", "regularizers": ["lnsr:layer=7"]}}
    cells = [cell for cell in place.cells(methods=methods, seeds=1) if cell.task == "first"]
    outcome = work(cells, place.folder / "results")
    assert outcome.done == ["first--full--seed0"]
    assert "layer=7" in outcome.failed["first--broken--seed0"]
    again = queue_of(cells, place.folder / "results")
    assert [(job.cell.method, job.seen.status) for job in again] == [("broken", "failed")]


def test_a_process_that_dies_is_recorded(place: Any, forked: Path, monkeypatch: pytest.MonkeyPatch):
    """The system kills one for memory, say: the cell failed, by which signal, and the others go on."""
    cells = [cell for cell in place.cells(seeds=1) if cell.task == "first"]
    monkeypatch.setattr(Forked, "_run", lambda self: os.kill(os.getpid(), signal.SIGKILL))
    outcome = work(cells, place.folder / "results")
    assert outcome.failed == {cell.name: "its process ended by signal SIGKILL" for cell in cells}


def test_a_process_that_crashes_is_recorded(place: Any, forked: Path, monkeypatch: pytest.MonkeyPatch):
    """Python ends with 1 where a module cannot be imported, say: that is no cell that recorded its own failure."""
    cells = [cell for cell in place.cells(seeds=1) if cell.task == "first"]
    monkeypatch.setattr(Forked, "_run", lambda self: 1)
    outcome = work(cells, place.folder / "results")
    assert outcome.failed == {cell.name: "its process ended by exit code 1" for cell in cells}


def test_a_death_that_cannot_be_recorded(place: Any, forked: Path, monkeypatch: pytest.MonkeyPatch):
    """A full disk ends the runner with one line, not with a traceback."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Forked, "_run", lambda self: 1)
    monkeypatch.setattr(runner, "write_result", full)
    with pytest.raises(TuneryError, match=r"cannot write .*first--full--seed0.json: No space left on device"):
        work(place.cells()[:1], place.folder / "results")


@pytest.fixture
def command(place: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run ``tunery bench`` on the tiny suite in process; return exit code, output and errors."""
    from tunery.core.commands import main

    def call(*words: str) -> tuple[int, str, str]:
        base = ["tunery", "bench", str(place.suite()), "--data_dir", str(place.data)]
        monkeypatch.setattr(sys, "argv", [*base, "--results", str(place.folder / "results"), *words])
        with pytest.raises(SystemExit) as stop:
            main()
        told = capsys.readouterr()
        return int(stop.value.code or 0), told.out, told.err

    return call


def test_command(place: Any, forked: Path, command: Callable[..., Any]):
    """Cells run and are told about; what is done is not listed any more; a flag makes it stale and says why."""
    code, out, _ = command("--only", "first--*--seed1", "--jobs", "1")
    assert code == 0, out
    assert "[1/2] first--full--seed1: accuracy 0." in out
    assert "2 of 2 cells are done" in out
    code, out, err = command("--list")
    assert len(out.splitlines()) == 6
    assert err == ""
    words = shlex.split(out.splitlines()[0])
    assert words[:2] == ["tunery", "bench"]
    assert words[words.index("--only") + 1] == "first--full--seed0"
    code, out, err = command("--list", "--only", "first--full--seed1", "--learning_rate", "0.5")
    assert len(out.splitlines()) == 1
    assert "--learning_rate 0.5" in out
    assert "first--full--seed1: stale: recipe.learning_rate: 0.01 -> 0.5" in err
    assert command("--only", "first--full--seed1")[1].endswith("are done\n")
    results = read_results(place.folder / "results" / "tiny")
    write_baseline(results, place.folder / "same.json")
    assert command("--only", "first--full--seed1", "--check", str(place.folder / "same.json"))[0] == 0
    better = [replace(cell, metrics={**cell.metrics, "accuracy": 1.5}) for cell in results.cells]
    write_baseline(replace(results, cells=tuple(better)), place.folder / "better.json")
    code, out, _ = command("--only", "first--full--seed1", "--check", str(place.folder / "better.json"))
    assert code == 1
    assert "full on first: worse" in out
    (place.folder / "results" / "tiny" / "second--full--seed9.json").write_text("half")  # of no cell of this call
    out = command("--only", "first--full--seed1", "--check", str(place.folder / "same.json"))[1]
    assert "damaged: second--full--seed9.json is not JSON" in out
    assert command("--learning_rat", "1")[0] == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tasks", "rte"], "--tasks is no flag of a suite; --only 'TASK--*' chooses cells by their names"),
        (["--seed", "3"], "--seed is no flag of a suite; --seeds 5 says how many, --seeds 0,4,7 which"),
        (["--output_dir", "here"], "--output_dir is no flag of a suite; --results FOLDER says where results go"),
        (["--strategy", "lora"], "--strategy is no flag of a suite; --methods lora, or a method in the suite's file"),
        (
            ["--regularizers", "l2_sp"],
            "--regularizers is no flag of a suite; --methods lora, or a method in the suite's file",
        ),
    ],
)
def test_flags_of_one_run(command: Callable[..., Any], words: list[str], says: str):
    """A suite has its own tasks, methods, seeds and folders: what sets them in a single run is answered in one line."""
    assert command(*words, "--list") == (2, "", f"tunery: {says}\n")


def test_what_cannot_be_used_is_told_before_the_first_cell(place: Any, command: Callable[..., Any]):
    """A baseline, a folder of data or one for results that is none: one line, and nothing has run."""
    (place.folder / "file").touch()
    for words, says in (
        (["--check", "nowhere.json"], "cannot read nowhere.json: No such file or directory"),
        (["--data_dir", "nowhere"], "no folder nowhere; in --data_dir"),
        (["--results", str(place.folder / "file")], f"cannot write {place.folder / 'file'}/tiny: Not a directory"),
    ):
        code, out, err = command(*words)
        assert (code, out, len(err.splitlines())) == (2, "", 1), err
        assert says in err
    assert not (place.folder / "results").exists()


@pytest.mark.slow
def test_real_processes(place: Any):
    """``tunery bench`` itself: killed once amid its cells, then run to the end with two jobs; the bits are the same."""
    words = [sys.executable, "-m", "tunery", "bench", str(place.suite(seeds=1)), "--data_dir", str(place.data)]
    words += ["--jobs", "2", "--results"]
    broken, whole = place.folder / "broken", place.folder / "whole"
    process = subprocess.Popen([*words, str(broken)], cwd=place.folder, start_new_session=True)
    deadline = time.monotonic() + 200
    while not list(broken.glob("tiny/*.json"))[1:] and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for folder in (broken, whole):
        ran = subprocess.run([*words, str(folder)], cwd=place.folder, check=False, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert measured(broken / "tiny") == measured(whole / "tiny")
    assert len(measured(whole / "tiny")) == 4


STRANGER = '''
from dataclasses import dataclass
from tunery import Regularizer, hookimpl

class Mine(Regularizer):
    """Pull the head's bias to zero."""
    name = "mine"
    summary = "a stranger's penalty"
    reference = "none"

    def attach(self, model, run):
        self.bias = model.classifier.bias

    def penalty(self, batch):
        return self.bias.square().sum()

    def detach(self, model):
        self.bias = None

@hookimpl
def tunery_regularizers():
    return [Mine]
'''


@pytest.mark.slow
def test_a_strangers_plugin(place: Any):
    """Installed, it is a method by its name, and the report has it beside the suite's own, with where it comes from."""
    site = place.folder / "site"
    info = site / "strangers_penalty-2.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: strangers-penalty\nVersion: 2.5\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[tunery]\nmine = strangers_penalty\n", encoding="utf-8")
    (site / "strangers_penalty.py").write_text(STRANGER, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    results = str(place.folder / "results")
    suite = ["bench", str(place.suite(seeds=1)), "--data_dir", str(place.data), "--results", results]
    for words in ([*suite, "--methods", "full,mine", "--only", "first--*"], ["report", f"{results}/tiny"]):
        ran = subprocess.run(
            [sys.executable, "-m", "tunery", *words],
            cwd=place.folder,
            env=environment,
            check=False,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "mine" in ran.stdout
    found = {cell.method: cell for cell in read_results(Path(results) / "tiny").cells}
    assert found.keys() == {"full", "mine"}
    assert found["mine"].inputs["plugins"]["regularizer mine"] == "strangers-penalty 2.5"
    assert found["mine"].score is not None
