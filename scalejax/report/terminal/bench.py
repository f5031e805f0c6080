"""Terminal tables of benches, doctor findings and input rates, in 80 columns.

Formats numbers and computes none. Functions that yield parts yield them in order.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scalejax.core.units import (
    UNKNOWN,
    counted,
    format_bytes_per_second,
    format_count,
    format_fraction,
    format_seconds,
)
from scalejax.hardware import InputRates
from scalejax.measure.bench.plan import BenchPlan
from scalejax.measure.bench.results import Summary, groups, kept_share
from scalejax.measure.bench.tables import Cells, ScalingTable
from scalejax.measure.doctor import Finding
from scalejax.report.terminal.tables import figures
from scalejax.simulator.input import InputPace
from scalejax.simulator.predict import Prediction

_MISSING = "-"


def plan(bench: BenchPlan) -> Iterator[RenderableType]:
    """Table of the planned benchmarks."""
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
    """Step time and share of the per-device throughput kept, then throughput as
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
    yield "In the format of tf_cnn_benchmarks, over all timed steps:"
    yield Text("\n".join(f"{each.benchmark.label}\n  {each.speed}" for each in measured))
    if len({result.versions for each in measured for result in each.results}) > 1:
        yield "Results are of several versions: --rerun makes them of this one."


def title_of(measured: Sequence[Summary]) -> str:
    """Model, device and number of steps of a bench, in one line."""
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
    """Tables of times, throughput, speedup and efficiency over devices, as DLBS prints them."""
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
    """Notes on how to read the efficiencies, and warnings about those above 100 %."""
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


def _over_devices(table: ScalingTable, cells: Cells | np.ndarray) -> Table:
    shown = figures("", *map(str, table.device_counts))
    for label, row in zip(table.labels, np.array(cells, dtype=float), strict=True):
        shown.add_row(label, *(_MISSING if np.isnan(cell) else f"{cell:.2f}" for cell in row))
    return shown


def against_predicted(
    rows: Sequence[tuple[Summary, Prediction | None, bool]],
) -> Iterator[RenderableType]:
    """Measured and predicted step times; benchmarks that the cluster was fitted to are marked."""
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


# Findings of the doctor: a table of all, and the fixes below it.

_STYLES = {"ok": "green", "warn": "yellow", "bad": "bold red"}


def findings(found: Sequence[Finding]) -> Iterator[RenderableType]:
    """Table of findings by topic; then those that are not ok, worst first, each with its fix."""
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for heading, least in (("", 4), ("", 14), ("found", 14), ("expected", 12)):
        table.add_column(heading, overflow="fold", min_width=least)
    for topic, alike in groupby(found, lambda each: each.topic):
        table.add_row("", Text(topic, style="bold"), "", "")
        for each in alike:
            verdict = Text(each.verdict, style=_STYLES[each.verdict])
            table.add_row(verdict, f" {_name(each)}", each.value, each.expected or UNKNOWN)
    yield table
    troubled = [each for each in found if each.verdict != "ok"]
    troubled.sort(key=lambda each: each.verdict != "bad")
    if troubled:
        yield Group(*(part for each in troubled for part in _fix(each)))
    counts = Counter(each.verdict for each in found)
    yield Text(
        f"{counted(len(found), 'finding')}: {counts['bad']} bad, "
        f"{counted(counts['warn'], 'warning')}, {counts['ok']} ok."
    )


def _fix(finding: Finding) -> Iterator[RenderableType]:
    yield Text.assemble(
        (finding.verdict, _STYLES[finding.verdict]), f" {_name(finding)}: {finding.value}"
    )
    yield Padding(Text(finding.fix or ""), (0, 0, 0, 5))


def _name(finding: Finding) -> str:
    if not finding.processes:
        return finding.name
    which = ", ".join(map(str, finding.processes))
    return f"{finding.name}, process{'es' if len(finding.processes) > 1 else ''} {which}"


# Input rates of a host: seconds of each stage, and throughput by number of workers.


def input_side(
    rates: InputRates, paces: Sequence[tuple[int, InputPace]]
) -> Iterator[RenderableType]:
    """Seconds per sample by stage, then samples per second by number of workers.

    Args:
        rates: measured input rates of the host.
        paces: throughput on the run's data by number of workers; at least one.
    """
    title = f"Input of {rates.data} on {rates.cores} core{'s' if rates.cores > 1 else ''}"
    yield Text.assemble((title, "bold"))
    seconds: dict[str, float] = {}
    for _, pace in paces:
        for stage, each in pace.stages:
            seconds.setdefault(stage, each)
    table = figures("stage", "of a sample")
    for stage, each in seconds.items():
        table.add_row(stage, format_seconds(each))
    yield table
    table = figures("workers", "samples/s", "limit")
    for workers, pace in paces:
        name = str(workers) if workers else "0 (threads)"
        table.add_row(name, format_count(pace.samples_per_second), pace.limit)
    yield table
    storage = rates.read and rates.read.storage_bytes_per_second
    if storage:
        yield Text(f"Storage gives {format_bytes_per_second(storage)} of what is not in memory.")
