"""Write the package's tables of measured collectives from the ledger.

Reads `../shared/ledger` beside this checkout; needed once, and when the ledger changes.

    python experiments/collectives_against_tables/vendor.py
"""

from math import exp, log
from pathlib import Path
from statistics import fmean

from ledger import Point, all_reduce_points, nvlink_points

TABLES = Path(__file__).parents[2] / "scalejax" / "hardware" / "collective_times"
XLA = "openxla/xla, tables of measured collectives (Apache-2.0)"
VTRAIN = (
    "VIA-Research/vTrain at f8dda8473a, trace/a100/AR_GPU*_LUT: nccl-tests, out of place (facts)"
)
HEADS = {
    "h100_sxm_80gb": ("h100-nvswitch", "dgx-h100", XLA),
    "b200_sxm": ("b200-nvswitch", "dgx-b200", XLA),
    "gb200": ("gb200-nvl72", "gb200-nvl72", XLA),
    "gb300": ("gb300-nvl72", "gb200-nvl72", XLA + "; links as of GB200"),
}


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
    (TABLES / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Write all tables."""
    points = nvlink_points()
    for hardware, (name, cluster, source) in HEADS.items():
        write(name, cluster, source, [point for point in points if point.hardware == hardware])
    a100 = [p for p in all_reduce_points() if p.hardware.startswith("vtrain_ar_a100")]
    write("a100-nvswitch", "dgx-a100-80gb", VTRAIN, a100)


if __name__ == "__main__":
    main()
