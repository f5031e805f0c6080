"""Steps with DeepEP over the same steps with NCCL: the time of sending tokens, and as measured.

Reads ../shared/ledger/2026/moe_multinode.csv, which is not in the repository: AWS's comparison of
dispatchers in Megatron-Bridge, the overlap of all-to-alls off, routing forced to be balanced. What
is predicted is the time of all dispatches and combines of a step on its own (4 for each layer and
microbatch, bf16; tokens of a microbatch divided over tensor), since nothing else changes between
two such steps.

    python experiments/expert_dispatch/whole_steps.py
"""

import csv
import json
from dataclasses import replace
from pathlib import Path

from scalejax.hardware import Cluster, load_cluster, load_dispatch
from scalejax.simulator.collectives.placement import collective_seconds
from scalejax.simulator.program import Collective, DeviceGroup, RoutedTokens

LEDGER = Path(__file__).parents[3] / "shared" / "ledger" / "2026" / "moe_multinode.csv"
CLUSTERS = {"b300_sxm": "dgx-b300", "h100_sxm_80gb": "aws-p5"}


def sending_seconds(row: dict[str, str], cluster: Cluster) -> float:
    """Seconds of all dispatches and combines of a step on one device."""
    number = {name: int(row[name]) for name in _NUMBERS}
    tokens = number["microbatch"] * number["seq_len"] // number["tensor"]
    routed = RoutedTokens(
        tokens=tokens,
        experts_per_token=number["experts_per_token"],
        experts=number["experts"],
    )
    sent = Collective(
        name="all_to_all",
        payload_bytes=tokens * routed.experts_per_token * number["hidden"] * 2,
        group=DeviceGroup(extents=((number["expert_parallel"], 1),), axes=("expert",)),
        is_async=False,
        tokens=routed,
    )
    microbatches = number["global_batch"] // (number["data"] * number["microbatch"])
    layers = number["layers"] / number["pipeline"]
    ticks = microbatches + number["pipeline"] - 1
    return 4 * ticks * layers * collective_seconds(sent, cluster)


_NUMBERS = (
    "microbatch", "seq_len", "tensor", "experts_per_token", "experts", "hidden",
    "expert_parallel", "global_batch", "data", "layers", "pipeline",
)  # fmt: skip


def main() -> None:
    """Print each pair of arms, and write them."""
    with LEDGER.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["case_id"].startswith("aws_")]
    plain = {row["case_id"]: row for row in rows if "nccl_alltoall" in row["case_id"]}
    found = []
    for row in rows:
        if "deepep_nvshmem" not in row["case_id"] or "ovloff" not in row["case_id"]:
            continue
        base = plain[row["case_id"].replace("deepep_nvshmem", "nccl_alltoall")]
        cluster = load_cluster(CLUSTERS[row["hardware"]])
        by_nccl = sending_seconds(row, cluster)
        by_deepep = sending_seconds(row, replace(cluster, dispatch=load_dispatch("deepep")))
        found.append(
            {
                "case": row["case_id"].removeprefix("aws_").replace("_deepep_nvshmem", ""),
                "predicted_by_nccl": round(by_nccl, 2),
                "predicted_by_deepep": round(by_deepep, 2),
                "measured_step_nccl": float(base["step_seconds"]),
                "measured_step_deepep": float(row["step_seconds"]),
            }
        )
        print(json.dumps(found[-1]))
    path = Path(__file__).parent / "whole_steps.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
