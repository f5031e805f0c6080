"""How long do 200 and 1,000 Downpour replicas take to emulate, and how much memory?

    python experiments/asynchronous/many_replicas.py              # 10 epochs of Fashion-MNIST
    python experiments/asynchronous/many_replicas.py --global-batch 32

Each in a process of its own. 60,000 images where the Debian package dataset-fashion-mnist is
installed, else the 10,000 that come with scalejax, of which the line says.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUN = """
[model]
name = "mlp"
[data]
name = "fashion_mnist"
[batch]
global_batch = 8
[optimizer]
name = "adagrad"
[schedule]
base_learning_rate = 0.001
warmup = "none"
[train]
epochs = 10
log_every_steps = 100
[emulation.algorithm]
name = "downpour"
[emulation.timing]
gradient_seconds = 0.1
latency_seconds = 1e-3
worker_bytes_per_second = 125e6
server_bytes_per_second = 125e6
"""
WORKERS = (200, 1000)


def main() -> None:
    """Emulate each number of replicas; print a line of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--global-batch", type=int, default=8, help="images of a gradient")
    batch = parser.parse_args().global_batch
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "run.toml"
        path.write_text(RUN)
        for workers in WORKERS:
            folder = Path(name) / str(workers)
            command = [sys.executable, "-m", "scalejax", "emulate", str(path)]
            command += ["--batch.global_batch", str(batch)]
            began = time.perf_counter()
            subprocess.run(
                [*command, "--workers", str(workers), "--folder", str(folder)],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            seconds = time.perf_counter() - began
            peak_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
            found = json.loads((folder / "emulation.json").read_text())
            print(
                f"{workers} replicas: {found['gradients']:,} gradients of {batch} images in "
                f"{seconds:.0f} s, at most {peak_bytes / 1e9:.2f} GB",
                flush=True,
            )


if __name__ == "__main__":
    main()
