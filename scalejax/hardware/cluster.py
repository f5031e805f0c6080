"""Specification of a cluster: devices, links within a node, network between nodes.

A node here is the set of devices that one kind of link connects: a server of 8 GPUs, a rack of 72,
a TPU slice. Knows no program; `simulator.collectives` costs collectives.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from scalejax.core.errors import (
    ConfigError,
    DoesNotFit,
    refusal,
    require_above,
    require_at_least,
    require_at_most,
    require_attained,
    require_byte_rates,
    require_physical,
)
from scalejax.hardware.chip import Chip, require_residual
from scalejax.hardware.site import CalibratedRange

LinkKind = Literal["nvswitch", "nvlink_mesh", "pcie", "ici", "host"]
Algorithm = Literal[
    "ring",
    "tree",
    "hierarchical",
    "halving_doubling",
    "nvls",
    "sharp",
    "parameter_server",
    "pairwise",
]

LaunchMode = Literal["asynchronous", "blocking", "graph"]
"""How a host launches operations: ahead of the devices; each only after the previous one has ended
(CUDA_LAUNCH_BLOCKING=1); or many at once, as a CUDA graph (XLA's command buffers, torch.cuda.graph,
MXNET_ENABLE_CUDA_GRAPHS=1)."""


_LARGEST_MULTIPLE = 1e3
"""Largest multiple of the library's latencies, and largest oversubscription."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Interconnect of the devices of a node."""

    kind: LinkKind
    """nvswitch: any device to any at full rate. nvlink_mesh: direct links, so that fewer partners
    mean fewer links. pcie: host bus. ici: TPU torus. host: memory of one machine."""
    bytes_per_second: float
    """Nominal rate per device, one way, over all its links."""
    attainable_fraction: float = 1.0
    """Share of the nominal rate that large messages reach."""
    in_switch_fraction: float | None = None
    """Share of the attainable rate with in-switch reduction (NVLS); None if there is none."""
    host_bytes_per_second: float | None = None
    """Attainable rate of all devices of a node together to their host's memory, one way; None: as
    fast as their links."""
    wires: tuple[tuple[int, ...], ...] | None = None
    """Number of links between each two devices of an nvlink_mesh, a symmetric matrix; None if
    unknown. A node with fewer devices uses the first rows."""
    own_share: float = 0.0
    """Time in which a device copies bytes within its memory over the time to send them on the link,
    at most 1: the cost of the n-th part of a payload, which a ring does not send, so that small
    groups are slower."""
    ramp_seconds: float = 0.0
    """Time constant of the pipeline through the link: medium payloads take 2 sqrt(ramp x transfer
    time) longer."""
    in_switch_ramp_seconds: float = 0.0
    """Time constant of the pipeline with in-switch reduction."""
    ring_multiple: int | None = None
    """For ici: an axis of a slice closes to a ring if its length is a multiple of this; None for
    one ring of all devices."""
    latency_fraction: float = 1.0
    """Latency of collectives within a node over that of the library's constants: the chip's clock
    sets the time of a kernel's start and of each of its messages."""
    measured: str | None = None
    """Table of measured times of collectives over this link, in `collective_times/`; None if
    there is none."""

    def __post_init__(self) -> None:
        require_physical("link.", self)
        require_byte_rates("link.", self)
        require_attained("link.attainable_fraction", self.attainable_fraction)
        require_at_most("link.own_share", self.own_share, 1)  # no memory is slower than its link
        require_at_most("link.latency_fraction", self.latency_fraction, _LARGEST_MULTIPLE)
        require_above("link.latency_fraction", self.latency_fraction, 0)
        require_at_least("link.ring_multiple", self.ring_multiple, 1)
        for name in ("own_share", "ramp_seconds", "in_switch_ramp_seconds"):
            require_at_least(f"link.{name}", getattr(self, name), 0)
        if self.wires is not None:
            _require_links(self.wires)
        require_attained("link.in_switch_fraction", self.in_switch_fraction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Network between the nodes."""

    bytes_per_second: float
    """Nominal rate per node, one way, over all its network cards."""
    attainable_fraction: float = 1.0
    """Share of the nominal rate that large messages reach."""
    partial_group_bytes_per_second: float | None = None
    """Nominal rate per node of groups that hold several but not all of its devices, if these use
    only some of the network cards; None if they use all."""
    message_seconds: float = 0.0
    """Latency added to each message, beyond that of the library's constants for InfiniBand."""
    ramp_seconds: float = 0.0
    """Time constant of the pipeline through the network: medium payloads take 2 sqrt(ramp x
    transfer time) longer."""
    measured: str | None = None
    """Table of measured times of collectives over all devices of several nodes, in
    `collective_times/`; None if there is none."""
    nodes_per_switch: int | None = None
    """Nodes that communicate at full rate; None if all do. In a fat tree those of a leaf switch; if
    a leaf joins cards of one number (rails), as many as it has ports; in a dragonfly those of a
    group."""
    oversubscription: float = 1.0
    """Factor by which groups over more nodes than `nodes_per_switch` are slower: the rate of the
    cards below a leaf over that of its links to the spine; in a dragonfly, the rate of a group's
    cards over that of its global links."""
    sums_in_switches: bool = False
    """Whether switches sum what nodes send (SHARP)."""
    keeps_order: bool = True
    """Whether what a device writes arrives in order, as required by low-latency protocols, whose
    data hold the flags that signal their arrival."""

    def __post_init__(self) -> None:
        require_physical("network.", self)
        require_byte_rates("network.", self)
        require_attained("network.attainable_fraction", self.attainable_fraction)
        require_at_least("network.message_seconds", self.message_seconds, 0)
        require_at_least("network.ramp_seconds", self.ramp_seconds, 0)
        require_at_least("network.oversubscription", self.oversubscription, 1)
        require_at_least("network.nodes_per_switch", self.nodes_per_switch, 1)
        require_at_most("network.nodes_per_switch", self.nodes_per_switch, 1e6)
        require_at_most("network.oversubscription", self.oversubscription, _LARGEST_MULTIPLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Host memory, to which arrays are offloaded."""

    bytes_per_second: float
    """Attainable rate from each device of a node to host memory while all copy, one way."""
    memory_bytes: int | None = None
    """Memory of a node; None if unknown."""

    def __post_init__(self) -> None:
        require_physical("host.", self)
        require_byte_rates("host.", self)
        if self.memory_bytes is not None:
            require_above("host.memory_bytes", self.memory_bytes, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveMethod:
    """An algorithm and protocol by which a communication library can run a collective."""

    algorithm: Algorithm
    """Algorithm of the collective."""
    protocol: str
    """Protocol of the messages, as the library names it: "simple", "ll", "ll128"."""
    bandwidth_fraction: float
    """Share of the attainable link rate that the protocol leaves to payload."""
    base_seconds: float
    """Time of a collective before its first message."""
    link_hop_seconds: float
    """Latency of one message within a node."""
    network_hop_seconds: float
    """Latency of one message between nodes."""
    link_hop_multiple_over_nodes: float = 1.0
    """`link_hop_seconds` of a group over several nodes, relative to a group within a node."""
    network_base_seconds: float = 0.0
    """Additional time before the first message of a collective over several nodes: the hosts'
    proxies start."""
    network_payload_bytes_per_second: float | None = None
    """Rate at which messages with flags, which the host's proxy posts, pass a hop between nodes,
    whatever the cards; each hop passes the whole payload. None if it flows at the rate of the
    links."""
    servers: int | None = None
    """Parameter servers, each on its own host; None: one on every node of the workers."""

    def __post_init__(self) -> None:
        require_physical("method.", self)
        require_at_least("method.servers", self.servers, 1)
        require_above(
            "method.network_payload_bytes_per_second", self.network_payload_bytes_per_second, 0
        )
        require_attained("method.bandwidth_fraction", self.bandwidth_fraction)
        require_at_most(
            "method.link_hop_multiple_over_nodes",
            self.link_hop_multiple_over_nodes,
            _LARGEST_MULTIPLE,
        )
        require_above("method.link_hop_multiple_over_nodes", self.link_hop_multiple_over_nodes, 0)
        for name in ("base", "link_hop", "network_hop", "network_base"):
            require_at_least(f"method.{name}_seconds", getattr(self, f"{name}_seconds"), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationLibrary:
    """A communication library: the algorithms of its collectives and their latencies."""

    name: str
    """Name in the catalogue: "nccl"."""
    title: str
    """Name for people: "NCCL over NVLink"."""
    methods: tuple[CollectiveMethod, ...]
    """Methods to run a collective; the fastest is chosen, as the library's own tuner does."""
    runs_buffers_one_by_one: bool = False
    """Whether a collective of several buffers has its latency once per buffer, not once."""
    rings_by_number: bool = False
    """Whether devices of an nvlink_mesh form one ring in the order of their numbers, linked or not;
    else rings follow the links."""
    residual: float | None = None
    """Standard deviation of the logarithm of measured over predicted times, so that 0.1 is about
    10 %; None if not compared with measurements."""
    sources: dict[str, str] = field(default_factory=dict)
    """Where each number above comes from, by its dotted name."""

    def __post_init__(self) -> None:
        algorithms = [method.algorithm for method in self.methods]
        if not set(algorithms) - {"pairwise", "nvls", "sharp"}:
            accepted = "one must be able to reduce, such as a ring"
            raise ConfigError(refusal("library.methods", algorithms, accepted))
        require_residual("library.residual", self.residual)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchRates:
    """Rates at which a library for experts sends tokens within a node."""

    base_seconds: float
    """Time of a dispatch or a combine before its first token."""
    token_seconds: float
    """Time per token of a device, whatever its size."""
    link_bytes_per_second: float
    """Rate from each device to all others of its node, limited by copying multiprocessors."""
    message_seconds: float = 0.0
    """Time per token and per other node that it goes to, whatever its size, in a network that takes
    messages from a proxy on the host instead of the device itself."""

    def __post_init__(self) -> None:
        require_physical("dispatch.", self)
        for name in ("base_seconds", "token_seconds", "message_seconds"):
            require_at_least(f"dispatch.{name}", getattr(self, name), 0)
        require_above("dispatch.link_bytes_per_second", self.link_bytes_per_second, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchLibrary:
    """A library that sends each token to its experts, and sums what they return.

    It knows which tokens go where: a token crosses the network once per node, and the links once
    per device, with one of its experts, whereas a plain all-to-all sends a copy per expert.
    """

    name: str
    """Name in the catalogue: "deepep"."""
    title: str
    """Name for people: "DeepEP, normal kernels"."""
    rates: DispatchRates
    """Rates on chips that were not measured."""
    network_fraction: float
    """Share of the network's attainable rate that it reaches."""
    network_seconds: float = 0.0
    """Additional time of a dispatch or a combine over several nodes, which first exchanges token
    counts."""
    chips: dict[str, DispatchRates] = field(default_factory=dict)
    """Rates on measured chips, by name."""
    sources: dict[str, str] = field(default_factory=dict)
    """Where each number above comes from, by its dotted name."""

    def __post_init__(self) -> None:
        require_attained("dispatch.network_fraction", self.network_fraction)
        require_physical("dispatch.", self)
        require_at_least("dispatch.network_seconds", self.network_seconds, 0)

    def rates_on(self, chip: str) -> DispatchRates:
        """Rates on the chip of that name."""
        return self.chips.get(chip, self.rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedChip:
    """The chip under load on a machine whose devices share cores and memory."""

    device_count: int
    """Busy devices on the machine."""
    chip: Chip
    """Each of these devices, with its rates under load."""

    def __post_init__(self) -> None:
        require_physical("shared.", self)
        require_at_least("shared.device_count", self.device_count, 2)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Name of a cluster, which is part of file names and table keys."""
_DATE = re.compile(r"[0-9]{4}(-(0[1-9]|1[0-2])(-(0[1-9]|[12][0-9]|3[01]))?)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """List price at which a device is rented."""

    dollars_per_device_hour: float
    """US dollars for an hour of one device with its share of host and network, on demand."""
    date: str | None = None
    """When that was the price: "2025-10-22", or the month or year, as far as known; None for the
    user's own price, which is not a list price."""

    def __post_init__(self) -> None:
        require_above("price.dollars_per_device_hour", self.dollars_per_device_hour, 0)
        if self.date is not None and not _DATE.fullmatch(self.date):
            accepted = 'it must be a day, month or year, such as "2025-10-22"'
            raise ConfigError(refusal("price.date", self.date, accepted))

    @property
    def in_words(self) -> str:
        """Which price it is: "list price of 2026-05-18"."""
        return "own price" if self.date is None else f"list price of {self.date}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Electric power of a device with its share of its node: host, fans, network cards."""

    max_watts: float | None = None
    """Most that it may draw, by the rating of its node; None if unknown."""
    training_watts: float | None = None
    """Measured draw while it trains; None if unknown."""
    idle_watts: float | None = None
    """Draw while nothing runs; None if unknown."""
    pue: float | None = None
    """Power of the whole data centre over that of its machines, 1 or more; None if unknown."""

    def __post_init__(self) -> None:
        known = [
            (name, watts)
            for name in ("idle_watts", "training_watts", "max_watts")
            if (watts := getattr(self, name)) is not None
        ]
        for name, watts in known:
            require_above(f"power.{name}", watts, 0)
        for (less, low), (more, high) in pairwise(known):
            if low > high:
                raise ConfigError(
                    refusal(f"power.{less}", low, f"it must be at most {more}={high}")
                )
        require_at_least("power.pue", self.pue, 1)
        require_at_most("power.pue", self.pue, 10)

    @property
    def watts(self) -> float | None:
        """Draw of a device in a run: as measured, else the maximum; None if unknown."""
        return self.max_watts if self.training_watts is None else self.training_watts


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes of equal devices; devices are numbered node by node.

    Example:
        >>> from dataclasses import replace
        >>> from scalejax import load_cluster
        >>> cluster = load_cluster("dgx-h100")
        >>> cluster.chip.name, cluster.devices_per_node
        ('h100', 8)
        >>> one_rack = replace(cluster, name="one-rack", max_device_count=32)
    """

    name: str
    """Name in the catalogue: "dgx-h100"."""
    title: str
    """Name for people: "NVIDIA DGX H100, 8 x 400 Gb/s InfiniBand"."""
    chip: Chip
    """Chip of every device."""
    devices_per_node: int
    """Devices per node, connected by `link`."""
    link: Link
    """Interconnect within a node."""
    library: CommunicationLibrary
    """Communication library."""
    network: Network | None = None
    """Network between nodes; None if there is only one node."""
    host: HostMemory | None = None
    """Host memory; None if unknown, in which case programs that offload arrays are not costed."""
    dispatch: DispatchLibrary | None = None
    """Library that sends tokens to experts and back; None for all-to-alls of `library`."""
    max_device_count: int | None = None
    """Devices of the whole cluster; None if unlimited."""
    launch_mode: LaunchMode = "asynchronous"
    """How hosts launch operations."""
    shared: tuple[SharedChip, ...] = ()
    """The chip while several devices of a node are busy, by rising number of busy devices; () if
    devices do not slow each other down."""
    price: Price | None = None
    """List price of a device; None if none is known."""
    power: Power | None = None
    """Electric power of a device; None if unknown."""
    calibrated: CalibratedRange | None = None
    """Runs that the constants were fitted to; None if they come from elsewhere."""
    sources: dict[str, str] = field(default_factory=dict)
    """Source of each number above, by its dotted name (chip and library have their own)."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            accepted = "it must be letters, digits and . _ -, beginning with a letter or a digit"
            raise ConfigError(refusal("name", self.name, accepted))
        require_physical("", self)
        require_at_least("devices_per_node", self.devices_per_node, 1)
        if self.link.wires is not None and len(self.link.wires) < self.devices_per_node:
            accepted = f"it must have a row for each of devices_per_node={self.devices_per_node}"
            raise ConfigError(refusal("link.wires", f"{len(self.link.wires)} rows", accepted))
        require_at_least("max_device_count", self.max_device_count, 1)

    @property
    def most_devices(self) -> float:
        """Devices of the whole cluster, or of a node without a network; infinite if unlimited."""
        if self.max_device_count is not None:
            return self.max_device_count
        return math.inf if self.network is not None else self.devices_per_node

    def host_memory_bytes(self, device_count: int) -> int | None:
        """Host memory per device in a run of `device_count` devices; None if unknown."""
        if self.host is None or self.host.memory_bytes is None:
            return None
        return self.host.memory_bytes // min(device_count, self.devices_per_node)

    def require_devices(self, count: int, *, field: str = "devices") -> None:
        """Refuse more devices than the cluster has.

        Args:
            count: requested devices.
            field: name of the field that requests them.

        Raises:
            DoesNotFit: stating how many it has.
        """
        if count > (most := self.most_devices):
            raise DoesNotFit(f"{field}={count} is refused: {self.name} has at most {most}.")


def require_own_names(clusters: Sequence[Cluster]) -> None:
    """Refuse two clusters with the same name, whose rows and files could not be distinguished.

    Raises:
        ConfigError: naming all clusters.
    """
    names = [each.name for each in clusters]
    if len(set(names)) < len(names):
        raise ConfigError(refusal("cluster", names, "each needs a name of its own"))


def _require_links(wires: tuple[tuple[int, ...], ...]) -> None:
    is_square = all(len(row) == len(wires) for row in wires)
    if (
        not is_square
        or any(
            wires[a][b] != wires[b][a] or wires[a][b] < 0 or wires[a][a] != 0
            for a in range(len(wires))
            for b in range(len(wires))
        )
        or not all(map(sum, wires))
    ):
        accepted = "it must be a symmetric matrix of counts, zero on its diagonal, no row all zero"
        raise ConfigError(refusal("link.wires", wires, accepted))
