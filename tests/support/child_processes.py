"""Child processes of a process, as the system lists them."""

import os
import time
from collections.abc import Callable
from pathlib import Path


def children_of(process: int | None = None) -> list[int]:
    """The running processes whose parent is `process`, or this one, by number."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == (process or os.getpid()) and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found


def is_running(process: int) -> bool:
    """Whether there is a process of that number that has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(is_so: Callable[[], bool], seconds: float = 30) -> bool:
    """Whether something came true in time."""
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.02)
    return is_so()
