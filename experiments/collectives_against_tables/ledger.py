"""Measured collectives: the ledger's, from `../shared/ledger` beside this checkout, or our copy.

Where the ledger is not there, the package's tables stand in for its NVLink rates, and
`measured_all_reduces.csv` for its all-reduces.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

from scalejax.hardware import load_measured_times

LEDGER = Path(__file__).parents[3] / "shared" / "ledger"
COPY = Path(__file__).parent / "measured_all_reduces.csv"
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
"""All rows are of F32."""
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
    path = LEDGER / "all_reduce_times.csv" if LEDGER.exists() else COPY
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
