"""Sweeps: many runs from one run.toml, planned, trained in parallel, resumed, and tabulated.

`config.grid` parses the command line into fields, `plan` builds runs from them, `scheduler` has
`worker` processes train them (one by one with `train`, or several in one program with `vmapped`),
and `results` reads their records. Does not import JAX, except in the workers.
"""

from scalejax.config.grid import Grammar, parse_grammar
from scalejax.sweep.folder import SweepFolder
from scalejax.sweep.plan import PlannedRun, SweepPlan, Target, plan_sweep
from scalejax.sweep.results import RunRow, read_rows, result_table, write_results
from scalejax.sweep.scheduler import run_sweep

__all__ = [
    "Grammar",
    "PlannedRun",
    "RunRow",
    "SweepFolder",
    "SweepPlan",
    "Target",
    "parse_grammar",
    "plan_sweep",
    "read_rows",
    "result_table",
    "run_sweep",
    "write_results",
]
