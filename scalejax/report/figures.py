"""Pictures for files: schedules, predictions against measurements, Pareto fronts, sweeps.

Plans and benches use the charts of their pages: `report.html.plan`, `report.html.bench`.
Knows results; nothing of files, which `save_picture` writes.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from statistics import geometric_mean, median
from typing import Any, Literal

import altair as alt

from scalejax.core.units import GIB, counted
from scalejax.planning.search import Candidate, pareto
from scalejax.report.html.charts import DASHES, PALETTE, Row, Spec, colored, line_chart
from scalejax.sweep.coordinates import LOGITS, CoordinateCheck
from scalejax.sweep.intervals import t_interval
from scalejax.sweep.plan import in_words, short_names
from scalejax.sweep.results import Arm, RunRow, arms
from scalejax.sweep.study import CellResult, Study, Warmup
from scalejax.validation import RowResult

_MOST_POINTS = 2000
"""Most points of a curve; more add nothing visible."""
_MOST_CURVES = 20
"""Most curves that colour and dash can distinguish."""
_SHAPES = ("circle", "triangle-up", "square", "diamond")
"""Shapes of families: the next one is used once all colours are."""
_FAR = 5
"""Ratio of largest to smallest time above which the axis is logarithmic."""
_WIDTH, _HEIGHT = 640, 380
"""Size of a picture, pixels."""
_ENDS = ("y", "low", "high")
"""Fields of a point: its mean and the ends of its interval."""
_LOGARITHMIC, _NEAR = alt.Scale(type="log", nice=False), alt.Scale(zero=False)


def schedule(learning_rates: Sequence[float], *, epochs: Sequence[float]) -> Spec:
    """Learning rate of every update, in order, over the epochs trained before it."""
    stride = max(1, len(learning_rates) // _MOST_POINTS)
    pairs = list(zip(epochs, learning_rates, strict=True))[::stride]
    chart = alt.Chart(_data([{"x": epoch, "y": rate} for epoch, rate in pairs]))
    return _picture(
        chart.mark_line(interpolate="step-after").encode(
            x=alt.X("x:Q", title="epoch", scale=alt.Scale(nice=False)),
            y=alt.Y("y:Q", title="learning rate"),
        )
    )


def scatter(results: Sequence[RowResult], *, title: str = "step times") -> Spec:
    """Predicted against measured step times, one colour and mark for each family.

    On the line in the middle the two are equal; between the dotted lines they differ by less
    than a quarter. The legend has the number of rows and the median absolute error of each family;
    rows without a prediction, or without a time to compare with, are counted under the title.

    Args:
        results: results of the rows of a ledger.
        title: what was predicted, such as the ledger's name.
    """
    families: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        if result.measured_seconds is not None and result.predicted_seconds is not None:
            pair = (result.measured_seconds, result.predicted_seconds)
            families.setdefault(result.family, []).append(pair)
    ordered = sorted(families.items(), key=lambda item: -len(item[1]))
    labels = [_family_label(family, pairs) for family, pairs in ordered]
    points: list[Row] = [
        {"x": measured, "y": predicted, "family": label}
        for label, (_, pairs) in zip(labels, ordered, strict=True)
        for measured, predicted in pairs
    ]
    seconds = [each for _, pairs in ordered for pair in pairs for each in pair]
    ends = (min(seconds, default=1) / 1.5, max(seconds, default=1) * 1.5)
    scale = alt.Scale(type="log", domain=ends)
    legend = alt.Legend(
        orient="bottom",
        columns=3,
        labelLimit=0,
        titleLimit=0,
        title="family: rows, median error of the step time",
    )
    shapes = [_SHAPES[place // len(PALETTE) % len(_SHAPES)] for place in range(len(labels))]
    color, shape = (
        {"scale": alt.Scale(domain=labels, range=values), "legend": legend}
        for values in (PALETTE, shapes)
    )
    base = alt.Chart(_data(points)).encode(
        x=alt.X("x:Q", title="measured seconds per step", scale=scale),
        y=alt.Y("y:Q", title="predicted seconds per step", scale=scale),
    )
    marks = base.mark_point(filled=True, size=25, opacity=0.6).encode(
        color=alt.Color("family:N", **color), shape=alt.Shape("family:N", **shape)
    )
    lines = [
        base.mark_line(color="black", strokeWidth=0.8, strokeDash=dash, clip=True).properties(
            data=_data([{"x": end, "y": end * factor} for end in ends])
        )
        for factor, dash in ((1, [1, 0]), (0.8, [2, 3]), (1.25, [2, 3]))
    ]
    left_out = len(results) - len(points)
    rest = f"; {left_out:,} without a prediction or a time are left out" if left_out else ""
    words = [f"{len(points):,} rows{rest}", "line: equal; dotted: x 0.8 and x 1.25"]
    named = alt.TitleParams(f"{title}: predicted against measured", subtitle=words)
    return _picture(alt.layer(*lines, marks, title=named), height=_WIDTH)


def _family_label(family: str, pairs: Sequence[tuple[float, float]]) -> str:
    """Legend text of a family: its row count and median absolute error."""
    error = median(abs(predicted / measured - 1) for measured, predicted in pairs)
    return f"{family}: {len(pairs):,}, {error:.0%}"


def time_and_memory(candidates: Sequence[Candidate], *, title: str) -> Spec:
    """Memory against step time of the strategies that fit, with the Pareto front of the two."""
    stride = max(1, len(candidates) // _MOST_POINTS)
    every = f"one in {stride:,} of " if stride > 1 else ""
    some = f"{every}{len(candidates):,} strategies that fit"
    front = "none is faster with less memory"
    shown = [(each, some) for each in candidates[::stride]]
    shown += [(each, front) for each in pareto(tuple(candidates))]
    rows: list[Row] = [
        {"label": label, "x": each.step_seconds, "y": each.peak_memory_bytes / GIB}
        for each, label in shown
    ]
    seconds = [each.step_seconds for each in candidates]
    base = alt.Chart(_data(rows)).encode(
        x=alt.X(
            "x:Q",
            title="predicted time of a step",
            scale=_LOGARITHMIC if max(seconds) >= _FAR * min(seconds) else _NEAR,
            axis=alt.Axis(
                tickCount=8, labelSeparation=15, labelExpr="format(datum.value, '~s') + 's'"
            ),
        ),
        y=alt.Y("y:Q", title="memory of a device, GiB"),
        color=colored("label", [some, front], colors=[PALETTE[0], PALETTE[3]]),
    )
    points = base.mark_circle(size=12, opacity=0.4).transform_filter(alt.datum.label == some)
    line = base.mark_line(point=True, interpolate="step-after", strokeWidth=1.5)
    line = line.transform_filter(alt.datum.label == front)
    return _picture(alt.layer(points, line, title=title))


def final_accuracies(rows: Sequence[RunRow]) -> Spec:
    """Final accuracy of each arm of a sweep over the numeric field with the most values.

    On validation data if there are any, else on test data. Points are single runs; lines join
    means, bars are 95 % intervals over seeds. Arms with the same x are drawn side by side. A run
    that diverged is in no mean but is a cross at the bottom. Unfinished runs are left out.
    """
    found = [arm for arm in arms(rows) if arm.rows]
    x_name = _numeric_field(found)
    series = _series(found, x_name)
    means: list[Row] = []
    single: list[Row] = []
    lost: list[Row] = []
    places = sorted({place for members in series.values() for place, _ in members})
    is_logarithmic = x_name is not None and min(places, default=0) > 0
    for index, (label, members) in enumerate(series.items()):
        for place, arm in members:
            at = place
            if x_name is not None:
                at = _beside(place, index - (len(series) - 1) / 2, places, len(series))
            point: Row = {"label": label, "x": place, "at": at}
            means.append({**point, **_spread(arm.accuracies)})
            single += [{**point, "y": accuracy} for accuracy in arm.accuracies]
            lost += [point] * len(arm.diverged)
    scale, axis = _NEAR, alt.Axis() if x_name else alt.Axis(labels=False, ticks=False)
    if is_logarithmic:
        scale = alt.Scale(type="log", base=2, nice=False, padding=20)
        axis = alt.Axis(values=places, format="~g")
    title = short_names([x_name])[0].replace("_", " ") if x_name else "arms of the sweep"
    x = alt.X("at:Q", title=title, scale=scale, axis=axis)
    y = f"{_part(found)} accuracy at the end"
    near = _within_shares([*means, *single], has_crosses=bool(lost))
    base = line_chart(means, x, y).encode(y=_accuracy("y", y, near))
    bars = base.mark_rule(strokeDash=[1, 0], clip=True)
    bars = bars.encode(_accuracy("low", y, near), alt.Y2("high:Q"))
    runs = base.mark_point(size=20, opacity=0.5, filled=True).properties(data=_data(single))
    names = list(series)
    shapes = [_SHAPES[place % len(_SHAPES)] for place in range(len(names))]
    legend = base.encoding.color["legend"]
    shape = alt.Shape(
        "label:N", title=None, legend=legend, scale=alt.Scale(domain=names, range=shapes)
    )
    runs = runs.encode(shape=shape)
    title = _said(found, _intervals("lines: means; bars", means))
    return _picture(alt.layer(bars, base, runs, _crosses(base, lost), title=title))


def _beside(place: float, rank: float, places: Sequence[float], count: int) -> float:
    """Where an arm is drawn that shares its place with others: `rank` steps from the middle of
    `count`. A step is 2.5 % of the axis, or less if all would not fit into half the smallest gap;
    the axis is logarithmic if all `places` are positive."""
    is_logarithmic = places[0] > 0
    ticks = [math.log2(each) if is_logarithmic else each for each in places]
    gaps = [after - before for before, after in pairwise(ticks)]
    step = min(0.025 * sum(gaps), 0.5 * min(gaps, default=0) / count)
    return place * 2 ** (rank * step) if is_logarithmic else place + rank * step


def accuracy_curves(rows: Sequence[RunRow]) -> Spec:
    """Accuracy of each arm of a sweep over epochs: the mean over seeds, shaded by its interval.

    Once some seeds have ended, the mean of the rest is a separate dotted line labelled with their
    number: otherwise the mean would rise because the worst are gone. A run that diverged is in no
    mean but is a cross at the bottom, where it ended. Unfinished runs are left out.
    """
    every = [arm for arm in arms(rows) if arm.rows]
    found = every[:_MOST_CURVES]
    whole: list[Row] = []
    rest: list[Row] = []
    lost: list[Row] = []
    for arm in found:
        label = in_words(arm.varied) or "all runs"
        kept = [row for row in arm.rows if not row.has_diverged]
        seeds = len(kept)
        points = sorted((m.epoch, m.accuracy) for row in kept for m in row.evaluations)
        left = seeds
        for epoch, group in groupby(points, key=lambda point: point[0]):
            values = [value for _, value in group]
            point: Row = {"label": label, "x": epoch, **_spread(values)}
            if len(values) == seeds:
                whole.append(point)
                continue
            words = f"{len(values)} of {seeds} seeds from here" if len(values) != left else ""
            left = len(values)
            rest.append({**point, "part": f"{label} {left}", "words": words})
        lost += [{"label": label, "x": row.planned.run.epoch_of(row.steps)} for row in arm.diverged]
    title = f"{_part(found)} accuracy"
    near = _within_shares([*whole, *rest], has_crosses=bool(lost))
    last = max((float(row["x"]) for row in [*whole, *rest, *lost]), default=0)  # type: ignore[arg-type]
    whole_epochs = alt.Axis(tickMinStep=1) if last >= 2 else alt.Axis()
    x, y = alt.X("x:Q", title="epoch", axis=whole_epochs), _accuracy("y", title, near)
    names = [in_words(arm.varied) or "all runs" for arm in found]
    base = line_chart(whole, x, title, names=names).encode(y=y)
    band = base.mark_area(opacity=0.15, strokeWidth=0, clip=True)
    band = band.encode(_accuracy("low", title, near), alt.Y2("high:Q"))
    ends = base.mark_line(point=True, opacity=0.6).properties(data=_data(rest))
    ends = ends.encode(strokeDash=alt.value([2, 3]), detail="part:N")
    words = ends.mark_text(align="left", dx=4, dy=-6).encode(text="words:N")
    left_out = len(every) - len(found)
    more = f"the first {len(found)} arms; {left_out} are left out" if left_out else ""
    layers = (band, base, ends, words, _crosses(base, lost))
    bands = _intervals("lines: means; bands", [*whole, *rest])
    return _picture(alt.layer(*layers, title=_said(found, more, bands)))


def _part(found: Sequence[Arm]) -> str:
    """The part of the data whose accuracy is shown."""
    is_validation = any(row.has_validation for arm in found for row in arm.rows)
    return "validation" if is_validation else "test"


def _numeric_field(found: Sequence[Arm]) -> str | None:
    """The varied field with the most values, all numeric; None if there is no such field."""
    numbers: dict[str, set[float]] = {}
    for name in found[0].varied if found else ():
        values = [arm.varied[name] for arm in found]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            numbers[name] = {float(value) for value in values if isinstance(value, int | float)}
    return max(numbers, key=lambda name: len(numbers[name]), default=None)


def _series(found: Sequence[Arm], x_name: str | None) -> Mapping[str, list[tuple[float, Arm]]]:
    """(x, arm) sorted by x, grouped by the other varied fields; x is the index without a field."""
    series: dict[str, list[tuple[float, Arm]]] = {}
    for place, arm in enumerate(found):
        rest = {name: value for name, value in arm.varied.items() if name != x_name}
        x = arm.varied[x_name] if x_name else place
        if isinstance(x, int | float):
            series.setdefault(in_words(rest) or "all runs", []).append((x, arm))
    return {label: sorted(s, key=lambda pair: pair[0]) for label, s in series.items()}


def _spread(values: Sequence[float]) -> Row:
    """Mean of accuracies, and the ends of its bar, cut to 0..1; a single value has no bar, and
    without values all are None."""
    found = t_interval(values)
    if found is None:
        return {"y": None, "low": None, "high": None, "seeds": 0}
    low, high = found.bar or (None, None)
    if low is not None and high is not None:
        low, high = max(0.0, low), min(1.0, high)
    return {"y": found.mean, "low": low, "high": high, "seeds": found.count}


def _intervals(what: str, points: Sequence[Row]) -> str:
    """What bars or bands are, if there are any."""
    bars = _bars(points)
    return f"{what}: {bars}" if bars else ""


def _bars(points: Sequence[Row]) -> str:
    """What the ends of bars are, in words; empty if there are no bars."""
    counts = {row["seeds"] for row in points if row["low"] is not None}
    if not counts:
        return ""
    if counts == {2}:
        return "both seeds"
    return f"95 % t intervals over seeds{'; both values for two seeds' if 2 in counts else ''}"


def _accuracy(field: str, title: str, scale: alt.Scale) -> alt.Y:
    """The axis of accuracies, in per cent as in tables."""
    axis = alt.Axis(labelExpr="format(100 * datum.value, '~g') + ' %'")
    return alt.Y(f"{field}:Q", title=title, scale=scale, axis=axis)


def _within_shares(points: Sequence[Row], *, has_crosses: bool) -> alt.Scale:
    """The scale of accuracies: covers what is drawn, with room for crosses below."""
    values = [float(row[name]) for row in points for name in _ENDS if row.get(name) is not None]  # type: ignore[arg-type]
    if not values:
        return _NEAR
    low, high = min(values), max(values)
    pad = 0.05 * (high - low) or 0.01
    below = low - 3 * pad if has_crosses else max(0.0, low - pad)
    return alt.Scale(zero=False, nice=False, domain=[below, min(1.0, high + pad)])


def _crosses(base: alt.Chart, lost: Sequence[Row]) -> alt.Chart:
    """A cross for each diverged run at the bottom of the chart, whatever its scale."""
    crosses = base.mark_point(shape="cross", angle=45, filled=True, size=70)
    return crosses.encode(y=alt.value(alt.expr("height - 8"))).properties(data=_data(lost))


def _said(found: Sequence[Arm], *more: str) -> alt.TitleParams:
    """The title of a chart: a line for each text, and one on crosses if there are any."""
    count = sum(len(arm.diverged) for arm in found)
    crosses = f"crosses: diverged ({counted(count, 'run')}, in no mean)" if count else ""
    return alt.TitleParams([text for text in (*more, crosses) if text], fontWeight="normal")


def coordinates(found: CoordinateCheck) -> Spec:
    """Mean absolute change of activations during a coordinate check against the size of the
    network: a line for the embedding, the last block and the logits of each parametrization, on
    logarithmic axes. A change that is 0 or not finite is left out."""
    layers = list(dict.fromkeys(each.layer for each in found.coordinates))
    shown = (layers[0], layers[-2], LOGITS)
    rows: list[Row] = [
        {"label": f"{each.parametrization}, {each.layer}", "x": each.size, "y": each.change}
        for each in found.coordinates
        if each.layer in shown and each.change
    ]
    scale = alt.Scale(type="log", base=2, nice=False, padding=20)
    x = alt.X("x:Q", title=found.along, scale=scale, axis=alt.Axis(values=list(found.sizes)))
    title = f"mean |change| in {counted(found.steps, 'step')}"
    chart = line_chart(rows, x, title)
    axis = alt.Axis(format="~g", labelOverlap="greedy")
    return _picture(chart.encode(y=alt.Y("y:Q", title=title, scale=_LOGARITHMIC, axis=axis)))


# For print.

PrintWidth = Literal["column", "page"]
"""Width of a figure in print: a column, or the page."""
_INCHES: dict[PrintWidth, float] = {"column": 3.25, "page": 6.75}
"""Widths of a column and of the text in ICML's instructions to authors."""
_PRINT_HEIGHT = 2.3
"""Height of a figure without its legend, inches."""
POINTS = 72
"""Points per inch; a point is a pixel of a figure for print."""
COLOR_BLIND_SAFE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours that every kind of colour-blind reader can distinguish (Okabe & Ito 2008, as in Wong
2011, Nature Methods 8, 441)."""
_FONT = "Liberation Sans"
"""The font, which has the widths of Arial and Helvetica; PDF files embed the glyphs they use."""
_SMALL, _USUAL, _LEAST = 7, 8, 5
"""Font sizes in points: of labels, of titles of axes, and the smallest for long names."""
_BESIDE_LEGEND = 60
"""Points across that names in a legend cannot use: the axis on the left, and the symbols."""
_LINE_WIDTH = 1.1
"""Width of lines, points."""
_LETTER_WIDTH = 0.55
"""Mean width of a letter over its height."""


def for_print(figure: Spec, width: PrintWidth) -> Spec:
    """A figure of a sweep for a paper: as wide as a column or the page, in small letters and
    colours that colour-blind readers can distinguish, with its legend below the axes and never over
    data. A pixel is a point."""
    spec = copy.deepcopy(figure)
    across = round(_INCHES[width] * POINTS)
    names = _labels(spec)
    room = across - _BESIDE_LEGEND
    longest = max(map(len, names), default=1) * _LETTER_WIDTH
    letters = max(_LEAST, min(_SMALL, room / longest))
    columns = max(1, min(len(names), int(room // (longest * letters + 25))))
    rows = -(-len(names) // columns) if len(names) > 1 else 0
    _style(spec, names)
    return spec | {
        "width": across,
        "height": round(_PRINT_HEIGHT * POINTS + rows * (letters + 5)),
        "autosize": {"type": "fit", "contains": "padding"},
        "padding": 2,
        "background": "white",
        "config": _print_config(letters, columns, room),
    }


def _print_config(letters: float, columns: int, room: float) -> Spec:
    """Vega-Lite's config of a figure for print, with the legend below the axes: font size in
    points, columns, and width of a name in the legend."""
    return {
        "font": _FONT,
        "axis": {
            **{"gridColor": "#e6e6e6", "gridWidth": 0.5, "domainWidth": 0.6, "tickWidth": 0.6},
            **{
                "labelColor": "black",
                "titleColor": "black",
                "tickSize": 3,
                "tickRound": False,
                "translate": 0,
            },
            **{"labelFontSize": _SMALL, "titleFontSize": _USUAL, "titleFontWeight": "normal"},
        },
        "legend": {
            **{"orient": "bottom", "direction": "horizontal", "columns": columns, "offset": 4},
            **{"labelFontSize": letters, "labelLimit": room, "symbolSize": 60},
            **{"rowPadding": 1, "columnPadding": 8, "labelColor": "black"},
        },
        "title": {"fontSize": _SMALL, "fontWeight": "normal", "offset": 4},
        "view": {"stroke": None},
    }


_PANEL_HEIGHT = {"column": 78, "page": 92}
"""Height of a panel of a study, points."""
_BESIDE_PANELS = 56
"""Points left and right of all panels: the axis, and the names of rows."""
_BETWEEN_PANELS = 8
"""Gap between panels, points."""


def study_panels(study: Study, results: Sequence[CellResult], width: PrintWidth) -> Spec:
    """The test metric of a study against the batch, for print: a panel for each optimizer and
    scaling rule, a line for each warmup. Points are means, bars 95 % t intervals over seeds (with
    two seeds, both values), side by side at the same batch. Means leave out runs that diverged; a
    cell with such runs has a cross at the bottom. A pixel is a point."""
    metric = study.metrics[1]
    is_accuracy = study.measure == "accuracy"
    names = [_warmup_in_words(each) for each in study.warmups]
    places = [float(batch) for batch in study.batches]
    rows: list[Row] = []
    singles: list[Row] = []
    for each in results:
        index = study.warmups.index(each.cell.warmup)
        at = _beside(float(each.cell.batch), index - (len(names) - 1) / 2, places, len(names))
        found = each.over_seeds(metric)
        point: Row = {
            "label": names[index],
            "optimizer": each.cell.optimizer.name,
            "rule": _RULES[each.cell.scaling],
            "at": at,
        }
        if found is not None:
            values = list(each.arm.by_seed(metric).values())
            low, high = found.bar or (None, None)
            spread = {"low": low, "high": high, "seeds": found.count}
            spread = _spread(values) if is_accuracy else spread
            rows.append({**point, "kind": "mean", **spread, "y": found.mean})
            singles += [Row(y=value) for value in values]
        if each.arm.diverged:
            words = f"{len(each.arm.diverged)}/{len(each.arm.rows)}"
            rows.append({**point, "kind": "lost", "words": words})
    has_crosses = any(each["kind"] == "lost" for each in rows)
    near = _NEAR
    if is_accuracy:
        near = _within_shares([*singles, *_bounded(rows, singles)], has_crosses=has_crosses)
    return _panels(study, results, rows, near, width)


def sharpness_panels(study: Study, results: Sequence[CellResult], width: PrintWidth) -> Spec:
    """Sharpness over epochs, if it was measured, for print: the geometric mean of seeds that did
    not diverge, a line for each warmup, a panel for each optimizer, scaling rule and batch; the
    dotted line is the limit up to which SGD at that rate is stable."""
    names = [_warmup_in_words(each) for each in study.warmups]
    is_several = len(study.optimizers) > 1
    rows: list[Row] = []
    for each in results:
        rule, optimizer = _RULES[each.cell.scaling], each.cell.optimizer.name
        point: Row = {
            "label": names[study.warmups.index(each.cell.warmup)],
            "rule": f"{optimizer}, {rule}" if is_several else rule,
            "batch": f"batch {each.cell.batch:,}",
        }
        found: dict[tuple[str, float], list[float]] = {}
        for row in each.arm.rows:
            for m in () if row.has_diverged else row.sharpness:
                for kind, value in (("is", m.sharpness), ("limit", m.stability_threshold)):
                    # The axis is logarithmic.
                    if value is not None and value > 0:
                        found.setdefault((kind, m.epoch), []).append(value)
        rows += [
            {**point, "kind": kind, "epoch": epoch, "y": geometric_mean(values)}
            for (kind, epoch), values in sorted(found.items())
        ]
    if not rows:
        return {}
    y = {
        "field": "y",
        "type": "quantitative",
        "scale": {"type": "log", "nice": False},
        "title": "sharpness",
        "axis": {"tickCount": 4, "format": "~g"},
    }
    x = {"field": "epoch", "type": "quantitative", "title": "epoch", "axis": {"tickCount": 5}}
    by_label = {"field": "label", "type": "nominal", "title": None}
    safe = [COLOR_BLIND_SAFE[place % len(COLOR_BLIND_SAFE)] for place in range(len(names))]
    legend = {"symbolType": "stroke", "symbolSize": 250, "symbolOpacity": 1}
    color = by_label | {"scale": {"domain": names, "range": safe}, "legend": legend}
    layers = [
        {
            "transform": [{"filter": f"datum.kind == '{kind}'"}],
            "mark": {"type": "line", "strokeWidth": stroke, "strokeDash": dash},
            "encoding": {"x": x, "y": y, "color": color},
        }
        for kind, stroke, dash in (("limit", 0.8, [1, 2]), ("is", _LINE_WIDTH, [1, 0]))
    ]
    said = ["largest eigenvalue of the Hessian of the training loss"]
    if any(each["kind"] == "limit" for each in rows):
        said.append("dotted: stability limit of SGD")
    rules = list(dict.fromkeys(str(each["rule"]) for each in rows))
    batches = list(dict.fromkeys(str(each["batch"]) for each in rows))
    return _framed(rows, ("rule", rules), ("batch", batches), layers, said, names, width)


def _bounded(rows: Sequence[Row], singles: Sequence[Row]) -> list[Row]:
    """The ends of the intervals. Those that go far beyond all single runs, as with three seeds,
    would hide these and are cut to three times their range; the rows say which are."""
    values = [float(each["y"]) for each in singles]  # type: ignore[arg-type]
    room = max(values, default=0) - min(values, default=0) or 0.02
    least, most = min(values, default=0) - room, max(values, default=0) + room
    found: list[Row] = []
    for each in rows:
        for name in ("low", "high"):
            if isinstance(end := each.get(name), float):
                found.append(Row(y=min(max(end, least), most)))
                each[f"is_{name}_cut"] = not least <= end <= most
    return found


_RULES = {
    "none": "rate unchanged",
    "linear": "linear scaling",
    "sqrt": "root scaling",
    "sde": "SDE scaling",
    "legw": "LEGW",
}


def _warmup_in_words(warmup: Warmup) -> str:
    if warmup.form == "none":
        return "no warmup"
    length = (
        f"{warmup.length:g} % of run" if warmup.is_share else counted(f"{warmup.length:g}", "epoch")
    )
    usual = "zero" if warmup.form == "gradual" else "base"
    start = "" if warmup.start == usual else f" from {warmup.start}"
    return f"{warmup.form}, {length}{start}"


def _panels(
    study: Study,
    results: Sequence[CellResult],
    rows: Sequence[Row],
    near: alt.Scale,
    width: PrintWidth,
) -> Spec:
    """The figure of points and intervals: on a page, one column per optimizer if there are several;
    otherwise one per rule."""
    optimizers = list(dict.fromkeys(each.cell.optimizer.name for each in results))
    rules = list(dict.fromkeys(_RULES[each.cell.scaling] for each in results))
    sides = [("optimizer", optimizers), ("rule", rules)]
    across_rules = width == "column" or len(optimizers) == 1
    (column, columns), (row, lines) = sides[::-1] if across_rules else sides
    panel = _panel_width(width, len(columns))
    names = [_warmup_in_words(each) for each in study.warmups]
    means = [each for each in rows if each["kind"] == "mean"]
    y = {
        "field": "y",
        "type": "quantitative",
        "scale": near.to_dict(),
        "title": f"test {study.measure}",
        "axis": {"tickCount": 5},
    }
    if study.measure == "accuracy":
        y["axis"]["labelExpr"] = "format(100 * datum.value, '~g') + ' %'"
    every = max(1, -(-len(study.batches) * 24 // panel))
    x = {
        "field": "at",
        "type": "quantitative",
        "title": "global batch",
        "scale": {"type": "log", "base": 2, "nice": False, "padding": 8},
        "axis": {"values": list(study.batches)[::every], "format": "d"},
    }
    shapes = [_SHAPES[place % len(_SHAPES)] for place in range(len(names))]
    by_label = {"field": "label", "type": "nominal", "title": None}
    safe = [COLOR_BLIND_SAFE[place % len(COLOR_BLIND_SAFE)] for place in range(len(names))]
    dashes = [DASHES[place % len(DASHES)] for place in range(len(names))]
    legend = {"symbolStrokeWidth": 0, "symbolOpacity": 1}
    color = by_label | {"scale": {"domain": names, "range": safe}, "legend": legend}
    dash = by_label | {"scale": {"domain": names, "range": dashes}, "legend": None}
    shape = by_label | {"scale": {"domain": names, "range": shapes}, "legend": legend}
    of_means = [{"filter": "datum.kind == 'mean'"}]
    low = y | {"field": "low"}
    layers = [
        {
            "transform": of_means,
            "mark": {"type": "rule", "strokeWidth": 0.8, "clip": True},
            "encoding": {"x": x, "y": low, "y2": {"field": "high"}, "color": color},
        },
        {
            "transform": of_means,
            "mark": {"type": "line", "strokeWidth": _LINE_WIDTH},
            "encoding": {"x": x, "y": y, "color": color, "strokeDash": dash},
        },
        {
            "transform": of_means,
            "mark": {"type": "point", "filled": True, "size": 16, "opacity": 1},
            "encoding": {"x": x, "y": y, "color": color, "shape": shape},
        },
        {
            "transform": [{"filter": "datum.kind == 'lost'"}],
            "mark": {
                **{"type": "point", "shape": "cross", "angle": 45},
                **{"filled": True, "size": 30, "opacity": 1},
            },
            "encoding": {"x": x, "y": {"value": _PANEL_HEIGHT[width] - 5}, "color": color},
        },
    ]
    lost = sum(len(arm.diverged) for arm in {id(r.arm): r.arm for r in results}.values())
    bars = _bars(means)
    said = [f"means{', ' if bars else ''}{bars}"]
    if any(each.get("is_low_cut") or each.get("is_high_cut") for each in means):
        said.append("bars that end at an edge extend beyond it")
    if lost:
        said.append(f"crosses: diverged, in no mean ({counted(lost, 'run')})")
    return _framed(rows, (column, columns), (row, lines), layers, said, names, width)


def _panel_width(width: PrintWidth, columns: int) -> int:
    """Width in points of one of `columns` panels side by side."""
    across = round(_INCHES[width] * POINTS)
    return (across - _BESIDE_PANELS - _BETWEEN_PANELS * (columns - 1)) // columns


def _framed(
    rows: Sequence[Row],
    column: tuple[str, Sequence[str]],
    row: tuple[str, Sequence[str]],
    layers: Sequence[Spec],
    said: Sequence[str],
    names: Sequence[str],
    width: PrintWidth,
) -> Spec:
    """Panels for print: `layers` of `rows`, by the values of two fields, with the texts `said`
    above them, and `names` in the legend below."""
    header = {"title": None, "labelFontSize": _USUAL, "labelColor": "black", "labelPadding": 3}
    longest = max(map(len, names)) * _LETTER_WIDTH * _SMALL
    room = round(_INCHES[width] * POINTS) - _BESIDE_LEGEND
    panel = _panel_width(width, len(column[1]))
    facet = {
        "column": {
            "field": column[0],
            "type": "nominal",
            "sort": list(column[1]),
            "header": header,
        },
        "row": {
            "field": row[0],
            "type": "nominal",
            "sort": list(row[1]),
            "header": header | {"labelOrient": "right"},
        },
    }
    return {
        "$schema": alt.SCHEMA_URL,
        "data": {"values": list(rows)},
        "facet": facet,
        "spec": {"width": panel, "height": _PANEL_HEIGHT[width], "layer": list(layers)},
        "spacing": _BETWEEN_PANELS,
        "title": {"text": said if width == "column" else "; ".join(said), "anchor": "middle"},
        "padding": 2,
        "background": "white",
        "config": _print_config(_SMALL, max(1, int(room // (longest + 25))), room),
    }


def _style(spec: Spec, names: Sequence[str]) -> None:
    """Give the layers safe colours, dashes that distinguish lines of one colour, thin lines, and a
    legend that the config places, unless there is a single line, which a caption names."""
    safe = list(COLOR_BLIND_SAFE)
    dashes = [DASHES[place // len(safe) % len(DASHES)] for place in range(len(names))]
    layers = spec.get("layer", [spec])
    is_of_lines = not any("shape" in layer.get("encoding", {}) for layer in layers)
    for layer in layers:
        encoding = layer.get("encoding", {})
        for channel, values in (("color", safe), ("strokeDash", dashes), ("shape", None)):
            each = encoding.get(channel)
            if not isinstance(each, dict) or "scale" not in each:
                continue
            if values is not None:
                each["scale"]["range"] = values
            legend = {"symbolOpacity": 1}
            if is_of_lines:
                legend |= {"symbolType": "stroke", "symbolSize": 250}
            each["legend"] = legend if len(names) > 1 else None
        if "strokeWidth" in layer["mark"] and layer["mark"]["strokeWidth"]:
            layer["mark"]["strokeWidth"] = _LINE_WIDTH


def _labels(spec: Spec) -> list[str]:
    """Names in the legend."""
    colors = (layer["encoding"].get("color", {}) for layer in spec.get("layer", [spec]))
    return next((each["scale"]["domain"] for each in colors if "scale" in each), [])


def _data(rows: Sequence[Row]) -> alt.Data:
    return alt.Data(values=list(rows))


def _picture(chart: Any, *, height: int = _HEIGHT) -> Spec:
    return chart.properties(width=_WIDTH, height=height).to_dict()
