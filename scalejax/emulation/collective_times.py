"""Seconds of the reductions of an `all_reduce_spec` of tf_cnn_benchmarks.

With n members, tensors of P bytes, a latency a and a bandwidth B in each direction:
    ring                 2 (n - 1) (a + P / (n B))
    halving and doubling 2 log2(n) a + 2 (n - 1) / n P / B
    servers              2 a + 2 (bytes received by the fullest) / B: 2 (n - 1) P / S with S equal
                         servers among the members, 2 n P for the memory of a host
A ring or halving reduces one tensor after the other, but NCCL all in one group. Servers take all at
once, each tensor cut into `shards` distributed round-robin, but devices and memory of one host copy
one tensor after the other. Traffic that leaves a host shares its links, and overlaps with the rest.
Knows formulas and links; no events, no values.

Sources: Patarasuk & Yuan 2009, JPDC 69(2); Thakur, Rabenseifner & Gropp 2005, IJHPCA 19(1); Li et
al. 2014, OSDI. Ignores how small tensors are packed together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scalejax.config.all_reduce_spec import ReduceRange
from scalejax.config.emulation import EmulationConfig
from scalejax.core.errors import ConfigError, refusal
from scalejax.emulation.virtual_cluster import Durations


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceLinks:
    """Links between the workers."""

    workers: int
    """Number of workers."""
    workers_per_host: int
    """Workers on each host."""
    latency_seconds: float
    """Latency of a message between hosts."""
    hop_seconds: float
    """Latency of a message within a host."""
    network_bytes_per_second: float | None
    """Bandwidth of a host to the others, each direction; None: unlimited."""
    link_bytes_per_second: float | None
    """Bandwidth of a device to the others of its host, each direction; None: unlimited."""
    host_bytes_per_second: float | None
    """Bandwidth of all devices of a host to its memory, each direction; None: unlimited."""

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return -(-self.workers // self.workers_per_host)


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
    hop = durations.hop_seconds
    links = ReduceLinks(
        workers=emulation.workers,
        workers_per_host=durations.workers_per_host,
        latency_seconds=durations.latency_seconds,
        hop_seconds=durations.latency_seconds if hop is None else hop,
        network_bytes_per_second=durations.worker_bytes_per_second,
        link_bytes_per_second=mode.link_rate or durations.link_bytes_per_second,
        host_bytes_per_second=mode.link_rate or durations.host_bytes_per_second,
    )
    seconds = reduction_seconds(mode.all_reduce_ranges, tensor_elements, links)
    return replace(durations, collective_seconds=seconds)


def reduction_seconds(
    ranges: Sequence[ReduceRange],
    tensor_elements: Sequence[int],
    links: ReduceLinks,
    *,
    element_bytes: int = 4,
) -> float:
    """Seconds until every worker has the sum of all tensors.

    Args:
        ranges: reduction method by tensor size.
        tensor_elements: elements of each tensor.
        links: links between the workers.
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
        total += _range_seconds(each, sizes, links) if sizes and links.workers > 1 else 0.0
        below = below if most is None else most
    return total


def _range_seconds(each: ReduceRange, sizes: list[int], links: ReduceLinks) -> float:
    inside, _, between = each.algorithm.partition("/")
    per_host = min(links.workers, links.workers_per_host)
    hop, link = links.hop_seconds, links.link_bytes_per_second
    latency, network = links.latency_seconds, links.network_bytes_per_second
    if not between:  # all workers alike
        if inside == "nccl":
            if links.hosts > 1:
                accepted = "nccl alone reduces within one host; take nccl/xring or nccl/pscpu"
                field = "emulation.algorithm.all_reduce_spec"
                raise ConfigError(refusal(field, inside, accepted))
            return _ring([sum(sizes)], links.workers, hop, link)
        if inside in ("pscpu", "psgpu"):
            return _served(sizes, each.shards, inside == "psgpu", links)
        if links.hosts == 1:
            return _ring(sizes, links.workers, hop, link)
        return _ring(sizes, links.workers, latency, network)
    local = (
        _ring([sum(sizes)], per_host, hop, link)
        if inside == "nccl"
        else _served(sizes, 1, False, replace(links, workers=per_host))
    )
    if between == "rechd":
        return local + _halved(sizes, links.hosts, latency, network)
    if between == "xring":
        return local + _ring(sizes, links.hosts, latency, network)
    # One worker of each host, whose gradient is already in host memory.
    hosts = replace(links, workers=links.hosts, workers_per_host=1, host_bytes_per_second=None)
    return local + _served(sizes, each.shards, False, hosts)


def _ring(sizes: list[int], members: int, latency: float, rate: float | None) -> float:
    moved = sum(sizes) / members / rate if rate else 0.0
    return 2 * (members - 1) * (len(sizes) * latency + moved)


def _halved(sizes: list[int], members: int, latency: float, rate: float | None) -> float:
    if members & (members - 1):
        accepted = "nccl/rechd halves: the hosts must be a power of two"
        raise ConfigError(refusal("emulation.algorithm.all_reduce_spec", "nccl/rechd", accepted))
    moved = (members - 1) / members * sum(sizes) / rate if rate else 0.0
    return 2 * ((members.bit_length() - 1) * len(sizes) * latency + moved)


def _served(sizes: list[int], shards: int, on_devices: bool, links: ReduceLinks) -> float:
    """Seconds of a reduction on servers. Tensors go to groups of `shards` servers round-robin, as
    tf_cnn_benchmarks groups devices: the devices of all workers, or the memories of their hosts."""
    if links.workers == 1:
        return 0.0
    servers = links.workers if on_devices else links.hosts
    if shards > servers:
        accepted = f"there are {servers} devices to reduce on, and no more shards than those"
        raise ConfigError(refusal("emulation.algorithm.all_reduce_spec", f"#{shards}", accepted))
    groups = -(-servers // shards)
    loads, copies = [0.0] * servers, [0] * servers
    for tensor, size in enumerate(sizes):
        for place in range(tensor % groups, groups * shards, groups):
            loads[place % servers] += size / shards
            copies[place % servers] += 1
    per_host = links.workers_per_host
    slowest = 0.0
    for host in range(links.hosts):
        members = min(per_host, links.workers - host * per_host)
        own = (
            slice(host * per_host, host * per_host + members)
            if on_devices
            else slice(host, host + 1)
        )
        senders = members - on_devices  # a device already has its own gradient
        rate = links.link_bytes_per_second if on_devices else links.host_bytes_per_second
        within = senders * max(loads[own]) / rate if rate else 0.0
        within += links.hop_seconds * max(copies[own]) if senders else 0.0
        network = links.network_bytes_per_second
        remote = (links.workers - members) * sum(loads[own])
        from_others = links.latency_seconds + (remote / network if network else 0.0)
        slowest = max(slowest, within, from_others if links.hosts > 1 else 0.0)
    return 2 * slowest
