"""Commands about runs: train, report, config show, config fields, schedule plot, quickstart.

Imported without JAX, which is imported when they run.
"""

import os
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional

from scalejax.cli.command import (
    CsvFile,
    JsonFile,
    Overrides,
    PlainCommand,
    RunFileCommand,
    flag,
    require_result_files,
    write_result,
)
from scalejax.config.advice import notes_of
from scalejax.config.checks import require_listable_steps
from scalejax.config.run import ResolvedRun, load_config, resolve
from scalejax.core import process_group, serialization
from scalejax.core.environment import choose_platform, limit_arenas
from scalejax.core.errors import ConfigError, ExitCode
from scalejax.core.folder import FileIn
from scalejax.launch.peers import PeerWatch, require_stuck_seconds
from scalejax.report.terminal import data as data_tables
from scalejax.report.terminal import tables
from scalejax.training.record import RunFolder, RunRecord, facts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(RunFileCommand):
    """Train the run of a run.toml on the devices you have.

    Started by srun, mpirun or scalejax launch, its processes join one run. A flag with a dot
    replaces a field of the file, such as --train.epochs 3. SIGINT and SIGTERM end the run after the
    current update and a checkpoint; without a checkpoint 20 s later, if the update does not finish;
    within 5 s before training.

    Exit codes: 0 when the run is completed, 2 when its input is refused, 3 when it diverged (no
    weights are kept), 4 when what is stored is damaged, 5 when a process is lost, 75 when the
    network or a store fails, 128 + n after signal n. After 4, 5 and 75, start the run again.
    """

    folder: Annotated[Path | None, flag("DIR")] = None
    """Folder of the run record and checkpoints. By default runs/ and the name of the file."""
    resume: FlagCreatePairsOff[bool] = False
    """Resume from the newest checkpoint in the folder that verifies."""
    start_over: FlagCreatePairsOff[bool] = False
    """With --resume: if steps are recorded but no checkpoint verifies, begin at the first step
    instead of refusing."""
    cpu_devices: Annotated[int | None, flag("N")] = None
    """Divide the CPU into N virtual devices, and train on those."""
    profile: FlagCreatePairsOff[bool] = False
    """Record a trace of some steps, for scalejax explain --trace."""
    profile_schedule: Annotated[str, flag("WAIT,WARMUP,ACTIVE,REPEAT")] = "10,2,5,1"
    """Steps to trace: ACTIVE steps after WAIT and WARMUP, REPEAT times. By default 10,2,5,1."""
    stuck_seconds: Annotated[int, flag("N")] = 60
    """Time without progress after which a run counts as hung, however it was started: its processes
    then write their stacks, name the one that the others wait for, and exit. Ten times the slowest
    so far of an update, batch, evaluation or checkpoint if that is more; five times N for a
    checkpoint, and thirty while it starts, compiles, or does the first two of a kind. By default
    60; 0 for no watch."""
    json: JsonFile = None
    """Write a summary of the run here as JSON (scalejax schema); its folder has every
    measurement."""
    csv: CsvFile = None
    """Write the same here as CSV, without the life of a batch."""

    def execute(self, overrides: Overrides) -> None:
        """Train, and print where the record is."""
        config = load_config(self.run_file, overrides)
        folder = self.folder or Path("runs") / self.run_file.stem
        require_result_files(self.json, self.csv, folder, FileIn.names(RunFolder))
        require_stuck_seconds(self.stuck_seconds)
        limit_arenas()
        choose_platform(self.cpu_devices)
        place = process_group.place_here()
        process_group.join(place)
        with process_group.leaving_at_once(place), PeerWatch(place, self.stuck_seconds):
            from scalejax.api import train
            from scalejax.training.profiler import parse_schedule
            from scalejax.training.time_accounting import process_seconds

            traces = parse_schedule(self.profile_schedule) if self.profile else None
            record = train(
                config,
                folder,
                resume=self.resume,
                start_over=self.start_over,
                traces=traces,
                startup_seconds=process_seconds(),
                leave=os._exit,
            )
        if place is None or place.process == 0:
            if traces is not None:
                print(f"traces are in {folder / 'traces'}, by their first step")
            _show_life(record)
            write_run(record, self.json, self.csv)
            print(f"scalejax report {folder} draws its curves.")
        if record.status == "diverged":
            raise SystemExit(ExitCode.DIVERGED)


def write_run(record: RunRecord, json: Path | None, csv: Path | None) -> None:
    """Write a summary of a run to --json and --csv, if given.

    Raises:
        ConfigError: if a file cannot be written.
    """
    if json is None and csv is None:
        return
    from scalejax.report.listings import RunList, run_summary
    from scalejax.training.run_folder import kept_prediction

    name = record.folder.path.resolve().name
    found = run_summary(record, kept_prediction(record.folder), name)
    write_result(RunList(runs=(found,)), json, csv)


def _show_life(record: RunRecord) -> None:
    """Print the life of the batches of the last epoch, if it was measured."""
    if not record.input:
        return
    from scalejax.training.run_folder import kept_prediction
    from scalejax.training.sample_life import life_of

    measured = record.input[-1]
    tables.show(data_tables.life(measured, life_of(measured, kept_prediction(record.folder))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(PlainCommand):
    """Plot runs, sweeps and predictions in one HTML report.

    For a sweep it shows means over seeds and the curves of all runs; for several runs, the
    difference in loss of each from the first after warmup.
    """

    sources: Annotated[Positional[tuple[Path, ...]], flag("RUN_OR_PREDICTION")]
    """Folders written by train, emulate and sweep, and JSON files written by predict and plan."""
    output: Annotated[Path, flag("FILE")] = Path("report.html")
    """The HTML file. By default report.html."""
    json: JsonFile = None
    """Write what it shows here as JSON (scalejax schema): summaries of runs, and predictions."""
    csv: CsvFile = None
    """Write a row for each run here as CSV; without runs, for each prediction, or else for each
    point of a plan."""

    def execute(self) -> None:
        """Read the sources and write the report."""
        from scalejax.report.html.report import render
        from scalejax.report.listings import report_contents
        from scalejax.report.sources import read_sources

        serialization.require_writable("output", self.output)
        require_result_files(self.json, self.csv)
        sources = read_sources(self.sources)
        serialization.save_text(render(sources, "scalejax report"), self.output)
        print(f"wrote {self.output}")
        if self.json is not None or self.csv is not None:
            write_result(report_contents(sources, str(self.output)), self.json, self.csv)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigShow(RunFileCommand):
    """Print the resolved run: batches, steps, learning rates.

    RUN.toml may also be the folder of a run, whose data need not exist any more.
    """

    devices: Annotated[int | None, flag("N")] = None
    """Number of devices. By default that of the layout, or else of this machine."""
    json: JsonFile = None
    """Write the result here as JSON (scalejax schema)."""
    csv: CsvFile = None
    """Write all fields here as CSV, in SI units."""

    def execute(self, overrides: Overrides) -> None:
        """Resolve the run and print it."""
        from scalejax.report.listings import resolved_run

        require_result_files(self.json, self.csv)
        run = _resolve_here(self.run_file, overrides, self.devices)
        learning = None if run.config.fine_tuning is None else _learning_count(run)
        rates = _learning_rates(run)
        shown = tables.run(run, rates)
        notes = (*notes_of(run), *_missing(run))
        tables.show(chain(shown, data_tables.update(run, learning, notes)))
        write_result(resolved_run(run, rates, notes), self.json, self.csv)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFields(PlainCommand):
    """List the fields of a run.toml: type, default, meaning."""

    name: Annotated[Positional[str | None], flag("NAME")] = None
    """A table or field by its dotted name, such as layout or batch.microbatches. By default all."""
    grep: Annotated[str | None, flag("TEXT")] = None
    """Only fields with TEXT in their name, values or meaning, in any case."""
    json: JsonFile = None
    """Write the result here as JSON (scalejax schema)."""
    csv: CsvFile = None
    """Write a row for each field here as CSV."""

    def execute(self) -> None:
        """Print the reference of these fields."""
        from scalejax.config.presets import PRESETS
        from scalejax.config.reference import containing, named_reference, run_reference
        from scalejax.report.listings import FieldList

        require_result_files(self.json, self.csv)
        sections = run_reference() if self.name is None else named_reference(self.name)
        if self.grep is not None:
            sections = containing(sections, self.grep)
        tables.show(tables.reference(sections, PRESETS))
        write_result(FieldList(tables=tuple(sections)), self.json, self.csv)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigMigrate(PlainCommand):
    """Rewrite a run.toml of an earlier version with current names.

    Comments and order stay. Files with the old names can still be read, with a note.
    """

    run_file: Annotated[Positional[Path], flag("RUN.toml")]
    """The file; it is rewritten in place."""

    def execute(self) -> None:
        """Rewrite the file, and print what was renamed."""
        from scalejax.config.migrate import migrated_text

        serialization.load_toml(self.run_file)  # refuses invalid TOML, with line and column
        try:
            text, renamed = migrated_text(self.run_file.read_text(encoding="utf-8"))
        except ConfigError as error:
            raise ConfigError(f"{self.run_file}: {error}") from error
        if not renamed:
            print(f"{self.run_file} has no old names.")
            return
        serialization.save_text(text, self.run_file)
        for each in renamed:
            print(each)
        print(f"wrote {self.run_file}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePlot(RunFileCommand):
    """Plot the learning rate of a run, step by step."""

    output: Annotated[Path, flag("FILE")] = Path("schedule.png")
    """The plot: png, svg or pdf. By default schedule.png."""
    devices: Annotated[int | None, flag("N")] = None
    """Number of devices. By default that of the layout, or else of this machine."""
    json: JsonFile = None
    """Write the result here as JSON (scalejax schema)."""
    csv: CsvFile = None
    """Write a row for each update here as CSV."""

    def execute(self, overrides: Overrides) -> None:
        """Resolve the run and plot its schedule."""
        from scalejax.report.figures import schedule
        from scalejax.report.html.charts import require_picture, save_picture
        from scalejax.report.listings import ScheduleTable

        require_result_files(self.json, self.csv)
        serialization.require_writable("output", self.output)
        require_picture("output", self.output)
        run = _resolve_here(self.run_file, overrides, self.devices)
        rates = _learning_rates(run)
        epochs = [run.epoch_of(step) for step in range(run.total_steps)]
        save_picture(schedule(rates, epochs=epochs), self.output)
        print(f"wrote {self.output}")
        found = ScheduleTable(learning_rates=tuple(rates), epochs=tuple(epochs))
        write_result(found, self.json, self.csv)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quickstart(PlainCommand):
    """See it all in two minutes: predict, train, report."""

    folder: Annotated[Path, flag("DIR")] = Path("quickstart")
    """Folder for runs, predictions and the report. By default quickstart."""
    seeds: Annotated[int, flag("N")] = 1
    """Number of seeds with which each run is trained. By default 1."""
    json: JsonFile = None
    """Write a summary of each run, and the predictions, here as JSON (scalejax schema)."""
    csv: CsvFile = None
    """Write a row for each run here as CSV."""

    def execute(self) -> None:
        """Run the quickstart."""
        from scalejax.cli.quickstart import FILES, quickstart

        require_result_files(self.json, self.csv, self.folder, FILES)
        shown = quickstart(self.folder, seeds=self.seeds)
        if self.json is not None or self.csv is not None:
            from scalejax.report.listings import report_contents
            from scalejax.report.sources import read_sources

            found = report_contents(read_sources(shown), str(self.folder / "report.html"))
            write_result(found, self.json, self.csv)


def _resolve_here(run_file: Path, overrides: Overrides, device_count: int | None) -> ResolvedRun:
    """The run of a file, or of a run folder, resolved on `device_count` devices; by default on
    those of its layout or of this machine."""
    if run_file.is_dir():
        run_file = RunFolder(path=run_file).config
    config = load_config(run_file, overrides)
    facts = facts_of(config, run_file, overrides)
    choose_platform()
    if device_count is None and config.layout.data is None:
        import jax

        device_count = jax.device_count()
    return resolve(config, device_count, facts)


def _learning_count(run: ResolvedRun) -> tuple[int, int]:
    """Numbers of trainable parameters and of all parameters; refuses path prefixes that match
    none."""
    from scalejax.training.state import learning_count

    return learning_count(run)


def _missing(run: ResolvedRun) -> tuple[str, ...]:
    """A warning if something is missing that `train` needs and `predict` does not: pretrained
    weights, or the packages of trackers."""
    from scalejax.models.pretrained import require_weights
    from scalejax.training.trackers import require_trackers

    try:
        require_weights(run.config.model)
        require_trackers(run.config.tracking)
    except ConfigError as error:
        return (f"train will not begin: {str(error).removesuffix('.')}",)
    return ()


def _learning_rates(run: ResolvedRun) -> list[float]:
    """The learning rate of every update of the run."""
    import numpy as np

    from scalejax.training.setup import schedule_of

    require_listable_steps(run.config.train.epochs, run.steps_per_epoch)
    return np.asarray(schedule_of(run)(np.arange(run.total_steps))).tolist()
