"""Many accelerators and what joins them: links in a node, a network between nodes.

A node here is the set of devices that one kind of link joins: a server of 8 GPUs, a rack of
72, a TPU slice. Knows no program; `collectives` says how long an exchange takes.
"""

from dataclasses import dataclass, field
from typing import Literal

from scalejax.core.errors import ConfigError, refusal, require_above, require_at_least
from scalejax.hardware.chip import Chip
from scalejax.hardware.host import HostInput
from scalejax.hardware.site import NO_CONDITIONS, CalibratedRange, RunConditions

LinkKind = Literal["nvswitch", "nvlink_mesh", "pcie", "ici", "host"]
Algorithm = Literal[
    "ring", "tree", "hierarchical", "halving_doubling", "nvls", "parameter_server", "pairwise"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins the devices of a node."""

    kind: LinkKind
    """nvswitch: any device to any at full rate. nvlink_mesh: direct wires, so that fewer
    partners mean fewer wires. pcie: host bus. ici: TPU torus. host: memory of one machine."""
    bytes_per_second: float
    """Nominal rate per device, one way, over all its wires."""
    attainable_fraction: float = 1.0
    """Share of the nominal rate that large messages reach."""
    in_switch_fraction: float | None = None
    """Share of the attainable rate that remains when the switch itself adds up (NVLS); None if
    it cannot."""
    host_bytes_per_second: float | None = None
    """Attainable rate of all devices of a node together to the memory of their host, one way;
    None: as fast as their links."""
    wires: tuple[tuple[int, ...], ...] | None = None
    """Wires between each two devices of an nvlink_mesh, a symmetric matrix; None if unknown.
    Where a node has fewer devices than that, the first."""
    own_share: float = 0.0
    """Time in which a device moves bytes in its own memory over time to send them on the link:
    what the n-th part costs that a ring leaves at home, so that few members are slower."""
    ramp_seconds: float = 0.0
    """Time constant of the pipeline through the link: medium payloads lose 2 sqrt(ramp wire)."""
    in_switch_ramp_seconds: float = 0.0
    """The same, when the switch itself adds up."""
    measured: str | None = None
    """Table of measured times of collectives over this link, in `collective_times/`; None if
    there is none."""

    def __post_init__(self) -> None:
        require_above("link.bytes_per_second", self.bytes_per_second, 0)
        _require_fraction("link.attainable_fraction", self.attainable_fraction)
        if self.host_bytes_per_second is not None:
            require_above("link.host_bytes_per_second", self.host_bytes_per_second, 0)
        for name in ("own_share", "ramp_seconds", "in_switch_ramp_seconds"):
            require_at_least(f"link.{name}", getattr(self, name), 0)
        if self.wires is not None:
            _require_links(self.wires)
        if self.in_switch_fraction is not None:
            _require_fraction("link.in_switch_fraction", self.in_switch_fraction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What joins the nodes."""

    bytes_per_second: float
    """Nominal rate per node, one way, over all its network cards."""
    attainable_fraction: float = 1.0
    """Share of the nominal rate that large messages reach."""
    partial_group_bytes_per_second: float | None = None
    """Nominal rate of all that leaves a node, in groups that hold several of its devices but not
    all, where these use fewer cards than there are; None where they use all."""
    message_seconds: float = 0.0
    """Time that it adds to each message, beyond what the library counts for InfiniBand."""
    ramp_seconds: float = 0.0
    """Time constant of the pipeline through it: medium payloads lose 2 sqrt(ramp wire)."""
    nodes_per_switch: int | None = None
    """Nodes that talk at full rate; None if all do."""
    oversubscription: float = 1.0
    """Factor by which a group over more nodes than that is slower."""

    def __post_init__(self) -> None:
        require_above("network.bytes_per_second", self.bytes_per_second, 0)
        _require_fraction("network.attainable_fraction", self.attainable_fraction)
        if self.partial_group_bytes_per_second is not None:
            name = "network.partial_group_bytes_per_second"
            require_above(name, self.partial_group_bytes_per_second, 0)
        require_at_least("network.message_seconds", self.message_seconds, 0)
        require_at_least("network.ramp_seconds", self.ramp_seconds, 0)
        require_at_least("network.oversubscription", self.oversubscription, 1)
        if self.nodes_per_switch is not None:
            require_at_least("network.nodes_per_switch", self.nodes_per_switch, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveMethod:
    """One way in which the cluster's communication library can run a collective."""

    algorithm: Algorithm
    """How messages travel."""
    protocol: str
    """The library's name for how a message is synchronised: "simple", "ll", "ll128"."""
    bandwidth_fraction: float
    """Share of the attainable link rate that the protocol leaves to payload."""
    base_seconds: float
    """Time of an exchange before its first message."""
    link_hop_seconds: float
    """Time of one message within a node, however small."""
    network_hop_seconds: float
    """Time of one message between nodes, however small."""
    servers: int | None = None
    """Parameter servers, each on a host of its own; None: one on every node of the workers."""

    def __post_init__(self) -> None:
        if self.servers is not None:
            require_at_least("method.servers", self.servers, 1)
        _require_fraction("method.bandwidth_fraction", self.bandwidth_fraction)
        for name in ("base_seconds", "link_hop_seconds", "network_hop_seconds"):
            require_at_least(f"method.{name}", getattr(self, name), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationLibrary:
    """What runs the collectives, and what its messages cost however small they are."""

    name: str
    """Name in the catalogue: "nccl"."""
    title: str
    """Name for people: "NCCL over NVLink"."""
    methods: tuple[CollectiveMethod, ...]
    """Ways to run a collective; the fastest is taken, as the library's own tuner would."""
    runs_buffers_one_by_one: bool = False
    """Whether a collective of several buffers costs its latency once for each, not once."""
    rings_by_number: bool = False
    """Whether devices on a mesh of wires make one ring in the order of their numbers, be there
    wires or not; else rings are laid along the wires."""
    residual: float | None = None
    """Standard deviation of the logarithm of measured over predicted times, so that 0.1 is about
    10 %; None if they were compared with nothing."""
    sources: dict[str, str] = field(default_factory=dict)
    """Where each number above comes from, by its dotted name."""

    def __post_init__(self) -> None:
        algorithms = [method.algorithm for method in self.methods]
        if not set(algorithms) - {"pairwise", "nvls"}:
            accepted = "one must be able to add up, such as a ring"
            raise ConfigError(refusal("library.methods", algorithms, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedChip:
    """A device of a machine whose devices share their cores and memory, all of them busy."""

    device_count: int
    """Devices that are busy on the machine."""
    chip: Chip
    """What each of them is then."""

    def __post_init__(self) -> None:
        require_at_least("shared.device_count", self.device_count, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes of equal devices; devices are numbered node by node."""

    name: str
    """Name in the catalogue: "dgx-h100"."""
    title: str
    """Name for people: "NVIDIA DGX H100, 8 x 400 Gb/s InfiniBand"."""
    chip: Chip
    """Every device."""
    devices_per_node: int
    """Devices that one kind of link joins."""
    link: Link
    """What joins them."""
    library: CommunicationLibrary
    """What runs the collectives."""
    network: Network | None = None
    """What joins the nodes; None if there is but one node."""
    max_device_count: int | None = None
    """Devices in all; None if it may grow."""
    conditions: RunConditions = NO_CONDITIONS
    """What delays runs there beside their own arithmetic."""
    input: HostInput | None = None
    """The input side of every host, from which `conditions.input_samples_per_second` follows;
    None where it is unknown, or given there by hand."""
    shared: tuple[SharedChip, ...] = ()
    """The chip when more than one device of a node is busy, by rising number of them; () where
    devices do not slow each other down."""
    calibrated: CalibratedRange | None = None
    """Runs that its constants were fitted to; None if they come from elsewhere."""
    sources: dict[str, str] = field(default_factory=dict)
    """Where each number above comes from, by its dotted name (chip and library have their own)."""

    def __post_init__(self) -> None:
        require_at_least("devices_per_node", self.devices_per_node, 1)
        if self.link.wires is not None and len(self.link.wires) < self.devices_per_node:
            accepted = f"it must have a row for each of devices_per_node={self.devices_per_node}"
            raise ConfigError(refusal("link.wires", f"{len(self.link.wires)} rows", accepted))
        if self.max_device_count is not None:
            require_at_least("max_device_count", self.max_device_count, 1)


def _require_fraction(field_name: str, fraction: float) -> None:
    if not 0 < fraction <= 1:
        raise ConfigError(refusal(field_name, fraction, "it must be above 0 and at most 1"))


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
