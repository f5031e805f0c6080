"""Ring model fitted to all-reduces timed at several sizes and device counts.

Knows no devices: `probes` and `processes` do the timing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from scalejax.core.errors import ConfigError
from scalejax.hardware import CollectiveMethod, CommunicationLibrary

SIZES = (64, 2**14, 2**18, 2**20, 2**22, 2**24)
"""All-reduce payloads in bytes: from a scalar up to the gradients of a small network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """One timed all-reduce."""

    device_count: int
    """Devices in the group."""
    size_bytes: int
    """Payload in bytes."""
    seconds: float
    """Median time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """seconds = base + 2 (n - 1) hop + 2 (n - 1)/n bytes / rate."""

    base_seconds: float
    """Start-up time before the first message."""
    hop_seconds: float
    """Latency of one message."""
    bytes_per_second: float
    """Bandwidth from each device to the next."""
    residual: float | None = None
    """Standard deviation of the logarithm of measured over fitted times; None if not fitted."""


def fit_ring(collectives: Sequence[MeasuredCollective]) -> Ring:
    """The ring parameters that fit `collectives` best, by relative error.

    Raises:
        ConfigError: if there are none.
    """
    if not collectives:
        raise ConfigError("collectives=[] is refused: at least one is needed.")
    rows = [
        (1.0, 2 * (e.device_count - 1), 2 * (e.device_count - 1) / e.device_count * e.size_bytes)
        for e in collectives
    ]
    seconds = np.array([e.seconds for e in collectives])
    scales = np.array([1.0, 1.0, 1e-9])  # nanoseconds per byte, to scale the columns alike
    weighted = np.array(rows) * scales / seconds[:, None]
    base, hop, per_byte = nnls(weighted, np.ones(len(rows)))[0] * scales
    fitted = np.array(rows) @ np.array([base, hop, per_byte])
    return Ring(
        base_seconds=float(base),
        hop_seconds=float(hop),
        # No measurable cost per byte: the highest rate that the largest payload could have shown.
        bytes_per_second=float(1 / max(per_byte, 1e-3 * seconds.max() / max(SIZES))),
        residual=float(np.std(np.log(seconds / fitted))),
    )


def library_of(
    name: str, title: str, ring: Ring, source: str, *, runs_buffers_one_by_one: bool = False
) -> CommunicationLibrary:
    """A communication library with `ring` as its one method, within and between nodes."""
    method = CollectiveMethod(
        algorithm="ring",
        protocol="simple",
        bandwidth_fraction=1.0,
        base_seconds=ring.base_seconds,
        link_hop_seconds=ring.hop_seconds,
        network_hop_seconds=ring.hop_seconds,
    )
    return CommunicationLibrary(
        name=name,
        title=title,
        methods=(method,),
        runs_buffers_one_by_one=runs_buffers_one_by_one,
        residual=ring.residual,
        sources={"*": source},
    )
