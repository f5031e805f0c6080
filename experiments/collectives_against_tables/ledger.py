"""The ledger's measured collectives, read from `../shared/ledger` beside this checkout."""

import csv
from dataclasses import dataclass
from pathlib import Path

LEDGER = Path(__file__).parents[3] / "shared" / "ledger"
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
    """As in `scalejax.program`: "all_reduce"."""
    devices: int
    """Members of the group."""
    payload_bytes: int
    """Bytes of the full buffer."""
    seconds: float
    """Time of one exchange."""


def nvlink_points() -> list[Point]:
    """Rows of `nvlink_collective_rates.csv`; of a reduce-scatter it gives the output shard."""
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
    with (LEDGER / "all_reduce_times.csv").open() as file:
        return [
            Point(
                hardware=row["case_id"],
                operation=row["operation"],
                devices=int(row["device_count"]),
                payload_bytes=int(row["payload_bytes"]),
                seconds=float(row["seconds"]),
            )
            for row in csv.DictReader(file)
        ]
