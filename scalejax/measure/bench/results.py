"""Results of a bench, read from its folder: a summary of each benchmark.

Knows files and their statistics; starts no processes.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import mean, median
from typing import Any

from scalejax.core import metrics, serialization
from scalejax.core.errors import ConfigError, refusal
from scalejax.core.serialization import JsonValue, document
from scalejax.core.tabular import Scalar, Tabular, scalar
from scalejax.measure.bench.folder import BenchFolder
from scalejax.measure.bench.monitor import Usage
from scalejax.measure.bench.plan import Benchmark, BenchPlan, Job, Settings
from scalejax.measure.bench.statistics import Speed, median_interval, speed
from scalejax.measure.bench.tables import Scaling, ScalingTable, column_of
from scalejax.measure.fit import FEWEST, MeasuredRun, spread
from scalejax.simulator.program import load_program
from scalejax.sweep.plan import in_words

_PLACES = ("devices", "processes", "scaling")


@document("bench_result")
@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Measurements of one benchmark in one round."""

    platform: str
    """Platform of the devices: cpu, gpu, tpu."""
    device_kind: str
    """Name of the devices."""
    versions: str
    """Versions of the software that ran."""
    started: str
    """Start time by the clock of the machine, ISO 8601."""
    load_average: float
    """Load average of the machine over the preceding minute."""
    compile_seconds: float
    """Time to trace and compile the step."""
    global_batch: int
    """Samples per step, all devices."""
    warmup_seconds: tuple[float, ...]
    """Times of the warm-up steps."""
    step_seconds: tuple[float, ...]
    """Times of the timed steps, each from the end of the previous step to its own end."""
    wait_seconds: tuple[float, ...]
    """Time that the devices waited for a batch, for each timed step."""
    usage: tuple[Usage, ...]
    """Samples of CPU, memory and threads of the processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow(Settings):
    """A benchmark: how it was timed, and its results over all rounds; None before the first."""

    name: str
    """Its folder."""
    varied: dict[str, Scalar]
    """Its values of the fields in which benchmarks of the bench differ; lists as JSON."""
    global_batch: int
    """Samples per step, all devices."""
    per_device_batch: int
    """Samples per step, each device."""
    rounds: int
    """Finished rounds."""
    median_step_seconds: float | None = None
    """Median time of a step."""
    median_low_seconds: float | None = None
    """Lower end of its 95 % interval."""
    median_high_seconds: float | None = None
    """Upper end of its 95 % interval."""
    mean_step_seconds: float | None = None
    """Mean time of a step."""
    samples_per_second: float | None = None
    """Throughput at the median."""
    speed: Speed | None = None
    """Throughput as tf_cnn_benchmarks reports it."""
    wait_share: float | None = None
    """Share of the time that the devices waited for a batch, 0..1."""
    compile_seconds: float | None = None
    """Median time to trace and compile the step."""


@document("bench_results")
@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResults(Tabular):
    """Results of a bench."""

    rows: tuple[BenchRow, ...]
    """The benchmarks, in order."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The benchmarks, a row for each."""
        return [{"name": each.name, **asdict(each)} for each in self.rows]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A benchmark with all its finished rounds."""

    benchmark: Benchmark
    """The benchmark."""
    results: tuple[BenchResult, ...]
    """Results by round; empty if none is finished."""

    @property
    def is_measured(self) -> bool:
        """Whether any round is finished."""
        return bool(self.results)

    @property
    def global_batch(self) -> int:
        """Samples per step, all devices."""
        return self.benchmark.run.split.global_batch

    @cached_property
    def step_seconds(self) -> tuple[float, ...]:
        """Times of the timed steps of all rounds."""
        return tuple(each for result in self.results for each in result.step_seconds)

    @cached_property
    def median_seconds(self) -> float:
        """Median time of a step, over all rounds."""
        return median(self.step_seconds)

    @cached_property
    def mean_seconds(self) -> float:
        """Mean time of a step, over all rounds."""
        return mean(self.step_seconds)

    @cached_property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the median step time."""
        return median_interval([result.step_seconds for result in self.results])

    @cached_property
    def speed(self) -> Speed:
        """Throughput as tf_cnn_benchmarks reports it, over all rounds."""
        return speed(self.global_batch, self.step_seconds)

    @property
    def wait_share(self) -> float:
        """Share of the time that the devices waited for a batch, 0..1."""
        waited = sum(each for result in self.results for each in result.wait_seconds)
        return waited / sum(self.step_seconds)

    @property
    def step_cv(self) -> float | None:
        """Spread of single steps over their median, from the quartiles; None with few steps."""
        return spread(self.step_seconds)

    def seconds(self, statistic: str) -> float:
        """The "median" or "mean" step time."""
        return self.mean_seconds if statistic == "mean" else self.median_seconds


def read_summaries(plan: BenchPlan, folder: BenchFolder) -> list[Summary]:
    """Summaries of the benchmarks of `plan`; a damaged result counts as missing.

    Raises:
        ConfigError: if results are from several kinds of devices.
    """
    found = [
        Summary(
            benchmark=each,
            results=tuple(
                result
                for repeat in range(plan.repeats)
                if (result := read_result(each, folder, repeat)) is not None
            ),
        )
        for each in plan.benchmarks
    ]
    kinds = sorted({result.device_kind for each in found for result in each.results})
    if len(kinds) > 1:
        raise ConfigError(
            f"{folder.path} holds results of {' and of '.join(kinds)}, which cannot be "
            "compared; give each a --folder of its own, or --rerun to time all on this one."
        )
    return found


def read_result(benchmark: Benchmark, folder: BenchFolder, repeat: int) -> BenchResult | None:
    """The result of a round; None if there is none or it cannot be read."""
    path = folder.result(benchmark.name, repeat)
    if not path.is_file():
        return None
    try:
        return serialization.load(BenchResult, path)
    except ConfigError:  # from an earlier version, or cut off: measured again
        return None


def read_plan(folder: BenchFolder) -> BenchPlan:
    """The last plan measured in `folder`, with its started benchmarks.

    Raises:
        ConfigError: if there is no plan, or it is damaged.
    """
    written: dict[str, Any] = serialization.unstamped(
        "bench_plan", 1, serialization.load(dict, folder.plan)
    )
    entries, repeats = written.get("benchmarks"), written.get("repeats")
    if not isinstance(entries, list) or not isinstance(repeats, int):
        raise ConfigError(f"{folder.plan} is not a plan of scalejax bench.")
    benchmarks = []
    for entry in entries:
        if not _is_entry(entry):
            raise ConfigError(
                f"{folder.plan} is not a plan of scalejax bench: an entry is damaged."
            )
        path = folder.job(str(entry["name"]))
        if path.is_file():
            job = serialization.load(Job, path)
            benchmarks.append(
                Benchmark(
                    settings=job.settings,
                    fields=dict(entry["fields"]),
                    varied=dict(entry["varied"]),
                    run=job.run,
                )
            )
    text = folder.run_file.read_text(encoding="utf-8")
    return BenchPlan(text=text, benchmarks=tuple(benchmarks), repeats=repeats)


def _is_entry(entry: object) -> bool:
    """Whether it has the name, fields and varied fields of a benchmark."""
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and all(isinstance(entry.get(each), dict) for each in ("fields", "varied"))
    )


def groups(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """Benchmarks grouped by label; members of a group differ only in devices.

    Labels name the process count only if two would otherwise be equal.
    """
    for places in (_PLACES, ("devices", "scaling")):
        found: dict[str, list[Summary]] = {}
        for each in summaries:
            found.setdefault(_label(each, places), []).append(each)
        if all(len({s.benchmark.settings.devices for s in g}) == len(g) for g in found.values()):
            break
    return found


def _label(summary: Summary, places: Sequence[str]) -> str:
    benchmark = summary.benchmark
    split, scaling = benchmark.run.split, benchmark.settings.scaling
    batch = ("batch.global_batch", "batch.per_device_batch")
    rest = {n: v for n, v in benchmark.varied.items() if n not in (*places, *batch)}
    kept = (
        f"{split.per_device_batch} per device"
        if scaling == "weak"
        else f"{split.global_batch} in all"
    )
    words = in_words(rest)
    return f"{words} {kept}".strip()


def scaling_table(
    summaries: Sequence[Summary],
    scaling: Scaling,
    *,
    baseline: int | None = None,
    clamps: bool = False,
    statistic: str = "median",
) -> ScalingTable | None:
    """Table of the weak- or strong-scaling benchmarks over devices; None if there are none.

    Args:
        summaries: those of a bench.
        scaling: weak or strong.
        baseline: device count to compare with; if None, the fewest.
        clamps: whether to show efficiencies above 100 as 100.
        statistic: "median" or "mean" time of a step.

    Raises:
        ConfigError: if nothing was measured on the baseline.
    """
    chosen = [s for s in summaries if s.benchmark.settings.scaling == scaling and s.is_measured]
    if not chosen:
        return None
    counts = sorted({each.benchmark.settings.devices for each in chosen})
    milliseconds, throughputs, labels = [], [], []
    for label, members in groups(chosen).items():
        by_count = {each.benchmark.settings.devices: each for each in members}
        row = [by_count.get(count) for count in counts]
        labels.append(label)
        milliseconds.append(tuple(s and 1e3 * s.seconds(statistic) for s in row))
        throughputs.append(tuple(s and s.global_batch / s.seconds(statistic) for s in row))
    return ScalingTable(
        scaling=scaling,
        device_counts=tuple(counts),
        labels=tuple(labels),
        milliseconds=tuple(milliseconds),
        samples_per_second=tuple(throughputs),
        baseline=column_of(baseline, counts),
        clamps=clamps,
    )


def kept_share(
    summary: Summary, summaries: Sequence[Summary], baseline: int | None = None
) -> float | None:
    """Per-device throughput relative to the baseline, 0..1 and above, from the medians.

    Unlike the tables of DLBS, it compares several processes with one process if the baseline was
    measured only in one.

    Args:
        summary: a measured benchmark.
        summaries: those of its bench, including its baseline.
        baseline: device count of the baseline; if None, the fewest of the bench.

    Returns:
        None if no baseline differs from it only in devices and processes.
    """
    settings = summary.benchmark.settings
    measured = [each for each in summaries if each.is_measured]
    count = baseline or min(each.benchmark.settings.devices for each in measured)
    alike = [
        each
        for each in measured
        if each.benchmark.settings.devices == count
        and each.benchmark.settings.scaling == settings.scaling
        and _label(each, _PLACES) == _label(summary, _PLACES)
    ]
    if not alike:
        return None
    # Prefer a baseline with as many processes, else the one with the fewest.
    base = min(
        alike,
        key=lambda each: (
            each.benchmark.settings.processes != settings.processes,
            each.benchmark.settings.processes,
        ),
    )
    if settings.scaling == "weak":
        return metrics.weak_scaling_efficiency(base.median_seconds, summary.median_seconds)
    return metrics.strong_scaling_efficiency(
        base.median_seconds, count, summary.median_seconds, settings.devices
    )


def row_of(summary: Summary) -> BenchRow:
    """Row of a benchmark in `results.json`."""
    benchmark = summary.benchmark
    row = BenchRow(
        **asdict(benchmark.settings),
        name=benchmark.name,
        varied={name: scalar(value) for name, value in benchmark.varied.items()},
        global_batch=benchmark.run.split.global_batch,
        per_device_batch=benchmark.run.split.per_device_batch,
        rounds=len(summary.results),
    )
    if not summary.is_measured:
        return row
    low, high = summary.interval
    return replace(
        row,
        median_step_seconds=summary.median_seconds,
        median_low_seconds=low,
        median_high_seconds=high,
        mean_step_seconds=summary.mean_seconds,
        samples_per_second=summary.global_batch / summary.median_seconds,
        speed=summary.speed,
        wait_share=summary.wait_share,
        compile_seconds=median(each.compile_seconds for each in summary.results),
    )


def measured_runs(
    summaries: Sequence[Summary],
    folder: BenchFolder,
    device_counts: Sequence[int] | None = None,
    *,
    processes: int = 1,
) -> list[MeasuredRun]:
    """The benchmarks on the given device counts, for fitting the constants of a cluster.

    Args:
        summaries: those of the bench in `folder`.
        folder: the folder of their programs.
        device_counts: device counts; if None, all.
        processes: process count of the benchmarks.

    Raises:
        ConfigError: if one of these counts was not measured.
    """
    planned = [each for each in summaries if each.benchmark.settings.processes == processes]
    measured = [each for each in planned if each.is_measured]
    counts = {each.benchmark.settings.devices for each in measured}
    for wanted in device_counts or ():
        if wanted not in counts:
            there = ", ".join(map(str, sorted(counts))) or "none"
            place = "1 process" if processes == 1 else f"{processes} processes"
            accepted = f"in {place}, {folder.path} has measured {there}"
            raise ConfigError(refusal("devices", wanted, accepted))
    if len(measured) < FEWEST <= len(planned):
        names = ", ".join(each.benchmark.name for each in planned if not each.is_measured)
        raise ConfigError(
            f"{folder.path} has too few results for a fit, which needs at least {FEWEST}: "
            f"{names} has none that can be read; the same scalejax bench times it."
        )
    return [
        _as_run(each, folder)
        for each in measured
        if device_counts is None or each.benchmark.settings.devices in device_counts
    ]


def is_benchmark(path: Path) -> bool:
    """Whether `path` is the folder of a benchmark within the folder of a bench."""
    folder = BenchFolder(path=path.parent.parent)
    return folder.plan.is_file() and folder.job(path.name).is_file()


def measured_run(path: Path) -> MeasuredRun:
    """The benchmark in the folder `path`, for fitting the constants of a cluster.

    Raises:
        ConfigError: if it is not measured, or not in the last plan measured.
    """
    folder = BenchFolder(path=path.parent.parent)
    for each in read_summaries(read_plan(folder), folder):
        if each.benchmark.name == path.name and each.is_measured:
            return _as_run(each, folder)
    accepted = f"it has no finished round in the plan of {folder.path}"
    raise ConfigError(refusal("from", str(path), accepted))


def _as_run(summary: Summary, folder: BenchFolder) -> MeasuredRun:
    name = summary.benchmark.name
    return MeasuredRun(
        name=str(folder.benchmark(name)),
        program=load_program(folder.program(name)),
        step_seconds=summary.median_seconds,
        step_cv=summary.step_cv,
    )
