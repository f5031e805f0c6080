"""Threads of a training process share a few of glibc's arenas."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="another C library than glibc"
)

HEAPS = """
import ctypes, sys, tempfile, threading

if "limit" in sys.argv:
    from scalejax.allocator import limit_arenas

    limit_arenas()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
together = threading.Barrier(12)


def take():
    together.wait()
    libc.free(ctypes.c_void_p(libc.malloc(100_000)))
    together.wait()  # no thread leaves its arena to another


libc.malloc.restype = ctypes.c_void_p
threads = [threading.Thread(target=take) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
with tempfile.NamedTemporaryFile() as file:
    stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    print(file.read().count(b"<heap "))
"""


def heaps(*arguments: str, **environment: str) -> int:
    """Arenas of a process in which twelve threads take memory at the same time."""
    inherited = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    inherited.pop("GLIBC_TUNABLES", None)
    done = subprocess.run(
        [sys.executable, "-c", HEAPS, *arguments],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_threads_share_four_arenas() -> None:
    """Twelve threads at once take more arenas, left to themselves."""
    assert heaps() > 4
    assert heaps("limit") == 4


@pytest.mark.parametrize(
    "chosen", [{"MALLOC_ARENA_MAX": "6"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=6"}]
)
def test_what_the_environment_says_is_left(chosen: dict[str, str]) -> None:
    """By either of the two ways in which glibc is told."""
    assert heaps("limit", **chosen) == 6
