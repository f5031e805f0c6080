"""What could keep runs from being right or fast on this machine: findings, each with its fix.

Every check is a function of plain readings, taken beside it. Starts without JAX, which the checks
of devices import when they run.
"""

from scalejax.measure.doctor.examination import Examination, examine, stage_count
from scalejax.measure.doctor.finding import Finding, is_any_bad

__all__ = ["Examination", "Finding", "examine", "is_any_bad", "stage_count"]
