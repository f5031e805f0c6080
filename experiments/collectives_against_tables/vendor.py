"""Write the package's tables of measured collectives from the ledger.

Reads `../shared/ledger` beside this checkout; needed once, and when the ledger changes.

    python experiments/collectives_against_tables/vendor.py
"""

import csv
from math import exp, log
from pathlib import Path
from statistics import fmean

from ledger import COPY, LEDGER, TABLES, Point, all_reduce_points, nvlink_points

FOLDER = Path(__file__).parents[2] / "scalejax" / "hardware" / "collective_times"
XLA = "openxla/xla, tables of measured collectives (Apache-2.0)"
VTRAIN = (
    "VIA-Research/vTrain at f8dda8473a, trace/a100/AR_GPU*_LUT: nccl-tests, out of place (facts)"
)
CLUSTERS = {"h100_sxm_80gb": "dgx-h100", "b200_sxm": "dgx-b200"}
"""Clusters that were measured; of the others, gb200-nvl72."""


def write(name: str, cluster: str, source: str, points: list[Point]) -> None:
    """One table: geometric means of equal rows, sorted, four digits."""
    rows: dict[tuple[str, int, int], list[float]] = {}
    for point in points:
        key = (point.operation, point.devices, point.payload_bytes)
        rows.setdefault(key, []).append(log(point.seconds))
    lines = [f"# cluster: {cluster}", f"# source: {source}"]
    lines.append("operation,device_count,payload_bytes,seconds")
    for (operation, devices, payload), logs in sorted(rows.items()):
        lines.append(f"{operation},{devices},{payload},{exp(fmean(logs)):.4g}")
    (FOLDER / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def copy_all_reduces() -> None:
    """What the experiment needs of `all_reduce_times.csv`, each row with its source."""
    columns: list[str] = ["case_id", "device_count", "payload_bytes", "seconds", "source"]
    with (LEDGER / "all_reduce_times.csv").open() as read, COPY.open("w", newline="") as written:
        writer = csv.DictWriter(written, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in csv.DictReader(read):
            writer.writerow(row | {"seconds": f"{float(row['seconds']):.5g}"})


def main() -> None:
    """Write all tables."""
    points = nvlink_points()
    for hardware, name in TABLES.items():
        chosen = [point for point in points if point.hardware == hardware]
        write(name, CLUSTERS.get(hardware, "gb200-nvl72"), XLA, chosen)
    a100 = [p for p in all_reduce_points() if p.hardware.startswith("vtrain_ar_a100")]
    write("a100-nvswitch", "dgx-a100-80gb", VTRAIN, a100)
    copy_all_reduces()


if __name__ == "__main__":
    main()
