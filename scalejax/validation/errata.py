"""What rows of the open ledger say otherwise than the source that they name.

A ledger is read as it is; here its rows become what was published. Each entry names the place in
the source and what stands there.
"""

from dataclasses import replace

from scalejax.validation.ledger import LedgerRow

_H200 = "benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
"""Of pytorch/torchtitan: "8 NVIDIA H200 GPUs connected via NVLink"; run with llama3_8b.toml, whose
[activation_checkpoint] has mode = 'selective'. The ledger has the H100 of the other reports, and
full recompute."""


def as_published(row: LedgerRow) -> LedgerRow:
    """`row` as its source has it."""
    if row.source_locator != _H200 or "torchtitan" not in row.source:
        return row
    return replace(
        row,
        machine=replace(row.machine, hardware="h200_sxm_141gb"),
        work=replace(row.work, recompute="selective"),
    )
