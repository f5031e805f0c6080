"""An emulated run on a terminal: a table that fits 80 columns.

Knows how to word figures, and computes none.
"""

from collections.abc import Iterator

from rich.console import RenderableType

from scalejax.emulation_record import Emulation, in_words
from scalejax.record import RunRecord
from scalejax.tables import facts
from scalejax.units import format_bytes, format_count, format_fraction, format_seconds


def emulation(found: Emulation, record: RunRecord) -> Iterator[RenderableType]:
    """Times, staleness and traffic of a run, and how good it got."""
    table = facts()
    where = f"of {found.cluster}" if found.cluster else "as given"
    table.add_row("gradient", format_seconds(found.gradient_seconds), f"of one worker, {where}")
    if found.exchange_seconds:
        table.add_row("exchange", format_seconds(found.exchange_seconds), "that nothing hides")
    table.add_row("virtual time", format_seconds(found.virtual_seconds), "of the whole run")
    table.add_row(
        "device time",
        format_seconds(found.device_seconds),
        "for which workers are held, all together",
    )
    words = f"of {found.gradients:,} gradients"
    if not found.updates:
        words += ": too few for one"
    table.add_row("updates", format_count(found.updates), words)
    if found.mean_staleness is not None:
        most = found.staleness[-1][0]
        table.add_row(
            "staleness",
            f"{found.mean_staleness:.3g}",
            f"updates on average between read and write, {most} at most",
        )
    if found.dropped_gradients:
        table.add_row("dropped", format_count(found.dropped_gradients), "gradients came too late")
    if found.sent_bytes:
        table.add_row("sent", format_bytes(found.sent_bytes), "between workers and servers")
    if found.worker_failures or found.server_failures:
        words = f"of workers, {found.server_failures} of servers"
        table.add_row("failures", str(found.worker_failures), words)
    if record.evaluations:
        best = max(record.evaluations, key=lambda each: each.test_accuracy)
        after = f"the best {format_fraction(best.test_accuracy)}, after "
        table.add_row(
            "test accuracy",
            format_fraction(record.evaluations[-1].test_accuracy),
            f"at the end; {after}{format_seconds(best.elapsed_seconds)}",
        )
    yield f"[bold]{in_words(found.config)}[/]"
    yield table
