"""The part of the report on where the wall time of runs went."""

from collections.abc import Sequence

from scalejax import report_charts
from scalejax.report_page import Page
from scalejax.report_sources import RunSource
from scalejax.units import format_fraction, format_seconds_briefly


def add_times(page: Page, runs: Sequence[RunSource]) -> None:
    """The time ledgers of the runs that have one, as a table and as bars; nothing without any."""
    timed = [run for run in runs if run.time is not None]
    if not timed:
        return
    page.add("<h3>Where the wall time went</h3>")
    page.add(
        "<p>From the start of the first process of a run to the end of its last session; the parts "
        "add up to it. Goodput is the share of steps that counted, their waiting for input "
        "included. Wasted is what was done after the checkpoint from which a later session went "
        "on; down is the time between sessions. Beside it is what the failure model says of as "
        "many failures, restarts and checkpoints as the run has met (Daly 2006).</p>"
    )
    parts = [name for name, _ in timed[0].time.parts] if timed[0].time else []
    page.add_table(
        ["run", "sessions", "steps again", "wall time", "goodput", "failure model", *parts],
        [_row(run) for run in timed],
    )
    page.add_chart(
        "Shares of the wall time",
        "Each bar is the whole time of a run, from start to end, whatever happened to it.",
        report_charts.wall_time(timed),
    )


def _row(run: RunSource) -> list[str]:
    ledger = run.time
    if ledger is None:
        return []
    return [
        run.label,
        str(ledger.sessions),
        f"{ledger.repeated_steps:,}",
        format_seconds_briefly(ledger.seconds),
        format_fraction(ledger.goodput),
        format_fraction(run.model_goodput),
        *(format_seconds_briefly(seconds) if seconds else "0" for _, seconds in ledger.parts),
    ]
