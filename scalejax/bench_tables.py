"""A bench on a terminal: tables that fit 80 columns.

Knows how to word and align figures, and computes none. Each function that gives parts gives them
in order.
"""

from collections.abc import Iterator, Sequence
from statistics import median

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from scalejax.bench.plan import BenchPlan
from scalejax.bench.results import Summary, groups, kept_share
from scalejax.bench.tables import Cells, ScalingTable
from scalejax.predict import Prediction
from scalejax.tables import figures
from scalejax.units import UNKNOWN, counted, format_count, format_fraction, format_seconds

_MISSING = "-"


def plan(bench: BenchPlan) -> Iterator[RenderableType]:
    """Every benchmark, a line each."""
    repeats = counted(bench.repeats, "round")
    title = f"{counted(len(bench.benchmarks), 'benchmark')}, {repeats}"
    yield Text.assemble((title, "bold"))
    table = figures("benchmark", "devices", "processes", "scaling", "per device", "in all", "steps")
    for each in bench.benchmarks:
        settings, split = each.settings, each.run.split
        table.add_row(
            each.label,
            str(settings.devices),
            str(settings.processes),
            settings.scaling,
            str(split.per_device_batch),
            str(split.global_batch),
            f"{settings.warmup_steps}+{settings.steps}",
        )
    yield table


def results(summaries: Sequence[Summary], baseline: int | None = None) -> Iterator[RenderableType]:
    """Time of a step and what of the throughput per device is kept, then throughput as
    tf_cnn_benchmarks prints it."""
    measured = [each for each in summaries if each.is_measured]
    if not measured:
        yield "Nothing is measured yet."
        return
    yield Text.assemble((title_of(measured), "bold"))
    table = figures("devices", "step", "95 % of the median", "samples/s", "kept", "waits")
    for label, members in groups(measured).items():
        ordered = sorted(members, key=lambda each: each.benchmark.settings.devices)
        table.add_row(Text(label, style="dim"))
        for each in ordered:
            table.add_row(*_cells(each, kept_share(each, measured, baseline)))
    yield table
    yield "As tf_cnn_benchmarks prints it, of all timed steps:"
    yield Text("\n".join(f"{each.benchmark.label}\n  {each.speed}" for each in measured))
    if len({result.versions for each in measured for result in each.results}) > 1:
        yield "Results are of several versions: --rerun makes them of this one."


def title_of(measured: Sequence[Summary]) -> str:
    """What was measured on what, in one line."""
    first, result = measured[0].benchmark, measured[0].results[0]
    settings = first.settings
    rounds = counted(max(len(each.results) for each in measured), "round")
    return (
        f"{first.run.config.model.name} on {result.device_kind}: {rounds} of {settings.steps} "
        f"steps, {settings.batches} batches"
    )


def _cells(each: Summary, kept: float | None) -> list[str]:
    low, high = each.interval
    settings = each.benchmark.settings
    place = f"{settings.devices}"
    if settings.processes > 1:
        place += f" in {settings.processes} processes"
    return [
        place,
        format_seconds(each.median_seconds),
        f"{format_seconds(low)} to {format_seconds(high)}",
        format_count(each.global_batch / each.median_seconds),
        format_fraction(kept),
        format_fraction(each.wait_share),
    ]


def scaling(table: ScalingTable, statistic: str) -> Iterator[RenderableType]:
    """Times, throughput, speedup and efficiency over devices, as DLBS prints them."""
    base = table.device_counts[table.baseline]
    formula = "t{0} / tN" if table.scaling == "weak" else "t{0} / (N tN)"
    yield Text.assemble((f"{table.scaling.capitalize()} scaling over devices", "bold"))
    yield f"Batch time in milliseconds ({statistic})"
    yield _over_devices(table, table.milliseconds)
    yield "Throughput in samples per second"
    yield _over_devices(table, table.samples_per_second)
    yield f"Speedup against {counted(base, 'device')}"
    yield _over_devices(table, table.speedups)
    yield f"Efficiency in per cent: 100 {formula.format(base)}"
    yield _over_devices(table, table.efficiencies)
    yield from notes(table)


def notes(table: ScalingTable) -> Iterator[str]:
    """What must be known of the efficiencies."""
    base = table.device_counts[table.baseline]
    if table.scaling == "strong" and base > 1:
        yield (
            f"N counts all devices, as DLBS counts them: against {base} devices, ideal strong "
            f"scaling reads {100 / base:.4g}."
        )
    for label, count, percent in table.above_most:
        shown = " (shown as 100)" if table.clamps else ""
        yield (
            f"Warning: {label} on {counted(count, 'device')} is {percent:.2f} % efficient{shown}: "
            "caches that hold more of a smaller part, or a baseline that something held up."
        )


def _over_devices(table: ScalingTable, cells: Cells) -> Table:
    shown = figures("", *map(str, table.device_counts))
    for label, row in zip(table.labels, cells, strict=True):
        shown.add_row(label, *(_MISSING if cell is None else f"{cell:.2f}" for cell in row))
    return shown


def against_predicted(
    rows: Sequence[tuple[Summary, Prediction | None, bool]],
) -> Iterator[RenderableType]:
    """Measured beside predicted steps, those marked to which the prediction was fitted."""
    table = figures("benchmark", "measured", "predicted", "error", "")
    left_out = []
    for summary, prediction, is_fitted in rows:
        error = prediction and prediction.step_seconds / summary.median_seconds - 1
        if error is not None and not is_fitted:
            left_out.append(abs(error))
        table.add_row(
            _named(summary),
            format_seconds(summary.median_seconds),
            UNKNOWN if prediction is None else format_seconds(prediction.step_seconds),
            UNKNOWN if error is None else f"{error:+.1%}",
            "fitted to" if is_fitted else "",
        )
    yield table
    if left_out:
        yield (
            f"Median absolute error of the {len(left_out)} to which nothing was fitted: "
            f"{median(left_out):.1%}."
        )


def _named(summary: Summary) -> str:
    settings = summary.benchmark.settings
    place = f"devices={settings.devices}"
    label = summary.benchmark.label
    return label if "devices=" in label else f"{place} {label}"
