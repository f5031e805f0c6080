"""CPU, memory and threads of this process and its children, sampled while steps are timed.

Reads /proc, as `top` does; without it, nothing is sampled. Knows nothing of JAX: device memory
comes from a function.
"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from scalejax.core.environment import process_fields, text_of
from scalejax.core.units import KIB

_PROC = Path("/proc")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_UTIME, _STIME, _THREADS, _RSS = 11, 12, 17, 21  # of /proc/PID/stat after the name: proc(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """One sample of one process of a benchmark, including its child processes."""

    process: int
    """Rank of the process in the benchmark."""
    seconds: float
    """Time since the first timed step began; negative during warm-up."""
    cpu_percent: float | None
    """CPU use since the previous sample, in per cent of one core; None in the first."""
    rss_bytes: int
    """Resident memory; shared pages count in every process that shares them."""
    pss_bytes: int | None
    """Resident memory, shared pages divided among their processes; None if unknown."""
    threads: int
    """Number of threads."""
    device_bytes: int | None
    """Memory in use on the fullest device of this process; None if unknown."""


class Monitor:
    """Samples usage periodically in a thread, and once at the beginning and at the end."""

    def __init__(
        self,
        period_seconds: float,
        *,
        process: int = 0,
        device_bytes: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create a monitor that is not yet sampling.

        Args:
            period_seconds: time between samples; 0 for no samples.
            process: rank of this process in the benchmark.
            device_bytes: memory in use on the fullest device.
            clock: seconds since some fixed moment.
        """
        self._period = period_seconds
        self._process = process
        self._device_bytes = device_bytes
        self._clock = clock
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._samples: list[Usage] = []  # their seconds are the clock's
        self._last: tuple[float, float] | None = None

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample usage inside the `with` block."""
        if not self._period or not (_PROC / "self" / "stat").exists():
            yield
            return
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()
        try:
            yield
        finally:
            self._end.set()
            self._thread.join()

    def samples(self, begin: float) -> tuple[Usage, ...]:
        """The samples taken, with seconds relative to the clock time `begin`."""
        return tuple(
            replace(each, seconds=round(each.seconds - begin, 4)) for each in self._samples
        )

    def _run(self) -> None:
        self._sample()
        while not self._end.wait(self._period):
            self._sample()
        self._sample()

    def _sample(self) -> None:
        now = self._clock()
        cpu_seconds, rss_bytes, pss_bytes, threads = 0.0, 0, 0, 0
        says_pss = True
        for number in _family(os.getpid()):
            with contextlib.suppress(OSError):  # the process has just ended
                fields = process_fields(number)
                cpu_seconds += (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_SECOND
                threads += int(fields[_THREADS])
                rss_bytes += int(fields[_RSS]) * _PAGE_BYTES
                own = _pss_bytes(number)
                says_pss = says_pss and own is not None
                pss_bytes += own or 0
        percent = None
        if self._last is not None and now > self._last[0]:
            # The CPU time of an ended process is lost.
            percent = max(0.0, 100 * (cpu_seconds - self._last[1]) / (now - self._last[0]))
        self._last = now, cpu_seconds
        usage = Usage(
            process=self._process,
            seconds=now,
            cpu_percent=None if percent is None else round(percent, 1),
            rss_bytes=rss_bytes,
            pss_bytes=pss_bytes if says_pss else None,
            threads=threads,
            device_bytes=self._device_bytes(),
        )
        self._samples.append(usage)


def _family(process: int) -> list[int]:
    """`process` and all its descendants."""
    found = [process]
    for parent in found:
        for path in (_PROC / str(parent) / "task").glob("*/children"):
            found += [int(child) for child in text_of(path).split()]
    return found


def _pss_bytes(process: int) -> int | None:
    found = re.search(r"^Pss:\s+(\d+) kB", text_of(_PROC / f"{process}/smaps_rollup"), re.MULTILINE)
    return int(found[1]) * KIB if found else None
