"""Two processes for each of DDP and ZeRO-1, 2 and 3, launched once and then given one job after the other.

Importing torch, transformers and DeepSpeed takes a process many seconds, a job takes one; so a group lives as long as the
session. Each stage has its own, since ZeRO-3 leaves its mark on torch's functions.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import errors

STAGES = ("ddp", "zero1", "zero2", "zero3")
RANKS = 2
START_SECONDS = 480.0  # DeepSpeed compiles a small operation when it is first used on a machine
JOB_SECONDS = 120.0
GRACE_SECONDS = 15.0
_TAIL = 4000

_groups: dict[str, WorkerGroup] = {}


class WorkerError(Exception):
    """A worker failed, died or did not answer in time; the message holds what it wrote to stderr."""


def on_stage(stage: str, job: Callable[[Mapping[str, Any]], Any], payload: Mapping[str, Any]) -> Any:
    """Run ``job`` on the two processes of a stage and return what rank 0 returned.

    Args:
        stage: one of ``STAGES``.
        job: a module's function; it takes and returns what JSON can hold.
        payload: its argument.

    Raises:
        TuneryError: the job was refused by tunery on every rank.
        WorkerError: anything else that went wrong.
    """
    if stage not in _groups:
        _groups[stage] = WorkerGroup()
    group = _groups[stage]
    try:
        return group.run(job, payload)
    finally:
        if group.broken:
            _groups.pop(stage).close()


@atexit.register
def close_all() -> None:
    """End every group; a next job starts it again."""
    while _groups:
        _groups.popitem()[1].close()


class WorkerGroup:
    """Processes that share one ``torch.distributed`` group on CPU.

    Attributes:
        broken: whether it can take no further job.
    """

    def __init__(self) -> None:
        self.broken = False
        self._folder = tempfile.TemporaryDirectory(prefix="tunery-workers-", ignore_cleanup_errors=True)
        self._workers = [_Worker(rank, Path(self._folder.name)) for rank in range(RANKS)]
        self._seconds = START_SECONDS

    def run(self, job: Callable[[Mapping[str, Any]], Any], payload: Mapping[str, Any], seconds: float = 0.0) -> Any:
        """Run ``job`` on every rank; see :func:`on_stage`.

        Args:
            job: a module's function.
            payload: its argument.
            seconds: how long it may take; default: ``JOB_SECONDS``, and for a first job ``START_SECONDS``.
        """
        line = json.dumps({"job": f"{job.__module__}:{job.__qualname__}", "payload": payload})
        for worker in self._workers:
            worker.send(line)
        answers = self._answers(seconds or self._seconds)
        self._seconds = JOB_SECONDS
        failed = [answer for answer in answers if "error" in answer]
        if not failed:
            return answers[0]["result"]
        refusals = {answer["error"] for answer in answers if answer.get("refused")}
        if len(failed) == len(answers) and len(refusals) == 1:
            refusal: type[errors.TuneryError] = getattr(errors, failed[0]["refused"])
            raise refusal(refusals.pop())
        self.broken = True  # ranks that failed apart no longer agree on what comes next
        raise WorkerError(
            "\n".join(f"rank {rank}: {answer.get('error', 'no error')}" for rank, answer in enumerate(answers))
        )

    def _answers(self, seconds: float) -> list[dict[str, Any]]:
        """Wait for every rank; once one has failed, the others have little time left: they may wait for it for ever."""
        end = time.monotonic() + seconds
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < len(self._workers):
            for rank, worker in enumerate(self._workers):
                answer = answers.get(rank) or worker.receive()
                if answer is not None and rank not in answers:
                    answers[rank] = answer
                    if "error" in answer:
                        end = min(end, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() > end:
                break
        for rank, worker in enumerate(self._workers):
            answers.setdefault(rank, {"error": f"no answer in time\n{worker.stderr()}"})
        return [answers[rank] for rank in range(len(self._workers))]

    def close(self) -> None:
        """End the processes: politely, and after a while firmly."""
        for worker in self._workers:
            worker.hang_up()
        end = time.monotonic() + (0.0 if self.broken else GRACE_SECONDS)
        for worker in self._workers:
            worker.end(end)
        self._folder.cleanup()

    @property
    def exit_codes(self) -> list[int | None]:
        """How the processes ended; ``None`` for one that runs."""
        return [worker.process.poll() for worker in self._workers]


class _Worker:
    """One process: jobs go in through its stdin, answers come out of its stdout, one JSON object a line."""

    def __init__(self, rank: int, folder: Path) -> None:
        self._log = folder / f"rank{rank}.log"
        own_bin = str(Path(sys.executable).parent)  # DeepSpeed builds with the ninja that is installed there
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",  # asked for, not used: the processes meet in a file
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "HF_HUB_OFFLINE": "1",
            "TUNERY_RENDEZVOUS": str(folder / "rendezvous"),
            "PATH": os.pathsep.join([own_bin, os.environ.get("PATH", "")]),
        }
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tunery.registry.conformance.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd=folder,
                text=True,
            )
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except OSError:
            pass  # it is dead, which receive() reports

    def receive(self) -> dict[str, Any] | None:
        """Return an answer, or ``None`` if there is none within a moment."""
        dead = self.process.poll() is not None
        try:
            answer: dict[str, Any] = json.loads(self._answers.get(timeout=0.02))
        except queue.Empty:
            return {"error": f"exited with {self.process.returncode}\n{self.stderr()}"} if dead else None
        return answer

    def stderr(self) -> str:
        return self._log.read_text("utf-8", errors="replace")[-_TAIL:]

    def hang_up(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except OSError:
            pass

    def end(self, deadline: float) -> None:
        try:
            self.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
