"""Write the package's tables of measured collectives from the ledger.

Reads `../shared/ledger` beside this checkout; needed once, and when the ledger changes.

    python experiments/collectives_against_tables/vendor.py
"""

import csv
import lzma
from math import exp, log
from pathlib import Path
from statistics import fmean

from ledger import COPY, LEDGER, TABLES, Point, all_reduce_points, nccl_points, nvlink_points

FOLDER = Path(__file__).parents[2] / "scalejax" / "hardware" / "collective_times"
XLA = "openxla/xla, tables of measured collectives (Apache-2.0)"
NCCL = "NVIDIA AIConfigurator (ai-dynamo/aiconfigurator, Apache-2.0), systems/data, {}/comm/nccl"
VTRAIN = "VIA-Research/vTrain at f8dda8473a, trace/*/AR_GPU*_LUT: nccl-tests, out of place (facts)"
AWS = (
    "aws-samples/awsome-distributed-training at 0162aac, micro-benchmarks/nccl-tests/README.md, "
    "out of place (facts)"
)
COREWEAVE = "coreweave/nccl-tests at cb86553328: NCCL 2.26.2, out of place (facts)"
OF_NCCL = {
    "a100_sxm": ("a100-nvswitch", "dgx-a100-80gb"),
    "h100_sxm": ("h100-nvswitch", "dgx-h100"),
    "h200_sxm": ("h200-nvswitch", "dgx-h200"),
    "b200_sxm": ("b200-nvswitch", "dgx-b200"),
    "b300_sxm": ("b300-nvswitch", "dgx-b300"),
    "l40s": ("l40s-pcie", "l40s"),
    "rtx_pro_6000_server": ("rtx-pro-6000-pcie", "rtx-pro-6000"),
}
"""(table, cluster) of systems of `nccl_times.csv`; the tables of GB200 and GB300 are XLA's, which
has groups of 8 to 72, with those of 2 and 4 from here. XLA's permutations are in none: of three
patterns and of no stated number of devices, they rise from 0.1 ms at 2 MiB to 0.75 at 16 MiB and
stay there to 256 MiB, where NCCL sends 16 MiB in 0.05."""
OF_ALL_REDUCES = {
    "vtrain_ar_a100": ("vtrain-a100", "vtrain-a100", VTRAIN),
    "vtrain_ar_v100": ("v100-mesh", "dgx1-v100", VTRAIN),
    "aws_p5_16gpu": ("aws-p5-2-nodes", "aws-p5", AWS),
    "aws_p4de_16gpu": ("aws-p4de-2-nodes", "aws-p4de", AWS),
    "cw_gb200": ("coreweave-gb200", "coreweave-gb200", COREWEAVE),
}
"""(table, cluster, source) of cases of `all_reduce_times.csv`."""
BUS_OPERATIONS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
}
BUS_BANDWIDTHS = LEDGER / "2026" / "hf_cluster_collectives_256MB.csv"


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


def write_bus_bandwidths() -> None:
    """Times of the 256 MB that a cluster sent over its nodes, from bus bandwidths: the bytes that
    each device sends in a ring over the time. Assumed of 2^20 bytes each, as that benchmark's."""
    source = (
        "vinjn/nanotron-ultrascale-playbook at 924e4d0, assets/data/benchmarks/"
        "pp_comm_bandwidth.html (Hugging Face, 2025; facts): median and 5th to 95th percentile"
    )
    lines = ["# cluster: hf-ultrascale", f"# source: {source}"]
    lines.append("operation,device_count,payload_bytes,seconds,p5_seconds,p95_seconds")
    with BUS_BANDWIDTHS.open() as file:
        for row in csv.DictReader(file):
            operation = BUS_OPERATIONS[row["operation"]]
            devices, payload = 8 * int(row["nodes_of_8_h100"]), 256 * 2**20
            sent = (1 + (operation == "all_reduce")) * (devices - 1) / devices * payload / 1e9
            rates = (row["bus_bandwidth_gbytes_per_s"], row["band_high"], row["band_low"])
            seconds = ",".join(f"{sent / float(rate):.4g}" for rate in rates)
            lines.append(f"{operation},{devices},{payload},{seconds}")
    (FOLDER / "hf-ultrascale.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def copy_all_reduces() -> None:
    """What the experiment needs of `all_reduce_times.csv` as scalejax ships it, each row with its
    source."""
    columns: list[str] = ["case_id", "device_count", "payload_bytes", "seconds", "source"]
    shipped = FOLDER.parents[1] / "validation" / "ledgers" / "all_reduce_times.csv.xz"
    with lzma.open(shipped, "rt") as read, COPY.open("w", newline="") as written:
        writer = csv.DictWriter(written, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in csv.DictReader(read):
            writer.writerow(row | {"seconds": f"{float(row['seconds']):.5g}"})


def main() -> None:
    """Write all tables."""
    points = nvlink_points()
    for hardware in ("gb200", "gb300"):
        small = nccl_points((hardware,))
        measured = {(point.operation, point.devices) for point in small}
        large = [
            p
            for p in points
            if p.hardware == hardware
            and p.operation != "collective_permute"
            and (p.operation, p.devices) not in measured
        ]
        source = f"{XLA}; of 2 and 4 devices {NCCL.format(hardware)}"
        write(TABLES[hardware], "gb200-nvl72", source, large + small)
    for system, (name, cluster) in OF_NCCL.items():
        write(name, cluster, NCCL.format(system), nccl_points((system,)))
    for case, (name, cluster, source) in OF_ALL_REDUCES.items():
        chosen = [p for p in all_reduce_points() if p.hardware.startswith(case)]
        chosen = [point for point in chosen if not point.hardware.endswith("_eks")]
        write(name, cluster, source, chosen)
    write_bus_bandwidths()
    copy_all_reduces()


if __name__ == "__main__":
    main()
