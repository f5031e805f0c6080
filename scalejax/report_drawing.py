"""What the interactive charts of the report share: colours, sizes and simple lines, by altair.

Colours of text and grid are left to the page, which knows whether it is light or dark.
"""

from typing import Any

import altair as alt

Row = dict[str, str | float | None]
"""One point of a chart."""
Spec = dict[str, Any]
"""A chart in Vega-Lite's JSON."""

PALETTE = ["#3f8fd2", "#e08a1e", "#2a9d78", "#d1495b", "#9a6fc4", "#7f8c8d", "#c49a2a", "#46b3c4"]
"""Told apart on white, on near-black, and by most colour-blind readers."""
_HEIGHT = 280


def specified(chart: Any, height: int = _HEIGHT) -> Spec:
    """`chart`, as wide as its column of the page."""
    return chart.properties(width="container", height=height).to_dict()


def colored(
    field: str, domain: list[str], *, columns: int = 4, colors: list[str] | None = None
) -> alt.Color:
    """The colour of each of `domain` in `field`, told in a legend above the chart."""
    scale = alt.Scale(domain=domain, range=colors or PALETTE)
    legend = alt.Legend(orient="top", labelLimit=0, columns=columns, symbolOpacity=1)
    return alt.Color(f"{field}:N", title=None, scale=scale, legend=legend)


def lines(rows: list[Row], x: alt.X, title: str, *, has_points: bool = False) -> Spec:
    """A line for each "label" among `rows` of x and y, y being `title`."""
    names = list(dict.fromkeys(str(row["label"]) for row in rows))
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_line(point=has_points, strokeWidth=1.8)
        .encode(
            x=x,
            y=alt.Y("y:Q", title=title, scale=alt.Scale(zero=True)),
            color=colored("label", names, columns=2),
            tooltip=["label:N", alt.Tooltip("x:Q", format=".4g"), alt.Tooltip("y:Q", format=".4g")],
        )
    )
    return specified(chart.interactive())
