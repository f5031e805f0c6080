"""The command `sweep`: trains many runs of one file.

Imported without JAX; only its worker processes import it.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, UseAppendAction, arg

from scalejax.cli.command import (
    CsvFile,
    JsonFile,
    Overrides,
    RunFileCommand,
    flag,
    require_result_files,
    write_result,
)
from scalejax.config.grid import flat_fields
from scalejax.config.migrate import load_run_file
from scalejax.core import progress, serialization
from scalejax.core.errors import ConfigError, ScalejaxError, refusal, require_at_least
from scalejax.core.folder import FileIn
from scalejax.launch.slurm import SlurmResources
from scalejax.report.terminal import sweep as sweep_tables
from scalejax.report.terminal import tables
from scalejax.sweep import (
    Grammar,
    SweepFolder,
    SweepPlan,
    parse_grammar,
    plan_sweep,
    read_rows,
    result_table,
    run_sweep,
    write_results,
)
from scalejax.sweep.plan import begin_sweep, parse_target


def repeated(letter: str, metavar: str) -> object:
    """The tyro annotation of a flag that may be repeated."""
    return arg(aliases=[f"-{letter}"], metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainMany(RunFileCommand):
    """A command that trains many runs of one run.toml."""

    resume: FlagCreatePairsOff[bool] = False
    """Resume what the folder holds."""
    plan: FlagCreatePairsOff[bool] = False
    """Print the plan, and train nothing."""
    processes: Annotated[int | None, flag("N")] = None
    """Processes in parallel. By default as many as cores and memory allow."""
    through: Literal["processes", "slurm"] = "processes"
    """Train in processes on this machine, or each program as a SLURM job of one node, with
    --processes at a time (by default all)."""
    gpus_per_node: Annotated[int | None, flag("N")] = None
    """SLURM: GPUs of each job. By default none are requested."""
    partition: Annotated[str | None, flag("NAME")] = None
    """SLURM: the partition. By default the cluster's."""
    time: Annotated[str | None, flag("TIME")] = None
    """SLURM: the time limit of each job, in minutes or as in 2-12:00:00; it saves and stops 120 s
    before it, and --resume continues. By default the partition's."""
    slurm: Annotated[tuple[str, ...], flag("OPTION=VALUE ...")] = ()
    """SLURM: further options of sbatch, such as account=vision mem=64G; setup=LINE is run first."""

    def require_training_flags(self) -> None:
        """Refuse numbers of processes and SLURM flags that have no effect.

        Raises:
            ConfigError: naming the flag.
        """
        require_at_least("processes", self.processes, 1)
        for name in ("gpus_per_node", "partition", "time", "slurm"):
            if self.through != "slurm" and (value := getattr(self, name)):
                raise ConfigError(refusal(name, value, "it is for --through slurm"))

    def train(
        self,
        sweep: SweepPlan,
        files: SweepFolder,
        *,
        processes: int | None = None,
        cores: int | None = None,
    ) -> list[str]:
        """Train the unfinished runs, by default in --processes, and write the tables; returns the
        problems."""
        slurm = SlurmResources(
            gpus_per_node=self.gpus_per_node,
            partition=self.partition,
            time=self.time,
            options=self.slurm,
        )
        try:
            with progress.training(len(sweep.jobs), len(sweep.runs)) as on_progress:
                problems = run_sweep(
                    sweep,
                    files,
                    processes=processes or self.processes,
                    cores=cores,
                    slurm=slurm if self.through == "slurm" else None,
                    on_progress=on_progress,
                )
        except KeyboardInterrupt:
            done = sum(row.is_finished for row in read_rows(sweep, files))
            print(
                f"{done} of {len(sweep.runs)} runs are finished in {files.path};\n"
                "the same command with --resume continues",
                file=sys.stderr,
            )
            raise
        write_results(sweep, files, read_rows(sweep, files))
        return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep(TrainMany):
    """Train every combination of values, in parallel.

    Values are JSON. Every combination of -V is merged over -P; each -E, in order, replaces
    parameters of the runs that match its condition, or forks them into cases. A flag with a dot
    is a -P whose value may be TOML.
    """

    variable: UseAppendAction[Annotated[tuple[str, ...], repeated("V", "FIELD=[VALUE,...]")]] = ()
    """Values to combine, such as 'seed=[0,1,2]'. May be repeated. A whole table as a value, such
    as 'optimizer=[{"name": "lamb"}, {"name": "lars"}]', replaces all fields of the file's table;
    -P and -E replace only the fields that they name."""
    parameter: UseAppendAction[Annotated[tuple[str, ...], repeated("P", "FIELD=VALUE")]] = ()
    """A value for every run. May be repeated."""
    extension: UseAppendAction[Annotated[tuple[str, ...], repeated("E", "JSON")]] = ()
    """{"condition": {FIELD: VALUE or [VALUES]}, "parameters": {...}, "cases": [{...}, ...]}.
    May be repeated. Such as '{"condition": {"batch.global_batch": 512}, "cases": [{},
    {"schedule": {"warmup": "gradual", "warmup_epochs": 1, "warmup_from": "zero"}}]}': with and
    without warmup."""
    folder: Annotated[Path | None, flag("DIR")] = None
    """Folder for runs and results. By default sweeps/ and the name of the file."""
    target: Annotated[str | None, flag("METRIC=VALUE")] = None
    """Target of the runs, such as test_accuracy=0.88; adds steps and samples to target to the
    results."""
    figure: Annotated[Path | None, flag("FILE")] = None
    """Draw the results for print too: FILE.pdf with its fonts, FILE.svg or FILE.png. With --resume
    of a finished sweep, only the figure is drawn."""
    figure_of: Literal["final", "curves"] = "final"
    """What it shows: accuracies at the end over the field with the most numbers, or over epochs."""
    figure_width: Literal["column", "page"] = "column"
    """Width of the figure: 3.25 inches, a column, or 6.75, the text of a page."""
    cpu_devices: Annotated[int | None, flag("N")] = None
    """Divide the CPU into N virtual devices for each run."""
    json: JsonFile = None
    """Write a row for each finished run here as JSON, as in results.parquet."""
    csv: CsvFile = None
    """Write a row for each finished run here as CSV."""
    one_by_one: FlagCreatePairsOff[bool] = False
    """Train each run in its own program, even if runs could share one."""
    optuna: Annotated[int | None, flag("N")] = None
    """Let Optuna choose N combinations of -V, which may be {"low": 1e-3, "high": 1, "log": true};
    each is trained for all values of seed. Needs the extra scalejax[optuna]."""

    def execute(self, overrides: Overrides) -> None:
        """Plan, train the unfinished runs, write and print the results."""
        self.require_training_flags()
        folder = self.folder or Path("sweeps") / self.run_file.stem
        require_result_files(self.json, self.csv, folder, FileIn.names(SweepFolder))
        if self.figure is not None:
            self._require_figure(self.figure)
        typed = parse_grammar(self.parameter, self.variable, self.extension)
        grammar = replace(typed, parameters=overrides | typed.parameters)
        if self.optuna is not None:
            for name in ("json", "csv"):
                if (path := getattr(self, name)) is not None:
                    accepted = "it is of a sweep without --optuna, whose trials.parquet has all"
                    raise ConfigError(refusal(name, str(path), accepted))
            self._search(grammar, folder)
            return
        sweep = self._planned(grammar)
        grammar.require_met_conditions(flat_fields(load_run_file(self.run_file)))
        tables.show(sweep_tables.plan(sweep))
        if self.plan:
            return
        serialization.require_writable_folder("folder", folder)
        files = SweepFolder(path=folder)
        begin_sweep(sweep, files, resume=self.resume)
        self._report(sweep, files, self.train(sweep, files))

    def _require_figure(self, path: Path) -> None:
        """Refuse a figure that cannot be drawn, before anything is trained."""
        from scalejax.report.html.charts import require_picture

        require_picture("figure", path)
        if self.optuna is not None:
            raise ConfigError(refusal("figure", str(path), "it is of a sweep without --optuna"))

    def _planned(self, grammar: Grammar) -> SweepPlan:
        return plan_sweep(
            self.run_file,
            grammar,
            one_by_one=self.one_by_one,
            cpu_devices=self.cpu_devices,
            target=parse_target(self.target),
        )

    def _report(self, sweep: SweepPlan, files: SweepFolder, problems: list[str]) -> None:
        """Print and plot the results."""
        from scalejax.report.figures import accuracy_curves, final_accuracies, for_print
        from scalejax.report.html.charts import save_picture, save_print

        rows = read_rows(sweep, files)
        print()
        tables.show(sweep_tables.results(sweep, rows))
        write_result(result_table(sweep, rows), self.json, self.csv)
        print(f"wrote {files.results}")
        print("  and evaluations, arms (.json too) and timings.parquet beside it")
        if any(row.evaluations for row in rows if row.is_finished):
            save_picture(final_accuracies(rows), files.path / "final.png")
            save_picture(accuracy_curves(rows), files.path / "curves.png")
            print(f"wrote {files.path / 'final.png'} and curves.png")
            if self.figure is not None:
                drawn = (final_accuracies if self.figure_of == "final" else accuracy_curves)(rows)
                save_print(for_print(drawn, self.figure_width), self.figure)
                print(f"wrote {self.figure}")
        raise_if_any(problems)

    def _search(self, grammar: Grammar, folder: Path) -> None:
        """Let Optuna choose, train each trial, and print them all."""
        from scalejax.sweep.optuna import best_of, search

        if self.plan:
            raise ConfigError("plan is refused: with optuna, each trial follows from those before.")
        if not self.resume and folder.exists() and any(folder.iterdir()):
            accepted = "it is not empty: continue with --resume, or give another folder"
            raise ConfigError(refusal("folder", str(folder), accepted))
        serialization.require_writable_folder("folder", folder)
        target = parse_target(self.target)
        trials, problems = search(
            self._planned,
            grammar,
            folder,
            trials=self.optuna or 0,
            target=target,
            train=self.train,
        )
        tables.show(sweep_tables.trials(trials, best_of(trials, target)))
        print(f"wrote {folder / 'trials.parquet'}")
        raise_if_any(problems)


def raise_if_any(problems: list[str]) -> None:
    """Raise the problems of failed jobs, if there are any."""
    if problems:
        raise ScalejaxError("\n".join([*problems, "--resume tries again what failed."]))
