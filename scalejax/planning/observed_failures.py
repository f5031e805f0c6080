"""Failure statistics of a run, and the goodput that the failure model predicts from them.

A check of the model against the run's own goodput. Knows intervals of a run's time; no files.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from scalejax.simulator.reliability import seconds_without_failure
from scalejax.training.time_accounting import Interval, steps_made, time_account, which_counted


@dataclass(frozen=True, slots=True, kw_only=True)
class FailuresMet:
    """Inputs of the failure model as observed in one run: means over the run."""

    failures: int
    """Sessions after the first; each followed a failure or an interruption."""
    run_mtbf_seconds: float | None
    """Time that the run was up after its start, over failures; None without failures."""
    down_seconds: float
    """Mean time from the last record of a session to the start of the next."""
    restart_seconds: float
    """Mean time from the start of a resuming session to training: start-up, compiling."""
    start_seconds: float
    """Mean time from the start of the first session to training."""
    intervals: int
    """Number of intervals between pauses whose steps counted."""
    interval_seconds: float
    """Mean training time in an interval, waiting for input included."""
    pause_seconds: float
    """Mean stall at the end of an interval: an evaluation, a checkpoint."""
    latency_seconds: float = 0.0
    """Time from the end of a pause until its checkpoint is complete; not in the intervals."""

    @property
    def goodput(self) -> float:
        """Fraction of the run's time spent on steps that count, by the failure model, 0..1.

        A run is a start, and then the intervals with their pauses, each repeated until it passes
        without a failure. The start has no failures: a run that fails before it has begun leaves no
        record.

        Raises:
            ConfigError: if failures come so fast that such a run would never end.
        """
        seconds = self.interval_seconds + self.pause_seconds
        if self.run_mtbf_seconds is not None:
            seconds = seconds_without_failure(
                seconds,
                self.restart_seconds,
                self.run_mtbf_seconds,
                latency_seconds=self.latency_seconds,
                down_seconds=self.down_seconds,
            )
        useful_seconds = self.intervals * self.interval_seconds
        return useful_seconds / (self.start_seconds + self.intervals * seconds)


def failures_met(intervals: Sequence[Interval]) -> FailuresMet | None:
    """Failure statistics from a run's intervals in order; None before the first is complete."""
    made = zip(intervals, steps_made(intervals), which_counted(intervals), strict=True)
    counted = [each for each, steps, is_counted in made if is_counted and steps]
    finished = [each for each in counted if each.is_finished]
    if not finished:
        return None
    ledger = time_account(intervals)
    failures = ledger.sessions - 1
    starts, restarts = _starts(intervals)
    start_seconds = fmean(starts or restarts)
    up_seconds = ledger.seconds - ledger.down_seconds - start_seconds
    return FailuresMet(
        failures=failures,
        run_mtbf_seconds=up_seconds / failures if failures else None,
        down_seconds=ledger.down_seconds / failures if failures else 0.0,
        start_seconds=start_seconds,
        restart_seconds=fmean(restarts or starts),
        intervals=len(finished),
        interval_seconds=fmean(each.step_seconds + each.input_wait_seconds for each in finished),
        pause_seconds=fmean(each.evaluation_seconds + each.checkpoint_seconds for each in finished),
    )


def _starts(intervals: Sequence[Interval]) -> tuple[list[float], list[float]]:
    """Seconds from start to training of each session that trained: first starts, and resumes."""
    starts, restarts = [], []
    for _, lines in groupby(intervals, key=lambda each: each.session):
        of_session = list(lines)
        if any(each.step_seconds + each.input_wait_seconds > 0 for each in of_session):
            seconds = math.fsum(each.startup_seconds + each.compile_seconds for each in of_session)
            (restarts if of_session[-1].first_step else starts).append(seconds)
    return starts, restarts
