"""What the harness's tests share: a tiny model, rows in files, and a suite of two tasks by two methods by two seeds."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, when the hub client is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import yaml

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
LETTERS = "abcdefghijkl"


class Place(NamedTuple):
    """What tiny cells start from.

    Attributes:
        base: folder of a two-layer BERT and its tokenizer.
        data: folder with a folder ``first`` and one ``second`` of train and validation rows.
        folder: free for results.
    """

    base: Path
    data: Path
    folder: Path

    def content(self, **changes: Any) -> dict[str, Any]:
        """Return what a suite file of eight cells says."""
        defaults = {
            "model_name_or_path": str(self.base),
            "max_length": 16,
            "max_steps": 4,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "use_cpu": True,
            "eval_strategy": "steps",
            "eval_steps": 2,
        }
        return {
            "name": "tiny",
            "defaults": defaults,
            "tasks": {name: {"data_files": f"{{data_dir}}/{name}"} for name in ("first", "second")},
            "methods": {"full": {"strategy": "full"}, "head": {"strategy": "head"}},
            "seeds": 2,
            "protocol": ["dev_as_test"],
        } | changes

    def suite(self, **changes: Any) -> Path:
        """Write the suite file and return its path."""
        path = self.folder / "tiny.yaml"
        path.write_text(yaml.safe_dump(self.content(**changes), sort_keys=False), encoding="utf-8")
        return path

    def cells(self, **changes: Any) -> list[Any]:
        """Return the suite's cells."""
        from tunery.benchmarks.suite import read_suite

        return read_suite(str(self.suite(**changes))).cells({}, str(self.data))


@pytest.fixture(scope="session")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    import datasets
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed

    folder = tmp_path_factory.mktemp("bench")
    words = Tokenizer(
        models.WordLevel({token: number for number, token in enumerate((*SPECIAL, *LETTERS))}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    set_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(SPECIAL) + len(LETTERS), max_position_embeddings=32, **size)
    BertModel(config).save_pretrained(folder / "base")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32
    )
    tokenizer.save_pretrained(folder / "base")
    pick = random.Random(0)
    for task, letter in (("first", "a"), ("second", "b")):
        (folder / "data" / task).mkdir(parents=True)
        for split, count in (("train", 40), ("validation", 20)):
            texts = [[pick.choice(LETTERS) for _ in range(6)] for _ in range(count)]
            rows = [{"text": " ".join(text), "label": "yes" if letter in text else "no"} for text in texts]
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / "data" / task / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield folder / "base", folder / "data"
    torch.set_num_threads(threads)


@pytest.fixture
def place(_made: tuple[Path, Path], tmp_path: Path) -> Place:
    """A tiny model, data, and an empty folder."""
    return Place(*_made, tmp_path)


@pytest.fixture
def run(place: Place) -> Callable[..., dict[str, Any] | None]:
    """Run one cell in process, as its own process does, and return what was written."""
    from tunery.benchmarks.cells import run_cell, state_of
    from tunery.benchmarks.inputs import inputs_of
    from tunery.registry.loading import load_plugins

    def run_one(cell: Any, folder: Path | None = None) -> dict[str, Any] | None:
        results = folder or place.folder / "results"
        results.mkdir(exist_ok=True)
        inputs = inputs_of(cell, load_plugins().catalog)
        return run_cell(cell, results, inputs, state_of(results, cell, inputs).seal)

    return run_one


class Forks:
    """Cells as processes forked from this one, which has everything imported.

    Attributes:
        note: a file with a line for every cell that ran to its end.
        body: what such a process does with its description, and ends with; a test may put something else in its place.
    """

    def __init__(self, note: Path) -> None:
        self.note = note
        self.body: Callable[[dict[str, Any]], int] = self.run
        note.touch()

    def run(self, spec: dict[str, Any]) -> int:
        """Do what ``tunery bench-cell`` does."""
        from tunery.benchmarks.cells import from_spec, run_cell
        from tunery.benchmarks.runner import BUSY, DONE, FAILED

        cell = from_spec(spec["cell"])
        result = run_cell(cell, Path(spec["folder"]), spec["inputs"], spec["replaces"])
        if result is None:
            return BUSY
        with self.note.open("a", encoding="utf-8") as file:
            file.write(f"{cell.name}\n")
        return DONE if result["status"] == "done" else FAILED

    @property
    def completed(self) -> list[str]:
        """Names of the cells that ran to their end, as often as they did."""
        return self.note.read_text(encoding="utf-8").split()

    def queue(self, cells: list[Any], folder: Path) -> list[Any]:
        """Return what is not done, as ``tunery bench`` finds it."""
        from tunery.benchmarks.cells import state_of
        from tunery.benchmarks.inputs import inputs_of
        from tunery.benchmarks.runner import Job
        from tunery.registry.loading import load_plugins

        inputs = [inputs_of(cell, load_plugins().catalog) for cell in cells]
        jobs = [Job(cell, found, state_of(folder, cell, found)) for cell, found in zip(cells, inputs, strict=True)]
        return [job for job in jobs if job.seen.status != "done"]

    def work(self, cells: list[Any], folder: Path, jobs: int = 1) -> Any:
        """Run a suite's cells as ``tunery bench`` does."""
        from tunery.benchmarks.runner import run_jobs

        folder.mkdir(exist_ok=True)
        return run_jobs(self.queue(cells, folder), folder, jobs, lambda *_: None)

    def worker(self, cells: list[Any], folder: Path, jobs: int = 1) -> int:
        """Start a process that does so, and return its number."""
        pid = os.fork()
        if pid == 0:
            code = 9
            try:
                code = len(self.work(cells, folder, jobs).failed)
            finally:
                os._exit(code)
        return pid


class Forked:
    """One of them: what ``subprocess.Popen`` is to the runner."""

    def __init__(self, spec: dict[str, Any], body: Callable[[dict[str, Any]], int]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 9
            try:
                os.setpgid(0, 0)
                sink = os.open(os.devnull, os.O_WRONLY)
                os.dup2(sink, 1)
                os.dup2(sink, 2)
                code = body(spec)
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("cell", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_warm: list[Any] = []


@pytest.fixture
def forked(place: Place, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Forks]:
    """Let runners fork instead of starting interpreters."""
    from tunery.benchmarks import runner

    if not _warm:  # everything lazy is imported once
        _warm.append(run(place.cells()[0], place.folder / "warm-up"))
    forks = Forks(place.folder / "completed")
    gc.collect()
    gc.freeze()

    def start(job: Any, folder: Path) -> Any:
        spec = {
            "cell": runner.as_spec(job.cell),
            "folder": str(folder),
            "inputs": job.inputs,
            "replaces": job.seen.seal,
        }
        log = runner.log_path(folder, job.cell).open("w", encoding="utf-8")
        return runner._Running(job, Forked(json.loads(json.dumps(spec)), forks.body), log)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "_start", start)
    monkeypatch.setattr(runner, "_RECHECK_SECONDS", 0.2)
    yield forks
    gc.unfreeze()
