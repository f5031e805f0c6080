"""Terminal tables of sweeps (plan and results) and of emulated runs, in 80 columns."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from scalejax.core.units import (
    UNKNOWN,
    counted,
    format_bytes,
    format_count,
    format_fraction,
    format_seconds,
)
from scalejax.emulation.record import Emulation
from scalejax.emulation.record import in_words as emulation_in_words
from scalejax.report.terminal.tables import facts, figures
from scalejax.sweep.coordinates import FLAT, LOGITS, CoordinateCheck
from scalejax.sweep.intervals import Interval, spread_in_words, t_interval
from scalejax.sweep.optuna import Trial
from scalejax.sweep.plan import SweepPlan, in_words, short_names, value_text
from scalejax.sweep.results import Arm, RunRow, arms, best_arm
from scalejax.sweep.study import CellResult, Study
from scalejax.training.record import RunRecord

_MOST_ROWS = 40
_MOST_WIDTH = 32
"""Most of the 80 columns that are kept free for one field and its value."""


def plan(sweep: SweepPlan) -> Iterator[RenderableType]:
    """Table of the planned runs: their varied fields, batch and steps."""
    together = sum(len(job) for job in sweep.jobs if len(job) > 1)
    count = len(sweep.runs)
    programs = len(sweep.jobs)
    words = f"{count} run{'s'[: count > 1]} in {programs} program{'s'[: programs > 1]}"
    if together:
        words += f", {together} of them with others in one"
    if sweep.repeated:
        words += f"; {sweep.repeated} combinations repeat another run, and are left out"
    yield Text(f"{words}.")
    names = [name for name in sweep.varied_names if name != "batch.global_batch"]
    table = figures("run", *short_names(names), "batch", "steps")
    for planned in sweep.runs[:_MOST_ROWS]:
        values = [value_text(planned.varied[name]) for name in names]
        batch = f"{planned.run.split.global_batch:,}"
        table.add_row(planned.name, *values, batch, f"{planned.run.total_steps:,}")
    yield table
    if count > _MOST_ROWS:
        yield f"... and {count - _MOST_ROWS} more"


def results(sweep: SweepPlan, rows: Sequence[RunRow]) -> Iterator[RenderableType]:
    """Results of each arm: mean over its seeds with its interval, and the difference from the first
    arm over the seeds that both have."""
    found = arms(rows)
    of_target = ("reached", "samples to it") if sweep.target else ()
    parts = ("validation accuracy", "test accuracy")[not sweep.has_validation :]
    beside = ("difference",) if len(found) > 1 else ()
    table = figures("", "mean of", *parts, *beside, "diverged", *of_target)
    for arm in found:
        table.add_row(*_arm_cells(arm, found, sweep))
    table.columns[0].min_width = _widest(in_words(arm.varied) for arm in found)
    yield table
    yield Text(_results_in_words(sweep, rows))


def _results_in_words(sweep: SweepPlan, rows: Sequence[RunRow]) -> str:
    """Sentences on how the means are taken, which arm is the best, and on missing runs."""
    found = arms(rows)
    left = [row for row in rows if not row.is_finished]
    seconds = sum(row.seconds for row in rows)
    words = (
        f"Mean over seeds{_beside_means(max(len(arm.rows) for arm in found))}, with the weights "
    )
    words += "that runs end with. "
    if len(found) > 1:
        words += (
            f"Differences in {found[0].metric.replace('_', ' ')} are relative to the first row, "
        )
        words += "in percentage points, paired over the seeds that both have. "
    if (best := best_arm(found)) is not None and len(found) > 1:
        words += f"Best by validation accuracy: {in_words(best.varied)}. "
    elif not sweep.has_validation and len(found) > 1:
        words += "There are no validation data to choose by (data.validation_fraction), and none "
        words += "is called the best. "
    if diverged := sum(len(arm.diverged) for arm in found):
        runs = sum(len(arm.rows) for arm in found)
        words += f"{diverged} of {runs} runs diverged, and are in no mean. "
    if sweep.target:
        words += f"Target: {sweep.target.metric} {sweep.target.value:g}. "
    is_virtual = any(row.planned.run.config.emulation is not None for row in rows)
    words += f"{format_seconds(seconds)} of training{', in virtual time' if is_virtual else ''}."
    if left:
        words += f" {counted(len(left), 'run')} {'is' if len(left) == 1 else 'are'} not finished."
    return words


def _beside_means(seeds: int) -> str:
    spread = spread_in_words(seeds)
    return spread and f", with {spread}"


def trials(found: Sequence[Trial], best: Trial | None) -> Iterator[RenderableType]:
    """Table of the trials of a search: their fields and values, the best one marked."""
    table = figures("trial", "value", "", "")
    for trial in found:
        value = UNKNOWN if trial.value is None else f"{trial.value:.4f}"
        mark = "best" if trial is best else ""
        table.add_row(f"{trial.number:04d}", value, mark, in_words(trial.fields))
    table.columns[-1].min_width = _widest(in_words(trial.fields) for trial in found)
    yield table


def _widest(labels: Iterable[str]) -> int:
    """Width at which labels break only between fields, never within a number."""
    words = (word for label in labels for word in label.split())
    return min(_MOST_WIDTH, max(map(len, words), default=0))


def _arm_cells(arm: Arm, found: Sequence[Arm], sweep: SweepPlan) -> list[str]:
    """Table cells of an arm: its varied fields and its results over seeds."""
    apart = arm.difference(found[0], arm.metric)
    beside = "reference" if arm is found[0] else _points(apart)
    cells = [
        in_words(arm.varied) or "all",
        f"{len(arm.accuracies)} of {len(arm.rows)}",
        _spread(arm.accuracies),
        *([_spread(arm.test_accuracies)] if sweep.has_validation else ()),
        *([beside] if len(found) > 1 else ()),
        str(len(arm.diverged)),
    ]
    if sweep.target:
        samples = [row.samples_to_target for row in arm.rows if row.samples_to_target]
        mean = f"{sum(samples) / len(samples):,.0f}" if samples else UNKNOWN
        cells += [f"{len(samples)} of {len(arm.rows)}", mean]
    return cells


def _spread(values: Sequence[float]) -> str:
    """Mean and half the width of its interval, in per cent."""
    found = t_interval(values)
    return UNKNOWN if found is None else f"{found.in_words(100, 2)} %"


def _points(found: Interval | None) -> str:
    """A difference of shares and half the width of its interval, in percentage points."""
    return UNKNOWN if found is None else found.in_words(100, 2, "+")


# Studies of warmup.


def study(found: Study, results: Sequence[CellResult]) -> Iterator[RenderableType]:
    """Table of the warmup that validation data choose for each optimizer, rule and batch, with its
    test metric and the difference from that of the baseline."""
    validation, test = found.metrics
    table = figures(
        "optimizer", "scaling", "batch", "best warmup", test.replace("_", " "), found.to_baseline
    )
    by_place: dict[tuple[str, str, int], list[CellResult]] = {}
    for each in results:
        place = (each.cell.optimizer.name, each.cell.scaling, each.cell.batch)
        by_place.setdefault(place, []).append(each)
    is_accuracy = found.measure == "accuracy"
    for (optimizer, scaling, batch), cells in by_place.items():
        best = next((each for each in cells if each.is_chosen), None)
        if best is None:
            table.add_row(optimizer, scaling, f"{batch:,}", _no_best(cells), UNKNOWN, UNKNOWN)
            continue
        value, beside = best.over_seeds(test), best.difference(test)
        table.add_row(
            optimizer,
            scaling,
            f"{batch:,}",
            best.cell.warmup.text,
            _spread(list(best.arm.by_seed(test).values())) if is_accuracy else _loss(value),
            "reference"
            if best.baseline is None
            else "; ".join(
                [_points(beside) if is_accuracy else _loss(beside), *only_one_trains(best)]
            ),
        )
    yield table
    lost = sum(len(arm.diverged) for arm in {id(each.arm): each.arm for each in results}.values())
    words = (
        f"Best by {validation.replace('_', ' ')}, of warmups of which no run diverged. Mean over "
        f"seeds{_beside_means(found.seeds)}; differences are paired over seeds"
    )
    words += ", in percentage points." if is_accuracy else "."
    yield Text(f"{words} {counted(lost, 'run')} diverged.")


def _no_best(cells: Sequence[CellResult]) -> str:
    """Why no warmup is the best of an optimizer, rule and batch."""
    diverged = sum(len(each.arm.diverged) for each in cells)
    if not diverged:
        return "(not trained)"
    if diverged == sum(len(each.arm.rows) for each in cells):
        return "(all diverged)"
    return "(each lost runs)"


def only_one_trains(each: CellResult) -> list[str]:
    """With how many seeds only the cell, or only its reference, trains, in words."""
    sides = ((each.trained_only, "this"), (each.diverged_only, "the reference"))
    return [
        f"with {counted(len(seeds), 'seed')} only {who} trains" for seeds, who in sides if seeds
    ]


def _loss(found: Interval | None) -> str:
    """A loss and half the width of its interval."""
    return UNKNOWN if found is None else found.in_words()


# Emulated runs.


def emulation(found: Emulation, record: RunRecord) -> Iterator[RenderableType]:
    """Table of an emulated run: times, staleness, bytes sent and accuracy."""
    table = facts()
    where = f"of {found.cluster}" if found.cluster else "as given"
    table.add_row("gradient", format_seconds(found.gradient_seconds), f"of one worker, {where}")
    if found.exchange_seconds:
        table.add_row("communication", format_seconds(found.exchange_seconds), "exposed")
    table.add_row("virtual time", format_seconds(found.virtual_seconds), "of the whole run")
    table.add_row(
        "device time",
        format_seconds(found.device_seconds),
        "virtual time times the workers",
    )
    words = f"of {found.gradients:,} gradients"
    if not found.updates:
        words += ": too few for one"
    table.add_row("updates", format_count(found.updates), words)
    if found.mean_staleness is not None:
        most = found.staleness[-1][0]
        table.add_row(
            "staleness",
            f"{found.mean_staleness:.3g}",
            f"updates on average between read and write, {most} at most",
        )
    if found.dropped_gradients:
        table.add_row("dropped", format_count(found.dropped_gradients), "gradients came too late")
    if found.sent_bytes:
        table.add_row("sent", format_bytes(found.sent_bytes), "between workers and servers")
    if found.worker_failures or found.server_failures:
        words = f"of workers, {found.server_failures} of servers"
        table.add_row("failures", str(found.worker_failures), words)
    if record.status == "diverged":
        table.add_row("accuracy", UNKNOWN, "it diverged")
    elif record.validations:
        last = record.validations[-1]
        table.add_row("validation accuracy", format_fraction(last.accuracy), "at the end")
    if record.tested is not None and record.status != "diverged":
        table.add_row("test accuracy", format_fraction(record.tested.accuracy), "at the end")
    yield Text(emulation_in_words(found.config), style="bold")
    yield table


_MAKES_FLAT = {
    "hidden": '\n"mup" and "completep" (model.parametrization.name) should be flat over widths.',
    "layers": '\n"completep" (model.parametrization.name) should be flat over depths, not "mup".',
}
"""What a network may lack if it is not flat, by the size that grows."""


def coordinates(found: CoordinateCheck) -> Iterator[RenderableType]:
    """Table of how each layer of a decoder grows with its size, and a verdict for each
    parametrization."""
    sizes = ", ".join(map(str, found.sizes))
    what = "width" if found.along == "hidden" else "depth"
    yield Text(
        f"Exponent of the {what} ({found.along} = {sizes}) in mean absolute activations, "
        f"{counted(found.steps, 'step')} at a rate of {found.learning_rate:g}."
    )
    table = figures("parametrization", "layer", "at start", "at end", "of change", "flat")
    for each in found.slopes:
        values = (each.start, each.end, each.change)
        numbers = (UNKNOWN if value is None else f"{value:+.2f}" for value in values)
        words = "yes" if each.is_flat else "no"
        table.add_row(each.parametrization, each.layer, *numbers, words)
    yield table
    verdicts = [
        f"{name}: {'flat' if is_flat else 'not flat'}." for name, is_flat in found.are_flat.items()
    ]
    yield Text(
        "\n".join(verdicts)
        + f"\nFlat: all three within {FLAT:g} of 0, of {LOGITS} the change."
        + ("" if all(found.are_flat.values()) else _MAKES_FLAT[found.along])
    )
