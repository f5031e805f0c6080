"""How long, and how much memory, compiling Llama 3 for thousands of GPUs takes.

Run from the root of the repository, with scalejax[gpu-target] installed:
    python experiments/large_programs/measure.py

Each prediction is a process of its own with an empty cache; printed are its elapsed time, the
most memory that one of its processes held, and what it predicts.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
CASES = (("llama3_70b", 1024), ("llama3_405b", 8192))


def main() -> None:
    """Print one line for each case."""
    print("network      devices  elapsed  most memory  step       MFU    memory of a device")
    for name, devices in CASES:
        elapsed, prediction = predicted(HERE / f"{name}.toml", devices)
        # The largest process so far; the cases grow.
        most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
        print(
            f"{name:12} {devices:7} {elapsed:7.1f} s {most:9.2f} GB  "
            f"{prediction['step_seconds']:6.2f} s {prediction['mfu']:6.1%} "
            f"{prediction['peak_memory_bytes'] / 2**30:10.1f} GiB"
        )


def predicted(path: Path, devices: int) -> tuple[float, dict]:
    """Seconds that `scalejax predict` took, and what it said."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "prediction.json"
        command = [sys.executable, "-m", "scalejax", "predict", str(path), "--cluster", "dgx-h100"]
        command += ["--devices", str(devices), "--json", str(answer)]
        begin = time.perf_counter()
        subprocess.run(
            command,
            check=True,
            env=os.environ | {"SCALEJAX_CACHE": folder},
            stdout=subprocess.DEVNULL,
        )
        elapsed = time.perf_counter() - begin
        (prediction,) = json.loads(answer.read_text())["predictions"]
    return elapsed, prediction


if __name__ == "__main__":
    main()
