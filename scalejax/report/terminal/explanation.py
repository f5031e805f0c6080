"""The explanation of a step time on a terminal: a text waterfall, and tables in 80 columns.

Formats numbers and computes none.
"""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from scalejax.core.units import (
    UNKNOWN,
    counted,
    format_bytes,
    format_fraction,
    format_seconds,
)
from scalejax.report.terminal.tables import figures
from scalejax.simulator.explain import (
    Explanation,
    Improvement,
    MemoryChoice,
    Term,
    TraceMatch,
    UnexpectedCollective,
)

_BAR_CELLS = 33
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MOST_SHOWN = 10
_LEAST_GAIN = 1.005
"""Smallest speedup that is recommended."""


def explanation(explained: Explanation, *, first: str | None = None) -> Iterator[RenderableType]:
    """The waterfall, the costliest operations, unexpected collectives, and possible improvements.

    Args:
        explained: breakdown of the step.
        first: a note to show before everything else; None for no note.
    """
    yield Text.assemble((explained.title, "bold"), f"\n{summary(explained)}")
    if first is not None:
        yield Text(f"Note: {first}.", style="bold")
    yield verdict(explained)
    yield waterfall(explained)
    yield from findings(explained)
    yield Text("What a factor of two buys", style="bold")
    yield improvements(explained.improvements)
    if explained.memory_choices:
        yield Text("What recompute and offload save", style="bold")
        yield memory_choices(explained.memory_choices)
    notes = [note for note in explained.notes if note != first]
    yield Text("\n".join(f"Note: {note}." for note in notes), style="dim")
    if explained.trace is not None:
        yield from trace_match(explained.trace)


def findings(explained: Explanation, *, most: int = _MOST_SHOWN) -> Iterator[RenderableType]:
    """The costliest operations, and at most `most` of the collectives that the layout does not call
    for."""
    yield Text("Costliest operations", style="bold")
    yield operations(explained)
    yield Text("Collectives that the layout does not call for", style="bold")
    yield (
        unexpected(explained.unexpected, most=most)
        if explained.unexpected
        else Text("None that takes a thousandth of the step.")
    )


def summary(explained: Explanation) -> str:
    """Devices, step time with its band, and MFU, in words."""
    axes = " x ".join(f"{name}={size}" for name, size in explained.mesh_axes if size > 1)
    devices = counted(explained.device_count, "device") + (f": {axes}" if axes else "")
    band = ""
    if explained.p10_step_seconds is not None:
        band = (
            f" (p10 {format_seconds(explained.p10_step_seconds)}, "
            f"p90 {format_seconds(explained.p90_step_seconds)})"
        )
    step = f"{format_seconds(explained.step_seconds)}{band}"
    return f"{devices}. Step {step}, MFU {format_fraction(explained.mfu)}."


def verdict(explained: Explanation) -> Text:
    """Summary in one or two sentences: the largest loss, and the best improvement."""
    losses = [
        term
        for term in explained.terms[1:]  # the first is the ideal compute time
        if term.is_of_step and term.seconds
    ]
    sentences = []
    ideal = explained.terms[0].seconds or 0.0
    sentences.append(f"{format_fraction(ideal / explained.step_seconds)} of the step is ideal.")
    if losses:
        worst = max(losses, key=lambda term: term.seconds or 0.0)
        share = (worst.seconds or 0.0) / explained.step_seconds
        sentences.append(f"The largest loss is {worst.name}: {format_fraction(share)}.")
    gains = [each for each in explained.improvements if each.speedup >= _LEAST_GAIN]
    if gains:
        best = gains[0]
        sentences.append(
            f"{best.change.capitalize()} gives {best.speedup:.2f} times the samples per second."
        )
    return Text(" ".join(sentences))


def waterfall(explained: Explanation) -> Table:
    """Table of all terms with bars, each bar beginning where the one before ended."""
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("from ideal to predicted", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("of step", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, width=_BAR_CELLS)
    longest = sum(term.seconds or 0.0 for term in explained.terms)
    begin = 0.0
    for term in (term for term in explained.terms if term.is_of_step):
        begin = _add_term(table, term, begin, longest, explained.step_seconds)
    table.add_row(
        Text("step", style="bold"),
        format_seconds(explained.step_seconds),
        "100.0 %",
        bar(0.0, explained.step_seconds, longest),
    )
    for term in (term for term in explained.terms if not term.is_of_step):
        begin = _add_term(table, term, begin, longest, explained.step_seconds)
    return table


def _add_term(table: Table, term: Term, begin: float, longest: float, step_seconds: float) -> float:
    name = term.name if term.is_of_step else f"+ {term.name}"
    if term.seconds is None:
        table.add_row(name, UNKNOWN, "", "")
        return begin
    share = format_fraction(term.seconds / step_seconds)
    drawn = bar(begin, begin + term.seconds, longest)
    table.add_row(name, format_seconds(term.seconds), share, drawn)
    return begin + term.seconds


def bar(begin: float, end: float, longest: float, cells: int = _BAR_CELLS) -> str:
    """A bar from `begin` to `end` on a scale that ends at `longest`; never empty if end > begin.

    It starts at a whole cell, and its end is rounded to an eighth of one.
    """
    if not end > begin:
        return ""
    first = min(int(begin / longest * cells), cells - 1)
    eighths = max(1, round(end / longest * cells * 8) - first * 8)
    whole, part = divmod(eighths, 8)
    return " " * first + "█" * whole + (_EIGHTHS[part] if part else "")


def _located(*headings: str) -> Table:
    """An empty table with columns of numbers, what they belong to, and its source line."""
    table = figures(*headings)
    table.columns[0].justify = "right"
    table.add_column("what", overflow="fold", ratio=1)
    table.add_column("where", overflow="fold")
    return table


def operations(explained: Explanation) -> Table:
    """Table of the operations that add most to the step, with their source lines."""
    table = _located("of step", "time", "runs", "bound", "of peak")
    for each in explained.operations:
        bound = {"communication": "network"}.get(each.bound, each.bound)
        peak = "" if each.peak_share is None else f"{each.peak_share * 100:.0f} %"
        table.add_row(
            format_fraction(each.share),
            format_seconds(each.seconds),
            str(each.runs),
            bound,
            peak,
            each.what,
            each.source or UNKNOWN,
        )
    return table


def unexpected(found: Sequence[UnexpectedCollective], *, most: int = _MOST_SHOWN) -> Table:
    """Table of collectives that the layout does not call for, with the reason for each; all after
    the first `most` share one row."""
    table = _located("adds", "takes", "runs")
    for each in found[:most]:
        axes = " x ".join(each.axes) or "no axis"
        kind = each.collective.replace("_", "-")
        what = f"{kind} {each.payload_bytes / 1e6:.3g} MB over {axes}: {each.reason}"
        table.add_row(
            format_seconds(each.step_seconds),
            format_seconds(each.seconds),
            str(each.runs),
            what,
            each.source or UNKNOWN,
        )
    if rest := found[most:]:
        seconds = sum(each.step_seconds for each in rest)
        table.add_row(format_seconds(seconds), "", str(len(rest)), "others", "")
    return table


def improvements(found: Sequence[Improvement]) -> Table:
    """Table of step times with one property doubled, the largest gain first."""
    table = figures("change", "step", "samples/s")
    table.add_column("of what", overflow="fold")
    for each in found:
        meaning = each.meaning if each.fits else f"{each.meaning}; does not fit into memory"
        table.add_row(
            each.change, format_seconds(each.step_seconds), f"x {each.speedup:.2f}", meaning
        )
    return table


def memory_choices(found: Sequence[MemoryChoice]) -> Table:
    """Table of the step's time and memory by what it recomputes and offloads, the least memory
    first."""
    table = figures("memory", "saves", "of host", "step", "takes")
    table.add_column("of what", overflow="fold")
    own = next(each for each in found if each.change == "as it is")
    for each in found:
        saved = own.peak_memory_bytes - each.peak_memory_bytes
        sign = "-" if saved < 0 else ""
        table.add_row(
            format_bytes(each.peak_memory_bytes),
            "" if each is own else sign + format_bytes(abs(saved)),
            format_bytes(each.host_bytes) if each.host_bytes else "",
            format_seconds(each.step_seconds),
            "" if each is own else f"x {each.step_seconds / own.step_seconds:.2f}",
            each.change if each.fits else f"{each.change}; does not fit into memory",
        )
    return table


def trace_match(match: TraceMatch, *, most: int = _MOST_SHOWN) -> Iterator[RenderableType]:
    """Comparison of a recorded step with the prediction, the `most` largest differences first; a
    collective counts in full, exposed or not."""
    yield Text("Recorded against predicted, operation by operation", style="bold")
    yield Text(
        f"{len(match.matches)} operations match; they hold "
        f"{format_fraction(match.matched_share)} of the measured time. Together they took "
        f"{format_seconds(match.measured_seconds)}, predicted "
        f"{format_seconds(match.predicted_seconds)} ({_signed(match.error)})."
    )
    if match.warning is not None:
        yield Text(f"Warning: {match.warning}", style="bold red")
    table = _located("measured", "predicted", "error")
    for each in match.matches[:most]:
        table.add_row(
            format_seconds(each.measured_seconds),
            format_seconds(each.predicted_seconds),
            _signed(each.error),
            f"{each.what} ({each.name})",
            each.source or UNKNOWN,
        )
    yield table
    for title, rest in (
        ("Only in the trace", match.only_measured),
        ("Only in the prediction", match.only_predicted),
    ):
        if rest:
            total = format_seconds(sum(seconds for _, seconds in rest))
            named = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in rest[:3])
            more = f" and {len(rest) - 3} more" if len(rest) > 3 else ""
            yield Text(f"{title}, {total}: {named}{more}.")


def _signed(error: float | None) -> str:
    return UNKNOWN if error is None else f"{error:+.0%}"
