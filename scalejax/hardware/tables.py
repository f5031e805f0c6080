"""Measured tables of the catalogue: products, grouped products, attention, collectives.

Knows no program: `simulator.operations` and `simulator.collectives.measured` interpolate between
the measurements.
"""

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

from scalejax.core.errors import (
    ConfigError,
    UnknownHardware,
    refusal,
    require_above,
    require_at_least,
    require_attained,
    unknown_name,
)
from scalejax.hardware.catalogue import CATALOGUE, catalogued, names_in
from scalejax.hardware.chip import RateType

_MATMUL, _GROUPED, _COLLECTIVES = "matmul_rates", "grouped_matmul_rates", "collective_times"
_ATTENTION = "attention_rates"
"""Folders of the catalogue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulForm:
    """Roofline relative to which the measurements of a table are interpolated.

    seconds = fixed + max(FLOP / (peak matmul_fraction), bytes / (bandwidth memory_fraction))
    """

    name: str
    """Name of the table, and of its file of rates: "h100"."""
    source: str
    """Source of the rates."""
    peak_flop_per_second: dict[RateType, float]
    """Dense peak of the measured chip."""
    memory_bytes_per_second: float
    """Peak bandwidth of its memory."""
    matmul_fraction: float
    """Share of peak FLOP/s that large compute-bound products reached."""
    memory_fraction: float
    """Share of peak bandwidth that memory-bound products reached."""
    fixed_seconds: float
    """Least measured time of a product."""
    aside_seconds: float
    """Part of `fixed_seconds` that is overhead of the measurement, absent from running programs."""
    layers: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Time of measured linear layers beyond their product, by AIConfigurator's name for their type
    ("fp8"): seconds, and seconds per element of the input, for its cast from bf16; then the time of
    the product over the table's. None of it is in the rates."""
    sources: dict[str, str]
    """Where each number above comes from, by its dotted name."""

    def __post_init__(self) -> None:
        for name, (cast, of_element, slower) in self.layers.items():
            require_at_least(f"layers.{name}", min(cast, of_element), 0)
            require_above(f"layers.{name}", slower, 0)
        for name in ("memory_bytes_per_second", "fixed_seconds"):
            require_above(name, getattr(self, name), 0)
        for name in ("matmul_fraction", "memory_fraction"):
            require_attained(name, getattr(self, name))
        if not 0 <= self.aside_seconds <= self.fixed_seconds:
            accepted = f"it must be at least 0 and at most fixed_seconds={self.fixed_seconds}"
            raise ConfigError(refusal("aside_seconds", self.aside_seconds, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulTable:
    """Rates of matrix products on one chip."""

    form: MatmulForm
    """Roofline relative to which the rates are interpolated."""
    shapes: dict[RateType, tuple[tuple[int, int, int, int], ...]]
    """(batch, m, n, k) of each product, by type of operands: not all were measured in each."""
    flop_per_second: dict[RateType, tuple[float, ...]]
    """FLOP/s of each product, by type of operands."""


def matmul_table_names() -> tuple[str, ...]:
    """Names of the tables of matrix products in the catalogue, sorted."""
    return names_in(_MATMUL)


@cache
def load_matmul_table(name: str) -> MatmulTable:
    """The table of that name in the catalogue.

    Raises:
        UnknownHardware: if there is none; names the closest one.
    """
    form = catalogued(MatmulForm, "matmul_table", _MATMUL, name)
    with (CATALOGUE / _MATMUL / f"{name}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    measured: dict[RateType, list[dict[str, str]]] = {
        kind: [row for row in rows if row[kind]] for kind in form.peak_flop_per_second
    }
    return MatmulTable(
        form=form,
        shapes={
            kind: tuple(
                (int(row["batch"]), int(row["m"]), int(row["n"]), int(row["k"])) for row in found
            )
            for kind, found in measured.items()
        },
        flop_per_second={
            kind: tuple(float(row[kind]) for row in found) for kind, found in measured.items()
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatmulRates:
    """Attainable rates of grouped products on one chip, fitted to measured layers of experts."""

    name: str
    """Name of the rates, and of their file: "h100"."""
    source: str
    """What was measured, and the licence under which it was published."""
    tile_rows: int
    """Rows of a tile: the rows of each group are rounded up to a multiple of it."""
    matmul_fraction: dict[RateType, float]
    """Share of peak FLOP/s that full tiles reach, by type of operands."""
    memory_fraction: float
    """Share of peak memory bandwidth that products of few rows reach."""
    group_seconds: float
    """Time of a product per group, beyond arithmetic and memory traffic."""
    layers: dict[RateType, tuple[float, float]] = field(default_factory=dict)
    """Time of measured layers of experts beyond their products, by type of operands: seconds, and
    the share of the peak memory bandwidth at which rows were gathered, activated and summed; not in
    the rates."""
    sources: dict[str, str]
    """Where each number above comes from, by its dotted name."""

    def __post_init__(self) -> None:
        require_at_least("tile_rows", self.tile_rows, 1)
        require_at_least("group_seconds", self.group_seconds, 0)
        require_attained("memory_fraction", self.memory_fraction)
        for kind, fraction in self.matmul_fraction.items():
            require_attained(f"matmul_fraction.{kind}", fraction)
        for kind, (seconds, share) in self.layers.items():
            require_at_least(f"layers.{kind}", seconds, 0)
            require_attained(f"layers.{kind}", share)


def grouped_matmul_names() -> tuple[str, ...]:
    """Names of the rates of grouped products in the catalogue, sorted."""
    return names_in(_GROUPED)


@cache
def load_grouped_matmul_rates(name: str) -> GroupedMatmulRates:
    """The rates of that name in the catalogue.

    Raises:
        UnknownHardware: if there are none; names the closest ones.
    """
    return catalogued(GroupedMatmulRates, "grouped_matmul_rates", _GROUPED, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRates:
    """Attainable rates of fused attention on one chip, fitted to measured layers.

    The share of the peak is u / (1 + s / tokens): blocks on the diagonal, and the start and end of
    a row of blocks, weigh less in long rows.
    """

    name: str
    """Name of the rates, and of their file: "b200"."""
    source: str
    """What was measured, and the licence under which it was published."""
    by_head_size: tuple[tuple[int, float, float], ...]
    """(head size, u, s) in ascending head size: the share of peak FLOP/s of the forward pass that
    long sequences reach, and the tokens at which half of it is reached."""
    both_over_forward: float
    """Rate of forward and backward together over that of forward, which was measured."""
    layer_seconds: float
    """Constant time of a measured layer beyond its kernel; not in the rates."""
    layer_passes: float
    """Passes over the bytes of a measured layer (positions embedded in queries, keys and values,
    and these written; then read by the kernel) at the peak bandwidth, beyond its kernel; not in the
    rates."""
    sources: dict[str, str]
    """Where each number above comes from, by its dotted name."""

    def __post_init__(self) -> None:
        require_above("both_over_forward", self.both_over_forward, 0)
        for name in ("layer_seconds", "layer_passes"):
            require_at_least(name, getattr(self, name), 0)
        sizes = [size for size, _, _ in self.by_head_size]
        if not sizes or sizes != sorted(set(sizes)):
            raise ConfigError(refusal("by_head_size", sizes, "it must hold ascending head sizes"))
        for size, share, tokens in self.by_head_size:
            require_above("by_head_size", size, 0)
            require_attained("by_head_size", share)
            require_at_least("by_head_size", tokens, 0)

    def share(self, tokens: int, head_size: int) -> float:
        """Share of peak FLOP/s of forward and backward together; interpolated between two head
        sizes in logarithms, and beyond them that of the nearest."""
        rows = self.by_head_size
        head_size = min(max(head_size, rows[0][0]), rows[-1][0])
        _, share, half = rows[-1]
        for (low, *below), (high, *above) in pairwise(rows):
            if low <= head_size <= high:
                part = math.log(head_size / low) / math.log(high / low)
                share = below[0] ** (1 - part) * above[0] ** part
                half = below[1] + (above[1] - below[1]) * part
                break
        return min(1.0, self.both_over_forward * share / (1 + half / tokens))


def attention_rates_names() -> tuple[str, ...]:
    """Names of the rates of attention in the catalogue, sorted."""
    return names_in(_ATTENTION)


@cache
def load_attention_rates(name: str) -> AttentionRates:
    """The rates of that name in the catalogue.

    Raises:
        UnknownHardware: if there are none; names the closest ones.
    """
    return catalogued(AttentionRates, "attention_rates", _ATTENTION, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimes:
    """Measured times of collectives over one kind of link, or over the nodes of one cluster."""

    name: str
    """Name of the table: "h100-nvswitch"."""
    cluster: str
    """The catalogue's cluster on which they were measured, with its library."""
    source: str
    """Authors, publication and licence."""
    curves: Mapping[str, Mapping[int, tuple[tuple[int, float], ...]]]
    """(payload bytes, seconds) in ascending bytes, by operation ("all_reduce") and group size."""
    ranges: Mapping[str, Mapping[int, tuple[float, float]]] = field(default_factory=dict)
    """5th and 95th percentile of the seconds, by operation and group size, if measured on many
    choices of nodes."""


@cache
def load_measured_times(name: str) -> MeasuredTimes:
    """The table of that name.

    Raises:
        UnknownHardware: if there is none; names the closest one.
        ConfigError: if its head lacks the cluster or the source.
    """
    if name not in (names := names_in(_COLLECTIVES, "csv")):
        raise UnknownHardware(unknown_name("measured", name, names))
    lines = (CATALOGUE / _COLLECTIVES / f"{name}.csv").read_text(encoding="utf-8").splitlines()
    comments = [line.removeprefix("# ") for line in lines if line.startswith("#")]
    head = dict(comment.split(": ", 1) for comment in comments)
    if not {"cluster", "source"} <= set(head):
        accepted = "the head of the file must name the cluster and the source"
        raise ConfigError(refusal("measured", name, accepted))
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    curves: dict[str, dict[int, list[tuple[int, float]]]] = {}
    ranges: dict[str, dict[int, tuple[float, float]]] = {}
    for row in rows:
        if "p5_seconds" in row:
            within = (float(row["p5_seconds"]), float(row["p95_seconds"]))
            ranges.setdefault(row["operation"], {})[int(row["device_count"])] = within
        sizes = curves.setdefault(row["operation"], {})
        point = (int(row["payload_bytes"]), float(row["seconds"]))
        sizes.setdefault(int(row["device_count"]), []).append(point)
    return MeasuredTimes(
        name=name,
        cluster=head["cluster"],
        source=head["source"],
        curves={
            operation: {devices: tuple(sorted(points)) for devices, points in sizes.items()}
            for operation, sizes in curves.items()
        },
        ranges=ranges,
    )
