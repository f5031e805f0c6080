"""The head of the report: verdict, time, cost, band and bottleneck of runs and predictions.

It answers a reader's first questions, in one line and four cards for each. Lays out what runs and
predictions say; the tables below have the rest.
"""

from collections.abc import Sequence
from html import escape

from scalejax.core.units import (
    UNKNOWN,
    counted,
    format_bytes,
    format_count,
    format_fraction,
    format_seconds,
)
from scalejax.planning.bill import Rates, bill
from scalejax.report.html.page import Page
from scalejax.report.sources import RunSource, Sources
from scalejax.simulator.predict import RUN_CONDITIONS, Prediction, ScalingPrediction
from scalejax.training.input_stalls import WORTH_SAYING

_MOST_STUDIES = 3
"""Most predictions over device counts that have a head; each has a section."""

Card = tuple[str, str, str]
"""Heading, number, and a line beneath."""


def add_head(page: Page, sources: Sources) -> None:
    """Append a verdict and cards for the runs, and for the first predictions."""
    if sources.curves:
        verdict, cards = _of_runs(sources.curves)
        _add(page, verdict, cards)
    for study in sources.studies[:_MOST_STUDIES]:
        verdict, cards = _of_study(study)
        _add(page, verdict, cards)


def _add(page: Page, verdict: str, cards: Sequence[Card]) -> None:
    body = "".join(
        f'<div class="card"><span class="soft">{escape(what)}</span><b>{escape(figure)}</b>'
        f'<span class="soft">{escape(more)}</span></div>'
        for what, figure, more in cards
    )
    page.add(f'<p class="verdict">{escape(verdict)}</p><div class="cards">{body}</div>')


def _of_runs(runs: Sequence[RunSource]) -> tuple[str, list[Card]]:
    """Verdict and cards of the best run by test accuracy, else the first that did not diverge."""
    whole = [run for run in runs if not run.has_diverged]
    diverged = len(runs) - len(whole)
    best = max(whole or runs, key=lambda run: _accuracy(run) or -1.0)
    accuracy = None if best.has_diverged else _accuracy(best)
    reached = "" if accuracy is None else f" {format_fraction(accuracy)} of the test examples"
    of = f", the best of {counted(len(runs), 'run')}" if len(runs) > 1 else ""
    verdict = f"{best.label}{of}: {reached.strip() or best.record.status or 'not finished'}."
    if diverged:
        verdict += f" {counted(diverged, 'run')} diverged."
    prediction, measured = best.prediction, best.step_seconds
    wall = None if best.time is None else best.time.seconds
    count = None if prediction is None else prediction.device_count
    held = None if wall is None or count is None else wall * count
    predicted = None if prediction is None else prediction.step_seconds
    return verdict, [
        ("Time", format_seconds(wall), f"of the run; a step took {format_seconds(measured)}"),
        (
            "Cost",
            UNKNOWN if held is None else format_seconds(held),
            "of devices" if count is None else f"of devices, on {counted(count, 'device')}",
        ),
        ("A step was predicted at", format_seconds(predicted), _against(prediction, measured)),
        ("What limits it", *_limit(prediction, best)),
    ]


def _accuracy(run: RunSource) -> float | None:
    tested = run.record.tested
    return None if tested is None else tested.accuracy


def _against(prediction: Prediction | None, measured: float | None) -> str:
    """How far off a prediction was, and whether its band held."""
    if prediction is None or measured is None:
        return "nothing to compare"
    error = (prediction.step_seconds - measured) / measured
    words = f"{abs(error):.0%} {'below' if error < 0 else 'above'} the measured"
    low, high = prediction.p10_step_seconds, prediction.p90_step_seconds
    if low is None or high is None:
        return f"{words}; no band"
    place = "in" if low <= measured <= high else "outside"
    band = f"{format_seconds(low)} to {format_seconds(high)}"
    return f"{words}, which is {place} p10 to p90, {band}"


def _limit(prediction: Prediction | None, run: RunSource | None = None) -> tuple[str, str]:
    """The largest term of a step and its share; also input, if devices were seen to wait for it."""
    waited = None if run is None else run.wait_share
    seen = "" if waited is None or waited < WORTH_SAYING else f"; waited {waited:.0%} for input"
    if prediction is None:
        return (UNKNOWN, seen.removeprefix("; ") or "no prediction")
    terms = [
        (name, seconds)
        for name, seconds in prediction.waterfall
        if seconds and name not in RUN_CONDITIONS
    ]
    if not terms:
        return UNKNOWN, seen.removeprefix("; ")
    (name, seconds), *rest = sorted(terms, key=lambda term: -term[1])
    words = f"{seconds / prediction.step_seconds:.0%} of the predicted step"
    if rest:
        words += f"; then {rest[0][0]}, {rest[0][1] / prediction.step_seconds:.0%}"
    return name, words + seen


def _of_study(study: ScalingPrediction) -> tuple[str, list[Card]]:
    """Verdict and cards for the most devices on which it fits, or else the most."""
    fitting = [each for each in study.predictions if each.fits]
    best = (fitting or study.predictions)[-1]
    run = best.run_seconds if best.run_seconds is not None else best.epoch_seconds
    what = "the run" if best.run_seconds is not None else "an epoch"
    fits = "it fits" if best.fits else "it does not fit"
    on = counted(f"{best.device_count:,}", "device")
    taken = (
        f"a step takes {format_seconds(best.step_seconds)}"
        if run is None
        else f"{what} takes {format_seconds(run)}"
    )
    low, high = best.p10_step_seconds, best.p90_step_seconds
    band = "p10 and p90 are not known"
    if low is not None and high is not None:
        times = 1.0 if run is None else run / best.step_seconds
        band = f"p10 to p90: {format_seconds(low * times)} to {format_seconds(high * times)}"
    return f"{study.title}: on {on} {taken}, and {fits}.", [
        (
            "Time" if run is not None else "Time of a step",
            format_seconds(run or best.step_seconds),
            band,
        ),
        ("Cost", *_cost(best, run)),
        (
            "Does it fit?",
            "yes" if best.fits else "no",
            f"{format_bytes(best.peak_memory_bytes)} of {format_bytes(best.memory_bytes)}",
        ),
        ("What limits it", *_limit(best)),
    ]


def _cost(best: Prediction, run_seconds: float | None) -> tuple[str, str]:
    """Dollars at the price of the cluster in the prediction, or device-hours."""
    if run_seconds is None:
        return UNKNOWN, "the length of the run is not known"
    price = best.price
    rates = Rates(price_per_device_hour=None if price is None else price.dollars_per_device_hour)
    found = bill(run_seconds, best.device_count, rates)
    hours = f"{format_count(found.device_hours)} device-hours"
    if price is None or found.price is None:
        return hours, f"no list price of {best.cluster} is known"
    dollars = f"{found.price:,.0f}" if found.price >= 100 else f"{found.price:.3g}"
    return f"${dollars}", f"{hours} at ${price.dollars_per_device_hour:g}, {price.in_words}"
