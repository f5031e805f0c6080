"""Terms that all collective algorithms share: latency of messages, pipelined transfer, a ring."""

import math
from collections.abc import Sequence

from scalejax.hardware import CollectiveMethod
from scalejax.simulator.collectives.route import Route

_LOW_LATENCY = ("ll", "ll128")
"""Protocols whose messages hold their own flags."""


def usable(methods: Sequence[CollectiveMethod], route: Route) -> tuple[CollectiveMethod, ...]:
    """The methods that the route allows: low-latency protocols need messages in order. If no other
    methods are left, all of `methods`, each of which the collective can use."""
    found = tuple(each for each in methods if each.protocol not in _LOW_LATENCY)
    return tuple(methods) if route.keeps_order or not found else found


def latency_seconds(
    method: CollectiveMethod, route: Route, *, link_hops: int, network_hops: int
) -> float:
    """Latency of a collective: its start, then one empty message per hop."""
    hop = method.link_hop_seconds
    if route.nodes > 1:
        hop *= method.link_hop_multiple_over_nodes
    inside = method.base_seconds + link_hops * hop
    between = network_hops * (method.network_hop_seconds + route.network_message_seconds)
    if network_hops:
        between += method.network_base_seconds
    return inside * route.latency_fraction + between


def pipelined_seconds(transfer_seconds: float, ramp_seconds: float) -> float:
    """Time to send a payload of `transfer_seconds` in chunks, including filling the pipeline.

    With chunks of c seconds, the link is busy for W and the last chunk is late by its own time;
    each chunk costs r: seconds = W + c + W r / c, least for c = sqrt(W r): W + 2 sqrt(W r).
    The second term is the dip in bandwidth between 1 and 64 MiB.
    """
    return transfer_seconds + 2 * math.sqrt(transfer_seconds * ramp_seconds)


def protocol_seconds(
    transfer_seconds: float, payload_bytes: float, route: Route, method: CollectiveMethod
) -> float:
    """Time to send what takes `transfer_seconds` at the links' rate, with the method's protocol.

    Over nodes, messages with flags may pass each hop whole: up and down a node's g - 1 links, and
    one hop between nodes each way, whose count here does not grow with the nodes.

    Args:
        transfer_seconds: time of the slowest link, without a protocol.
        payload_bytes: what is summed over the nodes; half of what is gathered counts as much.
        route: links between the members.
        method: the method whose protocol is used.
    """
    seconds = transfer_seconds / method.bandwidth_fraction
    posted = method.network_payload_bytes_per_second
    if route.nodes > 1 and posted is not None:
        inside = method.bandwidth_fraction * route.link_bytes_per_second
        whole = 2 / posted + 2 * (route.members_per_node - 1) / inside
        seconds = max(seconds, payload_bytes * whole)
    return seconds


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
    transfer *= passes * payload_bytes / n
    transfer = protocol_seconds(transfer, passes / 2 * payload_bytes, route, method)
    hops = passes * (n - 1) - network_hops
    start = latency_seconds(method, route, link_hops=hops, network_hops=network_hops)
    return start + pipelined_seconds(transfer, route.ramp_seconds)
