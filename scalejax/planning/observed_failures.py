"""What the failure model says of a run, given what the run has met: the check of one by the other.

Knows stretches of a run's time and the model; no files.
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
    """What the failure model takes, as one run has met it: means over the run."""

    failures: int
    """Sessions but the first; each followed a failure, or an interruption."""
    run_mtbf_seconds: float | None
    """Time that the run was up after its start, over failures; None if there were none."""
    down_seconds: float
    """From the last sign of a session to the start of the next."""
    restart_seconds: float
    """From the start of a session that goes on until it trains: start-up, compiling."""
    start_seconds: float
    """The same of the first session."""
    intervals: int
    """Stretches between pauses that counted."""
    interval_seconds: float
    """Training in such a stretch, waiting for input included."""
    pause_seconds: float
    """For which training stood still at the end of one: an evaluation, a checkpoint."""
    latency_seconds: float = 0.0
    """From the end of that pause until its checkpoint is whole; the stretches do not say."""

    @property
    def goodput(self) -> float:
        """The model's share of the time of such a run that goes into steps that count, 0..1.

        A start, and then the intervals with their pauses, each tried until it passes without a
        failure. The start has none: a run that fails before it has begun leaves nothing.

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
    """What a run has met, by its stretches in order; None before its first interval is done."""
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
    """Seconds until training of the sessions that came so far: of those that began the run, and
    of those that went on with it."""
    starts, restarts = [], []
    for _, lines in groupby(intervals, key=lambda each: each.session):
        of_session = list(lines)
        if any(each.step_seconds + each.input_wait_seconds > 0 for each in of_session):
            seconds = math.fsum(each.startup_seconds + each.compile_seconds for each in of_session)
            (restarts if of_session[-1].first_step else starts).append(seconds)
    return starts, restarts
