"""Rows of ledgers of single operations: collectives, products, attention, dispatch of experts.

Each class is one format: its fields are the columns, and it says which cost function of the
simulator predicts its row. Chips and clusters are found as for rows of step times (`clusters`).
Nothing here is fitted, and only the catalogue's tables use a measured row for its own prediction.

An operation measured alone is costed without the gaps and the overhead of a step. Bands are those
of the communication library; the residuals of chips are for whole steps and are not used here.
"""

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar, cast

from scalejax.core.errors import ConfigError, ScalejaxError, require_at_most
from scalejax.hardware import (
    Chip,
    Cluster,
    attention_rates_names,
    load_attention_rates,
    load_chip,
    load_dispatch,
    load_matmul_table,
    matmul_table_names,
)
from scalejax.simulator.collectives.placement import collective_seconds
from scalejax.simulator.expert_load import device_load_factor
from scalejax.simulator.operations.grouped_matmul import (
    GroupedProduct,
    grouped_product_time,
    rates_of,
)
from scalejax.simulator.operations.matmul import Shape, compulsory_bytes, product_flop
from scalejax.simulator.operations.roofline import operation_time
from scalejax.simulator.program import (
    Collective,
    CollectiveName,
    DeviceGroup,
    Operation,
    RoutedTokens,
)
from scalejax.simulator.uncertainty import Z_OF_P90
from scalejax.validation.cases import one_line
from scalejax.validation.clusters import chip_name, cluster_of_machine
from scalejax.validation.ledger import LedgerMachine
from scalejax.validation.summary import Quantity, RowResult
from scalejax.validation.table import MAY_BE_ZERO

Estimate = tuple[float, float | None]
"""(predicted seconds, standard deviation of ln(measured / predicted), None if unknown)."""

_MICROSECOND = 1e-6
_XLA = "openxla/xla (Apache-2.0)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a row states, in the same terms for every format."""

    name: str
    """What distinguishes it from other rows."""
    hardware: str
    """The ledger's name of the chip."""
    seconds: float
    """Measured time."""
    source: str
    """Publication, and the place in it."""
    library: str
    """Library that ran it."""
    group: str
    """Group of its ledger that it is summarised in."""
    devices: int = 1
    """Devices that take part."""
    nearest: tuple[str, ...] = ()
    """Which parts of it are only approximated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRow(ABC):
    """One measured operation."""

    quantity: ClassVar[Quantity]
    """What it measures."""

    @abstractmethod
    def measured(self) -> Measured:
        """What the row states."""

    @abstractmethod
    def predicted(self) -> Estimate:
        """Its time as the simulator predicts it.

        Raises:
            ScalejaxError: if the catalogue lacks the hardware, or the simulator the operation.
        """


def result_of(row: OperationRow, ledger: str) -> RowResult:
    """Prediction and measurement of a row, or the reason why there is no prediction."""
    seconds, deviation, status = None, None, "ok"
    try:
        seconds, deviation = row.predicted()
    except ScalejaxError as error:
        status = f"skipped: {one_line(error)}"
    has_band = seconds is not None and deviation is not None
    factor = math.exp(Z_OF_P90 * (deviation or 0.0))
    found = row.measured()
    family = _words(ledger, found.group)
    return RowResult(
        case_id=found.name,
        series=family,
        device_count=found.devices,
        measured_seconds=found.seconds,
        predicted_seconds=seconds,
        p10_seconds=seconds / factor if seconds is not None and has_band else None,
        p90_seconds=seconds * factor if seconds is not None and has_band else None,
        status=status,
        is_mapped=seconds is not None,
        nearest=() if seconds is None else found.nearest,
        kind=None,
        quantity=row.quantity,
        ledger=ledger,
        family=family,
        framework=found.library,
        chip=chip_name(found.hardware),
        source=found.source,
    )


def _words(*parts: object) -> str:
    return " ".join(str(part) for part in parts if part not in (None, ""))


# Measured by NVIDIA AIConfigurator.

_TYPES = {
    "bfloat16": "bf16",
    "fp8": "f8e4m3fn",
    "fp8_block": "f8e4m3fn",
    "nvfp4": "f4e2m1fn",
}
"""The simulator's name of an element type, by AIConfigurator's."""
_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5 + 1 / 16}
"""Bytes of an element; NVFP4 includes a scale for every 16."""
_NEAREST_TYPES = {"fp8_block": ("scales of blocks by a scale of the tensor",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class AiConfiguratorRow(OperationRow):
    """A row of one of AIConfigurator's tables."""

    system: str
    """Name of the chip."""
    file: str | None = None
    """File of the source: "h100_sxm/gemm/trtllm/1.0.0/gemm_perf.parquet"."""

    def _said(
        self,
        name: str,
        microseconds: float,
        group: str,
        *,
        library: str | None = None,
        devices: int = 1,
        nearest: tuple[str, ...] = (),
    ) -> Measured:
        folders = (self.file or "").split("/")
        return Measured(
            name=_words(self.system, name),
            hardware=self.system,
            seconds=microseconds * _MICROSECOND,
            source=_words("NVIDIA AIConfigurator (Apache-2.0)", self.file),
            library=library or (folders[2] if len(folders) > 2 else ""),
            group=group,
            devices=devices,
            nearest=nearest,
        )

    def _chip(self) -> Chip:
        return _chip(self.system)

    def _cluster(self) -> Cluster:
        return cluster_of_machine(LedgerMachine(hardware=self.system), "")


def _chip(hardware: str) -> Chip:
    # Asks for a cluster, whose error says that the catalogue has no such chip.
    cluster_of_machine(LedgerMachine(hardware=hardware), "")
    return load_chip(chip_name(hardware))


def _type(dtype: str, chip: Chip) -> str:
    """The simulator's name of an element type that the chip multiplies natively.

    Raises:
        ConfigError: if there is none, or the chip would convert it.
    """
    if dtype not in _TYPES:
        raise ConfigError(f"no products in {dtype!r}")
    found = _TYPES[dtype]
    wanted = {"f8": "fp8", "f4": "fp4"}.get(found[:2])
    if wanted is not None and wanted not in chip.peak_flop_per_second:
        raise ConfigError(f"{chip.name} does not multiply {wanted}")
    return found


# Collectives.

_OPERATIONS: dict[str, CollectiveName] = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "collectivepermute": "collective_permute",
}
"""The simulator's name of a collective, by the letters of a ledger's name for it."""


def _operation(name: str) -> str:
    """The simulator's name of a collective, or the ledger's own if there is none."""
    return _OPERATIONS.get(re.sub("[^a-z]", "", name.lower()), name)


_MOST_DEVICES = 10_000_000
"""More than any cluster has; the route of a group has an entry for each."""


def _collective(
    name: str,
    payload_bytes: int,
    devices: int,
    cluster: Cluster,
    tokens: RoutedTokens | None = None,
) -> Estimate:
    """Time of a collective, and the deviation of its library.

    Raises:
        ConfigError: if there is no such collective, or no cluster has that many devices.
    """
    if _operation(name) not in _OPERATIONS.values():
        raise ConfigError(f"no collective {name!r}")
    require_at_most("devices", devices, _MOST_DEVICES)
    collective = Collective(
        name=cast(CollectiveName, _operation(name)),
        payload_bytes=payload_bytes,
        group=DeviceGroup(extents=((devices, 1),), axes=("data",)),
        is_async=False,
        tokens=tokens,
    )
    return collective_seconds(collective, cluster), cluster.library.residual


_CHIP_IN_WORDS = re.compile(r"(?<![A-Z0-9])(A100|V100|H100|H200|A800|H800|GB200|GB300|B200|B300)")
_SIZED = {"A100": "a100_sxm_80gb", "V100": "v100_sxm2_16gb", "H100": "h100_sxm_80gb"}
"""Name of a chip in step times, if the words leave its memory open."""
_CARDS = re.compile(r"(?:(\d+)\s*x\s*)?(\d+)\s*Gb/s(\s*per GPU)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceRow(OperationRow):
    """Seconds of a collective within or between nodes (columns of all_reduce_times.csv)."""

    quantity: ClassVar[Quantity] = "collectives"

    case_id: str
    """Name of a series of payloads."""
    hardware: str
    """Hardware in words: "AWS p5 8xH100"."""
    device_count: int
    """Devices that take part."""
    devices_per_node: int
    """Devices of a node that take part, or that it has."""
    operation: str
    """The collective."""
    payload_bytes: int
    """Bytes of the full buffer."""
    seconds: float
    """Measured time."""
    source: str
    """Publication."""
    source_locator: str | None = None
    """Place in the publication."""
    intra_node_link: str | None = None
    """Link between the devices of a node."""
    inter_node_link: str | None = None
    """Network of a node, in words: "4x100Gb/s EFA"."""

    def measured(self) -> Measured:
        """What the row states."""
        return Measured(
            name=f"{self.case_id} {self.payload_bytes} B",
            hardware=self._chip_name(),
            seconds=self.seconds,
            source=", ".join(filter(None, (self.source, self.source_locator))),
            library="nccl",
            group=_operation(self.operation),
            devices=self.device_count,
        )

    def predicted(self) -> Estimate:
        """Its time on the cluster that the row names, with the network that it states."""
        machine = LedgerMachine(
            hardware=self._chip_name(),
            devices_per_node=self.devices_per_node,
            intra_node_link=self.intra_node_link,
            node_network_gbit_per_second=self._network_gigabits(),
        )
        words = f"{self.hardware} {self.inter_node_link or ''} {self.source}"
        cluster = cluster_of_machine(machine, words)
        return _collective(self.operation, self.payload_bytes, self.device_count, cluster)

    def _chip_name(self) -> str:
        found = _CHIP_IN_WORDS.search(self.hardware)
        return _SIZED.get(found[1], found[1].lower()) if found else self.hardware

    def _network_gigabits(self) -> float | None:
        """Rate of the cards of a node, 1e9 bits per second, if the row states it."""
        found = _CARDS.search(self.inter_node_link or "")
        if found is None:
            return None
        cards = self.devices_per_node if found[3] else int(found[1] or 1)
        return float(cards * int(found[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRateRow(OperationRow):
    """Bytes per second of a collective within a node (columns of nvlink_collective_rates.csv, from
    XLA's tables): full bytes over time; a reduce-scatter counts the elements of a shard."""

    quantity: ClassVar[Quantity] = "collectives"

    hardware: str
    """Name of the chip."""
    operation: str
    """The collective."""
    element_type: str
    """Type of an element: "F32"."""
    elements: int
    """Elements of the result."""
    device_count: int | None = None
    """Devices that take part; None for a permutation, where it does not matter."""
    bytes_per_second: float
    """Full bytes over time."""

    def measured(self) -> Measured:
        """What the row states."""
        group = _operation(self.operation)
        return Measured(
            name=_words(self.hardware, group, self._devices, "devices", self._payload_bytes, "B"),
            hardware=self.hardware,
            seconds=self._payload_bytes / self.bytes_per_second,
            source=_XLA,
            library="nccl",
            group=group,
            devices=self._devices,
        )

    def predicted(self) -> Estimate:
        """Its time within a node of the fastest cluster with the chip."""
        cluster = cluster_of_machine(LedgerMachine(hardware=self.hardware), "")
        return _collective(self.operation, self._payload_bytes, self._devices, cluster)

    @property
    def _devices(self) -> int:
        return self.device_count or 2

    @property
    def _payload_bytes(self) -> int:
        bits = re.search(r"\d+", self.element_type)
        payload = self.elements * int(bits[0] if bits else 32) // 8
        is_shard = _operation(self.operation) == "reduce_scatter"
        return payload * self._devices if is_shard else payload


_NCCL_BYTES = {"half": 2, "int8": 1}
"""Bytes of an element of nccl_times.csv."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCollectiveRow(AiConfiguratorRow):
    """Microseconds of a collective of NCCL within a node (columns of nccl_times.csv)."""

    quantity: ClassVar[Quantity] = "collectives"

    operation: str
    """The collective."""
    dtype: str
    """Type of an element."""
    devices: int
    """Devices that take part."""
    message_bytes: int
    """Elements of the full buffer, which the table calls bytes: a gather of half precision agrees
    within 0.5 % with one of twice as many int8."""
    microseconds: float
    """Measured time."""

    def measured(self) -> Measured:
        """What the row states."""
        group = _operation(self.operation)
        name = f"{group} {self.devices} devices {self.message_bytes} {self.dtype}"
        return self._said(name, self.microseconds, group, library="nccl", devices=self.devices)

    def predicted(self) -> Estimate:
        """Its time within a node."""
        payload = self.message_bytes * _NCCL_BYTES.get(self.dtype, 1)
        return _collective(self.operation, payload, self.devices, self._cluster())


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomAllReduceRow(AiConfiguratorRow):
    """Microseconds of an all-reduce by an inference framework's own kernel within a node (columns
    of custom_allreduce_times.csv)."""

    quantity: ClassVar[Quantity] = "collectives"

    dtype: str
    """Type of an element."""
    devices: int
    """Devices that take part."""
    message_size: int
    """Bytes of the buffer."""
    microseconds: float
    """Measured time."""
    implementation: str
    """Framework of the kernel: "TRTLLM"."""

    def measured(self) -> Measured:
        """What the row states; the kernel is not one of the catalogue's libraries."""
        return self._said(
            f"{self.implementation} {self.devices} devices {self.message_size} B",
            self.microseconds,
            "all_reduce",
            library=self.implementation.lower(),
            devices=self.devices,
            nearest=(f"the kernel of {self.implementation} by NCCL",),
        )

    def predicted(self) -> Estimate:
        """The time of NCCL's all-reduce, whose deviation does not hold for these kernels."""
        seconds, _ = _collective("all_reduce", self.message_size, self.devices, self._cluster())
        return seconds, None


@dataclass(frozen=True, slots=True, kw_only=True)
class BusBandwidthRow(OperationRow):
    """Bus bandwidth of a collective of 256 MiB over nodes of 8 H100 (columns of
    hf_cluster_collectives_256MB.csv), as nccl-tests defines it (its doc/PERFORMANCE.md)."""

    quantity: ClassVar[Quantity] = "collectives"

    operation: str
    """The collective."""
    nodes_of_8_h100: int
    """Nodes."""
    bus_bandwidth_gbytes_per_s: float
    """Bus bandwidth, 1e9 bytes per second."""
    source: str
    """Publication."""

    def measured(self) -> Measured:
        """What the row states."""
        group = _operation(self.operation)
        passes = 2 if group == "all_reduce" else 1
        share = passes * (self._devices - 1) / self._devices
        return Measured(
            name=f"{group} {self.nodes_of_8_h100} nodes",
            hardware="h100_sxm_80gb",
            seconds=share * _TESTED_BYTES / (self.bus_bandwidth_gbytes_per_s * 1e9),
            source=self.source,
            library="nccl",
            group=group,
            devices=self._devices,
        )

    def predicted(self) -> Estimate:
        """Its time on the cluster that step times from the same source get."""
        machine = LedgerMachine(hardware="h100_sxm_80gb", devices_per_node=8)
        cluster = cluster_of_machine(machine, self.source)
        return _collective(self.operation, _TESTED_BYTES, self._devices, cluster)

    @property
    def _devices(self) -> int:
        return 8 * self.nodes_of_8_h100


_TESTED_BYTES = 2**28


# Products.


def _product_seconds(shape: Shape, dtype: str, chip: Chip) -> float:
    operation = Operation(
        name="product",
        kind="matmul",
        dtype=dtype,
        flop=product_flop(shape),
        read_bytes=compulsory_bytes(shape, chip.rate_type(dtype)),
        shape=shape,
    )
    return operation_time(operation, chip).busy_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRateRow(OperationRow):
    """FLOP/s of a matrix product (columns of gemm_rates.csv, from XLA's tables)."""

    quantity: ClassVar[Quantity] = "products"

    hardware: str
    """Name of the chip."""
    batch: int
    """Products of one operation."""
    m: int
    """Rows of the result."""
    n: int
    """Columns of the result."""
    k: int
    """Terms of each sum."""
    types: str
    """Types of operands and result: "bf16xbf16->bf16"."""
    flop_per_second: float
    """Measured rate."""

    def measured(self) -> Measured:
        """What the row states."""
        return Measured(
            name=_words(self.hardware, "x".join(map(str, self._shape)), self.types),
            hardware=self.hardware,
            seconds=product_flop(self._shape) / self.flop_per_second,
            source=_XLA,
            library="xla",
            group=self._dtype,
        )

    def predicted(self) -> Estimate:
        """The time of the product, and the overhead of measuring it alone."""
        chip = _chip(self.hardware)
        table = chip.attainable.matmul_table
        aside = 0.0 if table is None else load_matmul_table(table).form.aside_seconds
        return _product_seconds(self._shape, self._dtype, chip) + aside, None

    @property
    def _shape(self) -> Shape:
        return self.batch, self.m, self.n, self.k

    @property
    def _dtype(self) -> str:
        known = (name for name in ("bf16", "f32", "f8e4m3fn") if self.types.startswith(name))
        return next(known, self.types)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTimeRow(AiConfiguratorRow):
    """Microseconds of a matrix product (columns of gemm_times.csv)."""

    quantity: ClassVar[Quantity] = "products"

    dtype: str
    """Type of the operands."""
    m: int
    """Rows of the result."""
    n: int
    """Columns of the result."""
    k: int
    """Terms of each sum."""
    microseconds: float
    """Measured time."""

    def measured(self) -> Measured:
        """What the row states."""
        name = f"{self.dtype} {self.m}x{self.n}x{self.k}"
        nearest = _NEAREST_TYPES.get(self.dtype, ())
        return self._said(name, self.microseconds, self.dtype, nearest=nearest)

    def predicted(self) -> Estimate:
        """The time of the layer: the product, and the cast of its input to fp8 or fp4, as fitted to
        other rows of the chip."""
        chip = self._chip()
        shape = (1, self.m, self.n, self.k)
        product = _product_seconds(shape, _type(self.dtype, chip), chip)
        cast, of_element, slower = _layers(chip).get(self.dtype, (0.0, 0.0, 1.0))
        return slower * product + cast + of_element * self.m * self.k, None


def _layers(chip: Chip) -> dict[str, tuple[float, float, float]]:
    """What linear layers measured on a chip took besides their products, by type, from the table
    made from such layers, whether or not the chip is costed by it."""
    for name in (chip.attainable.matmul_table, f"{chip.name}-2026", chip.name):
        if name in matmul_table_names():
            layers = load_matmul_table(name).form.layers
            if layers:
                return layers
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayerRow(AiConfiguratorRow):
    """Microseconds of a layer of experts, forward, on one device (columns of
    expert_gemm_forward_times.csv): two grouped products, and what moves their rows.

    The rows are gathered by expert, the activation reads and writes them between the products, and
    they are added up by token, at the rate and with the fixed time fitted to other layers of the
    chip (`experiments/grouped_products`), or as element-wise operations if none were fitted.
    """

    quantity: ClassVar[Quantity] = "grouped products"

    kernel: str
    """Which kernel."""
    dtype: str
    """Type of the operands."""
    tokens: int
    """Tokens of all devices that share the experts."""
    hidden: int
    """Width of a token."""
    expert_hidden: int
    """Inner width of an expert."""
    topk: int
    """Experts of a token."""
    experts: int
    """Routed experts."""
    tensor_parallel: int
    """Devices that share each expert."""
    expert_parallel: int
    """Devices that share the experts."""
    distribution: str
    """Loads of experts: "balanced" or "power_law_1.2"."""
    microseconds: float
    """Measured time."""

    def measured(self) -> Measured:
        """What the row states."""
        sizes = f"{self.tokens} tokens {self.hidden}x{self.expert_hidden}"
        layer = f"{sizes} {self.topk} of {self.experts}"
        spread = f"tp {self.tensor_parallel} ep {self.expert_parallel}"
        return self._said(
            _words(self.kernel, self.dtype, layer, spread, self.distribution),
            self.microseconds,
            self.dtype,
            library=self.kernel,
            nearest=_NEAREST_TYPES.get(self.dtype, ()),
        )

    def predicted(self) -> Estimate:
        """The time of its products and of what moves their rows."""
        chip = self._chip()
        dtype = _type(self.dtype, chip)
        rows = self.tokens * self.topk / self.expert_parallel * self._load()
        width = self.expert_hidden // self.tensor_parallel
        up = width if "nongated" in self.kernel else 2 * width
        products = (
            GroupedProduct(
                groups=self.experts // self.expert_parallel,
                rows=rows,
                outer=outer,
                inner=inner,
                dtype=dtype,
            )
            for outer, inner in ((up, self.hidden), (self.hidden, width))
        )
        multiplied = math.fsum(grouped_product_time(each, chip).busy_seconds for each in products)
        fitted = rates_of(chip).layers.get(chip.rate_type(dtype))
        if fitted is not None:
            fixed, share = fitted
            moved = rows * (2 * self.hidden + up + width) * 2 + self.tokens * 2 * self.hidden * 2
            return multiplied + fixed + moved / (share * chip.memory_bytes_per_second), None
        element = _BYTES[self.dtype]
        moved_bytes = (
            self.tokens * self.hidden * 2 + rows * self.hidden * element,  # gather, and cast
            rows * (up * 2 + width * element),  # activation
            rows * self.hidden * 2 + self.tokens * self.hidden * 2,  # sum
        )
        beside = math.fsum(_elementwise_seconds(each, chip) for each in moved_bytes)
        return multiplied + beside, None

    def _load(self) -> float:
        """Rows of the fullest device over the mean."""
        if self.experts % self.expert_parallel or self.expert_hidden % self.tensor_parallel:
            raise ConfigError("experts that their devices do not divide")
        law = re.fullmatch(r"power_law_([\d.]+)", self.distribution)
        if law is None and self.distribution != "balanced":
            raise ConfigError(f"distribution {self.distribution!r}")
        return device_load_factor(
            float(law[1]) if law else None,
            experts=self.experts,
            devices=self.expert_parallel,
            experts_per_token=self.topk,
        )


def _elementwise_seconds(moved_bytes: float, chip: Chip) -> float:
    moved = math.ceil(moved_bytes)
    operation = Operation(name="rows", kind="fusion", dtype="bf16", read_bytes=moved)
    return operation_time(operation, chip).busy_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRow(AiConfiguratorRow):
    """Microseconds of a layer of causal attention, forward (columns of
    attention_forward_times.csv): positions are embedded, and keys and values written, before its
    kernel. With a cache of keys and values in fp8, the kernel of Hopper and Blackwell multiplies in
    fp8; rows do not say so, and are assumed to be bf16 (`experiments/attention_rates`)."""

    quantity: ClassVar[Quantity] = "attention"

    dtype: str
    """Type of the operands."""
    batch: int
    """Samples."""
    sequence: int
    """Tokens of a sample."""
    heads: int
    """Heads of queries."""
    kv_heads: int
    """Heads of keys and values."""
    head_dim: int
    """Size of a head."""
    window: int = field(metadata=MAY_BE_ZERO)
    """Tokens that a query sees; 0 for all before it."""
    microseconds: float
    """Measured time."""

    def measured(self) -> Measured:
        """What the row states."""
        shape = f"batch {self.batch} sequence {self.sequence} heads {self.heads}/{self.kv_heads}"
        seen = f"window {self.window}" if self.window else None
        name = _words(self.dtype, shape, f"of {self.head_dim}", seen)
        return self._said(name, self.microseconds, self.dtype)

    def predicted(self) -> Estimate:
        """The time of the kernel, at its rate for forward alone if there is one, and of what
        precedes it."""
        if self.dtype != "bfloat16":
            raise ConfigError(f"no attention in {self.dtype!r}")
        queries, tokens = self.batch * self.heads, self.sequence
        seen = tokens / 2
        if self.window and self.window < tokens:
            seen = self.window - self.window**2 / (2 * tokens)
        row_bytes = self.batch * tokens * self.head_dim * 2
        operation = Operation(
            name="attention",
            kind="attention",
            dtype="bf16",
            flop=round(4 * queries * tokens * seen * self.head_dim),
            read_bytes=row_bytes * (self.heads + 2 * self.kv_heads),
            write_bytes=row_bytes * self.heads,
            shape=(queries, tokens, tokens, self.head_dim),
        )
        chip = self._chip()
        if chip.name not in attention_rates_names():
            return operation_time(operation, chip).busy_seconds, None
        rates = load_attention_rates(chip.name)
        attainable = replace(chip.attainable, attention_rates=rates.name)
        kernel = operation_time(operation, replace(chip, attainable=attainable)).busy_seconds
        passed = row_bytes * (3 * self.heads + 4 * self.kv_heads)
        passes = rates.layer_passes * passed / chip.memory_bytes_per_second
        return kernel * rates.both_over_forward + rates.layer_seconds + passes, None


# Dispatch of tokens to experts.

_FULL_SPEED_SMS = 24
"""Multiprocessors that copy in DeepEP's normal kernels, to which the rates of the catalogue were
fitted (`experiments/expert_dispatch`)."""
_TRAYS = {"gb200": 4, "gb300": 4}
"""Devices of a node in AIConfigurator's tables, as that experiment reads them; 8 on others."""
_DISPATCHED_BYTES, _COMBINED_BYTES = 1 + 4 / 128, 2.0
"""Bytes of a value that DeepEP dispatches (fp8 with a scale for every 128), and combines."""
_MOST_NODES = 4
"""Nodes that the experts of one token are limited to in DeepEP's benchmark (num_topk_groups)."""


def _dispatch_seconds(
    tokens: RoutedTokens, hidden: int, element_bytes: float, devices: int, cluster: Cluster
) -> float:
    payload = round(tokens.tokens * tokens.experts_per_token * hidden * element_bytes)
    seconds, _ = _collective("all_to_all", payload, devices, cluster, tokens)
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchRow(AiConfiguratorRow):
    """Microseconds of a dispatch and its combine by DeepEP (columns of
    expert_dispatch_combine_deepep.csv), added: the rates of the catalogue were fitted to both."""

    quantity: ClassVar[Quantity] = "dispatch"

    kind: str
    """Which kernels of DeepEP."""
    nodes: int
    """Nodes."""
    hidden: int
    """Width of a token."""
    tokens_per_device: int
    """Tokens of each device."""
    topk: int
    """Experts of a token."""
    experts: int
    """Routed experts."""
    sms: int
    """Multiprocessors that copy."""
    dispatch_us: float
    """Time of the dispatch."""
    dispatch_notify_us: float = field(default=0.0, metadata=MAY_BE_ZERO)
    """Time of the notification before it."""
    combine_us: float
    """Time of the combine."""
    combine_notify_us: float = field(default=0.0, metadata=MAY_BE_ZERO)
    """Time of the notification before it."""

    def measured(self) -> Measured:
        """What the row states."""
        tokens = f"{self.tokens_per_device} tokens of {self.hidden}, {self.topk} of {self.experts}"
        parts = self.dispatch_us, self.dispatch_notify_us, self.combine_us, self.combine_notify_us
        return self._said(
            f"{self.kind} {self.nodes} nodes {tokens} sms {self.sms}",
            sum(parts),
            f"{self.nodes} nodes",
            library="deepep",
            devices=self._devices,
        )

    def predicted(self) -> Estimate:
        """The time of both, by the catalogue's library."""
        if self.sms != _FULL_SPEED_SMS:
            raise ConfigError(f"{self.sms} multiprocessors that copy, not {_FULL_SPEED_SMS}")
        cluster = replace(
            self._cluster(),
            devices_per_node=self._devices // self.nodes,
            dispatch=load_dispatch("deepep"),
        )
        tokens = RoutedTokens(
            tokens=self.tokens_per_device,
            experts_per_token=self.topk,
            experts=self.experts,
            most_nodes=min(self.nodes, _MOST_NODES),
        )
        seconds = sum(
            _dispatch_seconds(tokens, self.hidden, each, self._devices, cluster)
            for each in (_DISPATCHED_BYTES, _COMBINED_BYTES)
        )
        return seconds, None

    @property
    def _devices(self) -> int:
        return self.nodes * _TRAYS.get(self.system, 8)


_DISPATCH, _COMBINE = "alltoall_dispatch", "alltoall_combine"
"""Operations of TensorRT-LLM's tables that send tokens as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertAllToAllRow(AiConfiguratorRow):
    """Microseconds of one operation of TensorRT-LLM's all-to-all of experts over NVLink (columns of
    expert_alltoall_trtllm.csv)."""

    quantity: ClassVar[Quantity] = "dispatch"

    operation: str
    """Which of its operations."""
    kernel: str
    """Which of its kernels."""
    dtype: str
    """Type of a value."""
    tokens: int
    """Tokens of each device."""
    hidden: int
    """Width of a token."""
    topk: int
    """Experts of a token."""
    experts: int
    """Routed experts."""
    expert_parallel: int
    """Devices that share the experts."""
    microseconds: float
    """Measured time."""

    def measured(self) -> Measured:
        """What the row states."""
        tokens = f"{self.tokens} tokens of {self.hidden}, {self.topk} of {self.experts}"
        is_one_sided = "OneSided" in self.kernel
        return self._said(
            _words(self.kernel, self.operation, self.dtype, tokens, "ep", self.expert_parallel),
            self.microseconds,
            self.operation,
            library="trtllm-nvlink",
            devices=self.expert_parallel,
            nearest=("NVLinkOneSided by NVLinkTwoSided",) if is_one_sided else (),
        )

    def predicted(self) -> Estimate:
        """Its time by the catalogue's library."""
        if self.operation not in (_DISPATCH, _COMBINE):
            raise ConfigError(f"{self.operation!r}, which is no sending of tokens as they are")
        # Results return as they were computed, in 16 bits.
        dtype = self.dtype if self.operation == _DISPATCH else "bfloat16"
        if dtype not in _BYTES:
            raise ConfigError(f"no values in {dtype!r}")
        cluster = replace(self._cluster(), dispatch=load_dispatch("trtllm-nvlink"))
        tokens = RoutedTokens(tokens=self.tokens, experts_per_token=self.topk, experts=self.experts)
        devices = self.expert_parallel
        return _dispatch_seconds(tokens, self.hidden, _BYTES[dtype], devices, cluster), None
