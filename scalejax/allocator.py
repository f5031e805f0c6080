"""What glibc's allocator is asked to do in a process of its own; with another C library, nothing.

Knows nothing of what is allocated.
"""

import contextlib
import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # <malloc.h>
_LEAST_ARENAS = 4
"""Measured on 2 cores: experiments/memory_flat."""


def keep_pages() -> None:
    """Keep what arrays leave free for the next ones, as small blocks are kept: the system takes
    time to give pages anew."""
    _set_option(_MMAP_THRESHOLD, 2**26)
    _set_option(_TRIM_THRESHOLD, 2**27)


def limit_arenas() -> None:
    """Let threads share an arena for each core, at least four, unless the environment says how
    many.

    Every checkpoint is written by new threads. With eight arenas for each core, as is the default,
    what they free comes to lie in ever other ones, and a long run takes more and more memory of
    which it uses no more than at its beginning. Without effect once there are more than eight.
    """
    is_chosen = "arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    if not is_chosen and "MALLOC_ARENA_MAX" not in os.environ:
        _set_option(_ARENA_MAX, max(_LEAST_ARENAS, os.cpu_count() or 1))


def _set_option(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # another library of C
        ctypes.CDLL(None).mallopt(option, value)
