"""Measured times of collectives in one node, as published: tables by operation and group size.

The tables are the CSV files in `collective_times/`; the comments at the head of each name its
source and the catalogue's cluster that it was measured on. Knows no model of a collective.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scalejax.errors import ConfigError, UnknownHardware, refusal, unknown_name

TABLES = Path(__file__).parent / "collective_times"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimes:
    """Seconds of collectives over one kind of link."""

    name: str
    """Name of the table: "h100-nvswitch"."""
    cluster: str
    """The catalogue's cluster on which they were measured, with its library."""
    source: str
    """Who measured them, where it is published, under which licence."""
    curves: Mapping[str, Mapping[int, tuple[tuple[int, float], ...]]]
    """(payload bytes, seconds) in ascending bytes, by operation ("all_reduce") and group size."""


@cache
def load_measured_times(name: str) -> MeasuredTimes:
    """The table of that name.

    Raises:
        UnknownHardware: if there is none; names the closest that is.
        ConfigError: if its head lacks the cluster or the source.
    """
    path = TABLES / f"{name}.csv"
    if not path.is_file():
        names = sorted(path.stem for path in TABLES.glob("*.csv"))
        raise UnknownHardware(unknown_name("link.measured", name, names))
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.removeprefix("# ") for line in lines if line.startswith("#")]
    head = dict(comment.split(": ", 1) for comment in comments)
    if not {"cluster", "source"} <= set(head):
        accepted = "the head of the file must name the cluster and the source"
        raise ConfigError(refusal("link.measured", name, accepted))
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    curves: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for row in rows:
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
    )
