"""Memory that is free and that the C library keeps all the same."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def give_back() -> None:
    """Have the C library give the system what is free of this process's memory; glibc can, others do so themselves.

    For between two kinds of work: activations of the one leave gaps that those of the other do not fit into, and the two add
    up. What is used again at once had better stay, since it costs time to get it back.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
