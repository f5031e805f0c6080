"""Predicted beside published peak memory of Llama 3.1 trained by torchtitan.

    python experiments/published_memory/compare.py

Reads `../shared/ledger/step_times.csv` beside this checkout for what was run. Programs come from
the archive of `scalejax.validation`; nothing is compiled. The ledger has no 405B: its runs over a
pipeline are counted by what PyTorch's pipeline holds in turn (`fsdp_pipeline.py`), of the layout
in `llama3_405b.toml`.

What was published is what PyTorch's allocator had reserved, and so holds what lay free between
its blocks, which no program tells. How much that is in proportion is taken from the ledger's runs
of the other networks, each network counting once, so that no row has a part in its own prediction.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from fsdp_pipeline import Pipeline

from scalejax.config.run import load_config, resolve
from scalejax.core.units import GIB
from scalejax.hardware import load_cluster
from scalejax.simulator.transformer import Strategy
from scalejax.simulator.transformer.shape import block_shard
from scalejax.validation import Skipped, compile_cases, read_ledger
from scalejax.xla.closed_form import shape_of, workspace_bytes

LEDGER = Path(__file__).parents[3] / "shared" / "ledger" / "step_times.csv"
PIPELINED = Path(__file__).parent / "llama3_405b.toml"
CLUSTER = "torchtitan-h100"
PIPELINED_RUNS = (
    (1, 8, 8192, 256, 82.5),
    (2, 8, 8192, 256, 72.7),
    (2, 16, 8192, 256, 72.7),
    (1, 8, 32768, 64, 75.3),
)
"""Of 405B: chunks, microbatches, tokens of a sample, samples of an update, published GiB; table 5
and the first row of table 6 of the first source below. Microbatches are not stated. Left out, they
were as many as stages, 8, until pull request 781 of torchtitan, two weeks after the source, and
then as many as chunks of all stages, 16."""
PUBLISHED_GIB = {
    # pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md at 31a17bfdb7: tables 1 to 4
    ("titan_llama8b_eager", 8): 82.4,
    ("titan_llama8b_torch.compile", 8): 77.0,
    ("titan_llama8b_torch.compile_Float8", 8): 76.8,
    ("titan_llama8b_eager", 128): 67.0,
    ("titan_llama8b_torch.compile", 128): 62.0,
    ("titan_llama8b_torch.compile_Float8", 128): 61.8,
    ("titan_llama8b_cp", 8): 83.9,
    ("titan_llama70b_2d", 256): 71.9,
    ("titan_llama70b_2d_asynctp", 256): 67.6,
    # the same, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md at 1af29373a0
    ("titan_llama8b_h200", 32): 47.96,
    ("titan_llama8b_h200", 64): 46.97,
}
"""Most memory of a device, by case of the ledger and devices: what PyTorch's allocator had
reserved (max_reserved of torchtitan's metrics), without the driver's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published run."""

    name: str
    """What was run."""
    devices: int
    """On how many."""
    recompute: str
    """What its backward pass computes again."""
    network: str
    """Layers and width, which tell the networks apart."""
    in_use_gib: float
    """The peak of the step and of what PyTorch holds beyond it, without what the chip's runtime
    takes."""
    published_gib: float
    """What was published."""

    @property
    def in_use_error(self) -> float:
        """(in use - published) / published."""
        return self.in_use_gib / self.published_gib - 1

    @property
    def reserved_over_used(self) -> float:
        """What was reserved, over what is predicted to be in use."""
        return self.published_gib / self.in_use_gib


def reserved_gib(row: Row, rows: Sequence[Row]) -> float:
    """What the allocator is predicted to have reserved for `row`, as for the other networks."""
    found = typical_ratios([other for other in rows if other.network != row.network])
    return row.in_use_gib * fmean(found.values())


def typical_ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Reserved over in use in the median of each network's runs."""
    return {
        network: median(row.reserved_over_used for row in rows if row.network == network)
        for network in sorted({row.network for row in rows})
    }


def compared() -> Iterator[Row]:
    """Every row of the ledger whose memory was published."""
    runs = [run for run in read_ledger(LEDGER) if (run.case_id, run.device_count) in PUBLISHED_GIB]
    for case in compile_cases(runs, compiles=False):
        if not isinstance(case, Skipped):
            run = case.row
            yield Row(
                name=run.case_id,
                devices=run.device_count,
                recompute=run.work.recompute or "none",
                network=f"{run.model.layers} layers of {run.model.hidden}",
                in_use_gib=case.program.memory.peak_bytes / GIB,
                published_gib=PUBLISHED_GIB[run.case_id, run.device_count],
            )


def pipelined(gathered_bytes: int = 2) -> Iterator[Row]:
    """The runs of 405B over a pipeline, by schedule and microbatches; each gathered parameter
    takes `gathered_bytes`."""
    config, chip = load_config(PIPELINED), load_cluster(CLUSTER).chip
    whole, network = resolve(config).split, shape_of(config, chip)
    for chunks, microbatches, tokens, global_batch, published in PIPELINED_RUNS:
        shape = replace(network, tokens=tokens)
        split = replace(whole, microbatches=microbatches, global_batch=global_batch)
        strategy = Strategy(split=split, recompute="full", sequence_parallel=True)
        pipeline = Pipeline(
            part=block_shard(shape, strategy),
            devices=split.layout.pipeline,
            chunks=chunks,
            microbatches=microbatches,
            shards=split.layout.data,
            gathered_bytes=gathered_bytes,
        )
        schedule = "1F1B" if chunks == 1 else "interleaved 1F1B"
        yield Row(
            name=f"405B, {schedule}, {microbatches} microbatches, {tokens} tokens",
            devices=split.layout.device_count,
            recompute="full",
            network=f"{shape.layers} layers of {shape.hidden}",
            in_use_gib=(pipeline.peak_bytes() + workspace_bytes(chip)) / GIB,
            published_gib=published,
        )


def main() -> None:
    """Print one Markdown row for each run."""
    if not LEDGER.exists():
        sys.exit(f"{LEDGER} is not there; it says what was run.")
    rows = list(compared())
    show((*rows, *pipelined()), rows)
    print("\n405B, its parameters gathered in float8:")
    show(tuple(pipelined(gathered_bytes=1)), rows)
    print("\nreserved over in use, in the median of a network's runs of the ledger:")
    for network, ratio in typical_ratios(rows).items():
        found = [row.reserved_over_used for row in rows if row.network == network]
        spread = f"{min(found):.3f} to {max(found):.3f}"
        print(f"{network}: {ratio:.3f}, {spread} ({len(found)} runs)")
    plain = median(row.reserved_over_used for row in rows)
    errors = [f"{row.in_use_gib * plain / row.published_gib - 1:+.1%}" for row in pipelined()]
    print(f"405B with the median of all of these runs, {plain:.3f}: {', '.join(errors)}")


def show(shown: Sequence[Row], known: Sequence[Row]) -> None:
    """Print a table of `shown`, reserved as the allocator did in `known`."""
    print(
        "| run | devices | recompute | published GiB | in use GiB | error | reserved GiB | error |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in shown:
        reserved = reserved_gib(row, known)
        print(
            f"| {row.name} | {row.devices} | {row.recompute} | "
            f"{row.published_gib:.1f} | {row.in_use_gib:.1f} | {row.in_use_error:+.1%} | "
            f"{reserved:.1f} | {reserved / row.published_gib - 1:+.1%} |"
        )


if __name__ == "__main__":
    main()
