"""Interactive charts of the report, as Vega-Lite specifications built with altair.

Knows runs and predictions; nothing of the page around the charts.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import altair as alt
import vl_convert

from scalejax.core.errors import ConfigError, refusal
from scalejax.core.serialization import save_bytes
from scalejax.report.sources import RunSource
from scalejax.report.terminal.scaling import waterfall_terms
from scalejax.simulator.predict import ScalingPrediction
from scalejax.training.record import TrainMeasurement

# Shared by all charts: colours, sizes and simple line charts.

Row = dict[str, str | float | None]
"""One point of a chart."""
Spec = dict[str, Any]
"""A chart as Vega-Lite JSON."""

PALETTE = ["#3f8fd2", "#e08a1e", "#2a9d78", "#d1495b", "#9a6fc4", "#7f8c8d", "#c49a2a", "#46b3c4"]
"""Colours distinguishable on white, on near-black, and by most colour-blind readers."""
_HEIGHT = 280


def specified(chart: Any, height: int = _HEIGHT) -> Spec:
    """Vega-Lite specification of `chart`, as wide as its column of the page."""
    return chart.properties(width="container", height=height).to_dict()


_WRITERS = {
    ".png": partial(vl_convert.vegalite_to_png, scale=2),
    ".svg": vl_convert.vegalite_to_svg,
    ".pdf": vl_convert.vegalite_to_pdf,
}


def require_picture(field: str, path: Path) -> None:
    """Refuse a path whose suffix is not a picture format.

    Raises:
        ConfigError: naming the formats.
    """
    if path.suffix not in _WRITERS:
        accepted = f"its suffix must be one of {', '.join(_WRITERS)}"
        raise ConfigError(refusal(field, str(path), accepted))


def save_picture(spec: Spec, path: Path) -> None:
    """Write a chart in the format of the suffix of `path`, which `require_picture` accepts.

    Raises:
        ConfigError: if the file cannot be written.
    """
    drawn = _WRITERS[path.suffix](spec)
    save_bytes(drawn.encode() if isinstance(drawn, str) else drawn, path)


def save_print(spec: Spec, path: Path) -> None:
    """Write a figure whose pixels are points, in the format of the suffix of `path`: PDF with its
    fonts, SVG with its size in points, or PNG with 300 pixels per inch.

    Raises:
        ConfigError: if the file cannot be written.
    """
    if path.suffix == ".png":
        save_bytes(vl_convert.vegalite_to_png(spec, ppi=300), path)
    elif path.suffix == ".svg":
        drawn = vl_convert.vegalite_to_svg(spec)
        sized = re.sub(r'(width|height)="([0-9.]+)"', r'\1="\2pt"', drawn, count=2)
        save_bytes(_numbered_anew(sized).encode(), path)
    else:
        save_picture(spec, path)


def _numbered_anew(drawn: str) -> str:
    """An SVG with its clip paths numbered from 0, whatever this process drew before."""
    numbers: dict[str, int] = {}
    return re.sub(
        r"\bclip(\d+)\b", lambda found: f"clip{numbers.setdefault(found[1], len(numbers))}", drawn
    )


def save_charts(specs: Sequence[Spec], path: Path, *, title: str, size: tuple[int, int]) -> None:
    """Write charts as one PNG, one below the other, each of `size` (width, height) in pixels.

    Raises:
        ConfigError: if the file cannot be written.
    """
    own = ("$schema", "config", "params")  # belong to whole pictures; PNGs have no clicks
    width, height = size
    charts = [
        {name: each for name, each in spec.items() if name not in own}
        | {"width": width, "height": height}
        for spec in specs
    ]
    picture = {"$schema": specs[0]["$schema"], "title": title, "vconcat": charts}
    picture["resolve"] = {"scale": {"color": "independent"}}
    save_picture(picture, path)


def colored(
    field: str, domain: list[str], *, columns: int = 4, colors: list[str] | None = None
) -> alt.Color:
    """Colour encoding of `field` with values `domain`, and a legend above the chart."""
    scale = alt.Scale(domain=domain, range=colors or PALETTE)
    legend = alt.Legend(orient="top", labelLimit=0, columns=columns, symbolOpacity=1)
    return alt.Color(f"{field}:N", title=None, scale=scale, legend=legend)


def zoomable(chart: alt.Chart) -> alt.Chart:
    """`chart` that dragging moves, and the wheel zooms only with Ctrl: without it, the wheel
    scrolls the page."""
    return chart.add_params(
        alt.selection_interval(bind="scales", zoom="wheel![event.ctrlKey]", name="zoomed")
    )


def lines(rows: list[Row], x: alt.X, title: str, *, has_points: bool = False) -> Spec:
    """Line chart of `rows` (label, x, y), a line for each label; `title` names the y axis."""
    return specified(zoomable(line_chart(rows, x, title, has_points=has_points)))


def line_chart(
    rows: list[Row],
    x: alt.X,
    title: str,
    *,
    has_points: bool = False,
    names: Sequence[str] | None = None,
) -> alt.Chart:
    """The chart of `lines`, for overlays; dashes distinguish lines of one colour.

    The legend has `names`, in their order, or those of `rows`.
    """
    names = list(names or dict.fromkeys(str(row["label"]) for row in rows))
    dashes = [DASHES[place // len(PALETTE) % len(DASHES)] for place in range(len(names))]
    color = colored("label", names, columns=2)
    scale = alt.Scale(domain=names, range=dashes)
    dash = alt.StrokeDash("label:N", title=None, legend=color["legend"], scale=scale)
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(point=has_points, strokeWidth=1.8)
        .encode(
            x=x,
            y=alt.Y("y:Q", title=title, scale=alt.Scale(zero=True)),
            color=color,
            strokeDash=dash,
            tooltip=["label:N", alt.Tooltip("x:Q", format=".4g"), alt.Tooltip("y:Q", format=".4g")],
        )
    )


_PART_COLORS = {
    "compute": PALETTE[0],
    "memory": PALETTE[1],
    "launch": PALETTE[2],
    "communication data": PALETTE[3],
    "communication fsdp": PALETTE[4],
    "communication tensor": "#d98cc4",
    "contention": PALETTE[5],
    "host": PALETTE[7],
    "overhead": "#8c6d46",
    "bubble": "#4d6b53",
    "stragglers": PALETTE[6],
    "input": "#5560c8",
    "checkpoints": "#93a84f",
    "failures": "#b9a5a0",
}
"""Colour of each part of a step, the same in every chart."""
_OTHER_COMMUNICATION = ("#a8324f", "#6f4a9e", "#f08a96")
"""Colours of communication over other axes, in order of appearance."""
DASHES = [[1, 0], [7, 5], [2, 5]]
"""Dash patterns of curves that coincide: the first is solid and shows through the others' gaps."""
_SAME = 0.005
"""Relative difference below which two curves look alike."""
_LEGEND_WIDTH = 140
"""Characters in one line of a legend."""
_MS = 1e3


def monitored_part(run: RunSource) -> Literal["validation", "test"]:
    """The part of the data that a run evaluates during training."""
    return "validation" if run.config.data.has_validation else "test"


def accuracy(runs: Sequence[RunSource], part: str) -> Spec:
    """Chart of the accuracy on `part` at each evaluation during the runs; a run that diverged is
    only a cross where it ended."""
    rows: list[Row] = [
        {"run": run.family, "label": run.label, "epoch": m.epoch, "accuracy": m.accuracy}
        for run in runs
        if not run.has_diverged
        for m in run.record.monitored
    ]
    y = alt.Y("accuracy:Q", title=f"{part} accuracy", axis=alt.Axis(format=".0%"))
    tooltip = alt.Tooltip("accuracy:Q", format=".2%")
    return _curves(
        rows, y, tooltip, has_points=True, runs=runs, lost=_lost(runs), lost_at=_HEIGHT - 8
    )


def training_loss(runs: Sequence[RunSource]) -> Spec:
    """Chart of the loss of each logged minibatch. The axis ends above the losses of runs that did
    not diverge, as one that did would otherwise flatten the others; a cross at the top marks where
    it ended."""
    rows = _logged(runs, "loss", lambda m: m.loss or None)  # 0 has no logarithm
    kept = {run.label for run in runs if not run.has_diverged}
    losses = [float(row["loss"]) for row in rows if row["loss"] and row["label"] in kept]
    if not losses:  # all diverged: use their first losses
        losses = [float(each) for run in runs for each in _first_loss(run)]
    most = _ABOVE_LOSSES * max(losses, default=math.inf)
    is_cut = any(float(row["loss"] or 0) > most for row in rows)
    scale = alt.Scale(type="log", domainMax=most) if is_cut else alt.Scale(type="log")
    y = alt.Y("loss:Q", title="training loss", scale=scale)
    tooltip = alt.Tooltip("loss:Q", format=".4g")
    return _curves(rows, y, tooltip, runs=runs, lost=_lost(runs), lost_at=8)


_ABOVE_LOSSES = 2.0
"""Top of the loss axis over the largest loss of runs that did not diverge."""


def _first_loss(run: RunSource) -> list[float]:
    return [each.loss for each in run.record.training[:1] if each.loss is not None]


def _lost(runs: Sequence[RunSource]) -> list[Row]:
    """Points where runs that diverged ended."""
    return [
        {
            "run": run.family,
            "label": run.label,
            "epoch": max((m.epoch for m in run.record.training), default=0.0),
        }
        for run in runs
        if run.has_diverged
    ]


def learning_rate(runs: Sequence[RunSource]) -> Spec:
    """Chart of the learning rate of each logged update."""
    rows = _logged(runs, "rate", lambda m: m.learning_rate)
    y = alt.Y("rate:Q", title="learning rate")
    # The rate of an update holds from the previous update to this one.
    tooltip = alt.Tooltip("rate:Q", format=".4g")
    return _curves(rows, y, tooltip, runs=runs, interpolate="step-before")


def noise_scale(runs: Sequence[RunSource]) -> Spec:
    """Gradient noise scale over epochs, for runs that measured it."""
    measured = [run for run in runs if run.measures_noise_scale]
    rows = _logged(measured, "samples", lambda m: m.noise_scale)
    y = alt.Y("samples:Q", title="noise scale (samples)", scale=alt.Scale(type="log"))
    return _curves(rows, y, alt.Tooltip("samples:Q", format=",.0f"))


def sharpness(runs: Sequence[RunSource]) -> Spec:
    """Sharpness over epochs, and the limit up to which the optimizer is stable, for runs that
    measured it; for AdamW also preconditioned. Only values above 0, as the axis is logarithmic."""
    rows: list[Row] = []
    for run in runs:
        for m in run.record.sharpness:
            for suffix, value in (
                ("", m.sharpness),
                (": limit", m.stability_threshold),
                (": preconditioned", m.preconditioned_sharpness),
                (": its limit", m.preconditioned_threshold),
            ):
                if value is not None and value > 0:
                    rows.append(
                        {
                            "run": run.family + suffix,
                            "label": run.label + suffix,
                            "epoch": m.epoch,
                            "sharpness": value,
                        }
                    )
    y = alt.Y("sharpness:Q", title="sharpness", scale=alt.Scale(type="log"))
    return _curves(rows, y, alt.Tooltip("sharpness:Q", format=".4g"), has_points=True)


def expert_load(runs: Sequence[RunSource]) -> Spec:
    """Load of the fullest expert over the mean, for runs that have experts: over windows of
    assignments if these were measured, else for each update."""
    rows: list[Row] = []
    for run in (run for run in runs if run.has_experts):
        windows = _logged([run], "load", lambda m: m.expert_load_of_window)
        windows = [row for row in windows if row["load"] is not None]
        rows += windows or _logged([run], "load", lambda m: m.expert_load)
    y = alt.Y("load:Q", title="fullest expert over the mean", scale=alt.Scale(zero=False))
    return _curves(rows, y, alt.Tooltip("load:Q", format=".3f"))


def input_wait(runs: Sequence[RunSource]) -> Spec:
    """Share of the time that devices waited for input, for runs that measured it."""

    def share(m: TrainMeasurement) -> float | None:
        waited = m.data_wait_seconds
        return None if waited is None or not m.step_seconds > 0 else waited / m.step_seconds

    rows = [row for row in _logged(runs, "share", share) if row["share"] is not None]
    y = alt.Y("share:Q", title="time without a batch", axis=alt.Axis(format=".0%"))
    return _curves(rows, y, alt.Tooltip("share:Q", format=".1%"))


def _logged(
    runs: Sequence[RunSource], name: str, value: Callable[[TrainMeasurement], float | None]
) -> list[Row]:
    """A point for each logged update of the runs."""
    return [
        {"run": run.family, "label": run.label, "epoch": m.epoch, name: value(m)}
        for run in runs
        for m in run.record.training
    ]


def wall_time(runs: Sequence[RunSource]) -> Spec:
    """Where the wall time of each run went, a bar for each."""
    rows: list[Row] = [
        {
            "run": run.label,
            "part": name,
            "order": order,
            "share": seconds / run.time.seconds,
            "seconds": seconds,
        }
        for run in runs
        if run.time is not None and run.time.seconds
        for order, (name, seconds) in enumerate(run.time.parts)
    ]
    names = list(dict.fromkeys(str(row["part"]) for row in rows))
    # Shares add up to 1 except for rounding, which would extend a nice axis to 110 %.
    whole = alt.Scale(domain=[0, 1], clamp=True)
    axis = alt.Axis(format=".0%")
    x = alt.X("share:Q", title="share of the wall time", stack="zero", axis=axis, scale=whole)
    figures = [
        alt.Tooltip("seconds:Q", format=",.4g"),
        alt.Tooltip("share:Q", format=".1%"),
    ]
    return _stacked(rows, alt.Y("run:N", title=None, sort=None), x, colored("part", names), figures)


def throughput(studies: Sequence[ScalingPrediction]) -> Spec:
    """Samples per second against devices, and a straight line from the smallest count."""
    rows: list[Row] = []
    for study in studies:
        first = study.predictions[0]
        for each in study.predictions:
            ideal = (first.samples_per_second or 0) * each.device_count / first.device_count
            point: Row = {"prediction": study.title, "devices": each.device_count}
            rows.append({**point, "kind": "predicted", "rate": each.samples_per_second})
            rows.append({**point, "kind": "ideal", "rate": ideal})
    rate = alt.Scale(type="log")
    y = alt.Y("rate:Q", title="samples per second", scale=rate, axis=alt.Axis(format="~s"))
    figures = ["kind:N", "devices:Q", alt.Tooltip("rate:Q", title="samples/s", format=",.0f")]
    kinds = alt.Scale(domain=["predicted", "ideal"], range=[[1, 0], [5, 5]])
    dashes = alt.StrokeDash("kind:N", legend=None, scale=kinds)
    return specified(_over_devices(rows, studies, y, figures).encode(strokeDash=dashes))


def efficiency(studies: Sequence[ScalingPrediction]) -> Spec:
    """Chart of scaling efficiency over devices."""
    rows: list[Row] = [
        {"prediction": study.title, "devices": each.device_count, "efficiency": kept}
        for study in studies
        for each, kept in zip(study.predictions, study.efficiencies, strict=True)
    ]
    percent, from_0 = alt.Axis(format=".0%"), alt.Scale(domainMin=0)
    y = alt.Y("efficiency:Q", title="scaling efficiency", axis=percent, scale=from_0)
    figures = ["devices:Q", alt.Tooltip("efficiency:Q", format=".1%")]
    return specified(_over_devices(rows, studies, y, figures))


def _over_devices(
    rows: list[Row], studies: Sequence[ScalingPrediction], y: alt.Y, figures: list[Any]
) -> alt.Chart:
    """A line for each study in `rows` (prediction, devices) over device counts."""
    color = colored("prediction", [study.title for study in studies], columns=1)
    chart = alt.Chart(alt.Data(values=rows)).mark_line(point=True)
    tooltip = ["prediction:N", *figures]
    return chart.encode(x=device_axis(), y=y, color=color, tooltip=tooltip)


def time_split(study: ScalingPrediction) -> Spec:
    """Chart of the parts of one step time, a stacked bar for each device count."""
    names = waterfall_terms(study.predictions)
    rows: list[Row] = [
        {
            "devices": str(each.device_count),
            "part": name,
            "order": names.index(name),
            "milliseconds": seconds * _MS,
            "share": seconds / math.fsum(term for _, term in each.waterfall if term is not None),
        }
        for each in study.predictions
        for name, seconds in each.waterfall
        if seconds is not None
    ]
    ticks = _few_ticks()
    x = alt.X("milliseconds:Q", title="milliseconds per step", stack="zero", axis=ticks)
    figures = [
        alt.Tooltip("milliseconds:Q", format=".4g"),
        alt.Tooltip("share:Q", title="share of the step", format=".1%"),
    ]
    color = colored("part", names, colors=part_colors(names))
    return _stacked(rows, alt.Y("devices:N", title="devices", sort=None), x, color, figures)


def _stacked(
    rows: list[Row], y: alt.Y, x: alt.X, color: alt.Color, figures: list[alt.Tooltip]
) -> Spec:
    """A bar for each value of `y`, stacked from `rows` (part, order) along `x`."""
    field = str(y.shorthand)  # type: ignore[union-attr]
    bars = len({row[field.partition(":")[0]] for row in rows})
    chart = alt.Chart(alt.Data(values=rows)).mark_bar()
    tooltip = [field, "part:N", *figures]
    chart = chart.encode(y=y, x=x, color=color, order="order:Q", tooltip=tooltip)
    return specified(chart, height=_bar_height(bars))


def memory(study: ScalingPrediction) -> Spec:
    """Chart of the peak memory of a device and its capacity."""
    rows: list[Row] = [
        {
            "devices": str(each.device_count),
            "used": each.peak_memory_bytes / 2**30,
            "verdict": "fits" if each.fits else "does not fit",
        }
        for each in study.predictions
    ]
    y = alt.Y("devices:N", title="devices", sort=None)
    bars = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar()
        .encode(
            y=y,
            x=alt.X("used:Q", title="peak memory of a device (GiB)", axis=_few_ticks()),
            color=colored("verdict", ["fits", "does not fit"], colors=[PALETTE[0], PALETTE[3]]),
            tooltip=[
                "devices:N",
                alt.Tooltip("used:Q", title="GiB used", format=".2f"),
                "verdict:N",
            ],
        )
    )
    has = study.predictions[0].memory_bytes / 2**30
    limit = (
        alt.Chart(alt.Data(values=[{"has": has}]))
        .mark_rule(strokeDash=[5, 5], strokeWidth=2, color=PALETTE[3])
        .encode(x="has:Q", tooltip=[alt.Tooltip("has:Q", title="GiB on a device", format=".2f")])
    )
    return specified(bars + limit, height=_bar_height(len(study.predictions)))


def _curves(
    rows: list[Row],
    y: alt.Y,
    tooltip: alt.Tooltip,
    *,
    has_points: bool = False,
    interpolate: Literal["linear", "step-before"] = "linear",
    runs: Sequence[RunSource] = (),
    lost: Sequence[Row] = (),
    lost_at: int = 0,
) -> Spec:
    """Line chart over epochs, a colour for each family of runs; a click in the legend picks one.

    Curves that coincide with an earlier one are dashed, so that both are visible. Families get
    their colours in the order of `runs`, if given, so that charts of the same runs agree. `lost`
    are crosses, `lost_at` pixels below the top.
    """
    picked = alt.selection_point(fields=["run"], bind="legend")
    drawn = (str(row["run"]) for row in [*rows, *lost])
    families = list(dict.fromkeys([*(run.family for run in runs), *drawn]))
    value = str(y.shorthand).partition(":")[0]  # type: ignore[union-attr]
    covered = _covered(rows, value)
    rows = [{**row, "covers": covered[str(row["label"])] % len(DASHES)} for row in rows]
    is_long = any(float(row["epoch"] or 0) >= 2 for row in rows)
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_line(point=has_points, strokeWidth=1.8, clip=True, interpolate=interpolate)
        .encode(
            x=alt.X(
                "epoch:Q",
                title="epoch",
                scale=alt.Scale(domainMin=0),
                axis=alt.Axis(tickMinStep=1) if is_long else alt.Axis(),
            ),
            y=y,
            color=colored("run", families, columns=_legend_columns(families)),
            detail="label:N",
            strokeDash=alt.StrokeDash(
                "covers:N",
                legend=None,
                scale=alt.Scale(domain=list(range(len(DASHES))), range=DASHES),
            ),
            opacity=alt.condition(picked, alt.value(1), alt.value(0.1)),
            tooltip=[
                alt.Tooltip("label:N", title="run"),
                alt.Tooltip("epoch:Q", format=".2f"),
                tooltip,
            ],
        )
        .add_params(picked)
    )
    if not lost:
        return specified(zoomable(chart))
    crosses = (
        alt.Chart(alt.Data(values=list(lost)))
        .mark_point(shape="cross", angle=45, filled=True, size=80, opacity=1)
        .encode(
            x=alt.X("epoch:Q"),
            y=alt.value(lost_at),
            color=alt.Color("run:N", scale=alt.Scale(domain=families, range=PALETTE)),
            tooltip=[
                alt.Tooltip("label:N", title="diverged"),
                alt.Tooltip("epoch:Q", format=".2f"),
            ],
        )
    )
    return specified(alt.layer(zoomable(chart), crosses))


def _legend_columns(names: Sequence[str]) -> int:
    """Number of legend columns that fit the page width, at most 4."""
    return max(1, min(4, _LEGEND_WIDTH // (max(map(len, names), default=1) + 4)))


def device_axis(field: str = "devices", counts: Sequence[int] | None = None) -> alt.X:
    """X axis of device counts, on a base-2 logarithm; ticks are at `counts` if they are given."""
    axis = alt.Axis() if counts is None else alt.Axis(values=[*counts])
    scale = alt.Scale(type="log", base=2, nice=False)
    return alt.X(f"{field}:Q", title="devices", scale=scale, axis=axis)


def part_colors(parts: Sequence[str]) -> list[str]:
    """The colour of each part of a step; communication is red, purple or pink."""
    others = [part for part in parts if part not in _PART_COLORS]
    return [
        _PART_COLORS[part]
        if part in _PART_COLORS
        else _OTHER_COMMUNICATION[others.index(part) % len(_OTHER_COMMUNICATION)]
        for part in parts
    ]


def _covered(rows: Sequence[Row], value: str) -> dict[str, int]:
    """Number of earlier runs with a visually equal curve, by label of each run."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        point = (float(row["epoch"] or 0), float(row[value] or 0))
        curves.setdefault(str(row["label"]), []).append(point)
    before: list[list[tuple[float, float]]] = []
    covered = {}
    for label, curve in curves.items():
        covered[label] = sum(_are_alike(curve, other) for other in before)
        before.append(curve)
    return covered


def _are_alike(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> bool:
    return len(one) == len(other) and all(
        math.isclose(a, b, rel_tol=_SAME)
        for points in zip(one, other, strict=True)
        for a, b in zip(*points, strict=True)
    )


def _few_ticks() -> alt.Axis:
    return alt.Axis(tickCount=8, format="~r")


def _bar_height(bars: int) -> int:
    return 40 + 34 * bars
