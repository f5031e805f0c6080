"""One of several processes that train as one, each with devices of its own.

python machine.py RUN.toml FOLDER INDEX COUNT DEVICES PORT [--field value ...]
"""

import sys
from pathlib import Path

import jax

from scalejax.api import train
from scalejax.config.run import load_config
from scalejax.core.serialization import parse_value


def main() -> None:
    """Train as the arguments say; the first process keeps the record."""
    run_file, folder, index, count, devices, port, *flags = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.distributed.initialize(f"localhost:{port}", int(count), int(index))
    names = [flag.removeprefix("--") for flag in flags[::2]]
    overrides = dict(zip(names, map(parse_value, flags[1::2]), strict=True))
    train(load_config(Path(run_file), overrides), Path(folder))


if __name__ == "__main__":
    main()
