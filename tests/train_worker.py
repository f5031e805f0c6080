"""Trains a small run in a process of its own, for tests that kill it or need several.

Usage: python train_worker.py RUN.toml FOLDER [resume | new] [PROCESS COUNT PORT]
"""

import sys
from pathlib import Path

import jax

from scalejax.config import load_config
from scalejax.progress import PlainLines
from scalejax.train import train


def main() -> None:
    """Train as the arguments say, on four devices in all."""
    run_file, folder, mode, *place = sys.argv[1:]
    if place:
        process, count, port = map(int, place)
        jax.config.update("jax_num_cpu_devices", 4 // count)
        jax.distributed.initialize(f"localhost:{port}", count, process)
    else:
        jax.config.update("jax_num_cpu_devices", 4)
    train(
        load_config(Path(run_file)),
        Path(folder),
        resume=mode == "resume",
        reporter=PlainLines(sys.stderr),
    )


if __name__ == "__main__":
    main()
