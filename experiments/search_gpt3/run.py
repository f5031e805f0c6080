"""Search every strategy for GPT-3 on 1536 A100, and find the published layout among them.

python experiments/search_gpt3/run.py [--fused] [--devices N] [--processes N]
"""

import argparse
import json
import os
import resource
import time
from pathlib import Path

from scalejax.core.environment import machine_cores
from scalejax.core.metrics import mfu
from scalejax.core.units import GIB, TFLOP
from scalejax.hardware import load_cluster
from scalejax.planning.search import Candidate, breakdown_difference, search
from scalejax.planning.search.run import in_words
from scalejax.simulator.predict import predict
from scalejax.simulator.transformer import TransformerShape, transformer_program

HERE = Path(__file__).parent
CLUSTER = load_cluster("selene")
SHOWN = 10


def main() -> None:
    """Search, print, write results.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fused", action="store_true", help="attention in one kernel")
    parser.add_argument("--devices", type=int, default=1536)
    parser.add_argument("--processes", type=int, default=machine_cores())
    arguments = parser.parse_args()
    shape = TransformerShape(
        layers=96,
        hidden=12288,
        heads=96,
        kv_heads=96,
        ffn_hidden=4 * 12288,
        vocabulary=51200,
        tokens=2048,
        is_fused=arguments.fused,
    )
    began, core_began = time.perf_counter(), time.process_time()
    found = search(shape, CLUSTER, (arguments.devices,), 1536, processes=arguments.processes)
    seconds, core_seconds = time.perf_counter() - began, time.process_time() - core_began
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ranked = found.ranked
    print(
        f"{found.considered:,} strategies, {len(ranked):,} fit: {seconds:.1f} s elapsed in up to "
        f"{arguments.processes} processes, {found.considered / seconds:,.0f} strategies a second "
        f"(load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; this process took "
        f"{core_seconds:.1f} s of one core and {peak_bytes / GIB:.2f} GiB)"
    )
    rows = [describe(place, each, shape) for place, each in enumerate(ranked[:SHOWN], start=1)]
    published = [(place, each) for place, each in enumerate(ranked, start=1) if is_published(each)]
    rows += [describe(place, each, shape) for place, each in published]
    for row in rows:
        print(
            f"{row['place']:>7,} {row['place'] / len(ranked):7.2%} {row['seconds']:7.2f} s "
            f"{row['samples_per_second']:6.1f} samples/s {row['tflop_per_second']:4.0f} TFLOP/s "
            f"{row['gib']:5.1f} GiB  {row['strategy']}"
        )
    if published:
        own, best = (
            predict(transformer_program(shape, each.strategy), CLUSTER).waterfall
            for each in (published[0][1], ranked[0])
        )
        changes = breakdown_difference(own, best)
        print("published against the best:")
        print(", ".join(f"{change:+.2f} s {name}" for name, change in changes))
    name = "results_fused.json" if arguments.fused else "results.json"
    (HERE / name).write_text(
        json.dumps({"considered": found.considered, "fitting": len(ranked), "rows": rows}, indent=1)
        + "\n"
    )


def is_published(each: Candidate) -> bool:
    """Tensor 8, pipeline 16, data 12, microbatches of 1, full recompute, interleaved."""
    strategy, layout = each.strategy, each.strategy.layout
    return (
        (layout.tensor, layout.pipeline, layout.data) == (8, 16, 12)
        and strategy.split.microbatch == 1
        and strategy.recompute == "full"
        and strategy.pipeline_chunks > 1
        and strategy.zero_stage == 0
        and not strategy.sequence_parallel
    )


def describe(place: int, each: Candidate, shape: TransformerShape) -> dict:
    """A row of the table: throughput in samples, and in FLOP of the model on each device."""
    devices = each.strategy.layout.device_count
    flop = shape.model_flop(each.strategy.split.global_batch)
    return {
        "place": place,
        "strategy": in_words(each.strategy),
        "seconds": round(each.step_seconds, 3),
        "samples_per_second": round(each.samples_per_second, 2),
        "tflop_per_second": round(mfu(flop, each.step_seconds, devices, TFLOP), 1),
        "gib": round(each.peak_memory_bytes / GIB, 1),
    }


if __name__ == "__main__":
    main()
