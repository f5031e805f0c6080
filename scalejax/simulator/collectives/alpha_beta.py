"""Terms that all collective algorithms share: latency of messages, pipelined transfer, a ring."""

import math

from scalejax.hardware import CollectiveMethod
from scalejax.simulator.collectives.route import Route


def latency_seconds(
    method: CollectiveMethod, route: Route, *, link_hops: int, network_hops: int
) -> float:
    """Latency of a collective: its start, then one empty message per hop."""
    return (
        method.base_seconds + link_hops * method.link_hop_seconds
    ) * route.latency_fraction + network_hops * (
        method.network_hop_seconds + route.network_message_seconds
    )


def pipelined_seconds(transfer_seconds: float, ramp_seconds: float) -> float:
    """Time to send a payload of `transfer_seconds` in chunks, filling of the pipeline included.

    With chunks of c seconds, the link is busy for W and the last chunk is late by its own time;
    each chunk costs r: seconds = W + c + W r / c, least for c = sqrt(W r): W + 2 sqrt(W r).
    The second term is the dip in bandwidth between 1 and 64 MiB.
    """
    return transfer_seconds + 2 * math.sqrt(transfer_seconds * ramp_seconds)


def ring_seconds(
    payload_bytes: int, route: Route, method: CollectiveMethod, *, passes: int
) -> float:
    """Time of `passes` passes around the ring, each of n - 1 messages of payload / n bytes.

    A member also copies its own n-th part in memory: `own_share` of the time on a link.
    """
    n = route.members
    network_hops = passes * (route.nodes - 1)
    transfer = (n - 1) / route.narrowest_bytes_per_second
    transfer += route.own_share / route.link_bytes_per_second
    transfer *= passes * payload_bytes / n / method.bandwidth_fraction
    hops = passes * (n - 1) - network_hops
    start = latency_seconds(method, route, link_hops=hops, network_hops=network_hops)
    return start + pipelined_seconds(transfer, route.ramp_seconds)
