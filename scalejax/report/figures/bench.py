"""Plots of a bench in files: scaling over devices, step times over time, CPU and memory usage."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from scalejax.core.units import MIB
from scalejax.measure.bench.results import Summary, groups, kept_share
from scalejax.measure.bench.statistics import moving_average
from scalejax.report.figures.style import new_figure, require_plot_format, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AVERAGED = 10
"""Steps over which times are averaged."""
_MOST_CURVES = 12
"""Most curves that colour and dash can tell apart."""
_DASHES = ("solid", "dashed", "dotted", "dashdot")
_LEGEND = {"loc": "outside lower center", "fontsize": "small", "ncols": 2}


def save_scaling(summaries: Sequence[Summary], *, path: Path) -> None:
    """Draw throughput, and the share of it kept per device, over device counts.

    Bars are the 95 % intervals of the medians; the dotted line is ideal scaling from the fewest
    devices.

    Args:
        summaries: of a bench; unmeasured ones are left out.
        path: output file; its suffix selects the format.

    Raises:
        ConfigError: if the format is none of png, svg and pdf, or the file cannot be written.
    """
    require_plot_format("path", path)
    figure = new_figure(8, 4.5)
    above, kept = figure.subplots(1, 2)
    measured = [each for each in summaries if each.is_measured]
    ticks = sorted({each.benchmark.settings.devices for each in measured})
    for number, (label, members) in enumerate(groups(measured).items()):
        ordered = sorted(members, key=lambda each: each.benchmark.settings.devices)
        counts = [each.benchmark.settings.devices for each in ordered]
        rates = [each.global_batch / each.median_seconds for each in ordered]
        errors = [
            [rate - each.global_batch / each.interval[1] for rate, each in zip(rates, ordered)],  # noqa: B905  of one list
            [each.global_batch / each.interval[0] - rate for rate, each in zip(rates, ordered)],  # noqa: B905  of one list
        ]
        style = {
            "color": f"C{number % 10}",
            "linestyle": _DASHES[number // 10 % len(_DASHES)],
            "marker": "o",
            "capsize": 3,
        }
        above.errorbar(counts, rates, yerr=errors, label=label, **style)
        ideal = [rates[0] * count / counts[0] for count in counts]
        above.plot(counts, ideal, color=style["color"], linestyle="dotted", linewidth=0.8)
        shares = [kept_share(each, measured) for each in ordered]
        points = [(c, 100 * s) for c, s in zip(counts, shares, strict=True) if s is not None]
        xs, ys = zip(*points, strict=True) if points else ((), ())
        kept.plot(xs, ys, color=style["color"], linestyle=style["linestyle"], marker="o")
    kept.axhline(100, color="black", linestyle="dotted", linewidth=0.8)
    for axes, name in ((above, "samples per second"), (kept, "kept per device, %")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("devices")
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    figure.legend(**_LEGEND)
    save_figure(figure, path)


def save_steps(summaries: Sequence[Summary], *, path: Path) -> None:
    """Draw the time of every timed step over time, and a moving average; a panel for each
    benchmark, its rounds one after another.

    Args:
        summaries: of a bench; unmeasured ones are left out, and of many all but the
            first.
        path: output file; its suffix selects the format.

    Raises:
        ConfigError: if the format is none of png, svg and pdf, or the file cannot be written.
    """
    require_plot_format("path", path)
    shown = [each for each in summaries if each.is_measured][:_MOST_CURVES]
    figure = new_figure(8, 1 + 1.5 * len(shown))
    panels = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    for axes, each in zip(panels, shown, strict=True):
        begin = 0.0
        for number, result in enumerate(each.results):
            milliseconds = [1e3 * seconds for seconds in result.step_seconds]
            ends = [begin + end for end in accumulate(result.step_seconds)]
            color = f"C{number % 10}"
            axes.scatter(ends, milliseconds, s=3, alpha=0.4, color=color, linewidths=0)
            average = moving_average(milliseconds, AVERAGED)
            axes.plot(ends[AVERAGED - 1 :], average, color=color, linewidth=1)
            begin = ends[-1]
        axes.set_title(each.benchmark.label, fontsize="small")
        axes.set_ylabel("ms")
        axes.margins(x=0.01)
        axes.grid(alpha=0.3)
    panels[-1].set_xlabel(f"seconds of timed steps; lines are means of {AVERAGED} steps")
    save_figure(figure, path)


def save_usage(summaries: Sequence[Summary], *, path: Path) -> None:
    """Draw CPU, memory and threads of the first process of each benchmark over time, first round.

    Args:
        summaries: of a bench; unmeasured ones are left out, and of many all but the
            first.
        path: output file; its suffix selects the format.

    Raises:
        ConfigError: if the format is none of png, svg and pdf, or the file cannot be written.
    """
    require_plot_format("path", path)
    shown = [each for each in summaries if each.is_measured][:_MOST_CURVES]
    figure = new_figure(8, 6.5)
    cpu, memory, threads = figure.subplots(3, 1, sharex=True)
    for number, each in enumerate(shown):
        style = {
            "color": f"C{number % 10}",
            "linestyle": _DASHES[number // 10 % len(_DASHES)],
            "marker": ".",
            "markersize": 3,
        }
        usage = [sample for sample in each.results[0].usage if sample.process == 0]
        busy = [sample for sample in usage if sample.cpu_percent is not None]
        cpu.plot([s.seconds for s in busy], [s.cpu_percent for s in busy], **style)
        _draw(memory, [(s.seconds, s.rss_bytes / MIB) for s in usage], each.benchmark.label, style)
        threads.plot([s.seconds for s in usage], [s.threads for s in usage], **style)
    names = ((cpu, "CPU, % of a core"), (memory, "RSS, MiB"), (threads, "threads"))
    for axes, name in names:
        axes.set_ylim(bottom=0)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    threads.set_xlabel("seconds since the first timed step")
    figure.legend(**_LEGEND)
    save_figure(figure, path)


def _draw(
    axes: "Axes", points: Sequence[tuple[float, float]], label: str, style: dict[str, object]
) -> None:
    """Draw a curve with an entry in the legend."""
    xs, ys = zip(*points, strict=True) if points else ((), ())
    axes.plot(xs, ys, label=label, **style)  # type: ignore[arg-type]  words that matplotlib knows
