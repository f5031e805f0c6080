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
CONVERGENCE = (
    "convergence_rcp", "2026/mlperf_submission_convergence", "2026/steplaw_dense_lr_batch_loss",
    "2026/steplaw_moe_lr_batch_loss",
)  # fmt: skip
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


CORRECTED: dict[tuple[str, str], tuple[dict[str, str], str]] = {
    ("2026/tpu_and_jax", "tpurecipe_v5p_GPT3-175B-MaxText"): (
        {
            "precision": "int8",
            "recompute": "full",
            "tensor": "8",
            "seq_len": "2048",
            "global_batch": "2048",
        },
        "its log is of MaxText's configs/v5p/gpt3_175b/v5p_1024.sh: quantization=int8, "
        "remat_policy=full, tensor 8, 4 samples of 2,048 tokens for each chip; in bfloat16 its "
        "rate would be 96 % of the peak",
    ),
    ("2026/tpu_and_jax", "ironwood_gemma4-2b_64_8192_bf16"): (
        {"ffn_hidden": "9728"},
        "config.json of Gemma 4 E2B: use_double_wide_mlp and num_kv_shared_layers, 20 of 35 layers "
        "are twice as wide as 6,144: their mean, to a multiple of 256",
    ),
}
"""Cells of rows of which the ledger has others than their source, and the source; by file and
case."""
_AWS = (
    "github:aws-samples/awsome-distributed-training@0162aacd5d",
    "micro-benchmarks/nccl-tests/README.md",
)
NAMED: dict[tuple[str, str], tuple[str, str]] = {
    ("all_reduce_times", "aws_p4de_16gpu"): _AWS,
    ("all_reduce_times", "aws_p5_16gpu"): _AWS,
    ("all_reduce_times", "aws_p5_16gpu_eks"): _AWS,
    ("all_reduce_times", "issue232_2x1_h100_tree"): ("github issue NVIDIA/nccl-tests#232", ""),
    ("all_reduce_times", "dgxh100_2x2gpu"): (
        "a user's log of nccl-tests on dgx-06 and dgx-07; unverified: its repository is not known",
        "",
    ),
    ("all_reduce_times", "a800_24gpu"): (
        "a user's log of nccl-tests in Kubeflow; unverified: its repository is not known",
        "",
    ),
}
"""Source, and the file in it, of rows that the ledger cites by the number of a look-up; by file and
case."""


def named(name: str, text: str) -> str:
    """The rows of a ledger with the sources that `NAMED` has for them."""
    sources = {case: found for (file, case), found in NAMED.items() if file == name}
    if not sources:
        return text
    reader = csv.DictReader(io.StringIO(text, newline=""))
    output = io.StringIO(newline="")
    writer = csv.DictWriter(output, list(reader.fieldnames or ()), lineterminator="\n")
    writer.writeheader()
    for row in reader:
        source, file = sources.get(row["case_id"], (row["source"], ""))
        place = f"{file}: {row['source_locator']}" if file else row["source_locator"]
        writer.writerow(row | {"source": source, "source_locator": place})
    return output.getvalue()


def corrected(name: str, text: str) -> str:
    """The rows of a ledger as their sources have them.

    Raises:
        KeyError: if it lacks a row that is to be corrected.
    """
    changes = {case: found for (file, case), found in CORRECTED.items() if file == name}
    if not changes:
        return text
    reader = csv.DictReader(io.StringIO(text, newline=""))
    output = io.StringIO(newline="")
    writer = csv.DictWriter(output, list(reader.fieldnames or ()), lineterminator="\n")
    writer.writeheader()
    for row in reader:
        cells, source = changes.pop(row["case_id"], ({}, ""))
        notes = f"{row['notes']}; corrected: {source}" if source else row["notes"]
        writer.writerow(row | cells | {"notes": notes})
    if changes:
        raise KeyError(f"{name} has no {', '.join(changes)}")
    return output.getvalue()


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
        text = named(name, corrected(name, read(folder, name)))
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
