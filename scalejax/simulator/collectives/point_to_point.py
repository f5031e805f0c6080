"""Seconds of all-gather, reduce-scatter, all-to-all and collective-permute.

Depends on the route of a group and the methods of a library, not on programs or placement.
"""

from collections.abc import Sequence

from scalejax.hardware import CollectiveMethod
from scalejax.simulator.collectives.alpha_beta import pipelined_seconds, ring_seconds, usable
from scalejax.simulator.collectives.route import Route


def gather_seconds(
    payload_bytes: int, route: Route, methods: tuple[CollectiveMethod, ...]
) -> float:
    """Time of an all-gather or a reduce-scatter, which take equally long.

    A ring sends n - 1 messages of payload / n bytes each:
    seconds = (n - 1) hop + (n - 1)/n payload / bandwidth.

    Args:
        payload_bytes: bytes of the gathered result, or of one input to be scattered.
        route: links between the members.
        methods: algorithms of the cluster's library; only rings are used.
    """
    if route.members == 1:
        return 0.0
    rings = usable(_of(methods, "ring"), route)
    return min(ring_seconds(payload_bytes, route, method, passes=1) for method in rings)


def all_to_all_seconds(
    payload_bytes: int, route: Route, methods: tuple[CollectiveMethod, ...]
) -> float:
    """Time until every member has sent every other 1/n of its `payload_bytes`.

    Messages within the node and between nodes use different links at the same time:
    seconds = (n - 1) hops + payload max((g - 1)/n / link, g (n - g)/n / network).

    Args:
        payload_bytes: bytes of one member's input.
        route: links between the members, g of them in a node.
        methods: algorithms of the cluster's library; without a pairwise one, messages cost as much
            as a ring's.
    """
    n, g = route.members, route.members_per_node
    if n == 1:
        return 0.0

    def seconds(method: CollectiveMethod) -> float:
        hops = method.base_seconds + (g - 1) * method.link_hop_seconds
        hops *= route.latency_fraction
        hops += (n - g) * method.network_hop_seconds
        inside = (g - 1 + route.own_share) / n * payload_bytes / route.link_bytes_per_second
        between = 0.0
        if route.network_bytes_per_second is not None:
            hops += route.network_message_seconds
            between = g * (n - g) / n * payload_bytes / route.network_bytes_per_second
        transfer = max(inside, between) / method.bandwidth_fraction
        return hops + pipelined_seconds(transfer, route.ramp_seconds)

    return min(seconds(method) for method in _of(methods, "pairwise"))


def permute_seconds(
    payload_bytes: int, route: Route, methods: tuple[CollectiveMethod, ...]
) -> float:
    """Time until every member has sent its payload to the next, one message each.

    If the group spans nodes, one member of each node sends through the network.
    """
    if route.members == 1:
        return 0.0

    def seconds(method: CollectiveMethod) -> float:
        hop = (method.base_seconds + method.link_hop_seconds) * route.latency_fraction
        if route.nodes > 1:
            hop = method.base_seconds * route.latency_fraction
            hop += method.network_hop_seconds + route.network_message_seconds
        transfer = payload_bytes / (route.narrowest_bytes_per_second * method.bandwidth_fraction)
        return hop + pipelined_seconds(transfer, route.ramp_seconds)

    return min(seconds(method) for method in _of(methods, "pairwise"))


def _of(methods: tuple[CollectiveMethod, ...], algorithm: str) -> Sequence[CollectiveMethod]:
    """The methods of that algorithm; if there are none, the rings; otherwise all methods."""
    for name in (algorithm, "ring"):
        found = [method for method in methods if method.algorithm == name]
        if found:
            return found
    return methods
