"""What glibc's allocator is asked to do in a process of its own; with another C library, nothing.

Knows nothing of what is allocated.
"""

import contextlib
import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # <malloc.h>
_ARENAS = 4


def keep_pages() -> None:
    """Have it keep what arrays leave free for the next, as it does small blocks: the system takes
    time to give pages anew."""
    _set(_MMAP_THRESHOLD, 2**26)
    _set(_TRIM_THRESHOLD, 2**27)


def limit_arenas() -> None:
    """Let threads share a few arenas, unless the environment says how many.

    Every checkpoint is written by new threads. With eight arenas for each core, as is the default,
    what they free comes to lie in ever other ones, and a long run takes more and more memory of
    which it uses no more than at its beginning. Called before there are many threads.
    """
    is_chosen = "arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    if not is_chosen and "MALLOC_ARENA_MAX" not in os.environ:
        _set(_ARENA_MAX, _ARENAS)


def _set(what: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # another library of C
        ctypes.CDLL(None).mallopt(what, value)
