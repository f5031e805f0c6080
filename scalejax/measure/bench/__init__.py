"""Benchmarks: the real training step, timed over device counts, process counts and batches.

`plan` builds benchmarks from the command line, `run` starts a `worker` for each, which times steps
(`timed_steps`) while a `monitor` samples usage; `results` reads their files, `statistics` and
`tables` compute on them. Imports no JAX, except in the workers.
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
