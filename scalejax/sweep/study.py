"""A study of warmup: batches x warmups x scaling rules x optimizers x seeds, as two sweeps.

The first finds the learning rate of each optimizer at the reference batch, without warmup, on
validation data; the second trains every cell of the grid at the rate that its scaling rule derives
from that. Knows fields and records; starts no processes, and writes no text for people.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Literal, get_args

from scalejax.config.grid import Extension, Fields, Grammar
from scalejax.config.optimizer import OptimizerConfig
from scalejax.config.run import RunConfig, load_config
from scalejax.config.schedule import ScheduleConfig
from scalejax.core.errors import (
    ConfigError,
    nearest_name,
    prefixed,
    refusal,
    require_above,
    require_at_least,
    require_at_most,
    unknown_name,
)
from scalejax.core.folder import FileIn
from scalejax.core.serialization import JsonValue, build, document, plain
from scalejax.core.tabular import Tabular, flat
from scalejax.data.facts import read_facts
from scalejax.sweep.folder import SweepFolder
from scalejax.sweep.intervals import Interval, t_interval
from scalejax.sweep.plan import Metric, SweepPlan, plan_sweep
from scalejax.sweep.results import Arm, RunRow, best_arm
from scalejax.sweep.scheduler import time_jobs
from scalejax.training.record import SharpnessMeasurement

Scaling = Literal["none", "linear", "sqrt", "sde", "legw"]
"""A rule of `schedule.scaling`."""
Measure = Literal["accuracy", "loss"]
"""Metric by which runs are compared."""
SharpnessName = Literal["largest", "last", "largest_preconditioned", "largest_over_threshold"]
"""A measure of the sharpness along a run."""
RATES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Learning rates that are tried, two in each decade, from those of Adam to those of LARS: as many
as train in one program."""
BATCHES = (1, 4, 16, 64)
"""Default batches, in reference batches."""
WARMUPS = "none,gradual:5%,gradual:20%"
"""Default warmups."""
SCALINGS = "linear,sqrt"
"""Default scaling rules."""
_LARGEST_SEEDS = 1000
_WARMUP = re.compile(r"(\w+)(?::([0-9.]+)(%?))?(?::(\w+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmup:
    """How the peak rate is reached, and for how long."""

    form: Literal["none", "gradual", "constant"] = "none"
    """As `schedule.warmup`."""
    length: float = 0.0
    """Epochs, or per cent of the run."""
    is_share: bool = False
    """Whether `length` is in per cent of the run."""
    start: Literal["base", "zero"] = "zero"
    """As `schedule.warmup_from`."""

    def epochs(self, of_run: int) -> float:
        """Epochs of warmup in a run of `of_run` epochs."""
        return self.length / 100 * of_run if self.is_share else self.length

    @property
    def text(self) -> str:
        """The warmup as it is typed, without the start if that is the usual one."""
        if self.form == "none":
            return "none"
        usual = "zero" if self.form == "gradual" else "base"
        start = "" if self.start == usual else f":{self.start}"
        return f"{self.form}:{self.length:.15g}{'%' if self.is_share else ''}{start}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudiedOptimizer:
    """An optimizer of the study."""

    table: Fields
    """Its table in a run.toml: the file's, if that has the same optimizer, else the defaults."""
    rate: float | None
    """Its learning rate at the reference batch; None if it is to be found."""
    averages: bool
    """Whether it averages its iterates instead of decaying the rate."""

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.table["name"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One setting of the grid, trained once for each seed."""

    optimizer: StudiedOptimizer
    """The optimizer."""
    scaling: Scaling
    """The scaling rule."""
    warmup: Warmup
    """The warmup."""
    batch: int
    """Global batch."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is studied: a run.toml, and the values that are combined."""

    run_file: Path
    """The run.toml that all runs start from."""
    overrides: Fields
    """Fields replaced in all of them, as given."""
    parameters: Fields
    """The same without those of the optimizer, as every run states its whole table, and with
    validation data held out."""
    batches: tuple[int, ...]
    """Global batches."""
    warmups: tuple[Warmup, ...]
    """Warmups; others are compared to the first that has none, or else to the first of all."""
    scalings: tuple[Scaling, ...]
    """Scaling rules."""
    optimizers: tuple[StudiedOptimizer, ...]
    """Optimizers."""
    seeds: int
    """Seeds, from 0."""
    rates: tuple[float, ...]
    """Learning rates tried for optimizers without a given rate, rising."""
    measure: Measure
    """Metric by which runs are compared."""

    @cached_property
    def config(self) -> RunConfig:
        """The run.toml with its fields replaced."""
        return load_config(self.run_file, self.overrides | self.parameters)

    @property
    def schedule(self) -> ScheduleConfig:
        """The schedule of the run.toml."""
        assert isinstance(self.config.schedule, ScheduleConfig)  # noqa: S101  by `plan_study`
        return self.config.schedule

    @property
    def baseline(self) -> Warmup:
        """The warmup that others are compared to."""
        return next((each for each in self.warmups if each.form == "none"), self.warmups[0])

    @property
    def to_baseline(self) -> str:
        """What differences are to, in words."""
        baseline = self.baseline.text
        return "to no warmup" if baseline == "none" else f"to {baseline}"

    @property
    def metrics(self) -> tuple[Metric, Metric]:
        """The metric on validation data, which decides choices, and that on test data."""
        if self.measure == "accuracy":
            return "validation_accuracy", "test_accuracy"
        return "validation_loss", "test_loss"

    @property
    def tuned(self) -> tuple[StudiedOptimizer, ...]:
        """Optimizers whose rate is to be found."""
        return tuple(each for each in self.optimizers if each.rate is None)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells that can be trained; `left_out` says which cannot."""
        return tuple(cell for cell in self._combined if self._why_not(cell) is None)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Which cells of the grid cannot be trained, and why."""
        found = (self._why_not(cell) for cell in self._combined)
        return tuple(dict.fromkeys(why for why in found if why is not None))

    @property
    def _combined(self) -> Iterable[Cell]:
        return (
            Cell(optimizer=optimizer, scaling=scaling, warmup=warmup, batch=batch)
            for optimizer in self.optimizers
            for scaling in self.scalings
            for batch in self.batches
            for warmup in self.warmups
        )

    def _why_not(self, cell: Cell) -> str | None:
        reference = self.schedule.reference_batch
        if cell.scaling == "sde":
            if cell.optimizer.name != "adamw":
                return f"sde with {cell.optimizer.name}: it is a rule of adamw"
            try:
                config = build(OptimizerConfig, cell.optimizer.table)
                config.scaled_by_sde(cell.batch / reference, reference)
            except ConfigError as error:
                return f"sde at {cell.batch:,}: {str(error).removesuffix('.')}"
        if cell.scaling == "legw":
            if cell.warmup.form == "constant":
                return f"legw with {cell.warmup.text}: it stretches gradual warmups"
            run = self.config.train.epochs
            stretched = cell.warmup.epochs(run) * cell.batch / reference
            if stretched >= run:
                return (
                    f"legw with {cell.warmup.text} at {cell.batch:,}: a warmup of "
                    f"{stretched:g} epochs would not end within the run's {run}"
                )
        return None

    def fields(self, cell: Cell, rate: float) -> Fields:
        """The fields of the runs of a cell, equal for equivalent cells: at the reference batch all
        scaling rules are the same, and a warmup from the peak rate is none."""
        scaling, warmup = cell.scaling, cell.warmup
        if cell.batch == self.schedule.reference_batch:
            scaling = "none"
        if scaling == "none" and warmup.start == "base":
            warmup = Warmup()
        if scaling == "legw" and warmup.form == "none":
            scaling = "sqrt"  # without a warmup, legw has the rate of sqrt
        return self._fields(cell.optimizer, rate) | {
            "batch.global_batch": cell.batch,
            "schedule.scaling": scaling,
            "schedule.warmup": warmup.form,
            "schedule.warmup_epochs": warmup.epochs(self.config.train.epochs),
            "schedule.warmup_from": "base" if warmup.form == "none" else warmup.start,
        }

    def rate_sweep(self) -> SweepPlan | None:
        """The runs that find rates, one for each rate tried; None if all rates are given."""
        cases = [
            self._fields(optimizer, rate)
            | {
                "batch.global_batch": self.schedule.reference_batch,
                "schedule.scaling": "none",
                "schedule.warmup": "none",
                "schedule.warmup_epochs": 0.0,
                "schedule.warmup_from": "base",
            }
            for optimizer in self.tuned
            for rate in self.rates
        ]
        return self._sweep(cases, 1) if cases else None

    def grid(self, rates: Mapping[str, float]) -> SweepPlan:
        """The runs of the grid, with the rate of each optimizer at the reference batch."""
        cases = [self.fields(cell, rates[cell.optimizer.name]) for cell in self.cells]
        return self._sweep(cases, self.seeds)

    def _fields(self, optimizer: StudiedOptimizer, rate: float) -> Fields:
        constant: Fields = {"schedule.decay": "constant", "schedule.decay_epochs": []}
        return {
            "optimizer": dict(optimizer.table),
            "schedule.base_learning_rate": rate,
            **(constant if optimizer.averages else {}),
        }

    def _sweep(self, cases: Sequence[Fields], seeds: int) -> SweepPlan:
        distinct = tuple({_key(case): case for case in cases}.values())
        grammar = Grammar(
            parameters=self.parameters,
            variables={"seed": list(range(seeds))},
            extensions=(Extension(condition={}, parameters={}, cases=distinct),),
        )
        return plan_sweep(self.run_file, grammar)


def _key(fields: Fields) -> str:
    """A text that is equal for equal fields, whatever the seed."""
    return json.dumps({k: v for k, v in fields.items() if k != "seed"}, sort_keys=True)


# Parsing of what is typed.

_STUDIED = {
    "batch.global_batch": "--batches",
    "batch.per_device_batch": "--batches",
    "schedule.warmup": "--warmup",
    "schedule.warmup_epochs": "--warmup",
    "schedule.warmup_from": "--warmup",
    "schedule.scaling": "--scaling",
    "schedule.base_learning_rate": "--optimizers NAME:RATE",
    "optimizer.name": "--optimizers",
    "seed": "--seeds",
}
"""Fields that a study varies itself, with the flag for each."""


def plan_study(
    run_file: Path,
    overrides: Fields,
    *,
    batches: str | None = None,
    warmups: str = WARMUPS,
    scalings: str = SCALINGS,
    optimizers: str | None = None,
    seeds: int = 3,
    rates: str | None = None,
    measure: Measure = "accuracy",
) -> Study:
    """The study of `run_file`, with values as typed, in comma-separated lists.

    Args:
        run_file: the run.toml that all runs start from.
        overrides: fields replaced in all of them.
        batches: global batches; by default 1, 4, 16 and 64 reference batches, as the data allow.
        warmups: none, or FORM:LENGTH, LENGTH in epochs or per cent, and ":base" or ":zero".
        scalings: names of rules.
        optimizers: NAME, or NAME:RATE if its rate at the reference batch is known; by default that
            of the file, with its rate.
        seeds: number of seeds.
        rates: rates tried for optimizers without one; by default `RATES`.
        measure: metric by which runs are compared.

    Raises:
        ConfigError: naming the value, and what is accepted.
    """
    for name, value in overrides.items():
        if name in _STUDIED:
            accepted = f"the study varies it; give {_STUDIED[name]}"
            raise ConfigError(refusal(name, value, accepted))
    require_at_least("seeds", seeds, 1)
    require_at_most("seeds", seeds, _LARGEST_SEEDS)
    # Early stopping needs validation data, which the study itself holds out.
    divided = load_config(run_file, overrides | {"train.early_stopping": None}).data
    held_out: Fields = {} if divided.has_validation else {"data.validation_fraction": 0.1}
    parameters = overrides | held_out
    config = load_config(run_file, parameters)
    schedule = config.schedule
    if not isinstance(schedule, ScheduleConfig):
        accepted = "scaling rules and warmups are those of the schedule without a name"
        raise ConfigError(refusal("schedule.name", schedule.name, accepted))
    if config.emulation is not None:
        accepted = "it trains with virtual workers; leave the table out"
        raise ConfigError(refusal("emulation", config.emulation.algorithm, accepted))
    if config.batch.ramp_epochs:
        accepted = "the study compares fixed batches; leave it out"
        raise ConfigError(refusal("batch.ramp_epochs", config.batch.ramp_epochs, accepted))
    own = _table(config.optimizer)
    if optimizers is None:
        _require_rate_of_reference(config, schedule)
    named = _listed("optimizers", optimizers or f"{own['name']}:{schedule.base_learning_rate!r}")
    typed = _listed("warmup", warmups)
    ways = tuple(_warmup(each) for each in typed)
    _require_distinct("warmup", typed, ways)
    for way in ways:
        if way.epochs(config.train.epochs) >= config.train.epochs:
            accepted = f"it must end before train.epochs={config.train.epochs} do"
            raise ConfigError(refusal("warmup", way.text, accepted))
    rules: tuple[Scaling, ...] = tuple(_scaling(each) for each in _listed("scaling", scalings))
    _require_distinct("scaling", rules, rules)
    study = Study(
        run_file=run_file,
        overrides=overrides,
        parameters={k: v for k, v in parameters.items() if not k.startswith("optimizer.")},
        batches=_batches(batches, schedule.reference_batch, config),
        warmups=ways,
        scalings=rules,
        optimizers=_optimizers(named, own),
        seeds=seeds,
        rates=RATES if rates is None else _rates(rates),
        measure=measure,
    )
    if not study.cells:
        accepted = f"nothing is left to train: {'; '.join(study.left_out)}"
        raise ConfigError(refusal("scaling", scalings, accepted))
    return study


def _require_rate_of_reference(config: RunConfig, schedule: ScheduleConfig) -> None:
    """Refuse the rate of a file that does not scale it, at a batch other than the reference batch:
    it is the rate of that batch."""
    batch, reference = config.batch.global_batch, schedule.reference_batch
    if schedule.scaling != "none" or batch == reference:
        return
    own = 'that of batch.per_device_batch, as scaling="none"' if batch is None else f"of {batch}"
    given = "" if batch is None else f"--schedule.reference_batch {batch}, or "
    accepted = (
        f"schedule.base_learning_rate={schedule.base_learning_rate:g} is not scaled, so it is "
        f"{own}; give {given}--optimizers {config.optimizer.name}:RATE with the rate at "
        f"{reference}, or without a rate to have it found"
    )
    raise ConfigError(refusal("schedule.reference_batch", reference, accepted))


def _table(optimizer: OptimizerConfig) -> Fields:
    table = plain(optimizer)
    assert isinstance(table, dict)  # noqa: S101  a dataclass is a table
    return table


def _listed(flag: str, text: str) -> list[str]:
    found = [each.strip() for each in text.split(",")]
    if not all(found):
        raise ConfigError(refusal(flag, text, "it must be comma-separated, with nothing empty"))
    return found


def _require_distinct(flag: str, texts: Sequence[str], values: Sequence[object]) -> None:
    """Refuse a value that is given twice, even if `texts` spell it differently."""
    for place, (text, value) in enumerate(zip(texts, values, strict=True)):
        if value in values[:place]:
            raise ConfigError(refusal(flag, text, "it is given twice"))


def _batches(text: str | None, reference: int, config: RunConfig) -> tuple[int, ...]:
    if text is None:
        most = read_facts(config.data).train_examples
        return tuple(k * reference for k in BATCHES if k * reference <= most) or (most,)
    found, typed = [], _listed("batches", text)
    for each in typed:
        if not each.isdecimal() or not int(each):
            accepted = "it must be whole numbers above 0, such as 256,1024,4096"
            raise ConfigError(refusal("batches", each, accepted))
        found.append(int(each))
    _require_distinct("batches", typed, found)
    return tuple(sorted(found))


def _warmup(text: str) -> Warmup:
    forms = ("none", "gradual", "constant")
    found = _WARMUP.fullmatch(text)
    if found is None:
        accepted = "it must be none or FORM:LENGTH, such as gradual:5% or gradual:2 (epochs)"
        raise ConfigError(refusal("warmup", text, accepted))
    form, length, per_cent, start = found.groups()
    if form == "linear":
        raise ConfigError(refusal("warmup", text, "a linear warmup is called gradual"))
    if form not in forms:
        closest = nearest_name(form, forms)
        accepted = "it must be none, gradual:LENGTH or constant:LENGTH, such as gradual:5%"
        hint = f" (did you mean {closest!r}?)" if closest else ""
        raise ConfigError(refusal("warmup", text, f"{accepted}{hint}"))
    if form == "none" and (length or start):
        raise ConfigError(refusal("warmup", text, "none has no length"))
    if form == "none":
        return Warmup()
    try:
        number = float(length or "")
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf or (per_cent and number >= 100):
        accepted = f"it needs a length above 0, such as {form}:5% (below 100%) or {form}:2 (epochs)"
        raise ConfigError(refusal("warmup", text, accepted))
    start = start or ("zero" if form == "gradual" else "base")
    if start not in ("base", "zero") or (form == "constant" and start == "zero"):
        accepted = "it begins at base or zero, a constant one at base"
        raise ConfigError(refusal("warmup", text, accepted))
    return Warmup(form=form, length=number, is_share=bool(per_cent), start=start)  # type: ignore[arg-type]  checked


def _scaling(text: str) -> Scaling:
    if text not in get_args(Scaling):
        raise ConfigError(unknown_name("scaling", text, get_args(Scaling)))
    return text  # type: ignore[return-value]  checked


def _optimizers(named: list[str], own: Fields) -> tuple[StudiedOptimizer, ...]:
    names = [each.partition(":")[0] for each in named]
    _require_distinct("optimizers", names, names)
    found = []
    for name, text in zip(names, named, strict=True):
        _, colon, rate = text.partition(":")
        if name not in OptimizerConfig.names():
            raise ConfigError(unknown_name("optimizers", name, OptimizerConfig.names()))
        with prefixed(f"optimizers {name}: "):
            built = build(OptimizerConfig, own if name == own["name"] else {"name": name})
        found.append(
            StudiedOptimizer(
                table=_table(built),
                rate=_rate("optimizers", rate) if colon else None,
                averages=built.averages_iterates,
            )
        )
    return tuple(found)


def _rates(text: str) -> tuple[float, ...]:
    found = sorted(_rate("rates", each) for each in _listed("rates", text))
    _require_distinct("rates", [f"{rate!r}" for rate in found], found)
    return tuple(found)


def _rate(flag: str, text: str) -> float:
    try:
        rate = float(text)
    except ValueError as error:
        raise ConfigError(refusal(flag, text, "a rate must be a number, as 0.01")) from error
    require_above(flag, rate, 0)
    return rate


# How long it takes.


def predicted_seconds(study: Study, *, processes: int, cores: int | None) -> float:
    """Seconds that the study takes here, inferred from the first seconds of a few of its jobs: one
    at the smallest batch for each optimizer, and one at the largest. An update takes a_o + b B
    seconds, where a_o depends on the optimizer and b on the network.

    Raises:
        ScalejaxError: if one of the jobs fails.
    """
    low = {each.name: each.rate or study.rates[0] for each in study.optimizers}
    grid = study.grid(low)
    tuning = study.rate_sweep()
    first = grid.runs[grid.jobs[0][0]].run
    smallest, largest = (
        pick(run.run.split.global_batch for run in grid.runs) for pick in (min, max)
    )
    watched: dict[tuple[str, int], int] = {}
    for position, job in enumerate(grid.jobs):
        run = grid.runs[job[0]].run
        name, batch = run.config.optimizer.name, run.split.global_batch
        if batch == smallest or (batch == largest and name == first.config.optimizer.name):
            watched.setdefault((name, batch), position)
    times = dict(
        zip(
            watched,
            time_jobs(grid, list(watched.values()), processes=processes, cores=cores),
            strict=True,
        )
    )
    per_update: dict[tuple[str, int], float] = {}
    for (name, batch), time in times.items():
        job = grid.jobs[watched[name, batch]]
        steps = sum(grid.runs[index].run.total_steps for index in job)
        per_update[name, batch] = time.training_seconds / steps
    name = first.config.optimizer.name
    rise = per_update[name, largest] - per_update[name, smallest]
    slope = max(0.0, rise / (largest - smallest)) if largest > smallest else 0.0
    startup = fmean(time.startup_seconds for time in times.values())
    total = 0.0
    for plan in (tuning, grid):
        for planned in plan.runs if plan else ():
            run = planned.run
            more = slope * (run.split.global_batch - smallest)
            total += run.total_steps * (per_update[run.config.optimizer.name, smallest] + more)
        total += startup * len(plan.jobs) if plan else 0.0
    return total / processes


# Results.


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRow:
    """A learning rate that was tried or given."""

    optimizer: str
    """Its optimizer."""
    learning_rate: float
    """The rate."""
    validation: float | None
    """Metric on validation data at the end; None if the run diverged, or the rate was given."""
    chosen: bool
    """Whether the grid was trained with it."""
    at_edge: bool
    """Whether it was chosen although a rate beyond those tried may be better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSummary:
    """A metric of a cell: accuracies are 0..1, intervals hold 95 %; None if undefined, such as an
    interval of fewer than three values."""

    mean: float | None
    """Mean over seeds that did not diverge."""
    low: float | None
    """Lower end of its interval."""
    high: float | None
    """Upper end of its interval."""
    count: int
    """Seeds in it."""
    difference: float | None
    """Mean difference from the cell without warmup, over pairs of runs with the same seed."""
    difference_low: float | None
    """Lower end of its interval."""
    difference_high: float | None
    """Upper end of its interval."""
    difference_count: int
    """Pairs in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharpnessSummary:
    """The sharpness of a cell's runs; None if it was not measured, or every run diverged."""

    largest: float | None = None
    """The largest value measured along a run, averaged over seeds that did not diverge."""
    last: float | None = None
    """The last value measured, likewise."""
    largest_preconditioned: float | None = None
    """With AdamW, the largest value for the preconditioned Hessian, likewise."""
    largest_over_threshold: float | None = None
    """The largest value over the threshold above which SGD with that rate and momentum is unstable;
    with AdamW, that of the preconditioned Hessian over its own threshold; likewise."""
    count: int = 0
    """Seeds in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRow:
    """A cell with its results."""

    optimizer: str
    """Optimizer."""
    scaling: str
    """Scaling rule."""
    warmup: str
    """Warmup, as typed."""
    batch: int
    """Samples per update."""
    base_learning_rate: float
    """Learning rate at the reference batch."""
    peak_learning_rate: float
    """Learning rate after the warmup, as scaled."""
    warmup_steps: float
    """Updates of warmup, as scaled."""
    runs: int
    """Runs that ended."""
    diverged: int
    """Those of them that diverged."""
    chosen: bool
    """Whether its warmup is the best of those with its optimizer, rule and batch."""
    trained_only: int
    """Seeds with which this cell trains and the cell without warmup diverges."""
    diverged_only: int
    """Seeds with which this cell diverges and the cell without warmup trains."""
    validation_accuracy: MetricSummary
    """Accuracy on validation data."""
    validation_loss: MetricSummary
    """Loss on validation data."""
    test_accuracy: MetricSummary
    """Accuracy on test data."""
    test_loss: MetricSummary
    """Loss on test data."""
    sharpness: SharpnessSummary = SharpnessSummary()
    """Sharpness of training, if the run file measures it (`train.sharpness`)."""


@document("warmup_study")
@dataclass(frozen=True, slots=True, kw_only=True)
class StudyTable(Tabular):
    """Results of a study, as JSON."""

    rates: tuple[RateRow, ...]
    """The rates that were tried or given."""
    cells: tuple[CellRow, ...]
    """The cells."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The cells, a row for each."""
        return lines_of(self.cells)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyFolder:
    """Paths of the files of a study."""

    path: Path
    """The folder itself."""

    run_file = FileIn("run.toml")
    """The run.toml that all runs start from."""
    rates = FileIn("rates")
    """The sweep that found the learning rates."""
    grid = FileIn("grid")
    """The sweep of the grid."""
    data = FileIn("data")
    """Tables of runs, cells and rates, as CSV and Parquet."""
    table = FileIn("table.md")
    """The table in Markdown."""
    latex = FileIn("table.tex")
    """The table in LaTeX (booktabs)."""
    protocol = FileIn("PROTOCOL.md")
    """The protocol, written like the methods section of a paper."""
    commands = FileIn("commands.sh")
    """Commands that reproduce all of this."""

    def figure(self, suffix: str) -> Path:
        """The figure, as pdf, svg or png."""
        return self.path / f"figure.{suffix}"

    def sharpness(self, suffix: str) -> Path:
        """The figure of the sharpness along runs, if it was measured."""
        return self.path / f"sharpness.{suffix}"

    @property
    def sweeps(self) -> tuple[SweepFolder, SweepFolder]:
        """The two sweeps."""
        return SweepFolder(path=self.rates), SweepFolder(path=self.grid)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRate:
    """The learning rate of an optimizer at the reference batch."""

    optimizer: str
    """Its name."""
    rate: float
    """The rate."""
    tried: tuple[tuple[float, float | None], ...] = ()
    """Each rate that was tried, with the metric on validation data at the end, None if the run
    diverged; empty if the rate was given."""

    @property
    def is_at_edge(self) -> bool:
        """Whether a rate beyond those tried may be better."""
        return bool(self.tried) and self.rate in (self.tried[0][0], self.tried[-1][0])


def found_rates(study: Study, rows: Sequence[RunRow]) -> tuple[FoundRate, ...]:
    """The rate of each optimizer: as given, or the best on validation data in `rows` of the rate
    sweep, the smallest of equals.

    Raises:
        ConfigError: if every rate of an optimizer diverged.
    """
    sign = 1 if study.measure == "accuracy" else -1
    found = []
    for optimizer in study.optimizers:
        if optimizer.rate is not None:
            found.append(FoundRate(optimizer=optimizer.name, rate=optimizer.rate))
            continue
        mine = [row for row in rows if row.planned.run.config.optimizer.name == optimizer.name]
        tried = tuple(
            (rate, row.final and getattr(row.final, study.measure))
            for rate, row in zip(study.rates, mine, strict=True)
        )
        trained = [(rate, value) for rate, value in tried if value is not None]
        if not trained:
            accepted = f"no run of {optimizer.name} finished with these; try smaller ones"
            raise ConfigError(refusal("rates", ",".join(f"{r:g}" for r in study.rates), accepted))
        best = max(trained, key=lambda pair: sign * pair[1])
        found.append(FoundRate(optimizer=optimizer.name, rate=best[0], tried=tried))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """Results of a cell."""

    cell: Cell
    """The cell."""
    rate: float
    """Learning rate at the reference batch."""
    peak_rate: float
    """Learning rate after the warmup, as scaled."""
    warmup_steps: float
    """Updates of warmup, as scaled."""
    arm: Arm
    """Its runs."""
    baseline: Arm | None
    """Runs of the cell without warmup; None for that cell itself."""
    is_chosen: bool
    """Whether its warmup is the best on validation data of those with its optimizer, rule and
    batch, cells with a diverged run left out."""

    def over_seeds(self, metric: Metric) -> Interval | None:
        """Mean of a metric over seeds that did not diverge, with its interval; None without any."""
        return t_interval(list(self.arm.by_seed(metric).values()))

    def difference(self, metric: Metric) -> Interval | None:
        """How far a metric is above that without warmup, over pairs of runs with the same seed
        neither of which diverged."""
        return None if self.baseline is None else self.arm.difference(self.baseline, metric)

    def sharpness(self, name: SharpnessName) -> Interval | None:
        """Mean, over seeds that did not diverge, of a measure of `SharpnessSummary` along each run,
        with its interval; None without any."""

        def of(each: SharpnessMeasurement) -> float | None:
            if name == "largest_preconditioned":
                return each.preconditioned_sharpness
            if name != "largest_over_threshold":
                return each.sharpness
            for value, limit in (
                (each.sharpness, each.stability_threshold),
                (each.preconditioned_sharpness, each.preconditioned_threshold),
            ):
                if value is not None and limit:
                    return value / limit
            return None

        runs = [[of(m) for m in row.sharpness] for row in self.arm.rows if not row.has_diverged]
        found = [[value for value in values if value is not None] for values in runs]
        return t_interval([v[-1] if name == "last" else max(v) for v in found if v])

    @property
    def trained_only(self) -> tuple[int, ...]:
        """Seeds with which this cell trains and the cell without warmup diverges, which differences
        do not include."""
        return self._lost_by(self.baseline, self.arm)

    @property
    def diverged_only(self) -> tuple[int, ...]:
        """Seeds with which this cell diverges and the cell without warmup trains."""
        return self._lost_by(self.arm, self.baseline)

    @staticmethod
    def _lost_by(one: Arm | None, other: Arm | None) -> tuple[int, ...]:
        if one is None or other is None:
            return ()
        lost, kept = (
            {row.planned.run.config.seed for row in arm.rows if row.has_diverged is diverged}
            for arm, diverged in ((one, True), (other, False))
        )
        return tuple(sorted(lost & kept))


def cell_results(
    study: Study, rates: Mapping[str, float], rows: Sequence[RunRow]
) -> tuple[CellResult, ...]:
    """Results of each cell, from `rows` of the grid."""
    by_key: dict[str, list[RunRow]] = {}
    for row in rows:
        by_key.setdefault(_key(row.planned.fields), []).append(row)
    cells = study.cells
    keys = [
        _key(study.parameters | study.fields(cell, rates[cell.optimizer.name])) for cell in cells
    ]
    arms = [
        Arm(varied={}, rows=tuple(row for row in by_key[key] if row.is_finished)) for key in keys
    ]
    found = []
    for place, (cell, key, arm) in enumerate(zip(cells, keys, arms, strict=True)):
        beside = [i for i, each in enumerate(cells) if _beside(each) == _beside(cell)]
        bare = next((i for i in beside if cells[i].warmup == study.baseline), place)
        run = by_key[key][0].planned.run
        peak, warmup_epochs = run.config.schedule.scaled(run.split.global_batch)
        found.append(
            CellResult(
                cell=cell,
                rate=rates[cell.optimizer.name],
                peak_rate=peak,
                warmup_steps=warmup_epochs * run.steps_per_epoch,
                arm=arm,
                baseline=None if keys[bare] == key else arms[bare],
                is_chosen=best_arm([arms[i] for i in beside], study.measure) is arm,
            )
        )
    return tuple(found)


def _beside(cell: Cell) -> tuple[str, str, int]:
    """Key shared by cells that differ only in their warmup."""
    return cell.optimizer.name, cell.scaling, cell.batch


def cell_rows(results: Sequence[CellResult]) -> tuple[CellRow, ...]:
    """A row for each cell."""
    return tuple(
        CellRow(
            optimizer=each.cell.optimizer.name,
            scaling=each.cell.scaling,
            warmup=each.cell.warmup.text,
            batch=each.cell.batch,
            base_learning_rate=each.rate,
            peak_learning_rate=each.peak_rate,
            warmup_steps=each.warmup_steps,
            runs=len(each.arm.rows),
            diverged=len(each.arm.diverged),
            chosen=each.is_chosen,
            trained_only=len(each.trained_only),
            diverged_only=len(each.diverged_only),
            **{metric: _summary(each, metric) for metric in get_args(Metric)},
            sharpness=_sharpness_summary(each),
        )
        for each in results
    )


def _summary(result: CellResult, metric: Metric) -> MetricSummary:
    over_seeds, beside = result.over_seeds(metric), result.difference(metric)
    return MetricSummary(
        mean=over_seeds and over_seeds.mean,
        low=over_seeds and over_seeds.low,
        high=over_seeds and over_seeds.high,
        count=over_seeds.count if over_seeds else 0,
        difference=beside and beside.mean,
        difference_low=beside and beside.low,
        difference_high=beside and beside.high,
        difference_count=beside.count if beside else 0,
    )


def _sharpness_summary(result: CellResult) -> SharpnessSummary:
    largest, last, preconditioned, over = map(result.sharpness, get_args(SharpnessName))
    return SharpnessSummary(
        largest=largest and largest.mean,
        last=last and last.mean,
        largest_preconditioned=preconditioned and preconditioned.mean,
        largest_over_threshold=over and over.mean,
        count=largest.count if largest else 0,
    )


def sharpness_lines(results: Sequence[CellResult]) -> list[dict[str, JsonValue]]:
    """A line for each measurement of sharpness along each run, including diverged runs."""
    return [
        {
            **_place(each, row),
            "status": row.status,
            "step": found.step,
            "epoch": found.epoch,
            "learning_rate": found.learning_rate,
            "sharpness": found.sharpness,
            "sharpness_error": found.sharpness_error,
            "stability_threshold": found.stability_threshold,
            "preconditioned_sharpness": found.preconditioned_sharpness,
            "preconditioned_error": found.preconditioned_error,
            "preconditioned_threshold": found.preconditioned_threshold,
        }
        for each in results
        for row in each.arm.rows
        for found in row.sharpness
    ]


def _place(each: CellResult, row: RunRow) -> dict[str, JsonValue]:
    """Columns that identify the cell and seed of a run."""
    return {
        "optimizer": each.cell.optimizer.name,
        "scaling": each.cell.scaling,
        "warmup": each.cell.warmup.text,
        "batch": each.cell.batch,
        "seed": row.planned.run.config.seed,
        "run": row.planned.name,
    }


def lines_of(rows: Sequence[CellRow | RateRow]) -> list[dict[str, JsonValue]]:
    """The rows as lines of a table, with columns such as `test_loss_mean`."""
    return [flat(asdict(each), separator="_") for each in rows]


def run_lines(results: Sequence[CellResult]) -> list[dict[str, JsonValue]]:
    """A line for each run of each cell; a run that two cells share has a line for each."""
    lines = []
    for each in results:
        for row in each.arm.rows:
            final, tested = row.final, row.final_test
            lines.append(
                {
                    **_place(each, row),
                    "status": row.status,
                    "steps": row.steps,
                    "validation_accuracy": final and final.accuracy,
                    "validation_loss": final and final.loss,
                    "test_accuracy": tested and tested.test_accuracy,
                    "test_loss": tested and tested.test_loss,
                }
            )
    return lines


def rate_rows(found: Sequence[FoundRate]) -> tuple[RateRow, ...]:
    """A row for each rate that was tried or given; diverged runs have no value."""
    return tuple(
        RateRow(
            optimizer=each.optimizer,
            learning_rate=rate,
            validation=value,
            chosen=rate == each.rate,
            at_edge=rate == each.rate and each.is_at_edge,
        )
        for each in found
        for rate, value in each.tried or ((each.rate, None),)
    )
