"""Compiles for a TPU that is not here, and says what XLA itself estimates, as JSON.

    python tests/support/tpu_worker.py CASE [FILE.json.gz]

CASE is a name in CASES. With a file, it is written there, as those in `golden/tpu` were; else
to standard output. A process of its own: libtpu keeps the settings that it starts with.
"""

import gzip
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
}

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from scalejax.config.parallelism import Layout
from scalejax.config.run import RunConfig, resolve
from scalejax.core import serialization
from scalejax.hardware import load_cluster
from scalejax.training.mesh import build_mesh
from scalejax.training.step import build_step
from scalejax.xla.compiled import read_compiled
from scalejax.xla.target import target_for
from scalejax.xla.worker import _devices

DEVICES = 4
BASE = {"optimizer": {"name": "sgd"}, "schedule": {"base_learning_rate": 0.1}}
RUNS = {
    "resnet50": {
        "model": {"name": "resnet50", "compute_dtype": "bfloat16"},
        "data": {"name": "synthetic_images"},
        "batch": {"per_device_batch": 64},
        "layout": {"bn_scope": "local", "data": DEVICES},
    },
    "gpt": {
        "model": {
            "name": "gpt",
            "layers": 4,
            "hidden": 1024,
            "heads": 8,
            "compute_dtype": "bfloat16",
        },
        "data": {"name": "synthetic_tokens", "tokens": 1024, "vocabulary": 8192},
        "batch": {"per_device_batch": 4},
        "layout": {"data": DEVICES},
    },
}


def chain(weights: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows times eight matrices, one after the other."""
    for weight in weights:
        rows = jax.nn.relu(rows @ weight)
    return rows


def compile_chain(mesh: Any) -> Any:
    """Eight products of 4096 x 4096 on each device."""
    kept, divided = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), (("data", "fsdp"),))
    )
    function = jax.jit(chain, in_shardings=(kept, divided), out_shardings=divided)
    shapes = ((8, 4096, 4096), (4096 * DEVICES, 4096))
    return function.lower(*(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)).compile()


def compile_run(name: str) -> Callable[[Any], Any]:
    """The training step of one of RUNS."""

    def compiled(mesh: Any) -> Any:
        step = build_step(resolve(serialization.build(RunConfig, {**BASE, **RUNS[name]})), mesh)
        return step.function.lower(step.state, step.batch).compile()

    return compiled


CASES = {"chain": compile_chain, **{name: compile_run(name) for name in RUNS}}


def estimates(name: str) -> dict[str, Any]:
    """The program of a case, and XLA's two estimates of its time on TPU v5e."""
    mesh = build_mesh(
        Layout(data=DEVICES), _devices(target_for(load_cluster("tpu-v5e"), DEVICES, "tpu"))
    )
    compiled = CASES[name](mesh)
    program = read_compiled(compiled, mesh, name=name)
    scheduled = {operation.name for operation, _ in program.walk()}
    return {
        "program": serialization.plain(program),
        # XLA counts -1 s for some calls of unknown cost: whole seconds are no estimate here.
        "optimal_seconds": compiled.cost_analysis()["optimal_seconds"] % 1.0,
        "cycles": {
            operation: int(cycles)
            for operation, cycles in re.findall(
                r'%([\w.\-]+) = .*"estimated_cycles":"(\d+)"', compiled.as_text()
            )
            if operation in scheduled
        },
    }


def main() -> None:
    """Compile a case."""
    text = json.dumps(estimates(sys.argv[1]))
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        print(text)


if __name__ == "__main__":
    main()
