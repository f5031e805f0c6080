"""Seconds of the reductions of an `all_reduce_spec` of tf_cnn_benchmarks.

Knows which tensors are reduced together, and on which servers; the times of a ring, of halving and
doubling and of a message are from `simulator.collectives`. A ring or halving reduces one tensor
after the other, but NCCL reduces all in one group. Servers reduce all at once, each tensor cut into
`shards` distributed round-robin, but devices and memory of one host copy one tensor after the
other. Traffic that leaves a host shares its links, and overlaps with the rest.

Ignores how small tensors are packed together, and the time from the start of a reduction to its
first message.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from scalejax.config.all_reduce_spec import ReduceRange
from scalejax.config.emulation import EmulationConfig
from scalejax.core.errors import ConfigError, refusal
from scalejax.emulation.virtual_cluster import Durations
from scalejax.hardware import CollectiveMethod
from scalejax.simulator.collectives import (
    Route,
    halving_doubling_all_reduce_seconds,
    permute_seconds,
    ring_all_reduce_seconds,
)


def with_reduction(
    durations: Durations, emulation: EmulationConfig, tensor_elements: Sequence[int]
) -> Durations:
    """`durations` with the all-reduce time of a tf_cnn_benchmarks mode, unless it is given.

    Raises:
        ConfigError: if workers cannot be reduced in that way.
    """
    mode = emulation.algorithm
    is_given = emulation.timing.collective_seconds is not None
    if mode.all_reduce_ranges is None or is_given or not emulation.core.is_all_reduced:
        return durations
    per_host = min(emulation.workers, durations.workers_per_host)
    hosts = -(-emulation.workers // per_host)
    network = durations.worker_bytes_per_second or math.inf
    link = mode.link_rate or durations.link_bytes_per_second or math.inf
    memory = mode.link_rate or durations.host_bytes_per_second or math.inf
    hop = durations.hop_seconds
    route = Route(
        members=emulation.workers,
        members_per_node=per_host,
        nodes=hosts,
        link_bytes_per_second=link,
        tree_link_bytes_per_second=link,
        network_bytes_per_second=network if hosts > 1 else None,
        host_bytes_per_second=memory,
    )
    method = CollectiveMethod(
        algorithm="ring",
        protocol="simple",
        bandwidth_fraction=1.0,
        base_seconds=0.0,
        link_hop_seconds=durations.latency_seconds if hop is None else hop,
        network_hop_seconds=durations.latency_seconds,
    )
    seconds = reduction_seconds(mode.all_reduce_ranges, tensor_elements, route, method)
    return replace(durations, collective_seconds=seconds)


def reduction_seconds(
    ranges: Sequence[ReduceRange],
    tensor_elements: Sequence[int],
    route: Route,
    method: CollectiveMethod,
    *,
    element_bytes: int = 4,
) -> float:
    """Seconds until every worker has the sum of all tensors.

    Args:
        ranges: reduction method by tensor size.
        tensor_elements: elements of each tensor.
        route: links between the workers; the last host may have fewer of them.
        method: gives the latencies of messages within a host and between hosts.
        element_bytes: bytes of an element.

    Raises:
        ConfigError: if workers cannot be reduced in that way.
    """
    total, below = 0.0, -1
    for each in ranges:
        most = each.most_elements
        sizes = [
            element_bytes * elements
            for elements in tensor_elements
            if elements > below and (most is None or elements <= most)
        ]
        total += _range_seconds(each, sizes, route, method) if sizes and route.members > 1 else 0.0
        below = below if most is None else most
    return total


def _range_seconds(
    each: ReduceRange, sizes: list[int], route: Route, method: CollectiveMethod
) -> float:
    inside, _, between = each.algorithm.partition("/")
    host = replace(route, members=route.members_per_node, nodes=1, network_bytes_per_second=None)
    hosts = replace(route, members=route.nodes, members_per_node=1)  # one worker of each
    field = "emulation.algorithm.all_reduce_spec"
    if inside == "nccl":
        if not between and route.nodes > 1:
            accepted = "nccl alone reduces within one host; take nccl/xring or nccl/pscpu"
            raise ConfigError(refusal(field, inside, accepted))
        seconds = ring_all_reduce_seconds(sum(sizes), host, method)
    elif between:
        seconds = _served(sizes, 1, False, host, method)
    elif inside in ("pscpu", "psgpu"):
        seconds = _served(sizes, each.shards, inside == "psgpu", route, method)
    else:
        seconds = sum(ring_all_reduce_seconds(size, route, method) for size in sizes)
    if between == "rechd":
        if route.nodes & (route.nodes - 1):
            accepted = "nccl/rechd halves: the hosts must be a power of two"
            raise ConfigError(refusal(field, "nccl/rechd", accepted))
        seconds += sum(halving_doubling_all_reduce_seconds(size, hosts, method) for size in sizes)
    elif between == "xring":
        seconds += sum(ring_all_reduce_seconds(size, hosts, method) for size in sizes)
    elif between:  # a host already has its own gradient in memory, as a device does
        seconds += _served(sizes, each.shards, True, hosts, method)
    return seconds


def _served(
    sizes: list[int], shards: int, on_devices: bool, route: Route, method: CollectiveMethod
) -> float:
    """Seconds of a reduction on servers. Tensors go to groups of `shards` servers round-robin, as
    tf_cnn_benchmarks groups devices: the devices of all workers, or the memories of their hosts."""
    if route.members == 1:
        return 0.0
    servers = route.members if on_devices else route.nodes
    if shards > servers:
        accepted = f"there are {servers} devices to reduce on, and no more shards than those"
        raise ConfigError(refusal("emulation.algorithm.all_reduce_spec", f"#{shards}", accepted))
    groups = -(-servers // shards)
    parts: list[list[int]] = [[] for _ in range(servers)]
    for tensor, size in enumerate(sizes):
        for place in range(tensor % groups, groups * shards, groups):
            parts[place % servers].append(-(-size // shards))
    per_host, methods = route.members_per_node, (method,)
    rate = route.link_bytes_per_second if on_devices else route.host_bytes_per_second
    within = replace(route, nodes=1, network_bytes_per_second=None, link_bytes_per_second=rate)
    hosts = replace(route, members=route.nodes, members_per_node=1)
    slowest = 0.0
    for host in range(route.nodes):
        members = min(per_host, route.members - host * per_host)
        own = parts[host * per_host :][:members] if on_devices else parts[host : host + 1]
        senders = members - on_devices  # a device already has its own gradient
        link = replace(within, members=senders + 1)
        for server in own:
            seconds = sum(permute_seconds(senders * part, link, methods) for part in server)
            slowest = max(slowest, seconds)
        remote = (route.members - members) * sum(map(sum, own))
        slowest = max(slowest, permute_seconds(remote, hosts, methods))
    return 2 * slowest
