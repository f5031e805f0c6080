"""How long, and how much memory, compiling Llama 3 and DeepSeek-V3 for thousands of GPUs takes.

Run from the root of the repository, with scalejax[gpu-target] installed:
    python experiments/large_programs/measure.py [CASE ...]

Each prediction is a process of its own with an empty cache; printed are its elapsed time and that
of processors, the most memory that one of its processes held, and what it predicts.
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
        before, (file, devices, options) = processor_seconds(), CASES[name]
        elapsed, prediction = predicted(HERE / f"{file}.toml", devices, options)
        # The largest process so far; the cases grow.
        most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
        print(
            f"{name:20} {devices:7} {elapsed:6.1f} s {processor_seconds() - before:9.1f} s "
            f"{most:9.2f} GB {prediction['step_seconds']:6.2f} s {prediction['mfu']:6.1%} "
            f"{prediction['tokens_per_second']:9,.0f} "
            f"{prediction['peak_memory_bytes'] / 2**30:15.1f} GiB",
            flush=True,
        )


def processor_seconds() -> float:
    """Time on processors of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def predicted(path: Path, devices: int, options: list[str]) -> tuple[float, dict]:
    """Seconds that `scalejax predict` took, and what it said."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "prediction.json"
        command = [sys.executable, "-m", "scalejax", "predict", str(path), *options]
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
