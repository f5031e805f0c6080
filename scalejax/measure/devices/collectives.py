"""Ring model fitted to all-reduces timed at several sizes and device counts.

Knows no devices: `probes` and `processes` do the timing.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from scalejax.core.errors import SLOWEST_RATE, ConfigError
from scalejax.hardware import CollectiveMethod, CommunicationLibrary
from scalejax.hardware.chip import LARGEST_RESIDUAL
from scalejax.measure.devices.probes import Parts

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
    """Time of one all-reduce in a step."""


ROUNDS = 3
"""Rounds of timing, unless they take longer than `_MOST_SECONDS`."""
_MOST_ROUNDS, _MOST_SECONDS = 9, 20.0
_FAR_OFF = math.log(2)
"""Residual above which a disturbance is likelier than an algorithm other than a ring."""


def timed_in_rounds(
    rounds: Mapping[tuple[int, int], Callable[[], Parts]],
    seconds_of: Callable[[Parts], float],
    agreed: Callable[[float], float] = float,
) -> list[MeasuredCollective]:
    """All-reduces that are timed in turn, again and again while they are far off a ring.

    The least time of every step counts: other programs can only make it longer, and one that runs
    for a second disturbs only one round of each. After the first round, none begins later than
    `_MOST_SECONDS`.

    Args:
        rounds: by number of devices and payload in bytes, a function that times the steps with such
            an all-reduce once.
        seconds_of: seconds of the all-reduce, from those of its steps.
        agreed: the largest value among all processes, which must time equally many.
    """

    def measured() -> list[MeasuredCollective]:
        return [
            MeasuredCollective(device_count=count, size_bytes=size, seconds=seconds_of(parts))
            for (count, size), parts in least.items()
        ]

    least = {key: seconds() for key, seconds in rounds.items()}
    end = time.perf_counter() + _MOST_SECONDS
    for done in range(1, _MOST_ROUNDS):
        is_far_off = (fit_ring(measured()).residual or 0.0) > _FAR_OFF
        if done >= ROUNDS and not agreed(is_far_off):
            break
        for key, seconds in rounds.items():
            if not agreed(time.perf_counter() < end):
                return measured()
            least[key] = tuple(map(min, seconds(), least[key]))  # type: ignore[assignment]  four
    return measured()


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


def as_accepted(ring: Ring) -> tuple[Ring, str | None]:
    """`ring` within the limits of hardware files, and a note on what was beyond them, or None."""
    found = []
    residual, rate = ring.residual, ring.bytes_per_second
    if residual is not None and residual > LARGEST_RESIDUAL:
        found.append(
            f"they are off a ring's by a factor of {math.exp(residual):.3g}, and "
            f"{math.exp(LARGEST_RESIDUAL):.3g} is written, so that the true band is wider"
        )
    if rate < SLOWEST_RATE:
        found.append(f"{rate:.3g} bytes per second were measured, and {SLOWEST_RATE:g} is written")
    accepted = replace(
        ring,
        residual=None if residual is None else min(residual, LARGEST_RESIDUAL),
        bytes_per_second=max(rate, SLOWEST_RATE),
    )
    if not found:
        return ring, None
    return accepted, (
        f"the times of all-reduces do not measure this machine: {'; '.join(found)}. Other "
        f"programs likely kept it busy: calibrate again once they have ended"
    )


def library_of(
    name: str, title: str, ring: Ring, source: str, *, runs_buffers_one_by_one: bool = False
) -> CommunicationLibrary:
    """A communication library whose only method is `ring`, within and between nodes."""
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
