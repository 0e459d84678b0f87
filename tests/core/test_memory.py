"""Memory that is free goes back to the system, and does so after every alignment."""

from __future__ import annotations

from pathlib import Path

from tunery.core.memory import give_back

STATUS = Path("/proc/self/status")


def resident() -> int:
    """Bytes of this process that lie in memory."""
    line = next(line for line in STATUS.read_text(encoding="utf-8").splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def test_what_is_free_below_something_in_use_goes_back() -> None:
    """A block at the end of the heap keeps the C library from shrinking it by itself; glibc gives back what is below."""
    size, count = 100_000, 1500
    blocks = [bytearray(size) for _ in range(count)]
    last = bytearray(size)
    full = resident()
    del blocks
    give_back()
    assert full - resident() > 0.8 * size * count
    assert len(last) == size
