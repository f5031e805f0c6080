"""The most memory that one training step takes from this machine while it runs, in bytes.

A process of its own for each case. It compiles the step, hands back to the system what the
compiler leaves, and only then takes its baseline; then it draws the parameters, fills a batch,
resets the kernel's high-water mark and takes one more step. What is printed is the mark
(VmHWM) less the baseline: parameters, optimizer state, batch, activations, and whatever the
runtime adds on its own.

    JAX_PLATFORMS=cpu MALLOC_TRIM_THRESHOLD_=0 MALLOC_ARENA_MAX=1 \\
    python experiments/memory_against_run/run_step.py CASE [--devices 1]

The settings have freed memory go back to the system at once, not to count as still in use.

Linux only; CASE names an entry of `cases.json`.
"""

import argparse
import ctypes
import gc
import json
from pathlib import Path

import jax
import numpy as np

from scalejax.config.run import ResolvedRun, RunConfig, resolve
from scalejax.core.serialization import build
from scalejax.training.mesh import build_mesh
from scalejax.training.step import Batch, build_step, init_state

CASES = Path(__file__).parent / "cases.json"


def run_of(case: str, device_count: int) -> ResolvedRun:
    """The run of a case on a number of devices."""
    return resolve(build(RunConfig, json.loads(CASES.read_text())[case]), device_count)


def status_bytes(field: str) -> int:
    """A figure of this process that the kernel keeps: "VmRSS" now, "VmHWM" at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def trim() -> None:
    """Hand back to the system what is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def filled(shapes: Batch) -> Batch:
    """A batch of zeros whose every page is in memory."""
    return {
        name: jax.device_put(np.full(shape.shape, 1, shape.dtype), shape.sharding)
        for name, shape in shapes.items()
    }


def measured_bytes(run: ResolvedRun) -> int:
    """Growth of this process from before the state is drawn to the peak of a step."""
    mesh = build_mesh(run.layout)
    step = build_step(run, mesh)
    update = step.function.lower(step.state, step.batch).compile()
    # Compiles what draws the parameters, and lets go of them.
    for array in jax.tree.leaves(jax.block_until_ready(init_state(run, mesh))):
        array.delete()
    trim()
    baseline = status_bytes("VmRSS")
    state, batch = init_state(run, mesh), filled(step.batch)
    state, _ = jax.block_until_ready(update(state, batch))
    trim()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from now
    jax.block_until_ready(update(state, batch))
    return status_bytes("VmHWM") - baseline


def main() -> None:
    """Measure one case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    parser.add_argument("--devices", type=int, default=1)
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    print(measured_bytes(run_of(arguments.case, arguments.devices)))


if __name__ == "__main__":
    main()
