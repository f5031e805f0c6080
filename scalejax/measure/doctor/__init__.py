"""Health check of this machine: what makes runs fail or slow, each finding with its fix.

Every check is a function of plain readings, so that it can be tested without the hardware.
Imports no JAX until the device checks run.
"""

from scalejax.measure.doctor.examination import examine, stage_count
from scalejax.measure.doctor.finding import Finding, Findings, is_any_bad

__all__ = ["Finding", "Findings", "examine", "is_any_bad", "stage_count"]
