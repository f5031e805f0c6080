"""Report section on benches: scaling, step times, CPU and memory usage; the charts in files."""

from collections.abc import Callable, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path

import altair as alt

from scalejax.core.units import MIB
from scalejax.measure.bench.monitor import Usage
from scalejax.measure.bench.results import Summary, groups, kept_share, scaling_table
from scalejax.measure.bench.statistics import moving_average
from scalejax.report.html.charts import (
    Row,
    Spec,
    device_axis,
    line_chart,
    lines,
    save_charts,
    specified,
)
from scalejax.report.html.page import Page
from scalejax.report.sources import BenchSource
from scalejax.report.terminal import bench as bench_tables

_AVERAGED = 10
"""Steps over which times are averaged."""
_MOST_CURVES = 12
"""Most benchmarks with curves of their own in a file."""
RESOURCES: dict[str, Callable[[Usage], float | None]] = {
    "CPU, % of a core": lambda sample: sample.cpu_percent,
    "RSS, MiB": lambda sample: sample.rss_bytes / MIB,
    "threads": lambda sample: sample.threads,
}
"""Resources of a process by the title of their axis."""
_MOST_STEPS = 2000
"""Points of a chart of step times above which they are thinned out."""


def add_benches(page: Page, benches: Sequence[BenchSource]) -> None:
    """Append tables and charts of every bench."""
    page.add('<h2 id="benches">Benches</h2>')
    page.add(
        "<p>Steps of the real training step, timed in rounds; warm-up is left out. The interval "
        "is the 95 % confidence interval of the median. Kept is the throughput per device "
        "relative to the fewest devices.</p>"
    )
    for bench in benches:
        page.add(f"<h3>{escape(bench.name)}</h3>")
        page.add_parts(bench_tables.results(bench.summaries))
        for scaling in ("weak", "strong"):
            table = scaling_table(bench.summaries, scaling)
            if table is not None and len(table.device_counts) > 1:
                page.add_parts(bench_tables.scaling(table, "median"))
        _add_charts(page, bench.summaries)


def _add_charts(page: Page, summaries: Sequence[Summary]) -> None:
    page.add_chart(
        "Throughput over devices",
        "Samples per second at the median step, with its interval. Dotted: ideal scaling.",
        throughput(summaries),
    )
    page.add_chart(
        "Kept per device", "Throughput per device over that on the fewest.", kept(summaries)
    )
    page.add_chart(
        "Step times over time",
        f"Single steps, and means of {_AVERAGED} consecutive ones, the rounds joined. A bump is "
        "usually another program on the same machine.",
        step_times(summaries),
    )
    if any(result.usage for each in summaries for result in each.results):
        for resource in RESOURCES:
            explanation = "By the first process of a benchmark, first round."
            page.add_chart(resource, explanation, usage(summaries, resource))


def throughput(summaries: Sequence[Summary]) -> Spec:
    """Chart of samples per second over devices, a line for each group of benchmarks, with intervals
    of the medians; dotted lines are ideal scaling from the fewest devices."""
    rows: list[Row] = []
    for label, members in groups(summaries).items():
        ordered = sorted(members, key=lambda each: each.benchmark.settings.devices)
        first = ordered[0]
        for each in ordered:
            count = each.benchmark.settings.devices
            grown = count / first.benchmark.settings.devices
            low, high = each.interval
            rows.append(
                {
                    "label": label,
                    "x": count,
                    "y": each.global_batch / each.median_seconds,
                    "low": each.global_batch / high,
                    "high": each.global_batch / low,
                    "ideal": first.global_batch / first.median_seconds * grown,
                }
            )
    measured = line_chart(rows, _axis(summaries), "samples per second", has_points=True)
    intervals = measured.mark_rule(strokeWidth=1.8).encode(y="low:Q", y2="high:Q")
    dotted = alt.value([2, 3])
    ideal = measured.mark_line(strokeWidth=0.8).encode(y="ideal:Q", strokeDash=dotted)
    return specified(ideal + intervals + measured)


def kept(summaries: Sequence[Summary]) -> Spec:
    """Chart of the throughput kept per device over devices."""
    rows: list[Row] = [
        {"label": label, "x": each.benchmark.settings.devices, "y": 100 * share}
        for label, members in groups(summaries).items()
        for each in sorted(members, key=lambda other: other.benchmark.settings.devices)
        if (share := kept_share(each, summaries)) is not None
    ]
    return lines(rows, _axis(summaries), "kept per device, %", has_points=True)


def _axis(summaries: Sequence[Summary]) -> alt.X:
    return device_axis("x", sorted({each.benchmark.settings.devices for each in summaries}))


def step_times(summaries: Sequence[Summary]) -> Spec:
    """Chart of step times, as points over time, and of their moving averages."""
    rows: list[Row] = []
    for each in summaries:
        times = [1e3 * seconds for seconds in each.step_seconds]
        average = [None] * (_AVERAGED - 1) + [*moving_average(times, _AVERAGED)]
        stride = max(1, len(times) * len(summaries) // _MOST_STEPS)
        points = list(zip(accumulate(each.step_seconds), times, average, strict=False))[::stride]
        rows += [
            {"label": each.benchmark.label, "x": end, "y": mean, "step": step}
            for end, step, mean in points
        ]
    averages = line_chart(rows, alt.X("x:Q", title="seconds of timed steps"), "milliseconds")
    return specified(averages.mark_circle(size=8, opacity=0.4).encode(y="step:Q") + averages)


def usage(summaries: Sequence[Summary], resource: str) -> Spec:
    """Chart of one of `RESOURCES`, as used by the first process in each benchmark's first
    round."""
    rows: list[Row] = []
    for each in summaries:
        for sample in each.results[0].usage if each.results else ():
            if sample.process == 0 and (value := RESOURCES[resource](sample)) is not None:
                rows.append({"label": each.benchmark.label, "x": sample.seconds, "y": value})
    x = alt.X("x:Q", title="seconds since the first timed step")
    return lines(rows, x, resource, has_points=True)


def save_bench(summaries: Sequence[Summary], folder: Path) -> list[str]:
    """Draw the charts of a bench in files of `folder`; returns the names of the files.

    If there are many benchmarks, charts with lines for each show only the first of them. Without
    samples of resource usage there is no picture of it.

    Raises:
        ConfigError: if a file cannot be written.
    """
    measured = [each for each in summaries if each.is_measured]
    few = measured[:_MOST_CURVES]
    title = bench_tables.title_of(measured)
    written = []
    for name, specs, height in (
        ("scaling.png", [throughput(measured), kept(measured)], 280),
        ("step_times.png", [step_times([each]) for each in few], 110),
        ("usage.png", [usage(few, resource) for resource in RESOURCES], 180),
    ):
        if shown := [spec for spec in specs if spec["data"]["values"]]:
            save_charts(shown, folder / name, title=title, size=(640, height))
            written.append(name)
    return written
