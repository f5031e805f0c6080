"""Report section on emulated runs: accuracy over virtual time, and staleness."""

from collections.abc import Sequence

import altair as alt

from scalejax.core.units import UNKNOWN, format_bytes, format_fraction, format_seconds, unit_of_axis
from scalejax.emulation.record import Emulation, in_words
from scalejax.report.html.charts import Row, Spec, lines
from scalejax.report.html.page import Page
from scalejax.report.sources import RunSource


def add_emulations(page: Page, runs: Sequence[RunSource]) -> None:
    """Append a table and charts of the emulated runs."""
    page.add('<h3 id="emulations">Emulated runs: virtual time</h3>')
    page.add(
        "<p>Gradients are real, from the real model and data; which worker computes and sends "
        "what, and when, was simulated. All times of these runs are virtual. Staleness is the "
        "number of updates between reading the parameters and applying their gradient.</p>"
    )
    found = [(run, run.emulation) for run in runs if run.emulation is not None]
    page.add_table(
        ["run", "algorithm", "virtual time", "device time", "staleness", "sent", "test accuracy"],
        [_row(run, emulation) for run, emulation in found],
    )
    page.add_chart(
        "Accuracy over virtual time",
        "Wall-clock view: which algorithm reaches an accuracy first.",
        _over_seconds(found, per_device=False),
    )
    page.add_chart(
        "Accuracy over device time",
        "Cost view: virtual time, times the workers.",
        _over_seconds(found, per_device=True),
    )
    stale = [(run, emulation) for run, emulation in found if emulation.staleness]
    if stale:
        page.add_chart(
            "Staleness",
            "Share of gradients by the number of updates made since their worker read the "
            "parameters.",
            staleness(stale),
        )


def _row(run: RunSource, emulation: Emulation) -> list[str]:
    mean = emulation.mean_staleness
    tested = None if run.has_diverged else run.record.tested
    return [
        run.label,
        in_words(emulation.config),
        format_seconds(emulation.virtual_seconds),
        format_seconds(emulation.device_seconds),
        UNKNOWN if mean is None else f"{mean:.3g}",
        format_bytes(emulation.sent_bytes) if emulation.sent_bytes else UNKNOWN,
        format_fraction(tested and tested.accuracy),
    ]


def _over_seconds(found: Sequence[tuple[RunSource, Emulation]], *, per_device: bool) -> Spec:
    factors = [emulation.config.workers if per_device else 1 for _, emulation in found]
    longest = max(
        emulation.virtual_seconds * factor
        for (_, emulation), factor in zip(found, factors, strict=True)
    )
    unit, seconds = unit_of_axis(longest)
    rows: list[Row] = [
        {
            "label": run.label,
            "x": m.elapsed_seconds * factor / seconds,
            "y": m.accuracy,
        }
        for (run, _), factor in zip(found, factors, strict=True)
        if not run.has_diverged
        for m in run.record.monitored
    ]
    title = f"device time, {unit}" if per_device else f"virtual time, {unit}"
    return lines(rows, alt.X("x:Q", title=title), "accuracy", has_points=True)


def staleness(found: Sequence[tuple[RunSource, Emulation]]) -> Spec:
    """Chart of the staleness distribution of each run."""
    rows: list[Row] = []
    for run, emulation in found:
        total = sum(count for _, count in emulation.staleness)
        rows += [
            {"label": run.label, "x": age, "y": count / total} for age, count in emulation.staleness
        ]
    return lines(rows, alt.X("x:Q", title="updates"), "share of the gradients")
