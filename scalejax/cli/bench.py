"""Commands that benchmark: the training step over devices, and the input pipeline of a host.

Imported without JAX: the workers of `bench` import it, and `data bench` does when it runs.
"""

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, UseAppendAction

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
from scalejax.cli.predict import (
    cluster_list,
    parse_counts,
    split_hardware,
    take_conditions,
)
from scalejax.cli.sweep import repeated
from scalejax.config.run import load_config
from scalejax.core import progress, serialization
from scalejax.core.environment import choose_platform
from scalejax.core.errors import ConfigError, ScalejaxError, refusal
from scalejax.core.folder import FileIn
from scalejax.core.serialization import JsonValue
from scalejax.measure.bench import (
    BenchFolder,
    BenchPlan,
    Summary,
    plan_bench,
    read_summaries,
    run_bench,
)
from scalejax.measure.bench.results import BenchResults, row_of, scaling_table
from scalejax.measure.bench.tables import column_of
from scalejax.report.terminal import bench as bench_tables
from scalejax.report.terminal import tables
from scalejax.sweep import Grammar, parse_grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench(RunFileCommand):
    """Time the training step on several numbers of devices.

    Warm-up and timed iterations of the real training step, on virtual CPU devices, GPUs, or
    processes of this machine, in rounds; then tables of speedup and efficiency. Benchmarks with a
    result are not timed again. -P, -V and -E are those of scalejax sweep; their fields are those of
    a run.toml, and devices, processes, scaling, batches, steps and warmup_steps.
    """

    variable: UseAppendAction[Annotated[tuple[str, ...], repeated("V", "FIELD=[VALUE,...]")]] = ()
    """Values to combine, such as 'batch.per_device_batch=[32,64]'. May be repeated."""
    parameter: UseAppendAction[Annotated[tuple[str, ...], repeated("P", "FIELD=VALUE")]] = ()
    """A value for every benchmark. May be repeated."""
    extension: UseAppendAction[Annotated[tuple[str, ...], repeated("E", "JSON")]] = ()
    """{"condition": {FIELD: VALUE or [VALUES]}, "parameters": {...}, "cases": [{...}, ...]}.
    May be repeated."""
    devices: Annotated[str | None, flag("N,N,...")] = None
    """Numbers of devices over all processes, such as 1,2,4. By default 1."""
    processes: Annotated[str | None, flag("N,N,...")] = None
    """Numbers of processes, among which devices are divided. By default 1; without --devices each
    has one device."""
    scaling: Literal["weak", "strong"] | None = None
    """What stays fixed as devices are added: the batch per device (weak, by default), or the global
    batch (strong)."""
    batches: Literal["synthetic", "real"] | None = None
    """One batch that stays on the devices (synthetic, by default), or batches of the data set."""
    steps: Annotated[int | None, flag("N")] = None
    """Timed steps. By default 100."""
    warmup_steps: Annotated[int | None, flag("N")] = None
    """Warm-up steps before them. By default 10, as in tf_cnn_benchmarks."""
    repeats: Annotated[int, flag("N")] = 3
    """Rounds, in each of which all benchmarks are timed. By default 3."""
    folder: Annotated[Path | None, flag("DIR")] = None
    """Folder of results. By default benches/ and the name of the file."""
    plan: Annotated[Path | None, flag("PLAN.json")] = None
    """Write the plan here, and time nothing."""
    json: JsonFile = None
    """Write a row for each benchmark here as JSON, as results.json in the folder."""
    csv: CsvFile = None
    """Write a row for each benchmark here as CSV, in SI units."""
    report: FlagCreatePairsOff[bool] = False
    """Print the results in the folder, and time nothing."""
    rerun: FlagCreatePairsOff[bool] = False
    """Time again the benchmarks that have a result."""
    baseline: Annotated[int | None, flag("N")] = None
    """Number of devices relative to which speedup and efficiency are given. By default the
    fewest."""
    statistic: Literal["median", "mean"] = "median"
    """Step time in the tables: median (by default), or mean as in DLBS."""
    clamp: FlagCreatePairsOff[bool] = False
    """Clamp efficiencies above 100 % to 100 %, as DLBS does."""
    monitor: Annotated[float, flag("SECONDS")] = 0.5
    """Interval between samples of CPU, memory and threads; 0 for none. By default 0.5."""
    cluster: Annotated[str | None, flag("CLUSTER,...")] = None
    """Compare with predictions for these clusters, such as cluster-fitted.toml of scalejax
    calibrate --from; each benchmark is predicted for the first with such devices."""

    def execute(self, overrides: Overrides) -> None:
        """Plan, time the benchmarks without a result, print the tables, write the plots."""
        if not 0 <= self.monitor < math.inf:
            accepted = "it must be at least 0, and finite"
            raise ConfigError(refusal("monitor", self.monitor, accepted))
        of_cluster, overrides = split_hardware(overrides)
        if self.cluster is None:
            for name, value in of_cluster.items():
                raise ConfigError(refusal(name, value, "it is of a cluster: give --cluster NAME"))
        names = [] if self.cluster is None else cluster_list(self.cluster)
        clusters = [take_conditions(name, of_cluster)[:2] for name in names]
        path = self.folder or Path("benches") / self.run_file.stem
        require_result_files(self.json, self.csv, path, FileIn.names(BenchFolder))
        serialization.require_writable("plan", self.plan)
        bench = plan_bench(self.run_file, self._grammar(overrides), repeats=self.repeats)
        tables.show(bench_tables.plan(bench))
        if self.plan is not None:
            serialization.save_text(bench.to_json(), self.plan)
            print(f"wrote {self.plan}; nothing was timed")
            return
        folder = BenchFolder(path=path)
        column_of(self.baseline, sorted({each.settings.devices for each in bench.benchmarks}))
        problems: list[str] = []
        if not self.report:
            serialization.require_writable_folder("folder", path)
            problems = self._run(bench, folder)
        summaries = read_summaries(bench, folder)
        print()
        tables.show(bench_tables.results(summaries, self.baseline))
        self._show_scaling(summaries)
        if clusters:
            from scalejax.measure.bench.predicted import predictions

            print()
            tables.show(bench_tables.against_predicted(predictions(summaries, folder, clusters)))
        if any(each.is_measured for each in summaries):
            self._save(summaries, folder)
        if problems:
            raise ScalejaxError("\n".join([*problems, "the same command tries them again."]))

    def _grammar(self, overrides: Overrides) -> Grammar:
        """The grammar of -P, -V and -E together with the flags of this command.

        Raises:
            ConfigError: if a field is given by a flag and by -P or -V.
        """
        typed = parse_grammar(self.parameter, self.variable, self.extension)
        counts: dict[str, str | None] = {"devices": self.devices, "processes": self.processes}
        variables: dict[str, list[JsonValue]] = {
            name: list(parse_counts(text, name)) for name, text in counts.items() if text
        }
        values = {
            "scaling": self.scaling,
            "batches": self.batches,
            "steps": self.steps,
            "warmup_steps": self.warmup_steps,
        }
        parameters = {name: value for name, value in values.items() if value is not None}
        for name in (*variables, *parameters):
            if name in typed.variables or name in typed.parameters:
                accepted = f"--{name.replace('_', '-')} says it already; give one of the two"
                raise ConfigError(refusal(f"-P or -V {name}", "given", accepted))
        if "processes" in variables and not {"devices"} & (
            {*variables, *typed.variables, *typed.parameters}
        ):
            parameters["devices"] = "${processes}"
        return replace(
            typed,
            parameters=overrides | parameters | typed.parameters,
            variables=variables | typed.variables,
        )

    def _run(self, bench: BenchPlan, folder: BenchFolder) -> list[str]:
        """Time the benchmarks that have no result; return the problems."""
        rounds = len(bench.rounds)
        try:
            with progress.measuring(rounds) as on_progress:
                return run_bench(
                    bench,
                    folder,
                    reruns=self.rerun,
                    monitor_seconds=self.monitor,
                    on_progress=on_progress,
                )
        except KeyboardInterrupt:
            done = sum(len(each.results) for each in read_summaries(bench, folder))
            on = "the same command continues"
            print(f"{done} of {rounds} rounds are in {folder.path};\n{on}", file=sys.stderr)
            raise

    def _show_scaling(self, summaries: list[Summary]) -> None:
        """Print the scaling tables if several numbers of devices were measured."""
        for scaling in ("weak", "strong"):
            table = scaling_table(
                summaries,
                scaling,
                baseline=self.baseline,
                clamps=self.clamp,
                statistic=self.statistic,
            )
            if table is not None and len(table.device_counts) > 1:
                print()
                tables.show(bench_tables.scaling(table, self.statistic))

    def _save(self, summaries: list[Summary], folder: BenchFolder) -> None:
        """Write the results and the plots."""
        from scalejax.report.html.bench import save_bench

        found = BenchResults(rows=tuple(row_of(each) for each in summaries))
        serialization.save(found, folder.results)
        write_result(found, self.json, self.csv)
        pictures = save_bench(summaries, folder.path)
        print(f"wrote {folder.path}")
        say(f"In it are {', '.join((folder.results.name, *pictures))}.")
        print(f"scalejax report {folder.path} draws them in one page.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataBench(RunFileCommand):
    """Measure the input pipeline of this host on a run's data.

    Times to read row groups, to decode images of several sizes in a worker process and in threads,
    and to copy batches to the devices; takes a minute or two. scalejax predict and explain take the
    file with --input-rates, also for images, sizes and numbers of workers that were not measured.
    Augmentation is not measured.
    """

    output: Annotated[Path | None, flag("INPUT.toml")] = None
    """Write the rates here. By default this-machine/input.toml in the user's cache folder."""
    json: JsonFile = None
    """Write the rates, the pace by workers and the life of a batch here as JSON (scalejax
    schema)."""
    csv: CsvFile = None
    """Write a row for each number of workers here as CSV, in SI units."""

    def execute(self, overrides: Overrides) -> None:
        """Measure, print the stages, write the input rates."""
        from scalejax.core.cache import user_folder

        config = load_config(self.run_file, overrides)
        output = self.output or user_folder() / "this-machine" / "input.toml"
        serialization.require_writable("output", output)
        require_result_files(self.json, self.csv)
        choose_platform()
        from scalejax.measure.input.bench import batch_life, bench, paces, stage_count
        from scalejax.report.listings import input_bench
        from scalejax.report.terminal.bench import input_side
        from scalejax.report.terminal.data import life

        with progress.measuring(stage_count(config.data)) as on_progress:
            rates = bench(config.data, on_progress=on_progress)
        serialization.save_toml(rates, output)
        by_workers = paces(rates, config)
        tables.show(input_side(rates, by_workers))
        print()
        measured, stages = batch_life(rates, config)
        tables.show(life(measured, stages))
        write_result(input_bench(rates, by_workers, stages), self.json, self.csv)
        print(f"wrote {output}, to predict with:")
        print(f"scalejax predict RUN.toml --input-rates {output}")
