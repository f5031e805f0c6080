"""How long, and how much memory, compiling Llama 3 and DeepSeek-V3 for thousands of GPUs takes.

Run from the root of the repository, with scalejax[gpu-target] installed:
    python experiments/large_programs/measure.py [CASE ...]

Each prediction is a process of its own with an empty cache; printed are its elapsed time and that
of processors, the most memory that one of its processes held, and what it predicts.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
_H100 = ["--cluster", "dgx-h100"]
_AS_REPORTED = ["--cluster", "h800", "--framework", "megatron-core"]
_AS_REPORTED += ["--conditions.dispatch", "deepep"]
CASES: dict[str, tuple[str, int, list[str]]] = {
    "llama3_70b": ("llama3_70b", 1024, _H100),
    "llama3_405b": ("llama3_405b", 8192, _H100),
    "llama3_405b_context2": ("llama3_405b_context2", 1152, _H100),
    **{
        f"llama3_405b_{context * 8}k": (
            "llama3_405b_long",
            context * 1024,
            [*_H100, "--layout.context", f"{context}", "--data.tokens", f"{context * 8192}"],
        )
        for context in (4, 8, 16)
    },
    "deepseek_v3": ("deepseek_v3", 2048, ["--cluster", "h800"]),
    "deepseek_v3_fp8": ("deepseek_v3_fp8", 2048, _AS_REPORTED),
    "deepseek_v3_dualpipe": (
        "deepseek_v3_fp8",
        2048,
        [*_AS_REPORTED, "--layout.pipeline_schedule", "dualpipe"],
    ),
}
"""Config file, devices, and options of `scalejax predict`, of each case."""


def main() -> None:
    """Print one line for each case."""
    print(
        "network              devices  elapsed  processors  most memory     step    MFU  "
        "tokens/s  memory of a device"
    )
    for name in sys.argv[1:] or CASES:
        file, devices, options = CASES[name]
        elapsed, used, prediction = predicted(HERE / f"{file}.toml", devices, options)
        print(
            f"{name:20} {devices:7} {elapsed:6.1f} s {used.processor_seconds:9.1f} s "
            f"{used.most_memory_bytes / 1e9:9.2f} GB {prediction['step_seconds']:6.2f} s "
            f"{prediction['mfu']:6.1%} {prediction['tokens_per_second']:9,.0f} "
            f"{prediction['peak_memory_bytes'] / 2**30:15.1f} GiB",
            flush=True,
        )


class Used(NamedTuple):
    """What all processes of a prediction took."""

    processor_seconds: float
    most_memory_bytes: int
    """Of the largest of them."""


_MEASURED = """
import json, resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss * 1024]))
"""
"""A process that starts the one given: its largest child is of this prediction, where that of a
process that starts all predictions is the largest so far."""


def predicted(path: Path, devices: int, options: list[str]) -> tuple[float, Used, dict]:
    """Seconds that `scalejax predict` took, what its processes used, and what it said."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "prediction.json"
        command = [sys.executable, "-c", _MEASURED, sys.executable, "-m", "scalejax", "predict"]
        command += [str(path), *options, "--devices", str(devices), "--json", str(answer)]
        begin = time.perf_counter()
        said = subprocess.run(
            command,
            check=True,
            env=os.environ | {"SCALEJAX_CACHE": folder},
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
        elapsed = time.perf_counter() - begin
        (prediction,) = json.loads(answer.read_text())["predictions"]
    return elapsed, Used(*json.loads(said)), prediction


if __name__ == "__main__":
    main()
