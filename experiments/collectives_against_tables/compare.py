"""Predicted time of collectives over NVLink beside the tables that XLA ships.

Reads `../shared/ledger/nvlink_collective_rates.csv` beside this checkout, and says so where it
is not there.

    python experiments/collectives_against_tables/compare.py
"""

import csv
from collections import defaultdict
from pathlib import Path
from statistics import mean

from scalejax.cost import collective_seconds
from scalejax.hardware import load_cluster
from scalejax.program import Collective, CollectiveName, DeviceGroup
from scalejax.units import MIB

LEDGER = Path(__file__).parents[3] / "shared" / "ledger" / "nvlink_collective_rates.csv"
CLUSTERS = {"h100_sxm_80gb": "dgx-h100", "gb200": "gb200-nvl72"}
OPERATIONS: dict[str, CollectiveName] = {"all-reduce": "all_reduce", "all-gather": "all_gather"}
ELEMENT_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "S32": 4}


def error(row: dict[str, str]) -> tuple[int, float]:
    """Payload in bytes, and (predicted - measured) / measured."""
    payload = int(row["elements"]) * ELEMENT_BYTES[row["element_type"]]
    group = DeviceGroup(extents=((int(row["device_count"]), 1),), axes=())
    exchange = Collective(
        name=OPERATIONS[row["operation"]], payload_bytes=payload, group=group, is_async=False
    )
    predicted = collective_seconds(exchange, load_cluster(CLUSTERS[row["hardware"]]))
    return payload, predicted * float(row["bytes_per_second"]) / payload - 1


def main() -> None:
    """Print the mean signed error by hardware, operation, devices and size."""
    if not LEDGER.exists():
        print(f"{LEDGER} is not here: nothing to compare with")
        return
    errors: dict[tuple[str, str, int], dict[str, list[float]]] = defaultdict(
        lambda: {"1 to 64 MiB": [], "64 MiB and up": []}
    )
    with LEDGER.open() as file:
        for row in csv.DictReader(file):
            known = row["hardware"] in CLUSTERS and row["operation"] in OPERATIONS
            if not known or row["element_type"] not in ELEMENT_BYTES:
                continue
            payload, signed = error(row)
            if payload >= MIB:
                size = "64 MiB and up" if payload >= 64 * MIB else "1 to 64 MiB"
                key = (row["hardware"], row["operation"], int(row["device_count"]))
                errors[key][size].append(signed)
    print("| hardware | operation | devices | 1 to 64 MiB | 64 MiB and up |")
    print("|---|---|---|---|---|")
    for (hardware, operation, devices), sizes in sorted(errors.items()):
        cells = (f"{mean(values):+.0%}" if values else "n/a" for values in sizes.values())
        print(f"| {hardware} | {operation} | {devices} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
