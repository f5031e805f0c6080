"""Checks of the output folders: free space, speed, and whether other machines see them."""

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from scalejax.core.environment import text_of
from scalejax.core.errors import ConfigError
from scalejax.core.units import GIB, format_bytes, format_bytes_per_second, format_seconds
from scalejax.measure.doctor.finding import Finding, found

_NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "smbfs", "9p",
            "glusterfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.sshfs", "fuse.glusterfs", "afs",
            "orangefs", "pvfs2", "wekafs", "virtiofs")  # fmt: skip
_IN_MEMORY = ("tmpfs", "ramfs")
_WRITTEN_BYTES = 2**24
_SYNCS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Readings of the storage of a folder."""

    role: str
    """Purpose of the folder, such as "run folder"."""
    file_system: str | None
    """File system type; None if unknown."""
    free_bytes: int
    """Free space."""
    size_bytes: int
    """Size of the file system."""
    write_bytes_per_second: float | None
    """Rate of writing a file including fsync; None if nothing can be written."""
    sync_seconds: float | None
    """Time of fsync for a few bytes."""
    problem: str | None = None
    """Error that prevents writing."""


def read_storage(role: str, folder: Path) -> Storage:
    """Readings of the storage of `folder`, or of its nearest existing parent."""
    from scalejax.measure.devices.host import storage_bytes_per_second

    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    about = os.statvfs(folder)
    rate = sync = problem = None
    try:
        rate = storage_bytes_per_second(folder, _WRITTEN_BYTES)
        sync = _sync_seconds(folder)
    except (ConfigError, OSError) as error:
        problem = str(error)
    return Storage(
        role=role,
        file_system=file_system_of(folder, text_of("/proc/mounts")),
        free_bytes=about.f_bavail * about.f_frsize,
        size_bytes=about.f_blocks * about.f_frsize,
        write_bytes_per_second=rate,
        sync_seconds=sync,
        problem=problem,
    )


def storage_findings(storage: Storage, hosts: int = 1) -> Iterator[Finding]:
    """A finding for each reading.

    Args:
        storage: readings.
        hosts: number of machines of the run.
    """
    role = storage.role
    is_run = role == "run folder"
    yield found(
        "storage",
        f"{role}: free",
        f"{format_bytes(storage.free_bytes)} of {format_bytes(storage.size_bytes)}",
        "at least 10 GiB",
        warn=storage.free_bytes < 10 * GIB,
        bad=storage.free_bytes < GIB,
        fix="make room; a checkpoint holds parameters and optimizer state, three are kept"
        if is_run
        else "make room, or set SCALEJAX_CACHE to a folder on another disk",
    )
    if storage.problem is not None:
        yield found(
            "storage",
            f"{role}: writing",
            "refused",
            "allowed",
            bad=True,
            fix=f"{storage.problem} Give --folder, or SCALEJAX_CACHE, one that can be",
        )
        return
    yield _kind(storage, hosts)
    rate, sync = storage.write_bytes_per_second, storage.sync_seconds
    yield found(
        "storage",
        f"{role}: writing",
        format_bytes_per_second(rate),
        "at least 100 MB/s",
        warn=rate is not None and rate < 100e6,
        bad=rate is not None and is_run and rate < 10e6,
        fix="checkpoints wait for it: write to a faster disk, or checkpoint less often",
    )
    yield found(
        "storage",
        f"{role}: fsync",
        format_seconds(sync),
        "at most 50 ms",
        warn=sync is not None and sync > 0.05,
        bad=sync is not None and is_run and sync > 1,
        fix="the disk is busy or far: write to a nearer one, or log and checkpoint less often",
    )


def _kind(storage: Storage, hosts: int) -> Finding:
    """Finding on the file system type: whether other machines see it, and whether it persists."""
    kind, is_run = storage.file_system, storage.role == "run folder"
    is_network, is_bad = kind in _NETWORK, False
    expected, fix = None, ""
    if hosts > 1 and is_run:
        expected, is_bad = f"one that {hosts} machines see", not is_network
        fix = "give --folder a folder that all machines see: each writes its part of a checkpoint"
    elif kind in _IN_MEMORY:
        expected, fix = "a disk", "it is memory, and lost with the machine: give another folder"
    elif is_network and not is_run:
        expected, fix = "a disk of this machine", "set SCALEJAX_CACHE to one, such as /tmp/cache"
    is_other = expected is not None and not (hosts > 1 and is_run)
    name = f"{storage.role}: kind"
    return found("storage", name, kind or "n/a", expected, warn=is_other, bad=is_bad, fix=fix)


def file_system_of(folder: Path, mounts: str) -> str | None:
    """Type of the file system of `folder`.

    Args:
        folder: an absolute path.
        mounts: content of /proc/mounts, with device, folder and type in each line; later lines
            take precedence.
    """
    kind, longest = None, -1
    for line in mounts.splitlines():
        where, type_ = line.split()[1:3]
        path = Path(where.replace("\\040", " "))
        if (folder == path or path in folder.parents) and len(path.parts) >= longest:
            kind, longest = type_, len(path.parts)
    return kind


def _sync_seconds(folder: Path) -> float:
    times = []
    with tempfile.NamedTemporaryFile(prefix=".scalejax-sync-", dir=folder) as file:
        for _ in range(_SYNCS):
            begin = time.perf_counter()
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - begin)
    return median(times)
