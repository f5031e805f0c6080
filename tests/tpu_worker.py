"""Compiles for a TPU that is not here, and prints what XLA itself estimates: a JSON line a case.

A process of its own, since libtpu keeps what it is given at its start. Usage:
`python tpu_worker.py CASE...`, each a name in CASES.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
}

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from scalejax import documents
from scalejax.config import RunConfig, resolve
from scalejax.hardware import load_cluster
from scalejax.mesh import build_mesh
from scalejax.profile.compiled import read_compiled
from scalejax.profile.target import target_for
from scalejax.profile.worker import _devices
from scalejax.step import build_step

DEVICES = 4
CLOCK_HZ = 1.5e9  # of TPU v5e: 197 TFLOP/s over 4 arrays of 128 x 128 multiply-adds
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
        step = build_step(resolve(documents.build(RunConfig, {**BASE, **RUNS[name]})), mesh)
        return step.function.lower(step.state, step.batch).compile()

    return compiled


CASES = {"chain": compile_chain, **{name: compile_run(name) for name in RUNS}}


def main() -> None:
    """Compile the cases that are named."""
    from scalejax.layout import Layout

    devices = _devices(target_for(load_cluster("tpu-v5e"), DEVICES, "tpu"))
    for name in sys.argv[1:]:
        mesh = build_mesh(Layout(data=DEVICES), devices)
        compiled = CASES[name](mesh)
        text = compiled.as_text()
        if folder := os.environ.get("KEEP_HLO"):
            open(f"{folder}/{name}.hlo", "w").write(text)
        answer = {
            "program": documents.plain(read_compiled(compiled, mesh, name=name)),
            "cost": compiled.cost_analysis(),
            "cycles": {
                match[1]: int(match[2])
                for match in re.finditer(r'%([\w.\-]+) = .*"estimated_cycles":"(\d+)"', text)
            },
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
