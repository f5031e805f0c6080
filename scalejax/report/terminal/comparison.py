"""The comparison of two revisions of a step on a terminal: tables in 80 columns.

Formats numbers and computes only ratios.
"""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from scalejax.core.units import (
    UNKNOWN,
    counted,
    format_bytes,
    format_count,
    format_fraction,
    format_seconds,
)
from scalejax.hardware import Cluster
from scalejax.report.terminal.tables import figures
from scalejax.simulator.comparison import AxisBytes, Bounds, CollectiveChange, Comparison
from scalejax.simulator.predict import Prediction

_MOST_SHOWN = 12


def comparison(
    found: Comparison, cluster: Cluster, *, titles: tuple[str, str]
) -> Iterator[RenderableType]:
    """Step, FLOP and memory; bytes of collectives by axis; collectives that appeared or vanished.

    Args:
        found: the comparison.
        cluster: the cluster.
        titles: what A and B are.
    """
    yield _heading(found, cluster, titles)
    yield _steps(found)
    yield Text("Bytes of collectives in a step, by mesh axes", style="bold")
    yield axes(found.axes) if found.axes else Text("There are no collectives.")
    yield Text("Collectives that appeared or disappeared", style="bold")
    yield changes(found.changes) if found.changes else Text("None.")
    if found.notes:
        yield Text("\n".join(f"Note: {note}." for note in found.notes), style="dim")
    yield verdict(found.exceeded, found.bounds)


def _heading(found: Comparison, cluster: Cluster, titles: tuple[str, str]) -> Text:
    devices = counted(found.after.device_count, "device")
    lines = [(f"{devices} of {cluster.title}", "bold")]
    for name, title, each in zip("AB", titles, (found.before, found.after), strict=True):
        mesh = " x ".join(f"{axis}={size}" for axis, size in each.mesh_axes if size > 1)
        lines.append((f"\n{name}: {title}{f' ({mesh})' if mesh else ''}", ""))
    return Text.assemble(*lines)


def _steps(found: Comparison) -> Table:
    before, after = found.before, found.after
    table = figures("", "A", "B", "B / A")
    times = (before.step_seconds, after.step_seconds)
    table.add_row("step time", *map(format_seconds, times), _ratio(*times))
    if before.global_batch != after.global_batch:
        samples = [_seconds_per_sample(each) for each in (before, after)]
        table.add_row("time per sample", *map(format_seconds, samples), f"x {found.time_ratio:.3f}")
    mfu = (before.mfu, after.mfu)
    table.add_row("MFU", *map(format_fraction, mfu), _ratio(*mfu))
    flop = (found.before_flop, found.after_flop)
    table.add_row("FLOP of a device", *map(format_count, flop), _ratio(*flop))
    peak = (before.peak_memory_bytes, after.peak_memory_bytes)
    table.add_row("peak memory", *map(format_bytes, peak), _ratio(*peak))
    return table


def _seconds_per_sample(prediction: Prediction) -> float | None:
    batch = prediction.global_batch
    return None if batch is None else prediction.step_seconds / batch


def _ratio(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return UNKNOWN
    if before:
        return f"x {after / before:.3f}"
    return "new" if after else UNKNOWN


def axes(found: Sequence[AxisBytes]) -> Table:
    """Table of the bytes over each product of axes, the largest first."""
    table = figures("axes", "A", "B", "B / A")
    for each in found:
        pair = (each.before_bytes, each.after_bytes)
        table.add_row(each.axes, *map(format_bytes, pair), _ratio(*pair))
    return table


def changes(found: Sequence[CollectiveChange]) -> Table:
    """Table of collectives whose number changed, those with the most bytes first."""
    table = figures("collective", "axes", "payload", "A", "B", "adds")
    table.columns[1].justify = "left"
    table.add_column("where", overflow="fold")
    for each in found[:_MOST_SHOWN]:
        table.add_row(
            each.name.replace("_", "-"),
            each.axes,
            format_bytes(each.payload_bytes),
            f"{each.before_runs:g}",
            f"{each.after_runs:g}",
            _signed_seconds(each.added_seconds),
            each.source or UNKNOWN,
        )
    if rest := found[_MOST_SHOWN:]:
        seconds = sum(each.added_seconds for each in rest)
        table.add_row(counted(len(rest), "other"), "", "", "", "", _signed_seconds(seconds), "")
    return table


def _signed_seconds(seconds: float) -> str:
    if not seconds:
        return "0 s"
    return f"{'-' if seconds < 0 else ''}{format_seconds(abs(seconds))}"


def verdict(exceeded: Sequence[str], bounds: Bounds) -> Text:
    """What exceeds a bound; or a statement that nothing does, with the bounds."""
    if exceeded:
        return Text("\n".join(f"Beyond a bound: {each}." for each in exceeded), style="bold")
    return Text(
        f"Within all bounds: step time +{bounds.max_slowdown:.4g}, peak memory "
        f"+{bounds.max_memory_growth:.4g}, bytes over any axes +{bounds.max_bytes_growth:.4g}, "
        "as fractions of A."
    )
