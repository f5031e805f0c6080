"""Writes the ledgers that come with scalejax, from those beside the repository.

    python experiments/open_ledger/pack.py ../shared/ledger

Packs what `scalejax validate` reads without a file into scalejax/validation/ledgers/, the same
bytes for the same ledgers. Large tables of operations are thinned: of neighbours, which differ in
one size, one in a few says as much of the error as all.
"""

import csv
import gzip
import io
import lzma
import math
import sys
from collections.abc import Callable
from pathlib import Path

from scalejax.validation.kinds import FOLDER

STEP_TIMES = (
    "step_times", "2026/automodel_and_rl", "2026/dgxc_benchmarking", "2026/lambda_single_node",
    "2026/megatron_bridge", "2026/misc_llm", "2026/mlperf_v4.1", "2026/mlperf_v5.1",
    "2026/moe_multinode", "2026/simumax_b200", "2026/step_times_added",
    "2026/timm_rtx3090_training", "2026/tpu_and_jax", "2026/trainium",
    "2026/ultrascale_crashed_or_oom", "2026/ultrascale_measured",
)  # fmt: skip
CONVERGENCE = ("convergence_rcp", "2026/mlperf_submission_convergence")
COLLECTIVES = ("all_reduce_times", "2026/hf_cluster_collectives_256MB")
THINNED = (
    "2026/attention_forward_times", "2026/custom_allreduce_times", "2026/expert_alltoall_trtllm",
    "2026/expert_dispatch_combine_deepep", "2026/expert_gemm_forward_times", "2026/gemm_times",
    "2026/nccl_times",
)  # fmt: skip
"""Tables of NVIDIA AIConfigurator."""
MOST_ROWS = 1500
"""Of a thinned table: every n-th row is kept, for the least n that leaves no more."""
KEPT: dict[str, Callable[[dict[str, str]], bool]] = {
    # The others are skipped: the catalogue's library copies with this many multiprocessors.
    "2026/expert_dispatch_combine_deepep": lambda row: row["sms"] == "24",
}
"""Rows that are kept before a table is thinned."""


def read(folder: Path, name: str) -> str:
    """Text of a ledger, unpacked."""
    plain, packed = folder / f"{name}.csv", folder / f"{name}.csv.gz"
    data = plain.read_bytes() if plain.is_file() else gzip.decompress(packed.read_bytes())
    return data.decode()


def thinned(name: str, text: str) -> str:
    """The rows of a table of which one in a few is kept."""
    reader = csv.DictReader(io.StringIO(text, newline=""))
    rows = [row for row in reader if KEPT.get(name, bool)(row)]
    kept = rows[:: math.ceil(len(rows) / MOST_ROWS)]
    output = io.StringIO(newline="")
    writer = csv.DictWriter(output, list(kept[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(kept)
    return output.getvalue()


def main() -> None:
    """Pack every ledger."""
    folder, total = Path(sys.argv[1]), 0
    FOLDER.mkdir(exist_ok=True)
    for name in (*STEP_TIMES, *CONVERGENCE, *COLLECTIVES, *THINNED):
        text = read(folder, name)
        if name in THINNED:
            text = thinned(name, text)
        data = lzma.compress(text.encode(), check=lzma.CHECK_CRC32, preset=9 | lzma.PRESET_EXTREME)
        path = FOLDER / f"{Path(name).name}.csv.xz"
        path.write_bytes(data)
        total += len(data)
        print(f"{path.name}: {text.count(chr(10)) - 1} rows, {len(data):,} bytes")
    print(f"{total:,} bytes")


if __name__ == "__main__":
    main()
