"""Checks of host names, ports, the coordinator, and clock offsets between processes."""

import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scalejax.core.process_group import LOOPBACK, Place
from scalejax.core.units import counted, format_seconds
from scalejax.measure.doctor.finding import Finding, found

_ROUNDS = 12
_STAMP = struct.Struct("<d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Readings of the network."""

    host_name: str
    """Host name of this machine."""
    address: str | None
    """Address that the name resolves to; None if it does not."""
    loopback_problem: str | None
    """Error of listening on a loopback port; None if that works."""


def read_network() -> Network:
    """Network readings of this machine."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = None
    problem = None
    try:
        with socket.socket() as listener, socket.socket() as caller:
            listener.bind((LOOPBACK, 0))
            listener.listen(1)
            caller.settimeout(5)
            caller.connect(listener.getsockname())
    except OSError as error:
        problem = str(error)
    return Network(host_name=name, address=address, loopback_problem=problem)


def network_findings(network: Network, place: Place | None) -> Iterator[Finding]:
    """A finding for each reading.

    Args:
        network: readings.
        place: rank of this process among the connected processes; None if it is alone.
    """
    yield found(
        "network",
        "loopback ports",
        network.loopback_problem or "open",
        "open",
        bad=network.loopback_problem is not None,
        fix="bring the interface up (ip link set lo up), or allow it in the sandbox",
    )
    yield found(
        "network",
        f"name {network.host_name}",
        network.address or "does not resolve",
        "an address",
        bad=network.address is None,
        fix=f"processes find each other by name: add '127.0.0.1 {network.host_name}' to "
        "/etc/hosts, on several machines the address that the others see",
    )
    if place is not None:
        where = place.coordinator or "given by the scheduler"
        value = f"reached by {counted(place.processes, 'process').replace('ss' + 's', 'sses')}"
        yield found("network", f"coordinator {where}", value, fix="")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """Offset of another process's clock from this one's, positive if ahead."""

    least_seconds: float
    """Lower bound; negative if behind."""
    most_seconds: float
    """Upper bound."""

    @property
    def seconds(self) -> float:
        """Midpoint of the bounds."""
        return (self.least_seconds + self.most_seconds) / 2


def clock_offsets(
    stamps: Sequence[Sequence[float]], ends: Sequence[float], mine: int
) -> list[ClockOffset]:
    """Bounds of the clock offsets of all processes, from repeated all-gathers (barriers).

    Process j stamps round k at s_j(k) after it has left round k - 1, so after I stamped that one,
    and before I leave round k at e(k). By my clock that moment is in [s_i(k - 1), e(k)], so j is
    ahead by an amount in [s_j(k) - e(k), s_j(k) - s_i(k - 1)], a round trip. The bounds are the
    intersection of these intervals over all rounds.

    Args:
        stamps: for each round, the time just before it by the clock of each process, seconds.
        ends: for each round, the time just after it by my clock.
        mine: index of my process.

    Source: Cristian 1989, "Probabilistic clock synchronization", Distributed Computing 3.
    """
    found_ = []
    for other in range(len(stamps[0])):
        rounds = range(1, len(stamps))
        least = max(stamps[k][other] - ends[k] for k in rounds)
        most = min(stamps[k][other] - stamps[k - 1][mine] for k in rounds)
        found_.append(ClockOffset(least_seconds=least, most_seconds=most))
    return found_


def measure_clock_offsets() -> list[ClockOffset]:
    """Clock offsets of all processes from this one; every process must call it."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    stamps, ends = [], []
    for _ in range(_ROUNDS):
        packed = np.frombuffer(_STAMP.pack(time.time()), np.uint8)  # JAX has no float64 here
        rows = np.asarray(multihost_utils.process_allgather(packed))
        ends.append(time.time())
        stamps.append([_STAMP.unpack(row.tobytes())[0] for row in rows])
    return clock_offsets(stamps, ends, jax.process_index())


def clock_finding(offsets: Sequence[ClockOffset]) -> Finding:
    """Finding on the clock with the largest offset."""
    process = max(range(len(offsets)), key=lambda each: abs(offsets[each].seconds))
    offset = offsets[process]
    # Certain offset, regardless of the time of the all-gather.
    sure = max(offset.least_seconds, -offset.most_seconds, 0.0)
    within = (offset.most_seconds - offset.least_seconds) / 2
    value = f"{format_seconds(abs(offset.seconds))} +- {format_seconds(within)}"
    return found(
        "network",
        f"clock of process {process}" if sure > 0 else "clocks",
        value,
        "within 1 s of each other",
        warn=sure > 1,
        bad=sure > 60,
        fix="set the clocks by NTP (chronyc makestep): times of logs and of files rest on them",
    )
