"""Tables, waterfalls, curves and timelines as HTML and SVG, which a result shows in a notebook; and
tables as text, which `print` shows.

Plain text, without external scripts or styles, so that it shows wherever HTML does, light or dark.
Knows names that carry their units, but not what the figures mean.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from textwrap import TextWrapper

from scalejax.core.serialization import JsonValue
from scalejax.core.units import format_bytes, format_count, format_fraction, format_seconds

_WIDTH = 640
_LABEL, _VALUE = 190, 90
"""Widths of the names and values next to bars, within `_WIDTH`."""
_LINE = 20
_SHORT = 24
"""Most letters of a text that stays on one line."""
_COLORS = ("#3b76c4", "#d9822b", "#3d9a5f", "#b0508e", "#8a6d3b", "#5b8f9a")
_FONT = "font-family:system-ui,sans-serif;font-size:12px"

_FRACTIONS = ("mfu", "efficiency", "share", "goodput", "accuracy")
_ENDINGS = {
    "_seconds": format_seconds,
    "_bytes": format_bytes,
    "_per_second": format_count,
    "_flop": format_count,
    "_joules": lambda value: f"{format_count(value)}J",
}
"""How to write a number whose name has this ending."""


def heading_of(name: str) -> str:
    """A column's name in words, without the unit, which its cells have: "p10 step"."""
    ending = next((each for each in ("_seconds", "_bytes", "_joules") if name.endswith(each)), "")
    words = "time" if name == "seconds" else name.removesuffix(ending)
    words = words.replace("_", " ").replace("mfu", "MFU")
    return words.replace(" per second", "/s").replace("device count", "devices")


def cell_of(name: str, value: JsonValue) -> str:
    """A figure in words, in the unit that its name ends with; a dash if it is unknown."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if not isinstance(value, int | float):
        return str(value)
    for ending, words in _ENDINGS.items():
        if f"_{name}".endswith(ending):
            return words(value)
    if any(name.endswith(each) for each in _FRACTIONS):
        return format_fraction(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def columns_of(rows: Sequence[Mapping[str, JsonValue]]) -> list[str]:
    """The columns of all rows, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def table(rows: Sequence[Mapping[str, JsonValue]], *, bold: Sequence[int] = ()) -> str:
    """A table with a line for each of `rows`; those at the positions in `bold` are bold. Its
    columns are those of all rows, except columns that are unknown in all of them."""
    columns = [name for name in columns_of(rows) if any(row.get(name) is not None for row in rows)]
    sides = {name: _side([row.get(name) for row in rows]) for name in columns}
    head = "".join(f"<th{sides[name]}>{escape(heading_of(name))}</th>" for name in columns)
    body = []
    for position, row in enumerate(rows):
        cells = "".join(
            f"<td{sides[name]}>{escape(_unbroken(name, row.get(name)))}</td>" for name in columns
        )
        weight = ' style="font-weight:bold"' if position in bold else ""
        body.append(f"<tr{weight}>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def text_of(rows: Sequence[Mapping[str, JsonValue]], width: int = 80) -> str:
    """A table as lines of at most `width` if its cells allow it: what all rows have in common, then
    the other columns, in as many parts as needed, each starting with the first of these columns.
    Text is aligned to the left."""
    names = [name for name in columns_of(rows) if any(row.get(name) is not None for row in rows)]
    common = [name for name in names if all(row.get(name) == rows[0].get(name) for row in rows)]
    size = max((len(heading_of(name)) for name in common), default=0)
    lines = [f"{heading_of(name):{size}}  {cell_of(name, rows[0][name])}" for name in common]
    columns = []
    for name in [each for each in names if each not in common]:
        cells = [heading_of(name), *(cell_of(name, row.get(name)) for row in rows)]
        size = max(map(len, cells))
        is_text = any(isinstance(row.get(name), str) for row in rows)
        columns.append([each.ljust(size) if is_text else each.rjust(size) for each in cells])
    wide = [len(column[0]) for column in columns]
    at = 1
    while columns and (at == 1 or at < len(columns)):
        part = [0]
        while at < len(columns) and (
            len(part) == 1 or sum(wide[each] + 2 for each in (*part, at)) - 2 <= width
        ):
            part.append(at)
            at += 1
        at = max(at, 2)
        lines += [
            "",
            *(
                "  ".join(columns[each][row] for each in part).rstrip()
                for row in range(len(rows) + 1)
            ),
        ]
    return "\n".join(lines).strip("\n")


def notes_text(texts: Sequence[str], width: int = 80) -> str:
    """Notes as text, each on lines of its own of at most `width`; words stay whole, so that paths
    and flags can be copied."""
    whole = TextWrapper(
        width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return "".join(f"\n{whole.fill(f'note: {each}.')}" for each in texts)


def _side(values: Sequence[JsonValue]) -> str:
    """Style of a column: text is left-aligned, and unbroken if short; numbers are as on the
    page."""
    texts = [each for each in values if isinstance(each, str)]
    if not texts:
        return ""
    is_short = max(map(len, texts)) <= _SHORT
    return f' style="text-align:left{";white-space:nowrap" if is_short else ""}"'


def _unbroken(name: str, value: JsonValue) -> str:
    """A cell in which a number and its unit stay together."""
    words = cell_of(name, value)
    return words if isinstance(value, str) else words.replace(" ", "\u00a0")


def heading(text: str) -> str:
    """A line above a table or a drawing."""
    return f'<p style="margin:0.6em 0 0.2em"><strong>{escape(text)}</strong></p>'


def notes(texts: Sequence[str]) -> str:
    """Notes that open on a click; nothing without any."""
    if not texts:
        return ""
    items = "".join(f"<li>{escape(each)}</li>" for each in texts)
    count = f"{len(texts)} note{'' if len(texts) == 1 else 's'}"
    return f"<details><summary>{count}</summary><ul>{items}</ul></details>"


def waterfall(terms: Sequence[tuple[str, float | None]], total: str) -> str:
    """Bars that begin where the previous one ends, a line for each (name, seconds), and one for the
    sum, named `total`. Terms of zero or unknown time are left out; the unknown ones are named."""
    known = [(name, seconds) for name, seconds in terms if seconds]
    unknown = [name for name, seconds in terms if seconds is None]
    whole = math.fsum(seconds for _, seconds in known)
    if not whole:
        return ""
    room, begin, lines = _WIDTH - _LABEL - _VALUE, 0.0, []
    for position, (name, seconds) in enumerate([*known, (total, whole)]):
        is_sum = position == len(known)
        left = _LABEL + room * (0 if is_sum else begin) / whole
        width = max(1.0, room * seconds / whole)
        y = _LINE * position
        color = "currentColor" if is_sum else _color_of(name)
        share = "" if is_sum else f", {format_fraction(seconds / whole)} of {total}"
        lines += [
            _text(_LABEL - 8, y + 14, name, anchor="end"),
            f'<rect x="{left:.1f}" y="{y + 3}" width="{width:.1f}" height="{_LINE - 6}" '
            f'fill="{color}" fill-opacity="{0.55 if is_sum else 1}">'
            f"<title>{escape(f'{name}: {format_seconds(seconds)}{share}')}</title></rect>",
            _text(_WIDTH - _VALUE + 8, y + 14, format_seconds(seconds)),
        ]
        begin += seconds
    drawn = _svg(_LINE * (len(known) + 1) + 4, lines)
    missing = (
        f'<p style="opacity:0.7">not known: {escape(", ".join(unknown))}</p>' if unknown else ""
    )
    return drawn + missing


def _color_of(name: str) -> str:
    """Blue for what devices compute, orange for what they exchange, green for the rest."""
    if name.startswith(("communication", "exposed", "wait")):
        return _COLORS[1]
    is_computed = name.startswith(("compute", "memory", "launch", "attainable"))
    return _COLORS[0] if is_computed else _COLORS[2]


def curves(
    series: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str, *, ideal: str | None = None
) -> str:
    """Lines through points (x, y) on logarithmic axes, one for each of `series`.

    The vertical axis is linear if a value, such as a loss, is 0 or below; all x are above 0.

    Args:
        series: name and points of each line.
        x: what is on the horizontal axis; its ticks are at the points.
        y: what is on the vertical axis, as `cell_of` names it: "step_seconds".
        ideal: the series whose first point is extended in proportion to x, dashed; None for none.
    """
    points = [each for line in series.values() for each in line]
    if len({first for first, _ in points}) < 2:
        return ""
    dashed = []
    if ideal is not None:
        (x0, y0), xn = series[ideal][0], series[ideal][-1][0]
        dashed = [(x0, y0), (xn, y0 * xn / x0)]
    is_even = any(second <= 0 for _, second in points)
    xs = [math.log(first) for first, _ in (*points, *dashed)]
    ys = [second if is_even else math.log(second) for _, second in (*points, *dashed)]
    left, right, top, height = 80, _WIDTH - 150, 12, 220
    low, high = min(ys), max(ys)
    margin = (0.05 * (high - low) or 0.05) if is_even else max(0.05 * (high - low), 0.05)
    low, high = low - margin, high + margin

    def place(point: tuple[float, float]) -> tuple[float, float]:
        across = (math.log(point[0]) - min(xs)) / (max(xs) - min(xs))
        up = ((point[1] if is_even else math.log(point[1])) - low) / (high - low)
        return left + across * (right - left), top + (1 - up) * height

    bottom = top + height
    parts = [
        f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="currentColor" '
        'stroke-opacity="0.5"/>'
    ]
    last = -math.inf
    for each in sorted({first for first, _ in points}):
        at = place((each, points[0][1]))[0]
        if at - last < 34:
            continue
        last = at
        parts.append(_text(at, bottom + 16, f"{each:,.0f}", anchor="middle"))
    for value in _even_ticks(low, high) if is_even else _ticks(math.exp(low), math.exp(high)):
        at = place((points[0][0], value))[1]
        parts += [
            f'<path d="M{left} {at:.1f}H{right}" stroke="currentColor" stroke-opacity="0.12"/>',
            _text(left - 6, at + 4, cell_of(y, value), anchor="end"),
        ]
    if dashed:
        parts.append(
            _line([place(each) for each in dashed], "currentColor", ' stroke-dasharray="4 4"')
        )
        parts.append(_text(right + 6, place(dashed[-1])[1] + 4, "in proportion"))
    taken: list[float] = [place(dashed[-1])[1]] if dashed else []
    for position, (name, line) in enumerate(series.items()):
        color = _COLORS[position % len(_COLORS)]
        placed = [place(each) for each in line]
        parts.append(_line(placed, color))
        for (first, second), (across, up) in zip(line, placed, strict=True):
            said = escape(f"{name}, {first:,.0f} {x}: {cell_of(y, second)}")
            parts.append(
                f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3.5" fill="{color}">'
                f"<title>{said}</title></circle>"
            )
        at = placed[-1][1] + 4
        while any(abs(at - other) < 13 for other in taken):
            at += 13
        taken.append(at)
        parts.append(_text(right + 10, at, name, color=color))
    parts += [
        _text((left + right) / 2, bottom + 34, x, anchor="middle"),
        _text(left + 6, top + 6, heading_of(y)),
    ]
    return _svg(bottom + 42, parts)


def _ticks(low: float, high: float) -> list[float]:
    """Some three to six round numbers between `low` and `high`."""
    for steps in (
        (1,),
        (1, 3),
        (1, 2, 5),
        (1, 1.5, 2, 3, 5, 7),
        tuple(n / 10 for n in range(10, 100)),
    ):
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [s * 10.0**e for e in exponents for s in steps if low <= s * 10.0**e <= high]
        if len(found) >= 3:
            return found[:: max(1, len(found) // 5)]
    return [math.sqrt(low * high)]


def _even_ticks(low: float, high: float) -> list[float]:
    """Some three to six evenly spaced round numbers between `low` and `high`."""
    unit = 10.0 ** math.floor(math.log10(high - low))
    step = next(s * unit for s in (0.2, 0.5, 1, 2) if (high - low) / (s * unit) <= 6)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def lanes(events: Mapping[str, Sequence[tuple[float, float, str]]]) -> str:
    """Spans (begin, end, what) in seconds, a lane for each name, on a common time axis."""
    end = max((span[1] for spans in events.values() for span in spans), default=0.0)
    if not end:
        return ""
    left, height = 90, 26
    room = _WIDTH - left - 10
    parts = []
    for lane, (name, spans) in enumerate(events.items()):
        y = lane * height
        parts.append(_text(left - 8, y + 17, name, anchor="end"))
        for begin, until, what in spans:
            width = max(0.3, room * (until - begin) / end)
            said = escape(f"{what}: {format_seconds(until - begin)} at {format_seconds(begin)}")
            parts.append(
                f'<rect x="{left + room * begin / end:.1f}" y="{y + 4}" width="{width:.1f}" '
                f'height="{height - 8}" fill="{_COLORS[lane % len(_COLORS)]}">'
                f"<title>{said}</title></rect>"
            )
    bottom = len(events) * height
    for share in (0.0, 0.5, 1.0):
        anchor = ("start", "middle", "end")[round(2 * share)]
        said = format_seconds(end * share) if share else "0"
        parts.append(_text(left + room * share, bottom + 14, said, anchor=anchor))
    return _svg(bottom + 20, parts)


def _line(points: Sequence[tuple[float, float]], color: str, more: str = "") -> str:
    path = "L".join(f"{across:.1f} {up:.1f}" for across, up in points)
    return f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="1.8"{more}/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", color: str = "currentColor"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
    )


def _svg(height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" '
        f'style="display:block;width:100%;max-width:{_WIDTH}px;{_FONT}">{"".join(parts)}</svg>'
    )
