"""Results of a sweep: a row for each run and for each evaluation, in Parquet.

The rows are read from the records of the runs, so they are the same no matter how often the sweep
was killed and resumed; wall times are in a separate file.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Literal, get_args

from scalejax.config.grid import Fields
from scalejax.config.run import ResolvedRun
from scalejax.core.drawing import columns_of
from scalejax.core.serialization import JsonValue, document, save, save_bytes
from scalejax.core.tabular import Scalar, Tabular, scalar
from scalejax.sweep.folder import SweepFolder
from scalejax.sweep.intervals import CONFIDENCE, Interval, paired_difference, t_interval
from scalejax.sweep.plan import (
    Metric,
    PlannedRun,
    SweepPlan,
    Target,
    in_words,
    read_runs,
    varied_fields,
    written,
)
from scalejax.training.noise_scale import averaged
from scalejax.training.record import (
    Evaluated,
    EvaluationMeasurement,
    RunFolder,
    RunRecord,
    SharpnessMeasurement,
)

FINISHED = ("completed", "stopped_early", "diverged")
"""Final statuses of a run."""


@document("sweep_arms")
@dataclass(frozen=True, slots=True, kw_only=True)
class ArmTable:
    """The arms of a sweep, with their means and intervals over seeds."""

    arms: tuple[dict[str, Scalar], ...]
    """A table for each arm: intervals hold 95 % and need three seeds or more, accuracies are 0..1,
    differences are from the first arm."""
    confidence: float = CONFIDENCE
    """Confidence level of the intervals."""


_BATCHES = ("batch.global_batch", "batch.per_device_batch")
"""Fields, besides the seed, that may differ between runs of one train setup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """Status and results of a run."""

    planned: PlannedRun
    """The run."""
    status: str
    """Run status; "planned" before its start."""
    evaluations: tuple[Evaluated, ...]
    """Evaluations during the run, in order: on validation data if it has any, else on test data."""
    steps: int
    """Number of updates made."""
    seconds: float
    """Training time; its share if several runs trained in one program."""
    reached: Evaluated | None
    """The first evaluation that reached the target; None if the run diverged."""
    tested: EvaluationMeasurement | None = None
    """The evaluation on test data at the end of a run that has validation data."""
    noise_scale: float | None = None
    """Mean gradient noise scale, in samples, until the target was reached, or else over the run;
    None if not measured."""
    sharpness: tuple[SharpnessMeasurement, ...] = ()
    """Largest eigenvalue of the Hessian along the run; empty if not measured."""

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended."""
        return self.status in FINISHED

    @property
    def has_diverged(self) -> bool:
        """Whether the run diverged: then no result of it is shown anywhere, whatever it evaluated
        before."""
        return self.status == "diverged"

    @property
    def has_validation(self) -> bool:
        """Whether the run has validation data to choose by."""
        return self.planned.run.config.data.has_validation

    @property
    def final(self) -> Evaluated | None:
        """The evaluation of the weights that the run ends with; None if it diverged."""
        if self.has_diverged:
            return None
        chosen = None if self.tested is None else self.tested.chosen_step
        found = [each for each in self.evaluations if chosen in (None, each.step)]
        return found[-1] if found else None

    @property
    def final_test(self) -> EvaluationMeasurement | None:
        """The evaluation on test data of the weights that the run ends with; None if it diverged,
        or has not ended."""
        final = self.final if self.tested is None else self.tested
        return final if isinstance(final, EvaluationMeasurement) and self.final else None

    @property
    def best(self) -> Evaluated | None:
        """The evaluation on validation data with the highest accuracy, the first of equals; None if
        the run diverged, or has no such data: nothing is chosen on test data."""
        if self.has_diverged or not self.has_validation:
            return None
        return max(self.evaluations, key=lambda each: each.accuracy, default=None)

    @property
    def samples_to_target(self) -> int | None:
        """Samples trained until the target was reached; None if it was not."""
        return None if self.reached is None else _samples(self.planned.run, self.reached.step)


def is_finished(folder: RunFolder) -> bool:
    """Whether the run in `folder` has ended."""
    return folder.measurements.is_file() and RunRecord.load(folder.path).status in FINISHED


def read_rows(plan: SweepPlan, folder: SweepFolder) -> list[RunRow]:
    """Rows of the runs of `plan` in `folder`, in order.

    Raises:
        ConfigError: if a record is damaged.
    """
    return [_row(plan, folder, planned) for planned in plan.runs]


def _row(plan: SweepPlan, folder: SweepFolder, planned: PlannedRun) -> RunRow:
    files = folder.run(planned.index)
    if not files.measurements.is_file():
        return RunRow(
            planned=planned, status="planned", evaluations=(), steps=0, seconds=0.0, reached=None
        )
    record = RunRecord.load(files.path)
    target = plan.target
    monitored = record.monitored
    reached = (
        (each for each in monitored if target.is_reached(target.value_in(each)))
        if target and record.status != "diverged"
        else iter(())
    )
    first, steps = next(reached, None), max((e.step for e in record.measurements), default=0)
    tested = record.tested
    return RunRow(
        planned=planned,
        status=record.status or "planned",
        evaluations=monitored,
        steps=steps,
        seconds=max((each.elapsed_seconds for each in record.measurements), default=0.0),
        reached=first,
        tested=tested if tested and tested.chosen_step is not None else None,
        noise_scale=averaged(
            (e.noise_scale for e in record.training if e.step <= (first.step if first else steps)),
            planned.run.split.global_batch,
        ),
        sharpness=record.sharpness,
    )


@document("sweep_results")
@dataclass(frozen=True, slots=True, kw_only=True)
class ResultTable(Tabular):
    """The finished runs of a sweep."""

    rows: tuple[dict[str, Scalar], ...]
    """A table for each run, as in results.parquet: its varied fields and its results."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The runs, a row for each."""
        return [{**row} for row in self.rows]


def result_table(plan: SweepPlan, rows: Sequence[RunRow]) -> ResultTable:
    """The table of the finished runs among `rows`."""
    done = (row for row in rows if row.is_finished)
    return ResultTable(rows=tuple(_result(row, plan.target) for row in done))


def write_results(plan: SweepPlan, folder: SweepFolder, rows: Sequence[RunRow]) -> None:
    """Write the tables of finished runs and of arms, each atomically.

    Raises:
        ConfigError: if a file cannot be written.
    """
    done = [row for row in rows if row.is_finished]
    save_table(folder.results, result_table(plan, rows).to_rows())
    save_table(folder.evaluations, [line for row in done for line in _evaluations(row)])
    save_table(folder.timings, [_timing(row) for row in done])
    found = arm_lines(rows)
    save_table(folder.arms, found)
    save(ArmTable(arms=tuple(found)), folder.arms_json)


def arm_lines(rows: Sequence[RunRow]) -> list[dict[str, Scalar]]:
    """A line for each arm: its varied fields, how many runs ended and diverged, and for each metric
    the mean over seeds, its deviation and interval, and the paired difference from the first
    arm."""
    found = arms(rows)
    return [
        {
            **_cells(arm.varied),
            "runs": len(arm.rows),
            "diverged": len(arm.diverged),
            **{
                f"{metric}_{name}": value
                for metric in get_args(Metric)
                for name, value in _spread(arm, found[0], metric).items()
            },
        }
        for arm in found
    ]


def _cells(varied: Fields) -> dict[str, Scalar]:
    """Varied fields, some of which are lists, as columns."""
    return {name: scalar(value) for name, value in varied.items()}


def _spread(arm: "Arm", baseline: "Arm", metric: Metric) -> dict[str, Scalar]:
    values = list(arm.by_seed(metric).values())
    over_seeds, beside = t_interval(values), arm.difference(baseline, metric)
    return {
        "count": len(values),
        "mean": over_seeds and over_seeds.mean,
        "deviation": stdev(values) if len(values) > 1 else None,
        "low": over_seeds and over_seeds.low,
        "high": over_seeds and over_seeds.high,
        "difference": beside and beside.mean,
        "difference_low": beside and beside.low,
        "difference_high": beside and beside.high,
        "difference_count": beside.count if beside else 0,
    }


def _result(row: RunRow, target: Target | None) -> dict[str, Scalar]:
    final, best, tested = row.final, row.best, row.final_test
    validated = final if row.has_validation else None
    setup = {name: value for name, value in seedless(row).items() if name not in _BATCHES}
    return {
        "run": row.planned.index,
        **_cells(row.planned.varied),
        # Column names that `scalejax plan --convergence` reads.
        "global_batch": row.planned.run.split.global_batch,
        "recipe": in_words(setup),
        "status": row.status,
        "steps": row.steps,
        "samples": _samples(row.planned.run, row.steps),
        "final_validation_accuracy": validated and validated.accuracy,
        "final_validation_loss": validated and validated.loss,
        "final_test_accuracy": tested and tested.test_accuracy,
        "final_test_loss": tested and tested.test_loss,
        "final_step": final and final.step,
        "best_validation_accuracy": best and best.accuracy,
        "best_validation_step": best and best.step,
        "steps_to_target": row.reached and row.reached.step,
        "samples_to_target": row.samples_to_target,
        "noise_scale": row.noise_scale,
        "target": target and target.value,
    }


def _evaluations(row: RunRow) -> list[dict[str, JsonValue]]:
    return [
        {
            "run": row.planned.index,
            **row.planned.varied,
            "step": each.step,
            "epoch": each.epoch,
            "samples": _samples(row.planned.run, each.step),
            "status": row.status,
            **{
                f"{part}_{name}": getattr(each, f"{part}_{name}", None)
                for part in ("validation", "test")
                for name in ("loss", "accuracy")
            },
        }
        for each in (*row.evaluations, *([row.tested] if row.tested else ()))
    ]


def _samples(run: ResolvedRun, steps: int) -> int:
    """Samples trained in `steps` updates, including a batch-size ramp."""
    phases = run.phases
    ends = [*(phase.first_step for phase in phases[1:]), steps]
    return sum(
        max(0, min(steps, end) - phase.first_step) * phase.split.global_batch
        for phase, end in zip(phases, ends, strict=True)
    )


def _timing(row: RunRow) -> dict[str, JsonValue]:
    return {
        "run": row.planned.index,
        "seconds": row.seconds,
        "seconds_to_target": row.reached and row.reached.elapsed_seconds,
    }


def save_table(path: Path, lines: Sequence[Mapping[str, JsonValue]]) -> None:
    """Write `lines` as Parquet; a column of mixed types holds JSON."""
    import pyarrow
    import pyarrow.parquet

    columns = {name: _column([line.get(name) for line in lines]) for name in columns_of(lines)}
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    save_bytes(sink.getvalue().to_pybytes(), path)


def _column(values: Sequence[JsonValue]) -> Sequence[JsonValue]:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return [None if value is None else float(value) for value in values]  # type: ignore[arg-type]
    if len(kinds) > 1 or kinds & {list, dict}:
        return [None if value is None else json.dumps(value) for value in values]
    return values


# --- over seeds ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Runs that differ only in their seed."""

    varied: Fields
    """Values that they share of the fields in which the sweep's runs differ, without the seed."""
    rows: tuple[RunRow, ...]
    """The finished runs."""

    @property
    def accuracies(self) -> list[float]:
        """Final accuracy of each run that did not diverge, on validation data if there are any,
        else on test data."""
        return [row.final.accuracy for row in self.rows if row.final]

    @property
    def test_accuracies(self) -> list[float]:
        """Final test accuracy of each run that did not diverge."""
        return [row.final_test.accuracy for row in self.rows if row.final_test]

    @property
    def diverged(self) -> tuple[RunRow, ...]:
        """The runs that diverged, which no mean includes."""
        return tuple(row for row in self.rows if row.has_diverged)

    def by_seed(self, metric: Metric) -> dict[int, float]:
        """A metric at the end of each run that did not diverge, by its seed; if several runs have
        one seed, because they differ in something that is not named, the last is taken."""
        part, _, name = metric.partition("_")
        found = {}
        for row in self.rows:
            end = row.final_test if part == "test" else row.final if row.has_validation else None
            if end is not None and (value := getattr(end, name)) is not None:
                found[row.planned.run.config.seed] = value
        return found

    @property
    def metric(self) -> Metric:
        """The accuracy by which arms are compared."""
        is_validated = any(row.has_validation for row in self.rows)
        return "validation_accuracy" if is_validated else "test_accuracy"

    def difference(self, baseline: "Arm", metric: Metric) -> Interval | None:
        """How far a metric is above that of another arm, over the seeds with which neither
        diverged; None if there are none, or if the other arm is this one."""
        if baseline is self:
            return None
        return paired_difference(self.by_seed(metric), baseline.by_seed(metric))


def arms(rows: Sequence[RunRow]) -> list[Arm]:
    """The runs of a sweep grouped by all varied fields but the seed, in the order of the plan."""
    groups: dict[str, list[RunRow]] = {}
    for row in rows:
        groups.setdefault(json.dumps(seedless(row), sort_keys=True), []).append(row)
    return [
        Arm(varied=seedless(group[0]), rows=tuple(row for row in group if row.is_finished))
        for group in groups.values()
    ]


def best_arm(found: Sequence[Arm], measure: Literal["accuracy", "loss"] = "accuracy") -> Arm | None:
    """The arm with the highest mean validation accuracy, or the lowest mean validation loss, among
    arms without diverged runs, the first of equals; None if there is none, or no validation data:
    nothing is chosen on test data."""
    metric = "validation_accuracy" if measure == "accuracy" else "validation_loss"
    sign = 1 if measure == "accuracy" else -1
    choices = [arm for arm in found if arm.by_seed(metric) and not arm.diverged]
    return max(choices, key=lambda arm: sign * mean(arm.by_seed(metric).values()), default=None)


def seedless(row: RunRow) -> Fields:
    """Varied fields of the run of `row` without the seed."""
    return {name: value for name, value in row.planned.varied.items() if name != "seed"}


# A sweep read from its folder: its plan, and the results of its runs.


def recorded_sweep(path: Path) -> tuple[SweepPlan, list[RunRow]]:
    """The plan of the sweep in the folder `path`, and a row for each of its runs.

    Raises:
        ConfigError: if there is no sweep, or a file of it is damaged.
    """
    folder = SweepFolder(path=path)
    text, kept = written(folder)
    resolved = read_runs(folder, uses_kept_facts=True)
    names = list(dict.fromkeys(name for fields in kept.runs for name in fields))
    varied = varied_fields(names, [run.config for run in resolved])
    plan = SweepPlan(
        text=text,
        runs=tuple(
            PlannedRun(index=index, fields=kept.runs[index], varied=varied[index], run=run)
            for index, run in enumerate(resolved)
        ),
        repeated=0,
        jobs=kept.jobs,
        cpu_devices=kept.cpu_devices,
        target=kept.target,
    )
    return plan, read_rows(plan, folder)
