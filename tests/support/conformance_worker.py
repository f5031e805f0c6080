"""One of several processes that train the runs of `test_conformance` together.

Usage: python conformance_worker.py PROCESS PROCESSES DEVICES PORT OUTPUT.npz
"""

import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# As in `conftest`: what compiles soonest.
if version("jaxlib").startswith("0.10."):  # others end at a flag that they do not know
    os.environ["XLA_FLAGS"] = (
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    )

import jax


def main(process: int, processes: int, devices: int, port: int, output: str) -> None:
    """Train every run of `MULTI_PROCESS` and let process 0 write what came out."""
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_disable_most_optimizations", True)  # as in `conftest`
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)

    import numpy as np
    from jax.experimental import multihost_utils

    sys.path.append(str(Path(__file__).parents[1] / "training"))
    from test_conformance import MULTI_PROCESS, run_of, train

    arrays = {}
    for name, (model, layout) in MULTI_PROCESS.items():
        losses, state = train(run_of(model, "sgd", layout))
        leaves = jax.tree.leaves((state.params, state.model_state))
        gathered = [multihost_utils.process_allgather(leaf, tiled=True) for leaf in leaves]
        arrays[f"{name}/losses"] = losses
        arrays |= {f"{name}/{index:03d}": leaf for index, leaf in enumerate(gathered)}
    if process == 0:
        np.savez(output, **arrays)
    # Not `jax.distributed.shutdown()`: on a busy machine the coordinator's server aborts in it now
    # and then (gRPC's server.cc:584, jaxlib 0.10.2). Process 0 has it, and goes last.
    multihost_utils.sync_global_devices("all is written")
    sys.stdout.flush()
    time.sleep(2 if process == 0 else 0)
    os._exit(0)


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:5]]
    main(numbers[0], numbers[1], numbers[2], numbers[3], sys.argv[5])
