"""One of several processes that train a run together over loopback.

python experiments/local_prediction/process.py PORT PROCESSES RANK FOLDER RUN.toml FIELD=VALUE...
"""

import sys
from pathlib import Path

import jax

from scalejax.api import train
from scalejax.config.run import load_config
from scalejax.core.serialization import parse_value


def main() -> None:
    """Join the others, and train."""
    port, processes, rank = (int(argument) for argument in sys.argv[1:4])
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    fields = dict(argument.split("=") for argument in sys.argv[6:])
    values = {name: parse_value(value) for name, value in fields.items()}
    train(load_config(Path(sys.argv[5]), values), Path(sys.argv[4]))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
