"""Claims about speed and memory, each measured by a script of its own against a peer.

Importing this package, before torch and others start threads, has glibc serve every thread from one heap. Otherwise each
gets its own, which returns memory to the system and maps it again at moments of its own: two equal trainers in two threads
have been seen 10 % apart. With one heap, threads allocate as the main thread of an ordinary training does.
"""

from __future__ import annotations

import ctypes
import sys

_M_ARENA_MAX = -8  # malloc.h

if sys.platform == "linux":
    _mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have one heap anyway
    if _mallopt is not None:
        _mallopt(_M_ARENA_MAX, 1)
