"""What the system grants this process: the cores it may run on, and an end with its caller."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def machine_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def end_with_caller(caller: int | None = None) -> None:
    """Have the kernel kill this process when its caller ends, however that ends (Linux only).

    Args:
        caller: its process; where that is known, a caller that is gone already counts, too.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if caller is not None and os.getppid() != caller:
        os.kill(os.getpid(), signal.SIGKILL)
