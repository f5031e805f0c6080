"""What commands list, as documents: the catalogue, published networks, fields, schedules, runs.

Knows no terminal; `report.terminal` prints the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from scalejax.config.presets import Preset
from scalejax.config.reference import TableReference
from scalejax.config.run import ResolvedRun
from scalejax.core.serialization import JsonValue, document, plain
from scalejax.core.tabular import Tabular
from scalejax.hardware import Chip, Cluster, InputRates
from scalejax.planning.search.run import in_words
from scalejax.planning.settings_grid import LayoutEntry, Origin, Setting, SettingsGrid
from scalejax.planning.time_to_target.plan import Plan
from scalejax.report.sources import Sources
from scalejax.simulator.frameworks import Framework
from scalejax.simulator.input import InputPace, Limit
from scalejax.simulator.predict import Prediction, ScalingPrediction
from scalejax.training.record import DivergenceCause, RunRecord, Status
from scalejax.training.sample_life import LifeStage, life_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """A published network."""

    name: str
    """The name for `model.name`."""
    network: str
    """Its architecture."""
    parameters: int
    """Parameters, as published."""
    active_parameters: int | None
    """Parameters of a mixture of experts that a token goes through; None if not published."""
    tokens_per_sample: int | None
    """Tokens of a sample while it was pretrained; None for images."""
    global_batch: int | None
    """Samples per update as published; None if not kept here."""
    total_tokens: int | None
    """Tokens that it was trained on; None if not kept here."""
    source: str
    """Publication."""


@document("models")
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelList(Tabular):
    """Published networks by name."""

    models: tuple[ModelRow, ...]
    """The networks."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The networks, a row for each."""
        return [asdict(each) for each in self.models]


def models(presets: Mapping[str, Preset]) -> ModelList:
    """The list of these networks."""
    return ModelList(
        models=tuple(
            ModelRow(
                name=name,
                network=each.network,
                parameters=each.parameters,
                active_parameters=each.active_parameters,
                tokens_per_sample=each.pretraining_tokens,
                global_batch=each.published_batch,
                total_tokens=each.pretraining.total_tokens if each.pretraining else None,
                source=each.source,
            )
            for name, each in presets.items()
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkRow:
    """A framework that steps are predicted for."""

    name: str
    """The name for --framework."""
    title: str
    """Its full name."""
    year: int
    """Year of its software."""


@document("frameworks")
@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkList(Tabular):
    """The frameworks that steps are predicted for."""

    frameworks: tuple[FrameworkRow, ...]
    """The frameworks."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The frameworks, a row for each."""
        return [asdict(each) for each in self.frameworks]


def frameworks(every: Iterable[Framework]) -> FrameworkList:
    """The list of these frameworks."""
    rows = (FrameworkRow(name=each.name, title=each.title, year=each.year) for each in every)
    return FrameworkList(frameworks=tuple(rows))


@document("hardware")
@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareList(Tabular):
    """Entries of the catalogue in full, with the source of each number."""

    clusters: tuple[Cluster, ...] = ()
    """Clusters, each with its chip, links, network and library."""
    chips: tuple[Chip, ...] = ()
    """Chips."""
    frameworks: tuple[FrameworkRow, ...] = ()
    """Frameworks."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The figures of the tables, a row for each entry."""
        rows: list[dict[str, JsonValue]] = [
            {
                "kind": "cluster",
                "name": each.name,
                "title": each.title,
                "chip": each.chip.name,
                "devices_per_node": each.devices_per_node,
                "link_bytes_per_second": each.link.bytes_per_second,
                "network_bytes_per_second": each.network and each.network.bytes_per_second,
            }
            for each in self.clusters
        ]
        rows += [
            {
                "kind": "chip",
                "name": each.name,
                "title": each.title,
                "memory_bytes": each.memory_bytes,
                "memory_bytes_per_second": each.memory_bytes_per_second,
                "peak_flop_per_second": dict(each.peak_flop_per_second),
            }
            for each in self.chips
        ]
        return [*rows, *({"kind": "framework", **asdict(each)} for each in self.frameworks)]


@document("config_fields")
@dataclass(frozen=True, slots=True, kw_only=True)
class FieldList(Tabular):
    """Fields of a run.toml."""

    tables: tuple[TableReference, ...]
    """The tables, each with its fields."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The fields, a row for each."""
        return [
            {"table": table.title, **asdict(each)} for table in self.tables for each in table.fields
        ]


@document("schedule")
@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTable(Tabular):
    """The learning rate of a run, update by update."""

    learning_rates: tuple[float, ...]
    """The rate of each update, in order."""
    epochs: tuple[float, ...]
    """Epochs before each update."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The updates, a row for each."""
        places = enumerate(zip(self.epochs, self.learning_rates, strict=True), start=1)
        return [
            {"step": step, "epoch": epoch, "learning_rate": rate} for step, (epoch, rate) in places
        ]


@document("resolved_run")
@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRunTable(Tabular):
    """A run on a given number of devices."""

    run: ResolvedRun
    """Its config, layout and batches."""
    steps_per_epoch: int
    """Updates in an epoch."""
    total_steps: int
    """Updates in all."""
    peak_learning_rate: float
    """Largest learning rate."""
    notes: tuple[str, ...]
    """What may be unexpected."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """One row of all fields."""
        row = plain(self)
        return [row] if isinstance(row, dict) else []


def resolved_run(
    run: ResolvedRun, learning_rates: Sequence[float], notes: Iterable[str]
) -> ResolvedRunTable:
    """The table of a run."""
    return ResolvedRunTable(
        run=run,
        steps_per_epoch=run.steps_per_epoch,
        total_steps=run.total_steps,
        peak_learning_rate=max(learning_rates, default=0.0),
        notes=tuple(notes),
    )


@document("calibration")
@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated(Tabular):
    """A cluster that was measured on this machine, or fitted to runs."""

    cluster: Cluster
    """The devices of one process."""
    processes: Cluster | None
    """Several processes; None if they were not measured."""
    notes: tuple[str, ...]
    """Caveats."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """All numbers, a row for each cluster."""
        rows = [plain(each) for each in (self.cluster, self.processes) if each is not None]
        return [row for row in rows if isinstance(row, dict)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """How a run went, from its first session to its last; what it lacks is None."""

    name: str
    """Name of the run."""
    folder: str
    """Folder of its record."""
    status: Status | None
    """How it ended, or its current status."""
    cause: DivergenceCause | None
    """Why it diverged."""
    message: str | None
    """The cause in words."""
    steps: int
    """Updates made."""
    epochs: float
    """Passes over the data made."""
    elapsed_seconds: float
    """Time since training began."""
    loss: float | None
    """Loss of the last update measured; like the next four fields, None if the run diverged."""
    validation_loss: float | None
    """Loss in its last evaluation on validation data."""
    validation_accuracy: float | None
    """Accuracy in that evaluation, 0..1."""
    test_loss: float | None
    """Loss in its last evaluation on test data."""
    test_accuracy: float | None
    """Accuracy in that evaluation, 0..1."""
    step_seconds: float | None
    """Median measured time of an update."""
    predicted_step_seconds: float | None
    """The time of an update as predicted before training."""
    life: tuple[LifeStage, ...]
    """Life of a batch of the last epoch, stage by stage; empty if it was not measured."""


def run_summary(record: RunRecord, prediction: Prediction | None, name: str) -> RunSummary:
    """The summary of a run.

    Args:
        record: its measurements.
        prediction: the one from before training.
        name: name of the run.
    """
    last, change = record.measurements[-1:], record.statuses[-1:]
    epochs = [each.epoch for each in (*record.training, *record.monitored)]
    has_result = record.status != "diverged"
    update, validation = record.training[-1:], record.validations[-1:]
    return RunSummary(
        name=name,
        folder=str(record.folder.path),
        status=record.status,
        cause=change[0].cause if change else None,
        message=change[0].message if change else None,
        steps=max((each.step for each in record.measurements), default=0),
        epochs=max(epochs, default=0.0),
        elapsed_seconds=last[0].elapsed_seconds if last else 0.0,
        loss=update[0].loss if has_result and update else None,
        validation_loss=validation[0].loss if has_result and validation else None,
        validation_accuracy=validation[0].accuracy if has_result and validation else None,
        test_loss=record.tested.loss if has_result and record.tested else None,
        test_accuracy=record.tested.accuracy if has_result and record.tested else None,
        step_seconds=record.median_step_seconds,
        predicted_step_seconds=prediction and prediction.step_seconds,
        life=life_of(record.input[-1], prediction) if record.input else (),
    )


def _run_rows(runs: Sequence[RunSummary]) -> list[dict[str, JsonValue]]:
    """A row for each run, without the life of its batches."""
    rows = [asdict(each) for each in runs]
    return [{name: row[name] for name in row if name != "life"} for row in rows]


@document("runs")
@dataclass(frozen=True, slots=True, kw_only=True)
class RunList(Tabular):
    """How runs went."""

    runs: tuple[RunSummary, ...]
    """The runs."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The runs, a row for each."""
        return _run_rows(self.runs)


@document("report")
@dataclass(frozen=True, slots=True, kw_only=True)
class ReportContents(Tabular):
    """What a report shows."""

    page: str
    """The HTML file."""
    runs: tuple[RunSummary, ...]
    """Its runs, those of sweeps last."""
    predictions: tuple[ScalingPrediction, ...]
    """Its predictions over numbers of devices."""
    sweeps: tuple[str, ...]
    """Names of its sweeps, in whose folders are tables of their arms."""
    benches: tuple[str, ...]
    """Names of its benches, in whose folders are their results."""
    plans: tuple[Plan, ...]
    """Its plans."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """A row for each run; without runs, one for each number of devices of the predictions;
        without these, one for each point of the plans."""

        def rows(found: Sequence[ScalingPrediction | Plan]) -> list[dict[str, JsonValue]]:
            return [{"title": each.title, **row} for each in found for row in each.to_rows()]

        return _run_rows(self.runs) or rows(self.predictions) or rows(self.plans)


def report_contents(sources: Sources, page: str) -> ReportContents:
    """What the report of these sources shows, in the file `page`."""
    return ReportContents(
        page=page,
        runs=tuple(
            run_summary(each.record, each.prediction, each.label) for each in sources.curves
        ),
        predictions=sources.studies,
        sweeps=tuple(each.name for each in sources.sweeps),
        benches=tuple(each.name for each in sources.benches),
        plans=sources.plans,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceRow:
    """Input of a host with a certain number of workers."""

    workers: int
    """Worker processes; 0 for threads of the training process."""
    samples_per_second: float
    """Samples per second delivered to the host's devices."""
    limit: Limit
    """What bounds it."""
    stage_seconds: dict[str, float]
    """Processor seconds of a sample, by stage."""


@document("input_bench")
@dataclass(frozen=True, slots=True, kw_only=True)
class InputBench(Tabular):
    """The input of a run as measured on this host."""

    rates: InputRates
    """Rates of its stages, which predictions use."""
    paces: tuple[PaceRow, ...]
    """How fast it is, by number of workers."""
    life: tuple[LifeStage, ...]
    """The life of a batch, measured and predicted."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """A row for each number of workers."""
        return [asdict(each) for each in self.paces]


def input_bench(
    rates: InputRates, paces: Iterable[tuple[int, InputPace]], life: Sequence[LifeStage]
) -> InputBench:
    """What was measured on a host, with its pace by number of workers."""
    return InputBench(
        rates=rates,
        paces=tuple(
            PaceRow(
                workers=workers,
                samples_per_second=pace.samples_per_second,
                limit=pace.limit,
                stage_seconds=dict(pace.stages),
            )
            for workers, pace in paces
        ),
        life=tuple(life),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRow:
    """A layout at one setting of a page."""

    setting: Setting
    """The setting."""
    layout: str
    """Parallelism, microbatch and recompute, in words."""
    step_seconds: float
    """Median time of an update."""
    p10_step_seconds: float | None
    """Lower end of its band."""
    p90_step_seconds: float | None
    """Upper end of its band."""
    tokens_per_second: float | None
    """Tokens trained per second over all devices."""
    mfu: float | None
    """Model FLOP utilisation, 0..1."""
    peak_memory_bytes: int
    """Peak memory of a device."""
    fits: bool
    """Whether that memory fits."""
    origin: Origin
    """Where the step is from: the compiled program, the closed form of a framework with kernels of
    its own, or a closed form that was not compiled, which is not what `predict` says."""
    closed_form_seconds: float | None
    """Time of a compiled step according to its closed form."""


@document("page")
@dataclass(frozen=True, slots=True, kw_only=True)
class PageContents(Tabular):
    """What an interactive page can show."""

    page: str
    """The HTML file."""
    page_bytes: int
    """Its size."""
    tokens: float
    """Tokens that it starts with."""
    tokens_per_sample: int
    """Tokens of a sample."""
    layouts: tuple[SettingRow, ...]
    """The layouts of each setting, the fastest that fits first."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The layouts, a row for each."""
        rows = (asdict(each) for each in self.layouts)
        return [{**row.pop("setting"), **row} for row in rows]


def page_contents(grid: SettingsGrid, page: str, page_bytes: int, tokens: float) -> PageContents:
    """What the page of these settings, a file of `page_bytes`, can show."""
    return PageContents(
        page=page,
        page_bytes=page_bytes,
        tokens=tokens,
        tokens_per_sample=grid.tokens_per_sample,
        layouts=tuple(
            _setting_row(setting, entry)
            for setting, entries in grid.entries.items()
            for entry in entries
        ),
    )


def _setting_row(setting: Setting, entry: LayoutEntry) -> SettingRow:
    found = entry.prediction
    return SettingRow(
        setting=setting,
        layout=in_words(entry.strategy),
        step_seconds=found.step_seconds,
        p10_step_seconds=found.p10_step_seconds,
        p90_step_seconds=found.p90_step_seconds,
        tokens_per_second=found.tokens_per_second,
        mfu=found.mfu,
        peak_memory_bytes=found.peak_memory_bytes,
        fits=found.fits,
        origin=entry.origin,
        closed_form_seconds=entry.closed_form_seconds,
    )
