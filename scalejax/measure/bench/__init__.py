"""Benchmarks: the real step of a run, timed on several devices, processes and batches.

`plan` makes benchmarks of what was typed, `run` starts a `worker` for each, which times steps
(`timed_steps`) beside a `monitor`; `results` reads what they left, `statistics` and `tables` are
the arithmetic on it. Starts without JAX, as all but the workers do.
"""

from scalejax.measure.bench.folder import BenchFolder
from scalejax.measure.bench.plan import Benchmark, BenchPlan, plan_bench
from scalejax.measure.bench.results import Summary, measured_runs, read_summaries
from scalejax.measure.bench.run import run_bench

__all__ = [
    "BenchFolder",
    "BenchPlan",
    "Benchmark",
    "Summary",
    "measured_runs",
    "plan_bench",
    "read_summaries",
    "run_bench",
]
