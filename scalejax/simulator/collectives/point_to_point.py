"""Seconds of the exchanges that add nothing up, or scatter the sum: gather, all-to-all, permute."""

from collections.abc import Sequence

from scalejax.hardware import CollectiveMethod
from scalejax.simulator.collectives.alpha_beta import pipelined_seconds, ring_seconds
from scalejax.simulator.collectives.route import Route


def gather_seconds(payload_bytes: int, way: Route, methods: tuple[CollectiveMethod, ...]) -> float:
    """Time of an all-gather, or of its mirror image, a reduce-scatter.

    A ring sends n - 1 messages of payload / n bytes each:
    seconds = (n - 1) hop + (n - 1)/n payload / bandwidth.

    Args:
        payload_bytes: bytes of the gathered result, or of one input to be scattered.
        way: where the members sit.
        methods: what the cluster's library can do; only its rings are of use.
    """
    if way.members == 1:
        return 0.0
    return min(
        ring_seconds(payload_bytes, way, method, passes=1) for method in _of(methods, "ring")
    )


def all_to_all_seconds(
    payload_bytes: int, way: Route, methods: tuple[CollectiveMethod, ...]
) -> float:
    """Time until every member has sent every other its 1/n of `payload_bytes`.

    Messages within the node and between nodes use different wires at the same time:
    seconds = (n - 1) hops + payload max((g - 1)/n / link, g (n - g)/n / network).

    Args:
        payload_bytes: bytes of one member's input.
        way: where the members sit, g of them in a node.
        methods: what the cluster's library can do; without messages between pairs of its own,
            they cost what a ring's do.
    """
    n, g = way.members, way.members_per_node
    if n == 1:
        return 0.0

    def seconds(method: CollectiveMethod) -> float:
        hops = (g - 1) * method.link_hop_seconds
        hops += (n - g) * method.network_hop_seconds
        inside = (g - 1 + way.own_share) / n * payload_bytes / way.link_bytes_per_second
        between = 0.0
        if way.network_bytes_per_second is not None:
            hops += way.network_message_seconds
            between = g * (n - g) / n * payload_bytes / way.network_bytes_per_second
        wire = max(inside, between) / method.bandwidth_fraction
        return method.base_seconds + hops + pipelined_seconds(wire, way.ramp_seconds)

    return min(seconds(method) for method in _of(methods, "pairwise"))


def permute_seconds(payload_bytes: int, way: Route, methods: tuple[CollectiveMethod, ...]) -> float:
    """Time until every member has passed its payload on to the next: one message each.

    Where the group spans nodes, one member of each node sends through the network.
    """
    if way.members == 1:
        return 0.0

    def seconds(method: CollectiveMethod) -> float:
        hop = method.link_hop_seconds
        if way.nodes > 1:
            hop = method.network_hop_seconds + way.network_message_seconds
        wire = payload_bytes / (way.narrowest_bytes_per_second * method.bandwidth_fraction)
        return method.base_seconds + hop + pipelined_seconds(wire, way.ramp_seconds)

    return min(seconds(method) for method in _of(methods, "pairwise"))


def _of(methods: tuple[CollectiveMethod, ...], algorithm: str) -> Sequence[CollectiveMethod]:
    """The methods of that algorithm; else the rings; else messages cost what any method's do."""
    for name in (algorithm, "ring"):
        found = [method for method in methods if method.algorithm == name]
        if found:
            return found
    return methods
