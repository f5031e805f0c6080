"""Time and memory of `scalejax predict`, whole process: compiled anew, and from the cache.

Run from the root of the repository: python experiments/profile_speed/measure.py
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
CACHED_REPEATS = 5
CASES = (
    # file, devices, goal cold, goal cached: the project's acceptance (issue 2, point 5)
    ("resnet50", 256, 40.0, 1.0),
    ("gpt", 4096, 60.0, 1.0),
)
MEMORY_GOAL_BYTES = 2e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One command, from its start to its end."""

    seconds: float
    """Elapsed."""
    cpu_seconds: float
    """Spent computing, the worker included: what remains when the machine is busy."""
    peak_bytes: int
    """Most memory of the largest process, which is the worker."""


def predict(run: str, devices: int, cache: str) -> Measured:
    """One whole `scalejax predict`."""
    command = [
        *(sys.executable, "-m", "scalejax", "predict", str(HERE / f"{run}.toml")),
        *("--cluster", "dgx-h100", "--devices", str(devices)),
    ]
    before = time.perf_counter()
    process = subprocess.Popen(
        command, env={**os.environ, "SCALEJAX_CACHE": cache}, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - before
    if status != 0:
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    return Measured(
        seconds=seconds,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak_bytes=usage.ru_maxrss * 1024,
    )


def main() -> None:
    """Measure every case and print it beside its goal."""
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib")}
    load = os.getloadavg()[0]
    print(
        f"{os.cpu_count()} cores ({platform.machine()}), load {load:.1f} at the start, {versions}"
    )
    results = []
    for run, devices, cold_goal, cached_goal in CASES:
        with tempfile.TemporaryDirectory() as cache:
            cold = predict(run, devices, cache)
            cached = [predict(run, devices, cache) for _ in range(CACHED_REPEATS)]
        median = statistics.median(one.seconds for one in cached)
        spread = max(one.seconds for one in cached) - min(one.seconds for one in cached)
        print(
            f"{run} on {devices} H100: cold {cold.seconds:.1f} s (goal {cold_goal:.0f}), "
            f"CPU {cold.cpu_seconds:.1f} s, peak {cold.peak_bytes / 1e9:.2f} GB "
            f"(goal {MEMORY_GOAL_BYTES / 1e9:.0f}); from the cache {median:.2f} s "
            f"(median of {CACHED_REPEATS}, spread {spread:.2f}, goal {cached_goal:.0f})"
        )
        results.append(
            {
                "run": run,
                "devices": devices,
                "cold": asdict(cold),
                "cached": [asdict(one) for one in cached],
            }
        )
    report = {"versions": versions, "cores": os.cpu_count(), "load": load, "results": results}
    name = f"results_jax_{versions['jax']}.json"
    (HERE / name).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
