"""A run whose batch grows, on a terminal: one table of its batches on each number of devices.

Knows how to word and align figures, and computes none.
"""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from scalejax.predict import merged_notes
from scalejax.ramp_prediction import PhasePrediction, RampPrediction
from scalejax.tables import figures
from scalejax.units import UNKNOWN, format_bytes, format_fraction, format_seconds


def ramp(prediction: RampPrediction) -> Iterator[RenderableType]:
    """The batches of the run, its updates and time, for every number of devices."""
    first = prediction.phases[0].study
    yield Text.assemble(
        (prediction.title, "bold"), f"\nPredicted, {first.scaling} scaling, the batch grows."
    )
    yield _figures(prediction)
    every = [each for phase in prediction.phases for each in phase.study.predictions]
    if any(each.p10_step_seconds or each.goodput for each in every):
        yield _ranges(prediction)
    yield (
        "The time is that of the epochs beside it: updates alone. A device has "
        f"{format_bytes(first.predictions[0].memory_bytes)} of memory."
    )
    if found := _notes(prediction):
        yield Text("\n".join(f"Note: {note}." for note in found))


def _notes(prediction: RampPrediction) -> list[str]:
    """What must be known of the predictions, with its first epoch where it is not of all."""
    of_phases = [merged_notes(phase.study.predictions) for phase in prediction.phases]
    shared = [note for note in of_phases[0] if all(note in notes for notes in of_phases)]
    own = [
        f"from epoch {phase.first_epoch}: {note}"
        for phase, notes in zip(prediction.phases, of_phases, strict=True)
        for note in notes
        if note not in shared
    ]
    # Of the utilisation, which is not in the table, nothing need be known.
    return [note for note in (*own, *shared) if "MFU " not in note]


def _ranges(prediction: RampPrediction) -> Table:
    """How far off the step time of each batch may be, on each number of devices."""
    table = figures("devices", "epochs", "step p10", "p50", "p90", "goodput")
    for position, count in enumerate(prediction.device_counts):
        for phase in prediction.phases:
            each = phase.study.predictions[position]
            table.add_row(
                str(count),
                _epochs(phase),
                format_seconds(each.p10_step_seconds),
                format_seconds(each.step_seconds),
                format_seconds(each.p90_step_seconds),
                format_fraction(each.goodput),
            )
    return table


def _epochs(phase: PhasePrediction) -> str:
    return f"{phase.first_epoch} to {phase.first_epoch + phase.epochs}"


def _figures(prediction: RampPrediction) -> Table:
    """A row for each batch, then the whole run, on each number of devices."""
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
