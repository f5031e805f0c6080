"""The commands `study`: from a run.toml to the results of a paper's section on warmup, and to how
the activations of a decoder grow with its size.

Imported without JAX: only worker processes of the first import it, and the second when it runs.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from scalejax.cli.command import (
    CsvFile,
    JsonFile,
    Overrides,
    RunFileCommand,
    flag,
    require_result_files,
    say,
    write_result,
)
from scalejax.cli.predict import parse_counts
from scalejax.cli.sweep import TrainMany, raise_if_any
from scalejax.config.run import load_config
from scalejax.core import progress, serialization
from scalejax.core.environment import choose_platform, has_accelerator, machine_cores
from scalejax.core.errors import ConfigError, refusal, require_at_least
from scalejax.core.folder import FileIn
from scalejax.core.progress import Progress
from scalejax.core.units import counted, format_seconds, parse_seconds
from scalejax.report.terminal import sweep as sweep_tables
from scalejax.report.terminal import tables
from scalejax.sweep.folder import SweepFolder
from scalejax.sweep.plan import SweepPlan, begin_sweep
from scalejax.sweep.results import RunRow, read_rows
from scalejax.sweep.study import (
    SCALINGS,
    WARMUPS,
    CellResult,
    FoundRate,
    Study,
    StudyFolder,
    StudyTable,
    cell_results,
    cell_rows,
    found_rates,
    plan_study,
    predicted_seconds,
    rate_rows,
)
from scalejax.xla.worker_pool import worker_count


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyWarmup(TrainMany):
    """Train warmups over batches, rules and optimizers, to a figure.

    The learning rate of each optimizer is found at the reference batch on validation data, and
    scaled from there; then every combination is trained with every seed. The folder gets data,
    figure, tables, PROTOCOL.md and commands.sh. Test data are evaluated at the end of runs; nothing
    is chosen on them. A flag with a dot replaces a field of the file.
    """

    batches: Annotated[str | None, flag("B,B,...")] = None
    """Global batches. By default 1, 4, 16 and 64 times schedule.reference_batch."""
    warmup: Annotated[str, flag("W,W,...")] = WARMUPS
    """Warmups: none, gradual:LENGTH (linear, from zero; with :base appended, from the rate of the
    reference batch) or constant:LENGTH; 5% is of the run, 2 is epochs. By default
    none,gradual:5%,gradual:20%."""
    scaling: Annotated[str, flag("RULE,...")] = SCALINGS
    """Scaling rules: none, linear, sqrt, sde, legw. By default linear,sqrt."""
    optimizers: Annotated[str | None, flag("NAME[:RATE],...")] = None
    """Optimizers, such as sgd,lars,lamb,muon: that of the file with its fields, others with their
    defaults. RATE is the rate at the reference batch; if missing, it is found. By default that of
    the file with its rate."""
    seeds: Annotated[int, flag("N")] = 3
    """Seeds, from 0. By default 3."""
    rates: Annotated[str | None, flag("R,R,...")] = None
    """Learning rates tried for optimizers without one. By default 0.0001,0.0003,...,30."""
    measure: Literal["accuracy", "loss"] = "accuracy"
    """Metric that is shown, and by which rates and warmups are chosen."""
    folder: Annotated[Path | None, flag("DIR")] = None
    """Folder for all of it. By default studies/ and the name of the file."""
    width: Literal["column", "page"] = "page"
    """Width of the figure: 3.25 inches, a column, or 6.75, the text of a page."""
    limit: Annotated[str, flag("TIME")] = "12h"
    """Longest predicted time with which training starts, such as 15min. By default 12h."""
    cores: Annotated[int, flag("N")] = 1
    """Cores of each process; results depend on it in their last bits. By default 1."""
    csv: CsvFile = None
    """Write the cells of the grid here as CSV."""
    json: JsonFile = None
    """Write rates and cells here as JSON too."""

    def execute(self, overrides: Overrides) -> None:
        """Plan, predict the time, train the unfinished runs, and write the folder."""
        self.require_training_flags()
        require_at_least("cores", self.cores, 1)
        limit = parse_seconds("limit", self.limit)
        folder = StudyFolder(path=self.folder or Path("studies") / self.run_file.stem)
        require_result_files(self.json, self.csv, folder.path, FileIn.names(StudyFolder))
        study = plan_study(
            self.run_file,
            overrides,
            batches=self.batches,
            warmups=self.warmup,
            scalings=self.scaling,
            optimizers=self.optimizers,
            seeds=self.seeds,
            rates=self.rates,
            measure=self.measure,
        )
        self._require_folder(folder)
        self._announce(study, limit)
        if self.plan:
            return
        serialization.require_writable_folder("folder", folder.path)
        serialization.make_folder(folder.path)
        serialization.save_bytes(self.run_file.read_bytes(), folder.run_file)
        of_rates, of_grid = folder.sweeps
        tuning = study.rate_sweep()
        rates = found_rates(study, self._trained(tuning, of_rates) if tuning else ())
        self._say_rates(rates)
        by_name = {each.optimizer: each.rate for each in rates}
        rows = self._trained(study.grid(by_name), of_grid)
        self._write(study, rates, cell_results(study, by_name, rows), folder)

    def _require_folder(self, folder: StudyFolder) -> None:
        holds = folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir()))
        if self.resume and not folder.run_file.exists():
            accepted = "it holds no study to resume: leave --resume out to begin one"
            raise ConfigError(refusal("folder", str(folder.path), accepted))
        if self.resume and folder.run_file.read_bytes() != self.run_file.read_bytes():
            accepted = "it holds another run.toml: resume with that one, or give another folder"
            raise ConfigError(refusal("folder", str(folder.path), accepted))
        if holds and not self.resume and not self.plan:
            accepted = "it is not empty: continue with --resume, or give another folder"
            raise ConfigError(refusal("folder", str(folder.path), accepted))

    def _announce(self, study: Study, limit: float) -> None:
        """Say how much is trained and how long it takes.

        Raises:
            ConfigError: if that is longer than `limit` seconds.
        """
        tuning = study.rate_sweep()
        low = {each.name: each.rate or study.rates[0] for each in study.optimizers}
        plans = [plan for plan in (tuning, study.grid(low)) if plan is not None]
        runs, programs = (
            sum(len(plan.runs) for plan in plans),
            sum(len(plan.jobs) for plan in plans),
        )
        updates = sum(planned.run.total_steps for plan in plans for planned in plan.runs)
        found = f", {len(tuning.runs)} of them to find learning rates" if tuning else ""
        say(
            f"{counted(runs, 'run')}{found}, in {counted(programs, 'program')}: "
            f"{updates:,} updates."
        )
        combined = {
            "optimizer": [each.name for each in study.optimizers],
            "scaling": study.scalings,
            "batch": [f"{batch}" for batch in study.batches],
            "warmup": [each.text for each in study.warmups],
        }
        values = "; ".join(f"{name} {', '.join(each)}" for name, each in combined.items())
        say(f"Combined: {values}; {counted(study.seeds, 'seed')}; equal runs are trained once.")
        for why in study.left_out:
            say(f"left out: {why}")
        if self.resume or self.through == "slurm":
            return
        processes = self._processes(programs)
        seconds = predicted_seconds(study, processes=processes, cores=self._cores)
        where = "1 process" if processes == 1 else f"{processes} processes"
        say(
            f"Predicted: {format_seconds(seconds)} in {where}, told from the first seconds "
            "of a few runs."
        )
        if seconds > limit and not self.plan:
            accepted = (
                f"the study is predicted to take {format_seconds(seconds)}; raise it, or take "
                "fewer batches, warmups, optimizers or seeds"
            )
            raise ConfigError(refusal("limit", self.limit, accepted))

    @property
    def _cores(self) -> int | None:
        """Cores of each process; all of them if it prepares batches for an accelerator."""
        return None if has_accelerator() else self.cores

    def _processes(self, programs: int) -> int:
        if has_accelerator():
            return self.processes or 1
        fitting = max(1, machine_cores() // self.cores)
        return self.processes or min(fitting, worker_count(programs))

    def _trained(self, plan: SweepPlan, files: SweepFolder) -> list[RunRow]:
        """The rows of a sweep once all of its runs have ended; their weights are not kept."""
        begin_sweep(plan, files, resume=files.plan.exists())
        processes = self._processes(len(plan.jobs)) if self.through == "processes" else None
        raise_if_any(self.train(plan, files, processes=processes, cores=self._cores))
        for planned in plan.runs:
            shutil.rmtree(files.run(planned.index).weights, ignore_errors=True)
        return read_rows(plan, files)

    def _say_rates(self, rates: tuple[FoundRate, ...]) -> None:
        for each in rates:
            if each.tried:
                edge = "; it is the first or last that was tried: see --rates"
                say(
                    f"{each.optimizer}: learning rate {each.rate:g} at the reference batch"
                    f"{edge if each.is_at_edge else ''}"
                )

    def _write(
        self,
        study: Study,
        rates: tuple[FoundRate, ...],
        results: tuple[CellResult, ...],
        folder: StudyFolder,
    ) -> None:
        from scalejax.report.study import write_study

        names = write_study(study, rates, results, folder, width=self.width, cores=self._cores)
        print()
        tables.show(sweep_tables.study(study, results))
        print(f"wrote {folder.path}")
        say(f"In it are {', '.join(names)}.")
        table = StudyTable(rates=rate_rows(rates), cells=cell_rows(results))
        write_result(table, self.json, self.csv)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyCoordinates(RunFileCommand):
    """Check how a decoder's activations grow with width.

    Trains a few steps at each width, with and without the file's model.parametrization, and fits
    how activations, and their changes over the steps, grow by layer (a coordinate check of muP).
    The rate is constant, the peak of the schedule.
    """

    widths: Annotated[str | None, flag("N,N,...")] = None
    """Widths (model.hidden), such as 64..512; other widths scale with them. By default
    64,128,256,512 without --depths."""
    depths: Annotated[str | None, flag("N,N,...")] = None
    """Depths (model.layers) instead of widths, such as 2..16 (CompleteP)."""
    steps: Annotated[int, flag("N")] = 10
    """Steps at each size. By default 10."""
    keep: Annotated[Literal["head_size", "heads"], flag("{head_size,heads}")] = "head_size"
    """What stays fixed as networks grow wider: the size of heads, or their number. By default their
    size."""
    json: JsonFile = None
    """Write every number here."""
    csv: CsvFile = None
    """Write the measurements here as CSV."""
    figure: Annotated[Path | None, flag("FILE")] = None
    """Draw the changes for print: FILE.pdf with its fonts, FILE.svg or FILE.png."""
    cpu_devices: Annotated[int | None, flag("N")] = None
    """Divide the CPU into N virtual devices."""

    def execute(self, overrides: Overrides) -> None:
        """Train, print exponents and verdict, write the requested files."""
        from scalejax.report.figures import coordinates, for_print
        from scalejax.report.html.charts import require_picture, save_print

        require_result_files(self.json, self.csv)
        if self.figure is not None:
            require_picture("figure", self.figure)
            serialization.require_writable("figure", self.figure)
        if self.depths is not None and self.widths is not None:
            accepted = "one of the two grows at a time: leave --widths out"
            raise ConfigError(refusal("depths", self.depths, accepted))
        along = "hidden" if self.depths is None else "layers"
        text = self.depths or self.widths or "64,128,256,512"
        sizes = parse_counts(text, "widths" if along == "hidden" else "depths")
        config = load_config(self.run_file, overrides)
        choose_platform(self.cpu_devices)
        from scalejax.sweep.activations import check_coordinates

        with progress.measuring(2 * len(sizes)) as on_progress:
            found = check_coordinates(
                config,
                along,
                sizes,
                steps=self.steps,
                kept=self.keep,
                say=lambda part: on_progress(Progress(part=part)),
            )
        tables.show(sweep_tables.coordinates(found))
        write_result(found, self.json, self.csv)
        if self.figure is not None:
            save_print(for_print(coordinates(found), "column"), self.figure)
            print(f"wrote {self.figure}")
