"""One epoch over a table in Parquet files, in a process of its own whose memory is measured.

Prints a JSON line: rows seen, the sum of their classes, bytes that the process grew by over what
JAX, Grain and a smaller epoch take, bytes that Arrow held at most, seconds of the epoch, and
seconds until the first batch of a resumed run: both by the clock and of processors.
"""

import json
import sys
import time

import jax
import numpy as np
import pyarrow as pa

from scalejax.config.data import ParquetConfig
from scalejax.config.parallelism import Layout
from scalejax.core.serialization import build
from scalejax.data.datasets import open_source
from scalejax.data.facts import read_facts
from scalejax.data.loader.loader import training_batches
from scalejax.data.readers.parquet import _moments
from scalejax.data.readers.row_group_cache import _memories
from scalejax.training.mesh import batch_sharding, build_mesh

GLOBAL_BATCH = 8192


def peak_bytes() -> int:
    """The most memory that this process has had."""
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def batches(config, start=0):
    """The batches of the first epoch from step `start` on, and how many there are in it."""
    about = read_facts(config)
    sharding = batch_sharding(build_mesh(Layout()))
    shapes = {
        "inputs": jax.ShapeDtypeStruct(
            (GLOBAL_BATCH, *about.input_shape), np.float32, sharding=sharding
        ),
        "targets": jax.ShapeDtypeStruct((GLOBAL_BATCH,), np.int32, sharding=sharding),
    }
    source = open_source(config, "train", seed=0)
    steps = len(source) // GLOBAL_BATCH
    return training_batches(source, shapes, seed=0, start_step=start, stop_step=steps), steps


def main() -> None:
    """Read a config from the first argument, its warm-up from the second."""
    warm_up, config = (build(ParquetConfig, json.loads(text)) for text in sys.argv[1:])
    for _ in batches(warm_up)[0]:
        pass
    before = peak_bytes()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    rows, ones = 0, 0
    for batch in batches(config)[0]:
        rows += len(batch["targets"])
        ones += int(np.asarray(batch["targets"]).sum())
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    grown = peak_bytes() - before
    held = pa.default_memory_pool().max_memory()  # of one source: below, a second is opened
    middle = batches(config)[1] * 2 // 3
    _moments.cache_clear()
    _memories.clear()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    next(batches(config, start=middle)[0])
    print(
        json.dumps(
            {
                "rows": rows,
                "ones": ones,
                "grown_bytes": grown,
                "arrow_bytes": held,
                "epoch_seconds": seconds,
                "epoch_cpu_seconds": cpu_seconds,
                "resume_seconds": time.perf_counter() - begin,
                "resume_cpu_seconds": time.process_time() - begin_cpu,
            }
        )
    )


if __name__ == "__main__":
    main()
