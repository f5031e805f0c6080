"""Sweeps: many runs from one file, planned, trained side by side, resumed, and put in tables.

`grammar` makes fields of what was typed, `plan` makes runs of them, `work` has them trained by
`worker` processes (each alone by `train`, or several at once by `together`), `results` reads
what they left. Starts without JAX, as all but the workers do.
"""

from scalejax.config.grid import Grammar, parse_grammar
from scalejax.sweep.folder import SweepFolder
from scalejax.sweep.plan import PlannedRun, SweepPlan, Target, plan_sweep
from scalejax.sweep.results import RunRow, read_rows, write_results
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
    "run_sweep",
    "write_results",
]
