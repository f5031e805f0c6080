"""The explanation of a step time as one HTML page: a waterfall chart, and tables.

Arranges the sections, each plot with a sentence on how to read it; computes no numbers.
"""

from html import escape
from pathlib import Path

import altair as alt

from scalejax.core.serialization import save_text
from scalejax.core.units import format_fraction, format_seconds
from scalejax.report.html.charts import PALETTE, Row, Spec, colored, specified
from scalejax.report.html.page import Page
from scalejax.report.terminal.explanation import findings, summary, trace_match
from scalejax.simulator.explain import Explanation

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
    "compute at peak": "ideal",
    **dict.fromkeys(("attainable rates", "memory", "launch", "host", "overhead"), "the chip"),
    **dict.fromkeys(("contention", "bubble"), "communication"),
}
"""Kind of each term except communication; others belong to the site."""
_COLORS = {"ideal": 0, "the chip": 1, "communication": 3, "the site": 4}


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
    page.add(
        f"<p>{escape(summary(explained))} Everything here is predicted from the compiled step "
        "and the figures of the hardware.</p>"
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
        "hardware changes and the program stays the same; twice the batch is another program.",
        improvements(explained),
    )
    page.add("<p>An operation's time is the sum over all its runs in one step. Collectives count ")
    page.add("only where exposed, but in full where they are compared with a trace.</p>")
    page.add_parts(findings(explained, most=_MOST_MATCHES))
    if explained.trace is not None:
        page.add_parts(trace_match(explained.trace, most=_MOST_MATCHES))
    page.add_notes(explained.notes)
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
    colors = [PALETTE[_COLORS[kind]] for kind in kinds]
    room = end * _MS * 1.22  # for the words behind the longest bar
    bars = base.mark_bar(size=20).encode(
        x=alt.X(
            "begin:Q",
            title="milliseconds",
            scale=alt.Scale(domain=[0, room], nice=False),
            axis=alt.Axis(tickCount=8, format="~r"),
        ),
        x2="end:Q",
        color=colored("kind", kinds, colors=colors),
    )
    words = base.mark_text(align="left", dx=5, color="gray").encode(x="end:Q", text="label:N")
    return specified(bars + words, 26 * len(rows))


def _waterfall_rows(explained: Explanation) -> tuple[list[Row], float]:
    """A chart row for each known term, and the seconds at which the last one ends."""
    rows: list[Row] = []
    begin = 0.0
    for term in explained.terms:
        if term.seconds is None:
            continue
        usual = "communication" if term.name.startswith("communication") else "the site"
        rows.append(
            {
                "term": term.name if term.is_of_step else f"+ {term.name}",
                "begin": begin * _MS,
                "end": (begin + term.seconds) * _MS,
                "milliseconds": term.seconds * _MS,
                "share": term.seconds / explained.step_seconds,
                "kind": _KINDS.get(term.name, usual),
                "label": f"{format_seconds(term.seconds)}, "
                f"{format_fraction(term.seconds / explained.step_seconds)}",
                "meaning": _MEANINGS.get(term.name, "waiting for collectives over these axes"),
            }
        )
        begin += term.seconds
    return rows, begin


def improvements(explained: Explanation) -> Spec:
    """Chart of the throughput with one property doubled, relative to the current one."""
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
    return specified(bars + words + now, 30 * len(rows))
