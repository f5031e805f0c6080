"""All-reduces timed at several sizes and device counts, and the ring that explains them.

Between devices of this process, and between processes on this machine over loopback.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from scalejax.documents import build
from scalejax.errors import ConfigError
from scalejax.hardware import CollectiveMethod, CommunicationLibrary

SIZES = (64, 2**14, 2**18, 2**20, 2**22, 2**24)
"""Bytes that are summed: a scalar's worth up to the gradients of a small network."""
TAG = "all_reduce"
"""First word of a line that holds a time."""
_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One all-reduce, as timed."""

    device_count: int
    """Devices that take part."""
    size_bytes: int
    """Bytes of the sum."""
    seconds: float
    """Shortest time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """seconds = base + 2 (n - 1) hop + 2 (n - 1)/n bytes / rate."""

    base_seconds: float
    """Time before the first message."""
    hop_seconds: float
    """Time of one message."""
    bytes_per_second: float
    """Rate of each device to the next."""
    residual: float
    """Standard deviation of the logarithm of measured over fitted times."""


def fit_ring(exchanges: Sequence[Exchange]) -> Ring:
    """The ring that is nearest to `exchanges`, by relative error.

    Raises:
        ConfigError: if there are none.
    """
    if not exchanges:
        raise ConfigError("exchanges=[] is refused: at least one is needed.")
    rows = [
        (1.0, 2 * (e.device_count - 1), 2 * (e.device_count - 1) / e.device_count * e.size_bytes)
        for e in exchanges
    ]
    seconds = np.array([e.seconds for e in exchanges])
    scales = np.array([1.0, 1.0, 1e-9])  # nanoseconds a byte: columns of like size
    weighted = np.array(rows) * scales / seconds[:, None]
    base, hop, per_byte = nnls(weighted, np.ones(len(rows)))[0] * scales
    fitted = np.array(rows) @ np.array([base, hop, per_byte])
    return Ring(
        base_seconds=float(base),
        hop_seconds=float(hop),
        # No cost per byte to be seen: as fast as would have been seen in the largest.
        bytes_per_second=float(1 / max(per_byte, 1e-3 * seconds.max() / max(SIZES))),
        residual=float(np.std(np.log(seconds / fitted))),
    )


def library_of(name: str, title: str, ring: Ring, source: str) -> CommunicationLibrary:
    """`ring` as a library of one method, within nodes and between them."""
    method = CollectiveMethod(
        algorithm="ring",
        protocol="simple",
        bandwidth_fraction=1.0,
        base_seconds=ring.base_seconds,
        link_hop_seconds=ring.hop_seconds,
        network_hop_seconds=ring.hop_seconds,
    )
    return CommunicationLibrary(
        name=name, title=title, methods=(method,), residual=ring.residual, sources={"*": source}
    )


def between_processes(count: int, *, calls: int, sizes: Sequence[int] = SIZES) -> list[Exchange]:
    """All-reduces between `count` processes of one device each, over loopback.

    Raises:
        ConfigError: if they could not exchange anything, with what they said.
    """
    command = [sys.executable, "-m", "scalejax.calibrate.worker"]
    port = str(_free_port())
    arguments = [str(calls), ",".join(map(str, sizes))]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    workers = [
        subprocess.Popen(
            [*command, port, str(count), str(rank), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [worker.communicate(timeout=_PATIENCE_SECONDS) for worker in workers]
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"processes={count} is refused: they exchanged nothing in {_PATIENCE_SECONDS:g} s."
        ) from error
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    if any(worker.returncode for worker in workers):
        failed = next(i for i, worker in enumerate(workers) if worker.returncode)
        said = outputs[failed][1].strip().splitlines() or ["nothing"]
        raise ConfigError(f"processes={count} is refused: they said {said[-1]!r}.")
    # The library that connects them prints on standard output too.
    lines = [line.split()[1:] for line in outputs[0][0].splitlines() if line.startswith(TAG)]
    return [
        build(
            Exchange,
            {"device_count": count, "size_bytes": int(size), "seconds": float(seconds)},
        )
        for size, seconds in lines
    ]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
