"""What a run has met, put into the failure model, gives the goodput that the run had."""

import random

import pytest
from test_time_accounting import KILLED_AND_RESUMED, interval

from scalejax.planning.observed_failures import failures_met
from scalejax.training.time_accounting import Interval, time_account

STARTUP, COMPILE, DOWN, INTERVAL, PAUSE = 8.0, 4.0, 3.0, 20.0, 2.0


def played(mtbf: float, intervals: int, seed: int) -> list[Interval]:
    """The stretches of a run with failures at random times while it is up, played through: a
    second is cut off wherever the failure falls."""
    rng = random.Random(seed)
    time_intervals: list[Interval] = []
    now, session, done = 0.0, 0, 0
    while done < intervals:
        began, left = now, rng.expovariate(1 / mtbf) if session else float("inf")
        first, parts = done, {"startup": STARTUP, "compile": COMPILE}
        while True:
            wanted = [*parts.items(), ("step", INTERVAL), ("checkpoint", PAUSE)]
            spent = {}
            for part, seconds in wanted:
                spent[part] = min(seconds, left)
                left -= spent[part]
                now += spent[part]
            is_finished = left > 0
            done += is_finished
            session_line = {"began": began, "first": 10 * first, "finished": is_finished}
            step = 10 * done + (0 if is_finished else 5 * (spent["step"] > INTERVAL / 2))
            time_intervals.append(interval(session, step, **session_line, **spent))
            if session == 0 and done == 1:
                left = rng.expovariate(1 / mtbf)
            if not is_finished or done == intervals:
                break
            parts = {}
        now += DOWN
        session += 1
    return time_intervals


@pytest.mark.parametrize("mtbf", [400.0, 120.0, 40.0])
def test_the_model_has_the_goodput_of_a_run_played_through(mtbf: float):
    """A few thousand failures; the ledger knows nothing of how they were drawn."""
    time_intervals = played(mtbf, 6000, seed=2)

    met, ledger = failures_met(time_intervals), time_account(time_intervals)

    assert met is not None
    assert met.failures == ledger.sessions - 1 > 100
    assert met.run_mtbf_seconds == pytest.approx(mtbf, rel=0.1)
    assert (met.interval_seconds, met.pause_seconds) == pytest.approx((INTERVAL, PAUSE))
    assert met.restart_seconds == pytest.approx(STARTUP + COMPILE)
    assert met.down_seconds == pytest.approx(DOWN)
    assert ledger.step_seconds == pytest.approx(6000 * INTERVAL)
    assert met.goodput == pytest.approx(ledger.goodput, abs=0.012)


def test_a_run_without_failures_is_a_start_and_its_intervals():
    """12 s of start, twice 20 s and 2 s of pause: 40 of 56 s."""
    met = failures_met(played(1e9, 2, seed=0))

    assert met is not None
    assert met.run_mtbf_seconds is None
    assert met.goodput == pytest.approx(40 / 56)


def test_what_a_run_has_met_by_hand():
    """One failure in the 51 s after the start; the interval to step 100 and the one to 200."""
    met = failures_met(KILLED_AND_RESUMED)

    assert met is not None
    assert met.run_mtbf_seconds == 34.25 + 16.75 - 8
    assert (met.down_seconds, met.start_seconds, met.restart_seconds) == (5.75, 8, 8)
    assert (met.intervals, met.interval_seconds, met.pause_seconds) == (2, (11 + 8) / 2, 0.5)


def test_nothing_is_known_before_the_first_interval():
    """Neither of no session, nor of one that has just begun."""
    assert failures_met(()) is None
    assert failures_met([interval(0, 3, finished=False, startup=5.0, step=1.0)]) is None
