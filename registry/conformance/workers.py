"""Two processes for each of DDP and ZeRO-1, 2 and 3, launched once and then given one job after the other.

Importing torch, transformers and DeepSpeed takes many seconds, a job one: so one server process imports them, the workers
are forked from it, and a group lives as long as the session. Each stage has its own group, since ZeRO-3 leaves its mark on
torch's functions.
"""

from __future__ import annotations

import atexit
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ..errors import TuneryError

STAGES = ("ddp", "zero1", "zero2", "zero3") if find_spec("deepspeed") else ("ddp",)
RANKS = 2
JOB_SECONDS = 300.0
GRACE_SECONDS = 20.0
_TAIL = 4000

_processes = multiprocessing.get_context("forkserver")
_groups: dict[str, WorkerGroup] = {}


class WorkerError(Exception):
    """A worker failed, died or did not answer in time; the message holds what it wrote to stderr."""


def on_stage(stage: str, job: Callable[..., Any], *arguments: Any) -> Any:
    """Run ``job`` on the two processes of a stage and return what rank 0 returned.

    Args:
        stage: one of ``STAGES``.
        job: a function of a module; it and what it takes and returns can be pickled.
        arguments: its arguments.

    Raises:
        TuneryError: tunery refused the job, on every rank.
        WorkerError: anything else that went wrong.
    """
    if stage not in _groups:
        _groups[stage] = WorkerGroup()
    group = _groups[stage]
    try:
        return group.run(job, *arguments)
    finally:
        if group.broken:
            _groups.pop(stage).close()


@atexit.register
def close_all() -> None:
    """End every group; a next job starts one again."""
    while _groups:
        _groups.popitem()[1].close()


class WorkerGroup:
    """Processes that share one ``torch.distributed`` group on CPU.

    Args:
        seconds: how long a job may take.

    Attributes:
        broken: whether it can take no further job.
        processes: one a rank.
    """

    def __init__(self, seconds: float = JOB_SECONDS) -> None:
        from .worker import serve

        self.broken = False
        self._seconds = seconds
        self._folder = tempfile.TemporaryDirectory(prefix="tunery-workers-", ignore_cleanup_errors=True)
        _processes.set_forkserver_preload([f"{__package__}.preload"])
        self._lines: list[Connection] = []
        self.processes = []
        for rank in range(RANKS):
            ours, theirs = _processes.Pipe()
            process = _processes.Process(target=serve, args=(theirs, rank, RANKS, self._folder.name), daemon=True)
            process.start()
            theirs.close()
            self._lines.append(ours)
            self.processes.append(process)

    def run(self, job: Callable[..., Any], *arguments: Any) -> Any:
        """Run ``job`` on every rank; see :func:`on_stage`."""
        for line in self._lines:
            try:
                line.send((job, arguments))
            except OSError:
                self.broken = True  # it has died; that it does not answer will tell
        answers = self._answers(self._seconds)
        errors = [error for _, error in answers]
        if not any(errors):
            return answers[0][0]
        refusals = [error for error in errors if isinstance(error, TuneryError)]
        if len(refusals) == RANKS:
            raise refusals[0]
        self.broken = True  # ranks that failed apart no longer agree on what comes next
        raise WorkerError("\n".join(f"rank {rank}: {error or 'no error'}" for rank, error in enumerate(errors)))

    def _answers(self, seconds: float) -> list[tuple[Any, object]]:
        """Wait for every rank; once one has failed, the others may wait for it for ever, and have little time left."""
        end = time.monotonic() + seconds
        answers: dict[Connection, tuple[Any, object]] = {}
        while len(answers) < RANKS and (left := end - time.monotonic()) > 0:
            for line in wait([line for line in self._lines if line not in answers], left):
                answers[line] = self._receive(line)  # type: ignore[arg-type, index]  # only pipes were asked for
                if answers[line][1]:  # type: ignore[index]
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        for line in self._lines:
            if line not in answers:
                answers[line] = None, f"no answer in time\n{self._stderr(line)}"
        return [answers[line] for line in self._lines]

    def _receive(self, line: Connection) -> tuple[Any, object]:
        try:
            answer: tuple[Any, object] = line.recv()
        except (EOFError, OSError):
            process = self.processes[self._lines.index(line)]
            process.join(GRACE_SECONDS)
            return None, f"exited with {process.exitcode}\n{self._stderr(line)}"
        return answer

    def _stderr(self, line: Connection) -> str:
        log = Path(self._folder.name) / f"rank{self._lines.index(line)}.log"
        return log.read_text("utf-8", errors="replace")[-_TAIL:] if log.exists() else ""

    def close(self) -> None:
        """End the processes: politely, and after a while, or if they are broken, firmly."""
        for line in self._lines:
            line.close()
        end = time.monotonic() + (0.0 if self.broken else GRACE_SECONDS)
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()
