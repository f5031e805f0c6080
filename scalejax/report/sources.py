"""The data of a report: runs, sweeps, benches, plans and predictions, read from their files.

Also computes the gap between two training-loss curves. Knows nothing of how any of it is shown.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np

from scalejax.config.run import RunConfig, load_kept_config
from scalejax.core import serialization
from scalejax.core.errors import ConfigError, nearest_name, refusal
from scalejax.emulation.record import EMULATION, Emulation
from scalejax.measure.bench.folder import BenchFolder
from scalejax.measure.bench.results import Summary, read_plan, read_summaries
from scalejax.planning.observed_failures import FailuresMet, failures_met
from scalejax.planning.time_to_target.plan import Plan
from scalejax.simulator.predict import Prediction, ScalingPrediction, scaling_prediction, slow_note
from scalejax.simulator.ramp import RampPrediction
from scalejax.sweep.folder import SweepFolder
from scalejax.sweep.plan import SweepPlan, in_words
from scalejax.sweep.results import RunRow, recorded_sweep, seedless
from scalejax.training.input_stalls import wait_share
from scalejax.training.manifest import record_damage
from scalejax.training.record import RunRecord, TrainMeasurement
from scalejax.training.time_accounting import TimeAccount, load_intervals, time_account

# Gap between the training-loss curves of two runs after warmup.


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGap:
    """Gap between two training-loss curves, both averaged over the same windows."""

    from_epoch: float
    """First epoch compared: after the warmup of both runs."""
    to_epoch: float
    """Last epoch compared: the end of the shorter run."""
    max_gap: float
    """Largest difference of the window means."""
    mean_gap: float
    """Mean difference of the window means."""


def loss_gap(
    one: Sequence[TrainMeasurement],
    other: Sequence[TrainMeasurement],
    *,
    after_epoch: float,
    window_epochs: float = 1.0,
) -> LossGap | None:
    """Gap between two curves of training loss over epochs.

    Max and mean over windows w of | mean over w of one - mean over w of other |. Each curve is
    interpolated linearly between logged losses, so the logging interval does not matter. A loss is
    placed at the epoch reached before its update.

    Args:
        one: logged losses of a run, in order.
        other: logged losses of another run on the same data.
        after_epoch: epoch at which both have warmed up.
        window_epochs: length of a window, adjusted to divide the compared range evenly.

    Returns:
        None if the runs have no epoch in common, or a loss in that range is not finite.

    Source: Goyal et al. 2017, section 5.2 and figure 3, arXiv 1706.02677, who overlay the curves.
    """
    curves = [_curve(one), _curve(other)]
    if any(len(epochs) < 2 for epochs, _ in curves):
        return None
    begin = max(after_epoch, *(epochs[0] for epochs, _ in curves))
    end = min(epochs[-1] for epochs, _ in curves)
    if begin >= end:
        return None
    edges = np.linspace(begin, end, max(1, round((end - begin) / window_epochs)) + 1)
    gaps = np.abs(np.subtract(*(_window_means(*curve, edges) for curve in curves)))
    if not np.isfinite(gaps).all():
        return None
    return LossGap(
        from_epoch=float(begin),
        to_epoch=float(end),
        max_gap=float(gaps.max()),
        mean_gap=float(gaps.mean()),
    )


def _curve(lines: Sequence[TrainMeasurement]) -> tuple[np.ndarray, np.ndarray]:
    """Epochs reached before each logged loss, and the losses."""
    epochs = [line.epoch - _epochs_of_update(line, lines[0]) for line in lines]
    losses = [np.nan if line.loss is None else line.loss for line in lines]
    return np.array(epochs), np.array(losses)


def _epochs_of_update(line: TrainMeasurement, first: TrainMeasurement) -> float:
    """Epochs that the update of `line` covers: those of the first update, scaled by the ratio of
    batches. Ignores the samples at the end of an epoch that fill no batch."""
    of_first = first.epoch / first.step
    if line.global_batch is None or first.global_batch is None:
        return of_first
    return of_first * line.global_batch / first.global_batch


def _window_means(epochs: np.ndarray, losses: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Mean of the curve between consecutive edges, which lie within its range."""
    points = np.union1d(epochs, edges)
    values = np.interp(points, epochs, losses)
    areas = np.diff(points) * (values[1:] + values[:-1]) / 2
    sums = np.concatenate([[0.0], np.cumsum(areas)])[np.searchsorted(points, edges)]
    return np.diff(sums) / np.diff(edges)


MOST_LINES = 20_000
"""Logged updates drawn over all runs of a sweep: about 3 MB in each chart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSource:
    """One run: its config, its prediction and its measurements."""

    label: str
    """Name of the run, unique in the report."""
    family: str
    """Name shared by runs that differ only in their seed."""
    config: RunConfig
    """The config that was trained."""
    record: RunRecord
    """The measurements."""
    prediction: Prediction | None
    """The prediction written before training; None if there is no such file."""
    time: TimeAccount | None = None
    """Time accounting of its wall time; None if it was not recorded."""
    emulation: Emulation | None = None
    """Results of the emulation, if the run was emulated: its seconds are virtual then."""
    failures: FailuresMet | None = None
    """Failures, restarts and checkpoints observed in the run, as inputs of the failure model; None
    if there are too few."""
    damage: str | None = None
    """How the record differs from what was written; None if it does not, or if that is unknown."""

    @property
    def model_goodput(self) -> float | None:
        """Goodput that the failure model predicts from the observed failures; None if unknown."""
        try:
            return self.failures.goodput if self.failures else None
        except ConfigError:  # such a run never ends, and this one may not have either
            return None

    @property
    def step_seconds(self) -> float | None:
        """Median measured step time in seconds; None if none was measured."""
        return self.record.median_step_seconds

    @property
    def slow_note(self) -> str | None:
        """Explanation if steps took far longer than predicted; None if they did not."""
        if self.prediction is None or self.step_seconds is None:
            return None
        return slow_note(self.prediction, self.step_seconds)

    @property
    def wait_share(self) -> float | None:
        """Share of the time that devices waited for input, 0..1; None if not measured."""
        return wait_share(self.record.training)

    @property
    def has_diverged(self) -> bool:
        """Whether the run diverged, and so has no result."""
        return self.record.status == "diverged"

    @property
    def measures_noise_scale(self) -> bool:
        """Whether the record has a gradient noise scale."""
        return any(m.noise_scale is not None for m in self.record.training)

    @property
    def measures_sharpness(self) -> bool:
        """Whether the record has a sharpness."""
        return any(m.sharpness is not None for m in self.record.sharpness)

    @property
    def has_experts(self) -> bool:
        """Whether the record has loads of experts."""
        return any(m.expert_load is not None for m in self.record.training)

    @property
    def warmup_epochs(self) -> float:
        """Length of the warmup in epochs; 0 without one."""
        _, epochs = self.config.schedule.scaled(self.config.batch.global_batch)
        return epochs


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSource:
    """One sweep: its plan, the results of its runs, and the started runs for curves."""

    name: str
    """Name of its folder."""
    plan: SweepPlan
    """The planned runs."""
    rows: tuple[RunRow, ...]
    """Status and results of each run, from its whole record."""
    runs: tuple[RunSource, ...]
    """Runs that have a record; runs that differ only in their seed are a family."""
    kept_every: int
    """`runs` keeps one logged update in this many: with many runs, all of them would make a page of
    many megabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSource:
    """One bench: the measured benchmarks."""

    name: str
    """Name of its folder."""
    summaries: tuple[Summary, ...]
    """Benchmarks with at least one finished round."""


def gap_between(one: RunSource, other: RunSource) -> LossGap | None:
    """Gap between the training losses of two runs after the warmup of both."""
    after_epoch = max(one.warmup_epochs, other.warmup_epochs)
    return loss_gap(one.record.training, other.record.training, after_epoch=after_epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Everything that one report shows."""

    runs: tuple[RunSource, ...]
    """Runs, in the order given."""
    studies: tuple[ScalingPrediction, ...]
    """Predictions over device counts, in the order given."""
    plans: tuple[Plan, ...] = ()
    """Plans, in the order given."""
    sweeps: tuple[SweepSource, ...] = ()
    """Sweeps, in the order given."""
    benches: tuple[BenchSource, ...] = ()
    """Benches, in the order given."""

    @property
    def curves(self) -> tuple[RunSource, ...]:
        """All runs to plot, those of sweeps last."""
        return (*self.runs, *(run for sweep in self.sweeps for run in sweep.runs))


def read_sources(paths: Sequence[Path]) -> Sources:
    """The runs, sweeps, benches and predictions at `paths`.

    Raises:
        ConfigError: if there are none, or a path is neither a folder of a run, sweep or bench nor
            a prediction.
    """
    if not paths:
        raise ConfigError("a report needs a run's folder, or a prediction's or plan's JSON file.")
    folders = [path for path in paths if path.is_dir()]
    sweeps = [path for path in folders if SweepFolder(path=path).plan.is_file()]
    benches = [path for path in folders if BenchFolder(path=path).plan.is_file()]
    runs = [_read_run(path) for path in folders if path not in (*sweeps, *benches)]
    read = [_read_file(path) for path in paths if not path.is_dir()]
    return Sources(
        runs=tuple(runs),
        studies=tuple(study for each in read for study in _studies(each)),
        plans=tuple(each for each in read if isinstance(each, Plan)),
        sweeps=tuple(_read_sweep(path, is_alone=len(paths) == 1) for path in sweeps),
        benches=tuple(map(_read_bench, benches)),
    )


def _read_bench(path: Path) -> BenchSource:
    folder = BenchFolder(path=path)
    summaries = [each for each in read_summaries(read_plan(folder), folder) if each.is_measured]
    if not summaries:
        raise ConfigError(
            f"{str(path)!r} is the folder of a bench without a result that can be read; the same "
            "scalejax bench times what is missing."
        )
    return BenchSource(name=path.resolve().name, summaries=tuple(summaries))


def _read_sweep(path: Path, *, is_alone: bool) -> SweepSource:
    plan, rows = recorded_sweep(path)
    name = path.resolve().name
    prefix = "" if is_alone else f"{name}: "
    runs = []
    for row in rows:
        if row.status == "planned":
            continue
        run = _read_run(SweepFolder(path=path).run(row.planned.index).path)
        family = f"{prefix}{in_words(seedless(row)) or 'all'}"
        label = f"{prefix}{row.planned.label or row.planned.name}"
        runs.append(replace(run, label=label, family=family))
    if not runs:
        raise ConfigError(f"{str(path)!r} is the folder of a sweep of which no run has begun.")
    lines = sum(len(run.record.training) for run in runs)
    kept_every = max(1, math.ceil(lines / MOST_LINES))
    return SweepSource(
        name=name,
        plan=plan,
        rows=tuple(rows),
        runs=tuple(replace(run, record=_thinned(run.record, kept_every)) for run in runs),
        kept_every=kept_every,
    )


def _thinned(record: RunRecord, kept_every: int) -> RunRecord:
    """`record` with one logged update in `kept_every`, but all other lines."""
    updates = count()
    lines = tuple(
        line
        for line in record.measurements
        if not isinstance(line, TrainMeasurement) or next(updates) % kept_every == 0
    )
    return replace(record, measurements=lines)


def _read_run(path: Path) -> RunSource:
    record = RunRecord.load(path)
    folder = record.folder
    prediction, intervals = folder.prediction, load_intervals(folder.time)
    name, emulated = path.resolve().name, path / EMULATION
    family = path.resolve().parent.name if re.fullmatch(r"seed-\d+", name) else name
    return RunSource(
        label=name if family == name else f"{family}, {name}",
        family=family,
        config=load_kept_config(folder.config),
        record=record,
        prediction=serialization.load(Prediction, prediction) if prediction.is_file() else None,
        time=time_account(intervals) if intervals else None,
        failures=failures_met(intervals),
        damage=record_damage(folder),
        emulation=serialization.load(Emulation, emulated) if emulated.is_file() else None,
    )


def _studies(read: ScalingPrediction | RampPrediction | Plan) -> tuple[ScalingPrediction, ...]:
    """The scaling studies of a file: for a batch-size ramp, one for each batch size."""
    if isinstance(read, RampPrediction):
        return tuple(phase.study for phase in read.phases)
    return () if isinstance(read, Plan) else (read,)


_DRAWN: dict[str, type[Plan | RampPrediction | ScalingPrediction]] = {
    "plan": Plan,
    "ramp_prediction": RampPrediction,
    "scaling_prediction": ScalingPrediction,
}
"""Class of each kind of file that is drawn as it is."""
_MARKS = {
    "front": "plan",
    "phases": "ramp_prediction",
    "predictions": "scaling_prediction",
    "step_seconds": "prediction",
}
"""A field that only one kind has, for files from versions that did not write their kind."""


def _guessed_kind(path: Path) -> str | None:
    fields = serialization.load(dict, path)
    return next((kind for mark, kind in _MARKS.items() if mark in fields), None)


def _read_file(path: Path) -> ScalingPrediction | RampPrediction | Plan:
    """A plan, a scaling study, a batch-size ramp, or a single prediction as a study of one."""
    if not path.exists():
        siblings = [str(path.parent / each.name) for each in path.parent.glob("*")]
        closest = nearest_name(str(path), siblings)
        hint = f" (did you mean {closest!r}?)" if closest else ""
        raise ConfigError(f"{str(path)!r} is neither a folder nor a file{hint}.")
    kind = serialization.kind_of(path) or _guessed_kind(path)
    if kind in _DRAWN:
        return serialization.load(_DRAWN[kind], path)
    if kind == "prediction":
        single = serialization.load(Prediction, path)
        title = f"{path.resolve().parent.name} on {single.device_count} x {single.chip}"
        return scaling_prediction([single], "weak", title)
    if kind is not None:
        accepted = f"{path} must be one of {', '.join(sorted(_DRAWN))}, prediction"
        raise ConfigError(refusal("kind", kind, accepted))
    raise ConfigError(
        f"{str(path)!r} is neither the folder of a run nor a prediction or plan that "
        "scalejax predict --json or scalejax plan --json wrote."
    )
