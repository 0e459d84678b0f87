"""Claims: who works on a cell, so that several workers and machines can share one folder and no cell is done twice.

A claim is a file made by atomic create. Its holder keeps it locked and touches it as it works. On its own machine a claim
is free again as soon as nobody holds the lock, which the system drops with the process, even one that was killed; on
another one, when it has not been touched for the time of a lease.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

LEASE_SECONDS = 120.0
_SUFFIX = ".claim"
_GUARD = ".guard"


@dataclass(frozen=True)
class Claim:
    """A claim that is held.

    Attributes:
        path: its file.
        token: what tells it from any other.
    """

    path: Path
    token: str

    @property
    def still_held(self) -> bool:
        """Whether nobody took it over, as may happen where a machine slept through its lease."""
        return _read(self.path).get("token") == self.token


def claim_path(folder: Path, cell: str) -> Path:
    """Return the file of a cell's claim."""
    return folder / f"{cell}{_SUFFIX}"


@contextmanager
def claimed(folder: Path, cell: str, lease: float = LEASE_SECONDS) -> Iterator[Claim | None]:
    """Hold the claim of a cell while the block runs; ``None`` where another holds it.

    Args:
        folder: where claims lie; it must exist.
        cell: the cell's name.
        lease: seconds after which another machine may take an untouched claim over.
    """
    path = claim_path(folder, cell)
    token = f"{_machine()} {os.getpid()} {time.time_ns()}"
    if not _take(path, token, lease):
        yield None
        return
    with ExitStack() as stack:
        try:
            fcntl.flock(stack.enter_context(path.open("r+b")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):  # slept so long that another has taken it over
            yield None
            return
        claim, done = Claim(path, token), threading.Event()
        beat = threading.Thread(target=_touch, args=(claim, done, lease / 4), daemon=True)
        beat.start()
        try:
            yield claim if claim.still_held else None
        finally:
            done.set()
            beat.join()
            if claim.still_held:
                path.unlink(missing_ok=True)


def is_claimed(folder: Path, cell: str, lease: float = LEASE_SECONDS) -> bool:
    """Whether somebody is at work on a cell."""
    return _is_live(claim_path(folder, cell), lease)


def _take(path: Path, token: str, lease: float) -> bool:
    if _create(path, token):
        return True
    # Taking over is one worker's turn at a time: what one finds abandoned, another may just have claimed.
    with (path.parent / _GUARD).open("a") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if _is_live(path, lease):
            return False
        path.unlink(missing_ok=True)
        return _create(path, token)


def _create(path: Path, token: str) -> bool:
    """Create a claim, whole and locked by nobody yet, if there is none."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    temporary.write_text(json.dumps({"token": token, "machine": _machine()}), encoding="utf-8")
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def _is_live(path: Path, lease: float) -> bool:
    content = _read(path)
    try:
        touched = path.stat().st_mtime
        age = _now(path.parent) - touched
        if content.get("machine") != _machine():
            return age < lease
        if age < 1:  # its holder has yet to lock it
            return True
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _now(folder: Path) -> float:
    """Return the time by the clock that stamps the folder's files; on a shared one it is another machine's."""
    guard = folder / _GUARD
    guard.touch()
    return guard.stat().st_mtime


def _touch(claim: Claim, done: threading.Event, every: float) -> None:
    while not done.wait(every):
        with suppress(OSError):
            if claim.still_held:
                os.utime(claim.path)


def _read(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _machine() -> str:
    """Name this machine since it was started; a container counts as one of its own."""
    parts = [platform.node()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    return " ".join(parts)
