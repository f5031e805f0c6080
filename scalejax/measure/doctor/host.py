"""Checks of the host limits of a process: cores, memory, shared memory, open files."""

import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass

from scalejax.core.environment import text_of
from scalejax.core.units import GIB, KIB, MIB, format_bytes
from scalejax.measure.doctor.finding import Finding, found

_CONTAINER = "docker run --shm-size=8g; Kubernetes: an emptyDir of medium Memory at /dev/shm"
_UNLIMITED = 2**60
"""Memory limits of at least this size mean no limit: version 1 cgroups write 2**63 - 4096."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Readings of the host; None if the system does not report one."""

    cores: int
    """Cores of the machine."""
    allowed_cores: int
    """Cores on which this process may run."""
    quota_cores: float | None
    """CPU quota of its cgroup in cores; None without a limit."""
    load: float
    """Load average over the last minute."""
    memory_bytes: int
    """Memory of the machine."""
    available_bytes: int | None
    """Memory available without swapping."""
    limit_bytes: int | None
    """Memory limit of its cgroup; None without a limit."""
    used_of_limit_bytes: int | None
    """Memory used of that limit."""
    shared_memory_bytes: int | None
    """Size of /dev/shm."""
    shared_memory_free_bytes: int | None
    """Free space of /dev/shm."""
    open_files: int
    """Soft limit of open files of a process (ulimit -n)."""
    most_open_files: int
    """Hard limit, up to which the process may raise it."""
    huge_pages: str | None
    """Setting of transparent huge pages."""


def read_host() -> Host:
    """Host readings of this process."""
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    open_files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = getattr(os, "sched_getaffinity", None)
    return Host(
        cores=os.cpu_count() or 1,
        allowed_cores=len(allowed(0)) if allowed else os.cpu_count() or 1,
        quota_cores=_quota_cores(),
        load=os.getloadavg()[0],
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        available_bytes=_available_bytes(),
        limit_bytes=_limit_bytes(),
        used_of_limit_bytes=_number("/sys/fs/cgroup/memory.current")
        or _number("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
        shared_memory_bytes=shared and shared.f_blocks * shared.f_frsize,
        shared_memory_free_bytes=shared and shared.f_bavail * shared.f_frsize,
        open_files=open_files if open_files >= 0 else 2**31,
        most_open_files=most if most >= 0 else 2**31,
        huge_pages=_huge_pages(),
    )


def host_findings(host: Host) -> Iterator[Finding]:
    """A finding for each reading."""
    yield _cores(host)
    yield found(
        "host",
        "load",
        f"{host.load:.1f}",
        f"below {host.cores}, the cores",
        warn=host.load > host.cores,
        fix="other programs are running: measured rates are too low",
    )
    yield _memory(host)
    if host.shared_memory_bytes is not None:
        yield _shared_memory(host.shared_memory_bytes, host.shared_memory_free_bytes or 0)
    fix = f"ulimit -n {min(65536, host.most_open_files)}, before the run or in its container"
    yield found(
        "host",
        "open files",
        f"{host.open_files:,}",
        "at least 4,096",
        warn=host.open_files < 4096,
        bad=host.open_files < 1024,
        fix=fix,
    )
    if host.huge_pages is not None:
        fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        yield found(
            "host",
            "huge pages",
            host.huge_pages,
            "always or madvise",
            warn=host.huge_pages == "never",
            fix=fix,
        )


def _cores(host: Host) -> Finding:
    usable = min(host.allowed_cores, host.quota_cores or host.cores)
    if host.allowed_cores < host.cores:
        value = f"{host.allowed_cores} of {host.cores} allowed"
    elif host.quota_cores is not None and host.quota_cores < host.cores:
        value = f"{host.cores}, time of {host.quota_cores:g}"
    else:
        value = str(host.cores)
    fix = (
        "threads started for all visible cores wait for the allowed ones: raise the quota (docker "
        f"--cpus, resources.limits.cpu), or keep input.workers at {max(1, int(usable))} or fewer"
    )
    # Libraries count threads by the CPU set, not by the quota.
    has_quota = host.quota_cores is not None and host.quota_cores < host.allowed_cores
    return found(
        "host", "cores", value, "all visible cores", warn=has_quota, bad=usable < 1, fix=fix
    )


def _memory(host: Host) -> Finding:
    free = [host.available_bytes] if host.available_bytes is not None else []
    total = host.memory_bytes
    if host.limit_bytes is not None and host.limit_bytes < total:
        total = host.limit_bytes
        free.append(max(0, total - (host.used_of_limit_bytes or 0)))
    left = min(free, default=None)
    limited = " (limit)" if total < host.memory_bytes else ""
    value = f"{format_bytes(left)} of {format_bytes(total)}{limited}"
    fix = "end other programs, or raise the limit (docker --memory, resources.limits.memory)"
    few = left is not None and left < 2 * GIB
    return found(
        "host",
        "free memory",
        value,
        "at least 2 GiB",
        warn=few,
        bad=few and (left or 0) < GIB // 2,
        fix=fix,
    )


def _shared_memory(size: int, free: int) -> Finding:
    """Finding on /dev/shm, used by input workers and by NCCL between GPUs of a node."""
    value = format_bytes(size) if free > size // 2 else f"{format_bytes(free)} free"
    return found(
        "host",
        "/dev/shm",
        value,
        "at least 1 GiB",
        warn=free < GIB,
        bad=free <= 64 * MIB,
        fix=_CONTAINER,
    )


def _available_bytes() -> int | None:
    found = re.search(r"MemAvailable:\s+(\d+) kB", text_of("/proc/meminfo"))
    return int(found[1]) * KIB if found else None


def _limit_bytes() -> int | None:
    limits = (
        _number("/sys/fs/cgroup/memory.max"),
        _number("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    )
    return min((limit for limit in limits if limit and limit < _UNLIMITED), default=None)


def _quota_cores() -> float | None:
    """CPU quota of the cgroup in cores, from version 2 or else 1."""
    words = text_of("/sys/fs/cgroup/cpu.max").split()
    if len(words) == 2 and words[0].isdecimal():
        return int(words[0]) / int(words[1])
    quota = _number("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    period = _number("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    return quota / period if quota and period else None


def _huge_pages() -> str | None:
    found = re.search(r"\[(.*?)\]", text_of("/sys/kernel/mm/transparent_hugepage/enabled"))
    return found[1] if found else None


def _number(path: str) -> int | None:
    """The number in a file; None for "max", -1 or anything else that is not a whole number."""
    text = text_of(path).strip()
    return int(text) if text.isdecimal() else None
