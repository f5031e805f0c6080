"""Measured collectives: the ledger's, from `../shared/ledger` beside this checkout, or our copy.

Where the ledger is not there, the package's tables stand in for its NVLink rates, and
`measured_all_reduces.csv` for its all-reduces.
"""

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from scalejax.hardware import load_measured_times

LEDGER = Path(__file__).parents[3] / "shared" / "ledger"
COPY = Path(__file__).parent / "measured_all_reduces.csv"
ELSEWHERE = Path(__file__).parent / "measured_elsewhere.csv"
"""All-reduces of machines that the ledger has not: logs of nccl-tests, out of place."""
TABLES = {
    "h100_sxm_80gb": "h100-nvswitch",
    "b200_sxm": "b200-nvswitch",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
}
"""The package's table of each hardware of the ledger."""
OPERATIONS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
}
ELEMENT_BYTES = 4
"""All rows of XLA's tables are of F32."""
NCCL_TYPES = {"half": 2, "int8": 1}
"""Bytes of an element of `nccl_times.csv`, whose column `message_bytes` counts elements: rows of
half and int8 agree within 0.5 % in gathers where half has half as many."""
NCCL_SYSTEMS = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "b300_sxm", "gb200", "gb300")
"""Its systems whose devices a switch joins, all measured by NCCL."""
PERMUTE_DEVICES = 2
"""Rows of collective-permute state no number of devices; it does not matter to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measured time."""

    hardware: str
    """The ledger's name of the hardware, or of the case."""
    operation: str
    """As in `scalejax.simulator.program`: "all_reduce"."""
    devices: int
    """Members of the group."""
    payload_bytes: int
    """Bytes of the full buffer."""
    seconds: float
    """Time of one exchange."""


def nvlink_points() -> list[Point]:
    """Rows of `nvlink_collective_rates.csv`; of a reduce-scatter it gives the output shard."""
    if not LEDGER.exists():
        return _tabled_points()
    points = []
    with (LEDGER / "nvlink_collective_rates.csv").open() as file:
        for row in csv.DictReader(file):
            operation = OPERATIONS[row["operation"]]
            devices = int(row["device_count"] or PERMUTE_DEVICES)
            payload = int(row["elements"]) * ELEMENT_BYTES
            if operation == "reduce_scatter":
                payload *= devices
            points.append(
                Point(
                    hardware=row["hardware"],
                    operation=operation,
                    devices=devices,
                    payload_bytes=payload,
                    seconds=payload / float(row["bytes_per_second"]),
                )
            )
    return points


def all_reduce_points() -> list[Point]:
    """Rows of `all_reduce_times.csv`, by case."""
    return _all_reduces(LEDGER / "all_reduce_times.csv" if LEDGER.exists() else COPY)


def elsewhere_points() -> list[Point]:
    """All-reduces of machines like those of `all_reduce_times.csv`, of other owners."""
    return _all_reduces(ELSEWHERE)


def _all_reduces(path: Path) -> list[Point]:
    with path.open() as file:
        return [
            Point(
                hardware=row["case_id"],
                operation="all_reduce",
                devices=int(row["device_count"]),
                payload_bytes=int(row["payload_bytes"]),
                seconds=float(row["seconds"]),
            )
            for row in csv.DictReader(file)
        ]


def nccl_points(systems: tuple[str, ...] = NCCL_SYSTEMS) -> list[Point]:
    """Rows of `2026/nccl_times.csv`, hardware `nccl_SYSTEM`: of each series those of the newest
    release that measured it, of equal payloads the geometric mean.

    Switches add up no int8, so an all-reduce of int8 counts only where there is none of half.
    """
    path = LEDGER / "2026" / "nccl_times.csv"
    if not path.exists():
        return []
    series: dict[tuple[str, str, int, str], dict[str, dict[int, list[float]]]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            if row["system"] not in systems:
                continue
            operation = "all_to_all" if row["operation"] == "alltoall" else row["operation"]
            key = (row["system"], operation, int(row["devices"]), row["dtype"])
            payload = int(row["message_bytes"]) * NCCL_TYPES[row["dtype"]]
            sizes = series.setdefault(key, {}).setdefault(row["nccl_version"], {})
            sizes.setdefault(payload, []).append(float(row["microseconds"]) * 1e-6)
    found: dict[tuple[str, str, int, int], list[float]] = {}
    for (system, operation, devices, kind), releases in sorted(series.items()):
        other = (system, operation, devices, "half")
        if operation == "all_reduce" and kind == "int8" and other in series:
            continue
        newest = max(releases, key=lambda name: tuple(map(int, re.findall(r"\d+", name))))
        for payload, seconds in releases[newest].items():
            found.setdefault((system, operation, devices, payload), []).extend(seconds)
    return [
        Point(
            hardware=f"nccl_{system}",
            operation=operation,
            devices=devices,
            payload_bytes=payload,
            seconds=geometric_mean(seconds),
        )
        for (system, operation, devices, payload), seconds in sorted(found.items())
    ]


def _tabled_points() -> list[Point]:
    return [
        Point(
            hardware=hardware,
            operation=operation,
            devices=devices,
            payload_bytes=payload,
            seconds=seconds,
        )
        for hardware, name in TABLES.items()
        for operation, sizes in load_measured_times(name).curves.items()
        for devices, points in sizes.items()
        for payload, seconds in points
    ]
