"""Report section on benches: scaling, step times, CPU and memory usage."""

from collections.abc import Sequence
from html import escape
from itertools import accumulate

import altair as alt

from scalejax.core.units import MIB
from scalejax.measure.bench.results import Summary, groups, scaling_table
from scalejax.measure.bench.statistics import moving_average
from scalejax.report.figures.bench import AVERAGED
from scalejax.report.html.charts import Row, Spec, device_axis, lines
from scalejax.report.html.page import Page
from scalejax.report.sources import BenchSource
from scalejax.report.terminal import bench as bench_tables

_MOST_STEPS = 2000
"""Points of one chart of step times, beyond which they are thinned out."""


def add_benches(page: Page, benches: Sequence[BenchSource]) -> None:
    """Append tables and charts of every bench."""
    page.add('<h2 id="benches">Benches</h2>')
    page.add(
        "<p>Steps of the real training step, timed in rounds; warm-up is left out. The interval "
        "is that of the median, with 95 % confidence. Kept is the throughput per device over "
        "that on the fewest devices.</p>"
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
        "Samples per second by the median step.",
        throughput(summaries),
    )
    page.add_chart(
        "Step times over time",
        f"Means of {AVERAGED} consecutive steps, the rounds joined. A bump is usually another "
        "program on the same machine.",
        step_times(summaries),
    )
    if any(result.usage for each in summaries for result in each.results):
        page.add_chart(
            "Processor",
            "Per cent of one core used by the first process of a benchmark, first round.",
            usage(summaries, "cpu", "% of a core"),
        )
        page.add_chart(
            "Memory",
            "MiB held by the first process of a benchmark, first round.",
            usage(summaries, "memory", "MiB"),
        )


def throughput(summaries: Sequence[Summary]) -> Spec:
    """Chart of samples per second over devices, a line for each group of benchmarks."""
    rows: list[Row] = [
        {
            "label": label,
            "x": each.benchmark.settings.devices,
            "y": each.global_batch / each.median_seconds,
        }
        for label, members in groups(summaries).items()
        for each in sorted(members, key=lambda other: other.benchmark.settings.devices)
    ]
    return lines(rows, device_axis("x"), "samples per second", has_points=True)


def step_times(summaries: Sequence[Summary]) -> Spec:
    """Chart of moving averages of the step times over time."""
    rows: list[Row] = []
    for each in summaries:
        average = moving_average([1e3 * seconds for seconds in each.step_seconds], AVERAGED)
        ends = list(accumulate(each.step_seconds))[AVERAGED - 1 :]
        stride = max(1, len(average) * len(summaries) // _MOST_STEPS)
        points = list(zip(ends, average, strict=True))[::stride]
        rows += [{"label": each.benchmark.label, "x": end, "y": mean} for end, mean in points]
    return lines(rows, alt.X("x:Q", title="seconds of timed steps"), "milliseconds")


def usage(summaries: Sequence[Summary], resource: str, unit: str) -> Spec:
    """Chart of "cpu" or "memory" of the first process in each benchmark's first round."""
    rows: list[Row] = []
    for each in summaries:
        samples = [sample for sample in each.results[0].usage if sample.process == 0]
        for sample in samples:
            value = sample.cpu_percent if resource == "cpu" else sample.rss_bytes / MIB
            if value is not None:
                rows.append({"label": each.benchmark.label, "x": sample.seconds, "y": value})
    x = alt.X("x:Q", title="seconds since the first timed step")
    return lines(rows, x, unit, has_points=True)
