"""What all algorithms share: the time of empty messages, and of filling a pipeline."""

import math

from scalejax.hardware import CollectiveMethod
from scalejax.simulator.collectives.route import Route


def latency_seconds(
    method: CollectiveMethod, way: Route, *, link_hops: int, network_hops: int
) -> float:
    """Time of an exchange of nothing: its start, then one message after another."""
    return (
        method.base_seconds
        + link_hops * method.link_hop_seconds
        + network_hops * (method.network_hop_seconds + way.network_message_seconds)
    )


def pipelined_seconds(wire_seconds: float, ramp_seconds: float) -> float:
    """Time to pass `wire_seconds` of payload on in chunks, through a pipeline that must fill.

    With chunks of c seconds, the wire is busy for W and the last chunk is late by its own time;
    each chunk costs r: seconds = W + c + W r / c, least for c = sqrt(W r): W + 2 sqrt(W r).
    The second term is the dip in bandwidth between 1 and 64 MiB.
    """
    return wire_seconds + 2 * math.sqrt(wire_seconds * ramp_seconds)


def ring_seconds(payload_bytes: int, way: Route, method: CollectiveMethod, *, passes: int) -> float:
    """Time for `passes` rounds of the ring, each of n - 1 messages of payload / n bytes.

    A member also moves the n-th part, its own, in memory: `own_share` of the time on a link.
    """
    n = way.members
    network_hops = passes * (way.nodes - 1)
    wire = (n - 1) / way.narrowest_bytes_per_second + way.own_share / way.link_bytes_per_second
    wire *= passes * payload_bytes / n / method.bandwidth_fraction
    hops = passes * (n - 1) - network_hops
    start = latency_seconds(method, way, link_hops=hops, network_hops=network_hops)
    return start + pipelined_seconds(wire, way.ramp_seconds)
