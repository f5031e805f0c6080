"""Terminal tables of scaling studies and batch-size ramps, in 80 columns.

Formats numbers and computes only shares. Functions that yield parts yield them in order.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from scalejax.core.units import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_fraction,
    format_seconds,
    format_seconds_briefly,
)
from scalejax.report.terminal.tables import figures
from scalejax.simulator.predict import Prediction, ScalingPrediction, merged_notes
from scalejax.simulator.ramp import PhasePrediction, RampPrediction

_SCREEN_WIDTH, _SHARE_WIDTH = 80, len("100.0 %")
_LONGEST_NAME = 16
_BROKEN_HEADINGS = {
    "samples/s": "samples\n/s",
    "tokens/s": "tokens\n/s",
    "efficiency": "effi-\nciency",
}


def scaling(prediction: ScalingPrediction) -> Iterator[RenderableType]:
    """The numbers for each device count, then the breakdown of the step time."""
    first, kept = prediction.predictions[0], kept_samples(prediction)
    yield Text.assemble(
        (prediction.title, "bold"), f"\nPredicted, {prediction.scaling} scaling: {kept}."
    )
    yield figures_of(prediction)
    if any(each.p10_step_seconds or each.goodput for each in prediction.predictions):
        yield ranges(prediction.predictions)
    yield time_split(prediction.predictions)
    yield (
        "Efficiency is relative to the fewest devices. A device has "
        f"{format_bytes(first.memory_bytes)} of memory."
    )
    yield notes(prediction.predictions)


def beside(predictions: Sequence[ScalingPrediction | RampPrediction]) -> Iterator[RenderableType]:
    """Several clusters side by side, and how much faster each is than the first.

    Args:
        predictions: those of one run on each cluster, on the same numbers of devices.
    """
    table = figures("cluster", "devices", "step", "run", "MFU", "memory", "fits", "speed")
    seconds: dict[int, float | None] = {}
    for each in predictions:
        phases = each.phases if isinstance(each, RampPrediction) else ()
        last = phases[-1].study if phases else each
        for one in last.predictions if isinstance(last, ScalingPrediction) else ():
            count = one.device_count
            run = each.run_seconds(count) if isinstance(each, RampPrediction) else one.run_seconds
            step = run if phases else one.step_seconds
            first = seconds.setdefault(count, step)
            table.add_row(
                one.cluster[:_LONGEST_NAME],
                str(count),
                format_seconds(one.step_seconds),
                format_seconds_briefly(run),
                format_fraction(one.mfu),
                format_bytes(one.peak_memory_bytes),
                "yes" if one.fits else "NO",
                "n/a" if not first or not step else f"{first / step:.2f}x",
            )
    yield table
    yield "speed: relative to the first cluster with as many devices."


def kept_samples(prediction: ScalingPrediction) -> str:
    """What stays as devices are added, in words."""
    first = prediction.predictions[0]
    if prediction.scaling == "weak" and first.global_batch and first.per_device_batch:
        sharing = first.device_count * first.per_device_batch // first.global_batch
        where = "per device" if sharing == 1 else f"on every {sharing} devices"
        return f"{first.per_device_batch} samples {where}"
    return f"{first.global_batch} samples per step"


def figures_of(prediction: ScalingPrediction) -> Table:
    """Table with a row for each device count, on one line if possible.

    If the table is wider than a screen, times share one unit; if it is still too wide, long
    headings wrap to two lines.
    """
    for formatted, headings in (
        (format_seconds, {}),
        (format_seconds_briefly, {}),
        (format_seconds_briefly, _BROKEN_HEADINGS),
    ):
        columns = _columns(prediction, formatted)
        table = figures(*(headings.get(name, name) for name in columns))
        for row in zip(*columns.values(), strict=True):
            table.add_row(*row)
        if Console(width=10 * _SCREEN_WIDTH).measure(table).maximum <= _SCREEN_WIDTH:
            break
    return table


def _columns(
    prediction: ScalingPrediction, formatted: Callable[[float | None], str]
) -> dict[str, list[str]]:
    """Cells by heading; models without tokens have no column of tokens."""
    every = prediction.predictions
    columns = {
        "devices": [str(each.device_count) for each in every],
        "step": [formatted(each.step_seconds) for each in every],
        "epoch": [formatted(each.epoch_seconds) for each in every],
        "run": [formatted(each.run_seconds) for each in every],
        "samples/s": [format_count(each.samples_per_second) for each in every],
        "tokens/s": [format_count(each.tokens_per_second) for each in every],
        "MFU": [format_fraction(each.mfu) for each in every],
        "efficiency": [format_fraction(share) for share in prediction.efficiencies],
        "memory": [format_bytes(each.peak_memory_bytes) for each in every],
        "fits": ["yes" if each.fits else "NO" for each in every],
    }
    if all(each.tokens_per_second is None for each in every):
        del columns["tokens/s"]
    return columns


def ranges(predictions: Sequence[Prediction]) -> Table:
    """Table of the p10 to p90 band of each step time, and of goodput."""
    table = figures("devices", "step p10", "p50", "p90", "goodput")
    for each in predictions:
        table.add_row(str(each.device_count), *_band(each))
    return table


def _band(each: Prediction) -> list[str]:
    seconds = (each.p10_step_seconds, each.step_seconds, each.p90_step_seconds)
    return [*map(format_seconds, seconds), format_fraction(each.goodput)]


def time_split(predictions: Sequence[Prediction]) -> Table:
    """Table of the share of each term in the step time, with checkpoints and failures.

    Unknown terms are left out. Terms become rows if there are too many for columns.
    """
    names = waterfall_terms(predictions)
    counts = [str(each.device_count) for each in predictions]
    shares = [_shares(each, names) for each in predictions]
    if sum(max(len(name), _SHARE_WIDTH) + 1 for name in ("devices", *names)) <= _SCREEN_WIDTH:
        table = figures("devices", *names)
        for count, row in zip(counts, shares, strict=True):
            table.add_row(count, *row)
        return table
    table = figures("devices", *counts)
    for name, row in zip(names, zip(*shares, strict=True), strict=True):
        table.add_row(name, *row)
    return table


def _shares(prediction: Prediction, names: Sequence[str]) -> list[str]:
    seconds = dict(prediction.waterfall)
    whole = math.fsum(term for term in seconds.values() if term is not None)
    # A missing term took no time; an unknown one is present as None.
    return [_share(seconds.get(name, 0.0), whole) for name in names]


def _share(seconds: float | None, of: float) -> str:
    return format_fraction(None if seconds is None else seconds / of)


def waterfall_terms(predictions: Sequence[Prediction]) -> list[str]:
    """Names of the terms that are known for at least one prediction, in order."""
    names = [
        name for each in predictions for name, seconds in each.waterfall if seconds is not None
    ]
    return list(dict.fromkeys(names))


def notes(predictions: Sequence[Prediction]) -> Text:
    """Notes on the predictions, each once."""
    return Text("\n".join(f"Note: {note}." for note in merged_notes(predictions)))


# Runs with a batch-size ramp: a table of their batches on each device count.


def ramp(prediction: RampPrediction) -> Iterator[RenderableType]:
    """Batches of the run, its updates and times, for each device count."""
    first = prediction.phases[0].study
    yield Text.assemble(
        (prediction.title, "bold"), f"\nPredicted, {first.scaling} scaling, the batch grows."
    )
    yield _ramp_figures(prediction)
    every = [each for phase in prediction.phases for each in phase.study.predictions]
    if any(each.p10_step_seconds or each.goodput for each in every):
        yield _ranges(prediction)
    yield (
        "The time is for the updates of the epochs shown, nothing else. A device has "
        f"{format_bytes(first.predictions[0].memory_bytes)} of memory."
    )
    if found := _notes(prediction):
        yield Text("\n".join(f"Note: {note}." for note in found))


def _notes(prediction: RampPrediction) -> list[str]:
    """Notes on the predictions; those on one phase are prefixed with its first epoch."""
    of_phases = [merged_notes(phase.study.predictions) for phase in prediction.phases]
    shared = [note for note in of_phases[0] if all(note in notes for notes in of_phases)]
    own = [
        f"from epoch {phase.first_epoch}: {note}"
        for phase, notes in zip(prediction.phases, of_phases, strict=True)
        for note in notes
        if note not in shared
    ]
    # The table does not show MFU, so notes on it are dropped.
    return [note for note in (*own, *shared) if "MFU " not in note]


def _ranges(prediction: RampPrediction) -> Table:
    """Table of the p10 to p90 band of the step time of each batch, on each device count."""
    table = figures("devices", "epochs", "step p10", "p50", "p90", "goodput")
    for position, count in enumerate(prediction.device_counts):
        for phase in prediction.phases:
            each = phase.study.predictions[position]
            table.add_row(str(count), _epochs(phase), *_band(each))
    return table


def _epochs(phase: PhasePrediction) -> str:
    return f"{phase.first_epoch} to {phase.first_epoch + phase.epochs}"


def _ramp_figures(prediction: RampPrediction) -> Table:
    """Table with a row for each batch, then for the whole run, on each device count."""
    table = figures("devices", "epochs", "batch", "updates", "step", "time", "memory", "fits")
    for position, count in enumerate(prediction.device_counts):
        for phase in prediction.phases:
            each = phase.study.predictions[position]
            steps = each.steps_per_epoch
            table.add_row(
                str(count),
                _epochs(phase),
                UNKNOWN if each.global_batch is None else f"{each.global_batch:,}",
                UNKNOWN if steps is None else f"{steps * phase.epochs:,}",
                format_seconds(each.step_seconds),
                format_seconds(each.run_seconds),
                format_bytes(each.peak_memory_bytes),
                "yes" if each.fits else "NO",
            )
        steps = prediction.total_steps(count)
        table.add_row(
            str(count),
            "all",
            "",
            UNKNOWN if steps is None else f"{steps:,}",
            "",
            format_seconds(prediction.run_seconds(count)),
            "",
            "yes" if prediction.fits(count) else "NO",
        )
    return table
