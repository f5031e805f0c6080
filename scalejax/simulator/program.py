"""A compiled step as plain data: operations in schedule order, loops, memory.

Written by `profile` (from XLA's program) and by the closed-form transformer; read by the timeline
and `predict`. Contains bytes and FLOP, never seconds: no JAX, no clock and no hardware.

All figures are those of *one* device. A collective appears where it starts; if it is
asynchronous, a `wait` follows where its result is needed. The order of the operations is the
schedule, so no other dependency is kept: compute runs in order on one stream, communication
on another, and the two synchronise at starts and waits.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from scalejax.core.errors import (
    ConfigError,
    prefixed,
    refusal,
    require_at_least,
    require_at_most,
)
from scalejax.core.serialization import document, load

CollectiveName = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "collective_permute",
    "copy_to_host",
    "copy_from_host",
]
ConvolutionPass = Literal["forward", "input_gradient", "filter_gradient"]
GroupedPass = Literal["forward", "input_gradient", "weight_gradient"]
OperationKind = Literal[
    "matmul", "convolution", "attention", "fusion", "copy", "collective", "wait", "custom"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """The devices that take part in one collective, as a grid of strides.

    `extents` ((4, 8), (2, 1)) is the group {base + 8 i + j : i < 4, j < 2}; all groups of one
    collective have the same extents and different bases. Devices are numbered along the mesh,
    major to minor, so that devices k apart in number are k apart in the cluster.
    """

    extents: tuple[tuple[int, int], ...]
    """(size, stride) of each dimension of the group, major to minor."""
    axes: tuple[str, ...]
    """Mesh axes that the group spans; empty if the group is not a product of axes."""

    @property
    def size(self) -> int:
        """Devices in the group."""
        size = 1
        for extent, _ in self.extents:
            size *= extent
        return size


HOST_MEMORY = DeviceGroup(extents=((1, 1),), axes=("host memory",))
"""The group of a copy to or from host memory: the device alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedTokens:
    """Tokens that an all-to-all sends to their experts, or back."""

    tokens: int
    """Tokens of one device."""
    experts_per_token: int
    """Experts that each token goes to: copies of it in the payload."""
    experts: int
    """Routed experts on all devices of the group."""
    most_nodes: int | None = None
    """Nodes that the experts of one token are limited to; None if they may be on any."""
    has_capacity: bool = False
    """Whether experts take no more tokens than their capacity: uneven loads then drop some tokens
    and send no more than even ones."""

    def __post_init__(self) -> None:
        for name in ("tokens", "experts_per_token", "experts"):
            require_at_least(f"tokens.{name}", getattr(self, name), 1)
        if self.experts_per_token > self.experts:
            accepted = f"a token goes to distinct ones of experts={self.experts}"
            raise ConfigError(refusal("tokens.experts_per_token", self.experts_per_token, accepted))
        require_at_least("tokens.most_nodes", self.most_nodes, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective operation between the devices of a group, or a copy between a device and its
    host's memory, which is scheduled the same way."""

    name: CollectiveName
    """Kind of collective, or direction of the copy."""
    payload_bytes: int
    """Bytes of the full buffer: the sum (all_reduce), the gathered result (all_gather), the input
    before scattering (reduce_scatter); otherwise one device's input."""
    group: DeviceGroup
    """Devices that take part."""
    is_async: bool
    """Whether compute continues until a `wait` for the collective."""
    buffer_count: int = 1
    """Buffers that make up the payload, combined into one collective."""
    share: float = 1.0
    """Fraction of the steps in which it runs, 0..1: 1/8 when averaging every 8 steps."""
    tokens: RoutedTokens | None = None
    """Tokens of an all-to-all for experts; None for other collectives."""

    @property
    def is_send(self) -> bool:
        """Whether each device sends to only one other."""
        return self.name == "collective_permute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of the schedule."""

    name: str
    """The compiler's name for the operation, unique in the program."""
    kind: OperationKind
    """Kind for costing: a fusion that holds a matmul is a `matmul`."""
    dtype: str
    """Element type that sets the arithmetic rate ("bf16", "f32", ...): for a matrix product or
    convolution, of its operands ("f32_highest" if they must not be rounded to tf32); otherwise of
    the result."""
    flop: int = 0
    """FLOP of one run of its matrix products, convolutions and fused attention; 0 for others
    (element-wise arithmetic is ignored: it is bound by bytes)."""
    read_bytes: int = 0
    """Bytes it reads; for a slice, only the slice."""
    write_bytes: int = 0
    """Bytes it writes; for an in-place update, only the update."""
    shape: tuple[int, ...] = ()
    """(batch, m, n, k) of a matmul, for grouped ones see `grouped_pass`; (samples, output
    positions, input channels of a group, output channels, window positions) of a convolution,
    where gradients have the shape of the forward convolution; (samples x heads, query tokens, key
    tokens, head size) of fused attention; () otherwise."""
    convolution_pass: ConvolutionPass | None = None
    """Pass that a convolution belongs to; None for other kinds, and if the pass is unknown."""
    convolution_groups: int = 1
    """Groups into which a convolution divides its channels: all of them if depthwise."""
    channels_first: bool = False
    """Whether a convolution's arrays have channels before positions (NCHW), PyTorch's default;
    otherwise their layout is the one that 16-bit matrix units read."""
    grouped_pass: GroupedPass | None = None
    """Pass of a grouped product, whose rows are divided among groups with a matrix each, as tokens
    are among experts; None for other operations. Its `shape` is (groups on the device, mean rows
    per group, outer, inner) of the forward product, in which a group's matrix is inner x outer.
    Its `flop` count the actual rows, 2 rows outer inner, which need not be a multiple of the
    groups."""
    collective: Collective | None = None
    """The collective, for kind "collective"."""
    share: float = 1.0
    """Fraction of the steps in which it runs, 0..1; its figures are for a step in which it does."""
    waits_for: str | None = None
    """Name of the asynchronous collective that a "wait" completes."""
    source: str | None = None
    """Place in the user's program that it comes from, "file.py:line" or a name scope."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBlocks:
    """Work of a loop over blocks of expert rows: one block of one expert at a time."""

    experts: int
    """Experts on the device."""
    rows: int
    """Rows of a block; an expert's last block is padded."""
    experts_per_token: int
    """Experts that each token goes to: an expert has at most one in this many of the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Operations that repeat, such as the layers of a scanned network."""

    name: str
    """The compiler's name for the loop."""
    trip_count: int
    """Iterations of the body."""
    body: tuple["Operation | Loop", ...]
    """The operations of one iteration, in schedule order."""
    expert_blocks: ExpertBlocks | None = None
    """Blocks of expert rows, if that is what the iterations are; `trip_count` then assumes experts
    with equally many tokens. None for other loops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedBytes:
    """Bytes that the allocator of a framework reserves of a device's memory, in use or free."""

    bytes: int
    """The estimate."""
    p10_bytes: int
    """One run in ten reserves less."""
    p90_bytes: int
    """One run in ten reserves more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes that one device holds while the program runs, as the compiler assigned them."""

    argument_bytes: int
    """Inputs: parameters, optimizer state, batch."""
    output_bytes: int
    """Results."""
    alias_bytes: int
    """Part of the results that reuses inputs (donated buffers)."""
    temporary_bytes: int
    """Peak of everything else: activations, gradients, workspace."""
    kernel_bytes: int = 0
    """Workspace that kernels allocate while they run, which the compiler does not count: on CPUs,
    padded copies for convolutions."""
    host_bytes: int = 0
    """Host memory of what the program offloads; not in `peak_bytes`."""
    reserved: ReservedBytes | None = None
    """What the framework's allocator reserves, including free blocks, which it releases when memory
    is short: whether a program fits depends on `peak_bytes`. None if nothing more is reserved, or
    if that is unknown."""

    @classmethod
    def of_statistics(cls, statistics: Any) -> "MemoryUse":
        """Memory of a compiled program, from its `memory_analysis`."""
        return cls(
            argument_bytes=statistics.argument_size_in_bytes,
            output_bytes=statistics.output_size_in_bytes,
            alias_bytes=statistics.alias_size_in_bytes,
            temporary_bytes=statistics.temp_size_in_bytes,
            host_bytes=statistics.host_argument_size_in_bytes
            + statistics.host_output_size_in_bytes
            - statistics.host_alias_size_in_bytes
            + statistics.host_temp_size_in_bytes,
        )

    @property
    def peak_bytes(self) -> int:
        """Most bytes held at once, before the runtime's own reserve."""
        held = self.argument_bytes + self.output_bytes - self.alias_bytes
        return held + self.temporary_bytes + self.kernel_bytes


@document("program")
@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A compiled step: the schedule of each device, its memory and its batch.

    Example:
        >>> from scalejax import Program, load_cluster, predict
        >>> from scalejax.simulator.program import MemoryUse, Operation
        >>> side = 8192
        >>> program = Program(
        ...     name="a matrix product by hand",
        ...     backend="closed_form",
        ...     target="any",
        ...     compiler="none",
        ...     mesh_axes=(("data", 8),),
        ...     operations=(
        ...         Operation(
        ...             name="product", kind="matmul", dtype="bf16", shape=(1, side, side, side),
        ...             flop=2 * side**3, read_bytes=4 * side**2, write_bytes=2 * side**2,
        ...         ),
        ...     ),
        ...     memory=MemoryUse(
        ...         argument_bytes=4 * side**2, output_bytes=2 * side**2, alias_bytes=0,
        ...         temporary_bytes=0,
        ...     ),
        ... )
        >>> predict(program, load_cluster("dgx-h100")).fits
        True
    """

    name: str
    """Title of the step: "resnet50 train step"."""
    backend: Literal["cuda", "cpu", "tpu", "closed_form"]
    """Compiler backend of the schedule. A "cpu" program is a substitute where the target cannot
    be compiled for: its FLOP and its number of collectives carry over; its fusions and overlap do
    not, and its bytes do only if the target would not use bf16, which CPUs widen to f32."""
    target: str
    """Chip that it was compiled for, as the compiler describes it ("sm_90", "cpu")."""
    compiler: str
    """Versions of the compiler: "jax 0.10.2, jaxlib 0.10.2"."""
    mesh_axes: tuple[tuple[str, int], ...]
    """(name, size) of each mesh axis, major to minor."""
    operations: tuple[Operation | Loop, ...]
    """The schedule of one device."""
    memory: MemoryUse
    """Memory of one device."""
    global_batch: int | None = None
    """Samples per step over all devices; None if the program is not a training step."""
    tokens_per_sample: int | None = None
    """Tokens in a sample; None for images."""
    model_flop: int | None = None
    """FLOP that the model itself needs per step over all devices, recompute not counted:
    three times the forward pass. The numerator of MFU; None if unknown."""
    state_bytes: int | None = None
    """Parameters and optimizer state of one replica, over all devices; None if unknown."""
    framework: str = "xla-2026"
    """Name of the framework that runs the step."""
    most_blocks: float = 1.0
    """Blocks of the pipeline stage with the most blocks, over those of the stage that this program
    describes: the former's host takes that many times as long to launch them; all wait for it."""
    notes: tuple[str, ...] = ()
    """Caveats on how the step was compiled."""

    @property
    def device_count(self) -> int:
        """Devices in the mesh."""
        count = 1
        for _, size in self.mesh_axes:
            count *= size
        return count

    def walk(self) -> Iterator[tuple[Operation, int]]:
        """Yield every operation with the number of times it runs, counting loop iterations."""
        yield from _walk(self.operations, 1)

    @property
    def flop(self) -> int:
        """FLOP of one device in one step, recompute included."""
        return round(sum(item.flop * item.share * times for item, times in self.walk()))

    def collective_bytes(self, name: CollectiveName) -> int:
        """Payload bytes of all collectives of one kind per step, averaged over all steps."""
        return round(
            sum(
                operation.collective.payload_bytes * operation.collective.share * times
                for operation, times in self.walk()
                if operation.collective is not None and operation.collective.name == name
            )
        )


_NAMED = 3
"""Maximum number of collectives that an error message names."""
_MOST_RUNS, _MOST_FLOP, _MOST_BYTES = 1e9, 1e21, 1e18
"""Bounds for one device and step: a billion operations; ten days at a petaFLOP/s; ten thousand
times the memory of any device, moved once a second for a day."""


def load_program(path: Path) -> Program:
    """The program in a file that `scalejax` wrote.

    Raises:
        ConfigError: if the file is missing or damaged, or no device could run what it says.
    """
    program = load(Program, path)
    with prefixed(f"{path}: "):
        _require_possible(program)
        require_known_waits(program)
    return program


def require_known_waits(program: Program) -> None:
    """Refuse a program in which an operation waits for a collective that is not in the program.

    Raises:
        ConfigError: naming both, and some collectives of the program.
    """
    started = {item.name for item, _ in program.walk() if item.collective is not None}
    for item, _ in program.walk():
        if item.waits_for is not None and item.waits_for not in started:
            named = ", ".join(map(repr, sorted(started)[:_NAMED])) or "here there is none"
            more = f", and {len(started) - _NAMED:,} more" if len(started) > _NAMED else ""
            accepted = (
                "it must be the name of an operation of the program that has a collective "
                f"({named}{more}), or absent"
            )
            raise ConfigError(refusal(f"{item.name[:80]}.waits_for", item.waits_for, accepted))


def _require_possible(program: Program) -> None:
    for name, size in program.mesh_axes:
        require_at_least(f"mesh_axes.{name}", size, 1)
        require_at_most(f"mesh_axes.{name}", size, 2**20)
    require_at_most("mesh_axes", program.device_count, 2**20)
    for name in ("global_batch", "tokens_per_sample"):
        require_at_least(name, getattr(program, name), 1)
        require_at_most(name, getattr(program, name), 2**40)
    _require_counts("", program)
    _require_counts("memory.", program.memory)
    if program.memory.peak_bytes < 0:
        accepted = "it must be at most what arguments, results and the rest are together"
        raise ConfigError(refusal("memory.alias_bytes", program.memory.alias_bytes, accepted))
    for item in program.operations:
        _require_possible_item(item)
    total: dict[str, float] = {"operations": 0, "flop": 0, "read_bytes": 0, "write_bytes": 0}
    for operation, times in program.walk():
        moved = operation.collective.payload_bytes if operation.collective else 0
        counts = (1, operation.flop, operation.read_bytes + moved, operation.write_bytes)
        for name, count in zip(total, counts, strict=True):
            total[name] += count * times
    most = (_MOST_RUNS, _MOST_FLOP, _MOST_BYTES, _MOST_BYTES)
    for (name, count), limit in zip(total.items(), most, strict=True):
        require_at_most(f"the sum of {name}, in loops as often as they run,", count, limit)


def _require_possible_item(item: Operation | Loop) -> None:
    where = f"{item.name[:80]}."
    if isinstance(item, Loop):
        require_at_least(f"{where}trip_count", item.trip_count, 0)
        require_at_most(f"{where}trip_count", item.trip_count, _MOST_RUNS)
        if item.expert_blocks is not None:
            for name in ("experts", "rows", "experts_per_token"):
                value = getattr(item.expert_blocks, name)
                require_at_least(f"{where}expert_blocks.{name}", value, 1)
        for each in item.body:
            _require_possible_item(each)
        return
    _require_counts(where, item)
    require_at_least(f"{where}convolution_groups", item.convolution_groups, 1)
    for size in item.shape:
        require_at_least(f"{where}shape", size, 0)
        require_at_most(f"{where}shape", size, 2**40)
    if (collective := item.collective) is None:
        return
    where += "collective."
    _require_counts(where, collective)
    require_at_least(f"{where}buffer_count", collective.buffer_count, 1)
    for extent in collective.group.extents:
        for each in extent:
            require_at_least(f"{where}group.extents", each, 1)
            require_at_most(f"{where}group.extents", each, 2**20)


def _require_counts(where: str, part: object) -> None:
    """Refuse bytes and FLOP of a part of a program that are negative or beyond any device, and
    shares outside 0..1."""
    for each in fields(part):  # type: ignore[arg-type]  a dataclass
        value = getattr(part, each.name)
        if each.name == "share":
            require_at_least(f"{where}{each.name}", value, 0)
            require_at_most(f"{where}{each.name}", value, 1)
        elif each.name.endswith(("flop", "bytes")):
            require_at_least(f"{where}{each.name}", value, 0)
            # `model_flop` counts all devices.
            most = _MOST_FLOP * 2**20 if each.name.endswith("flop") else _MOST_BYTES
            require_at_most(f"{where}{each.name}", value, most)


def each_changed(
    items: Iterable[Operation | Loop], change: Callable[[Operation], Operation]
) -> tuple[Operation | Loop, ...]:
    """`items` with `change` applied to every operation, in loops at any depth."""
    return tuple(
        replace(item, body=each_changed(item.body, change))
        if isinstance(item, Loop)
        else change(item)
        for item in items
    )


def with_channels_first(program: Program, is_first: bool = True) -> Program:
    """`program` with the arrays of its convolutions in channels-first layout, or channels-last."""

    def changed(item: Operation) -> Operation:
        return replace(item, channels_first=is_first) if item.kind == "convolution" else item

    return replace(program, operations=each_changed(program.operations, changed))


def with_share(items: Iterable[Operation | Loop], share: float) -> tuple[Operation | Loop, ...]:
    """`items`, run in the fraction `share` of the steps in which they ran before."""

    def shared(item: Operation) -> Operation:
        collective = item.collective
        if collective is not None:
            collective = replace(collective, share=collective.share * share)
        return replace(item, share=item.share * share, collective=collective)

    return each_changed(items, shared)


def _walk(operations: tuple[Operation | Loop, ...], times: int) -> Iterator[tuple[Operation, int]]:
    for item in operations:
        if isinstance(item, Loop):
            yield from _walk(item.body, times * item.trip_count)
        else:
            yield item, times
