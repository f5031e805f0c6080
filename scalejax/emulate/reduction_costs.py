"""Seconds that the reductions of an `all_reduce_spec` take, by the plain formulas.

With n members, tensors of P bytes, a latency a and a rate B of each way:
    ring                 2 (n - 1) (a + P / (n B))
    halving and doubling 2 log2(n) a + 2 (n - 1) / n P / B
    servers              2 a + 2 n (bytes of the fullest server) / B: 2 n P / S of S equal ones
A ring or halving takes one tensor after the other; servers take all at once, each tensor cut into
`shards` and dealt out in turn. Knows formulas and wires; no events, no values.

Sources: Patarasuk & Yuan 2009, JPDC 69(2); Thakur, Rabenseifner & Gropp 2005, IJHPCA 19(1); Li et
al. 2014, OSDI. Ignores how small tensors are packed together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scalejax.all_reduce_spec import ReduceRange
from scalejax.emulate.world import Durations
from scalejax.emulation_config import EmulationConfig
from scalejax.emulation_modes import KvStoreConfig, VariableUpdateConfig
from scalejax.errors import ConfigError, refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceWires:
    """What joins the workers."""

    workers: int
    """All of them."""
    workers_per_host: int
    """Those that share a host."""
    latency_seconds: float
    """Of a message."""
    network_bytes_per_second: float | None
    """From one host to the others, each way; None: nothing is ever slow there."""
    host_bytes_per_second: float | None
    """Between the workers of one host; None likewise."""

    @property
    def hosts(self) -> int:
        """Hosts that have workers."""
        return -(-self.workers // self.workers_per_host)


def with_reduction(
    durations: Durations, emulation: EmulationConfig, tensor_elements: Sequence[int]
) -> Durations:
    """`durations` with the exchange of a mode that another program names, if nobody gives it.

    Raises:
        ConfigError: if workers cannot be reduced in that way.
    """
    mode = emulation.algorithm
    is_given = emulation.timing.exchange_seconds is not None
    is_mode = isinstance(mode, VariableUpdateConfig | KvStoreConfig)
    if not is_mode or is_given or not emulation.is_all_reduced:
        return durations
    wires = ReduceWires(
        workers=emulation.workers,
        workers_per_host=durations.workers_per_host,
        latency_seconds=durations.latency_seconds,
        network_bytes_per_second=durations.worker_bytes_per_second,
        host_bytes_per_second=mode.host_bytes_per_second,
    )
    seconds = reduction_seconds(mode.reduction, tensor_elements, wires)
    return replace(durations, exchange_seconds=seconds)


def reduction_seconds(
    ranges: Sequence[ReduceRange],
    tensor_elements: Sequence[int],
    wires: ReduceWires,
    *,
    element_bytes: int = 4,
) -> float:
    """Time until every worker has the sum of all tensors.

    Args:
        ranges: how tensors are reduced, by their sizes.
        tensor_elements: numbers in each tensor.
        wires: what joins the workers.
        element_bytes: size of a number.

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
        total += _range_seconds(each, sizes, wires) if sizes and wires.workers > 1 else 0.0
        below = below if most is None else most
    return total


def _range_seconds(each: ReduceRange, sizes: list[int], wires: ReduceWires) -> float:
    inside, _, between = each.algorithm.partition("/")
    per_host = min(wires.workers, wires.workers_per_host)
    latency, network, host = (
        wires.latency_seconds,
        wires.network_bytes_per_second,
        wires.host_bytes_per_second,
    )
    if not between:  # all workers alike
        if inside == "nccl" and wires.hosts > 1:
            accepted = "nccl alone reduces within one host; take nccl/xring, nccl/rechd, nccl/pscpu"
            raise ConfigError(refusal("emulation.algorithm.all_reduce_spec", inside, accepted))
        rate = host if wires.hosts == 1 else network
        if inside in ("pscpu", "psgpu"):
            servers = wires.hosts if inside == "pscpu" else wires.workers
            return _served(sizes, wires.workers, servers, each.shards, latency, rate)
        return _ring(sizes, wires.workers, latency, rate)
    local = (
        _ring(sizes, per_host, latency, host)
        if inside == "nccl"
        else _served(sizes, per_host, 1, 1, latency, host)
    )
    if between == "rechd":
        return local + _halved(sizes, wires.hosts, latency, network)
    if between == "xring":
        return local + _ring(sizes, wires.hosts, latency, network)
    return local + _served(sizes, wires.hosts, wires.hosts, each.shards, latency, network)


def _ring(sizes: list[int], members: int, latency: float, rate: float | None) -> float:
    moved = sum(sizes) / members / rate if rate else 0.0
    return 2 * (members - 1) * (len(sizes) * latency + moved)


def _halved(sizes: list[int], members: int, latency: float, rate: float | None) -> float:
    if members & (members - 1):
        accepted = "nccl/rechd halves: the hosts must be a power of two"
        raise ConfigError(refusal("emulation.algorithm.all_reduce_spec", "nccl/rechd", accepted))
    moved = (members - 1) / members * sum(sizes) / rate if rate else 0.0
    return 2 * ((members.bit_length() - 1) * len(sizes) * latency + moved)


def _served(
    sizes: list[int], members: int, servers: int, shards: int, latency: float, rate: float | None
) -> float:
    """Tensors go to groups of `shards` servers in turn, as tf_cnn_benchmarks groups devices."""
    if members == 1:
        return 0.0
    if shards > servers:
        accepted = f"there are {servers} devices to reduce on, and no more shards than those"
        raise ConfigError(refusal("emulation.algorithm.all_reduce_spec", f"#{shards}", accepted))
    groups = -(-servers // shards)
    loads = [0.0] * servers
    for tensor, size in enumerate(sizes):
        for place in range(tensor % groups, groups * shards, groups):
            loads[place % servers] += size / shards
    return 2 * (latency + (members * max(loads) / rate if rate else 0.0))
