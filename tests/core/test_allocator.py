"""Threads of a process that trains share a few of glibc's arenas."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import scalejax
from scalejax.cli import train
from scalejax.sweep import worker
from scalejax.sweep.folder import SweepFolder

EXAMPLE = Path(scalejax.__file__).parent / "config" / "examples" / "fashion_small_batch.toml"

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="another C library than glibc"
)

HEAPS = """
import ctypes, sys, tempfile, threading

if "limit" in sys.argv:
    from scalejax.core.environment import limit_arenas

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


@pytest.mark.skipif((os.cpu_count() or 1) > 8, reason="more cores than arenas that were taken")
def test_threads_share_an_arena_for_each_core() -> None:
    """At least four; twelve threads at once take more, left to themselves."""
    shared = max(4, os.cpu_count() or 1)
    assert heaps() > shared
    assert heaps("limit") == shared


class _Asked(BaseException):
    """Arenas were to be limited."""


def _ask() -> None:
    raise _Asked


def test_what_trains_limits_them_first(monkeypatch, tmp_path) -> None:
    """Before JAX has threads, of which glibc would take notice no more."""
    monkeypatch.setattr(train, "limit_arenas", _ask)
    monkeypatch.setattr(train, "choose_platform", lambda *_: pytest.fail("JAX came first"))
    monkeypatch.setattr(worker, "limit_arenas", _ask)

    with pytest.raises(_Asked):
        train.Train(run_file=EXAMPLE).execute({})
    with pytest.raises(_Asked):
        worker.JobTrainer(SweepFolder(path=tmp_path), 0, ())([0])


@pytest.mark.parametrize(
    "chosen", [{"MALLOC_ARENA_MAX": "6"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=6"}]
)
def test_what_the_environment_says_is_left(chosen: dict[str, str]) -> None:
    """By either of the two ways in which glibc is told."""
    assert heaps("limit", **chosen) == 6
