"""Trains a small run in a process of its own, for tests that kill it.

Usage: python train_worker.py RUN.toml FOLDER [resume | new]
"""

import sys
from pathlib import Path

import jax

from scalejax.api import train
from scalejax.config.run import load_config
from scalejax.training.reporter import PlainLines


def main() -> None:
    """Train as the arguments say, on four devices."""
    run_file, folder, mode = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 4)
    train(
        load_config(Path(run_file)),
        Path(folder),
        resume=mode == "resume",
        reporter=PlainLines(sys.stderr),
        predicts=False,
    )


if __name__ == "__main__":
    main()
