"""The explanation of a step time as one HTML page: a waterfall chart, and tables.

Arranges the sections, each plot with a sentence on how to read it; computes no figures.
"""

from html import escape
from pathlib import Path

import altair as alt

from scalejax.core.serialization import save_text
from scalejax.core.units import UNKNOWN, counted, format_fraction, format_seconds
from scalejax.report.html.charts import PALETTE, Row, Spec
from scalejax.report.html.page import Page
from scalejax.simulator.explain import Explanation, TraceMatch

_MS = 1e3
_MOST_MATCHES = 20
"""Operations of a trace that the page names."""
_MEANINGS = {
    "compute at peak": "FLOP at the peak rate of the chip: no step is faster",
    "attainable rates": "extra time of matmuls and convolutions at their attainable rates",
    "memory": "operations bound by the device's memory bandwidth",
    "launch": "gaps between operations",
    "contention": "compute slowed by overlapping collectives",
    "host": "devices waiting for the host to launch operations",
    "overhead": "step time outside its operations",
    "bubble": "pipeline stages without a microbatch to work on",
    "stragglers": "waiting for the slowest device",
    "input": "waiting for data",
    "checkpoints": "added to each step: writing checkpoints",
    "failures": "added to each step: lost work and restarts",
}
_KINDS = {
    "compute at peak": ("ideal", 0),
    "attainable rates": ("the chip", 1),
    "memory": ("the chip", 1),
    "launch": ("the chip", 1),
    "host": ("the chip", 1),
    "overhead": ("the chip", 1),
    "contention": ("communication", 3),
    "bubble": ("communication", 3),
}
_OTHER = ("the site", 4)


def write_explanation(explained: Explanation, output: Path) -> None:
    """Write `explained` as one page.

    Raises:
        ConfigError: if the file cannot be written.
    """
    save_text(render(explained), output)


def render(explained: Explanation) -> str:
    """The page, as HTML with everything inside it."""
    page = Page()
    page.add(f"<h1>{escape(explained.title)}</h1>")
    axes = " x ".join(f"{name}={size}" for name, size in explained.mesh_axes if size > 1)
    devices = counted(explained.device_count, "device")
    page.add(
        f"<p>{devices}{': ' + escape(axes) if axes else ''}. One step "
        f"takes {format_seconds(explained.step_seconds)}; p10 "
        f"{format_seconds(explained.p10_step_seconds)}, p90 "
        f"{format_seconds(explained.p90_step_seconds)}. MFU {format_fraction(explained.mfu)}. "
        "All of it is predicted from the compiled step and the figures of the hardware.</p>"
    )
    page.add_chart(
        "From ideal to predicted",
        "Each bar begins where the one above it ends. The first is the FLOP of the step "
        "at the peak rate of the chip; each further bar is one loss.",
        waterfall(explained),
    )
    page.add_chart(
        "What a factor of two buys",
        "Samples per second with one property doubled, or latency halved, relative to now. The "
        "hardware changes and the program stays; twice the batch is a program of its own.",
        improvements(explained),
    )
    _add_operations(page, explained)
    _add_unexpected(page, explained)
    if explained.trace is not None:
        _add_trace(page, explained.trace)
    items = "".join(f"<li>{escape(note)}</li>" for note in explained.notes)
    page.add(f'<p class="soft">Notes</p><ul class="soft">{items}</ul>')
    return page.render(explained.title)


def waterfall(explained: Explanation) -> Spec:
    """Waterfall chart of the terms of a step: each bar begins where the one above ends."""
    rows, end = _waterfall_rows(explained)
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y("term:N", title=None, sort=None, axis=alt.Axis(labelLimit=220)),
        tooltip=[
            "term:N",
            alt.Tooltip("milliseconds:Q", format=".4g"),
            alt.Tooltip("share:Q", title="share of the step", format=".1%"),
            "meaning:N",
        ],
    )
    kinds = list(dict.fromkeys(str(row["kind"]) for row in rows))
    colors = [
        PALETTE[dict((*_KINDS.values(), ("communication", 3), _OTHER))[kind]] for kind in kinds
    ]
    room = end * _MS * 1.22  # for the words behind the longest bar
    bars = base.mark_bar(size=20).encode(
        x=alt.X(
            "begin:Q",
            title="milliseconds",
            scale=alt.Scale(domain=[0, room], nice=False),
            axis=alt.Axis(tickCount=8, format="~r"),
        ),
        x2="end:Q",
        color=alt.Color(
            "kind:N",
            title=None,
            scale=alt.Scale(domain=kinds, range=colors),
            legend=alt.Legend(orient="top", symbolOpacity=1),
        ),
    )
    words = base.mark_text(align="left", dx=5, color="gray").encode(x="end:Q", text="label:N")
    return (bars + words).properties(width="container", height=26 * len(rows)).to_dict()


def _waterfall_rows(explained: Explanation) -> tuple[list[Row], float]:
    """A chart row for each known term, and the seconds at which the last one ends."""
    rows: list[Row] = []
    begin = 0.0
    for term in explained.terms:
        if term.seconds is None:
            continue
        kind, _ = _kind(term.name)
        rows.append(
            {
                "term": term.name if term.is_of_step else f"+ {term.name}",
                "begin": begin * _MS,
                "end": (begin + term.seconds) * _MS,
                "milliseconds": term.seconds * _MS,
                "share": term.seconds / explained.step_seconds,
                "kind": kind,
                "label": f"{format_seconds(term.seconds)}, "
                f"{format_fraction(term.seconds / explained.step_seconds)}",
                "meaning": _MEANINGS.get(term.name, "waiting for collectives over these axes"),
            }
        )
        begin += term.seconds
    return rows, begin


def _kind(name: str) -> tuple[str, int]:
    if name.startswith("communication"):
        return ("communication", 3)
    return _KINDS.get(name, _OTHER)


def improvements(explained: Explanation) -> Spec:
    """Chart of the throughput with one property doubled, relative to now."""
    rows: list[Row] = [
        {
            "what": f"{each.change}: {each.meaning}",
            "speedup": each.speedup,
            "step": format_seconds(each.step_seconds),
            "label": f"x {each.speedup:.2f}" + ("" if each.fits else ", does not fit into memory"),
        }
        for each in explained.improvements
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y("what:N", title=None, sort=None, axis=alt.Axis(labelLimit=420)),
        tooltip=["what:N", "label:N", alt.Tooltip("step:N", title="step")],
    )
    bars = base.mark_bar(size=18, color=PALETTE[0]).encode(
        x=alt.X(
            "speedup:Q",
            title="samples per second, relative to now",
            scale=alt.Scale(domain=[0, 2.3]),
            axis=alt.Axis(tickCount=6, format="~r"),
        )
    )
    words = base.mark_text(align="left", dx=5, color="gray").encode(x="speedup:Q", text="label:N")
    now = alt.Chart(alt.Data(values=[{"now": 1}])).mark_rule(strokeDash=[5, 5]).encode(x="now:Q")
    return (bars + words + now).properties(width="container", height=30 * len(rows)).to_dict()


def _add_operations(page: Page, explained: Explanation) -> None:
    page.add("<h3>Costliest operations</h3>")
    page.add(
        "<p>Sum over all runs of an operation in one step; of collectives, the exposed time.</p>"
    )
    page.add_table(
        ["operation", "of step", "time", "runs", "bound", "of peak", "where"],
        [
            [
                each.what,
                format_fraction(each.share),
                format_seconds(each.seconds),
                str(each.runs),
                each.bound,
                format_fraction(each.peak_share) if each.peak_share is not None else "",
                each.source or UNKNOWN,
            ]
            for each in explained.operations
        ],
    )


def _add_unexpected(page: Page, explained: Explanation) -> None:
    page.add("<h3>Collectives that the layout does not call for</h3>")
    if not explained.unexpected:
        page.add("<p>None that takes a thousandth of the step.</p>")
        return
    page.add_table(
        ["collective", "over", "bytes", "runs", "takes", "adds", "why it is odd", "where"],
        [
            [
                each.collective.replace("_", "-"),
                " x ".join(each.axes) or "no axis",
                f"{each.payload_bytes / 1e6:.3g} MB",
                str(each.runs),
                format_seconds(each.seconds),
                format_seconds(each.step_seconds),
                each.reason,
                each.source or UNKNOWN,
            ]
            for each in explained.unexpected
        ],
    )


def _add_trace(page: Page, match: TraceMatch) -> None:
    page.add("<h3>Recorded against predicted, operation by operation</h3>")
    page.add(
        f"<p>{len(match.matches)} operations match; they hold "
        f"{format_fraction(match.matched_share)} of the measured time. Together they took "
        f"{format_seconds(match.measured_seconds)}, predicted "
        f"{format_seconds(match.predicted_seconds)} ({_signed(match.error)}). The largest "
        "differences come first; a collective counts in full, exposed or not.</p>"
    )
    if match.warning is not None:
        page.add(f'<p class="bad">Warning: {escape(match.warning)}</p>')
    page.add_table(
        ["operation", "measured", "predicted", "error", "where"],
        [
            [
                f"{each.what} ({each.name})",
                format_seconds(each.measured_seconds),
                format_seconds(each.predicted_seconds),
                _signed(each.error),
                each.source or UNKNOWN,
            ]
            for each in match.matches[:_MOST_MATCHES]
        ],
    )
    for title, rest in (
        ("Only in the trace", match.only_measured),
        ("Only in the prediction", match.only_predicted),
    ):
        if rest:
            named = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in rest[:5])
            more = f" and {len(rest) - 5} more" if len(rest) > 5 else ""
            total = format_seconds(sum(seconds for _, seconds in rest))
            page.add(f"<p>{title}, {total}: {escape(named)}{more}.</p>")


def _signed(error: float | None) -> str:
    return UNKNOWN if error is None else f"{error:+.0%}"
