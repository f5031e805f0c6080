"""Commands about the cost of a step: predict, explain, hardware, calibrate, validate.

Imported without JAX, which is imported when they run.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from scalejax import __version__
from scalejax.cli.command import (
    CostCommand,
    CsvFile,
    JsonFile,
    Overrides,
    PlainCommand,
    flag,
    flags_of,
    require_result_files,
    suggest,
    write_result,
)
from scalejax.config.presets import PRESETS, costed_note
from scalejax.config.run import ResolvedRun, RunConfig, given_name, load_config
from scalejax.core import progress, serialization
from scalejax.core.environment import choose_platform
from scalejax.core.errors import (
    ConfigError,
    UnknownHardware,
    refusal,
    require_at_least,
    unknown_name,
)
from scalejax.core.serialization import JsonValue
from scalejax.core.units import counted
from scalejax.hardware import (
    HARDWARE_TABLES,
    Cluster,
    Site,
    chip_names,
    cluster_names,
    load_cluster,
    load_cluster_and_site,
    parts_without,
    save_cluster,
    with_conditions,
    with_hardware,
)
from scalejax.report.terminal import scaling as ramp_tables
from scalejax.report.terminal import scaling as scaling_tables
from scalejax.report.terminal import tables
from scalejax.simulator.expert_load import of_fullest_device
from scalejax.simulator.frameworks import FRAMEWORKS, framework_named, known_framework
from scalejax.simulator.predict import ScalingPrediction
from scalejax.simulator.program import Program
from scalejax.simulator.ramp import RampPrediction
from scalejax.training.record import facts_of

if TYPE_CHECKING:
    from scalejax.measure.fit import MeasuredRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Predict(CostCommand):
    """Predict time, efficiency and memory on GPUs you do not have.

    A flag with a dot replaces a field of the file, such as --batch.global_batch 512, a condition
    of the site, such as --conditions.step_cv 0.02, or a part of the hardware, such as
    --network.bytes_per_second 2x.
    """

    cluster: Annotated[str, flag("A,B,...")]
    """Names in the catalogue (see scalejax hardware), or TOML files of your own."""
    devices: Annotated[str, flag("N..M")]
    """Numbers of devices: 8,64,256, or 8..256 for every doubling. Efficiency is relative to the
    smallest."""
    input_rates: Annotated[Path | None, flag("INPUT.toml")] = None
    """Input rates of a host, measured by scalejax data bench."""
    scaling: Literal["weak", "strong"] = "weak"
    """What stays fixed as devices are added: the batch per device (weak), or the global batch
    (strong)."""
    json: JsonFile = None
    """Write the predictions here, for scalejax report; with several clusters, an OUT-CLUSTER.json
    for each."""
    csv: CsvFile = None
    """Write the rows of the table here as CSV, in SI units; with several clusters, an
    OUT-CLUSTER.csv for each."""
    trace: Annotated[Path | None, flag("TRACE.json")] = None
    """Write a trace of the step on the most devices here, for ui.perfetto.dev; if the batch grows,
    of the last step."""

    def execute(self, overrides: Overrides) -> None:
        """Compile and cost each case, print the table, write the predictions."""
        require_result_files(self.json, self.csv)
        serialization.require_writable("trace", self.trace)
        names = cluster_list(self.cluster)
        found = []
        for place, name in enumerate(names):
            if place:
                print()
            found.append(self._predict(name, names, overrides))
        if len(names) > 1:
            print()
            tables.show(scaling_tables.beside([prediction for prediction, _ in found]))
        prediction, last = found[0]
        if isinstance(prediction, ScalingPrediction):  # explain knows only one batch of a ramp
            suggest("To see where the time goes", *self._explained(names[0], overrides, *last))

    def _explained(
        self, cluster_name: str, overrides: Overrides, config: RunConfig, run: ResolvedRun
    ) -> list[str]:
        """Words of the command that explains `run`: `config` on the most devices, batch scaled."""
        scaled: dict[str, tuple[JsonValue, JsonValue]] = {
            "batch.global_batch": (config.batch.global_batch, run.split.global_batch),
            "batch.per_device_batch": (config.batch.per_device_batch, run.split.per_device_batch),
            "layout.data": (config.layout.data, run.layout.data),
        }
        changed = {
            name: after
            for name, (before, after) in scaled.items()
            if before is not None and before != after
        }
        words = ["scalejax", "explain", str(self.run_file), "--cluster", cluster_name]
        words += ["--devices", str(run.layout.device_count)]
        words += flags_of({**overrides, **changed})
        words += [] if self.framework == "xla" else ["--framework", self.framework]
        for flag_name, path in (("--facts", self.facts), ("--input-rates", self.input_rates)):
            words += [] if path is None else [flag_name, str(path)]
        return words

    def _predict(
        self, cluster_name: str, names: Sequence[str], overrides: Overrides
    ) -> tuple[ScalingPrediction | RampPrediction, tuple[RunConfig, ResolvedRun]]:
        """Predict for one of the clusters, print its tables, write its files; returns the
        prediction, and the run with its resolution on the most devices."""
        from scalejax.planning.scaling_study import ramp_study, resolve_all, study
        from scalejax.simulator.perfetto import write_trace

        framework = framework_named(self.framework)
        cluster, site, overrides = take_conditions(cluster_name, overrides)
        config = load_config(self.run_file, overrides)
        facts = facts_of(config, self.run_file, overrides, self.facts)
        site = with_input(site, self.input_rates, config)
        counts = parse_counts(self.devices)
        name = given_name(self.run_file, overrides)
        costed = costed_note(name, config.model, facts)
        programs: list[Program] = []
        phases = 1 + len(config.batch.ramp_epochs)
        with progress.compiling(phases * len(set(counts))) as on_progress:
            prediction = (study if phases == 1 else ramp_study)(
                config,
                cluster,
                counts,
                self.scaling,
                site=site,
                framework=framework,
                facts=facts,
                notes=(costed,) if costed else (),
                on_progress=on_progress,
                on_program=programs.append,
            )
        if isinstance(prediction, RampPrediction):
            tables.show(ramp_tables.ramp(prediction))
        else:
            tables.show(scaling_tables.scaling(prediction))
        if (trace := path_for(self.trace, cluster_name, names)) is not None:
            loaded, _ = of_fullest_device(programs[-1], site)
            write_trace(loaded, cluster, trace)
            print(f"wrote {trace}; ui.perfetto.dev opens it")
        write_result(
            prediction,
            path_for(self.json, cluster_name, names),
            path_for(self.csv, cluster_name, names),
            more="; scalejax report draws it",
        )
        return prediction, (config, resolve_all(config, counts, self.scaling, facts)[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Explain(CostCommand):
    """Show where the time of a step goes, and what would shorten it.

    A waterfall from ideal to predicted time, the costliest operations with their source lines,
    collectives that the layout does not need, and the speedup with twice the bandwidth, network,
    batch or chip. A flag with a dot replaces a field of the file, or of --conditions.
    """

    cluster: Annotated[str, flag("CLUSTER")]
    """Name in the catalogue (see scalejax hardware), or a TOML file of your own."""
    devices: Annotated[int, flag("N")]
    """Number of devices."""
    input_rates: Annotated[Path | None, flag("INPUT.toml")] = None
    """Input rates of a host, measured by scalejax data bench."""
    output: Annotated[Path | None, flag("FILE.html")] = None
    """Write an HTML page with the waterfall chart here."""
    json: JsonFile = None
    """Write the explanation here as JSON."""
    csv: CsvFile = None
    """Write the terms of the step here as CSV, in SI units."""
    trace: Annotated[Path | None, flag("TRACE_DIR")] = None
    """A recorded profile of the step (scalejax train --profile), to compare with."""
    trace_output: Annotated[Path | None, flag("TRACE.json")] = None
    """Write a trace of the predicted step here, for ui.perfetto.dev."""
    memory_choices: bool = False
    """Also compile the step with every other recompute and offload, and show what they save."""

    def execute(self, overrides: Overrides) -> None:
        """Compile the step, print the explanation, write the output files."""
        from scalejax.measure.trace import recorded_trace
        from scalejax.planning.explain_run import (
            CASES,
            compare_trace,
            explain_run,
            with_memory_choices,
        )
        from scalejax.report.terminal import explanation as explanation_tables
        from scalejax.simulator.perfetto import write_trace

        require_result_files(self.json, self.csv)
        for name in ("output", "trace_output"):
            serialization.require_writable(name, getattr(self, name))
        framework = framework_named(self.framework)
        cluster, site, overrides = take_conditions(self.cluster, overrides)
        config = load_config(self.run_file, overrides)
        facts = facts_of(config, self.run_file, overrides, self.facts)
        site = with_input(site, self.input_rates, config)
        recorded = self.trace and recorded_trace(self.trace, cluster, self.devices)
        with progress.compiling(CASES) as on_progress:
            explained = explain_run(
                config,
                cluster,
                self.devices,
                site=site,
                framework=framework,
                facts=facts,
                on_progress=on_progress,
            )
        if self.memory_choices:
            with progress.compiling_programs() as on_progress:
                explained = with_memory_choices(
                    explained,
                    config,
                    cluster,
                    site=site,
                    framework=framework,
                    facts=facts,
                    on_progress=on_progress,
                )
        if recorded:
            explained = compare_trace(explained, cluster, recorded)
        first = explained.shortage
        tables.show(explanation_tables.explanation(explained.explanation, first=first))
        if self.output is not None:
            from scalejax.report.html.explanation import write_explanation

            write_explanation(explained.explanation, self.output)
            print(f"wrote {self.output}")
        write_result(explained.explanation, self.json, self.csv)
        if self.trace_output is not None:
            loaded, _ = of_fullest_device(explained.program, site)
            write_trace(loaded, cluster, self.trace_output)
            print(f"wrote {self.trace_output}; ui.perfetto.dev opens it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware(PlainCommand):
    """List clusters, chips and frameworks, or one with its sources."""

    name: Annotated[Positional[str | None], flag("NAME")] = None
    """A cluster, a chip, a framework, or a TOML file that describes a cluster."""
    json: JsonFile = None
    """Write the result here as JSON (scalejax schema)."""
    csv: CsvFile = None
    """Write the rows of the table here as CSV, in SI units."""

    def execute(self) -> None:
        """Print the catalogue, or the entry."""
        from scalejax.hardware import load_chip
        from scalejax.report.listings import HardwareList, frameworks

        require_result_files(self.json, self.csv)
        name = self.name
        if name is None:
            found = HardwareList(
                clusters=tuple(load_cluster(each) for each in cluster_names()),
                chips=tuple(load_chip(each) for each in chip_names()),
                frameworks=frameworks(FRAMEWORKS.values()).frameworks,
            )
            every = tuple(FRAMEWORKS.values())
            tables.show(tables.catalogue(found.clusters, found.chips, every))
        elif known_framework(name) is not None:
            framework = framework_named(name)
            tables.show(tables.framework(framework))
            found = HardwareList(frameworks=frameworks([framework]).frameworks)
        else:
            chips = (load_chip(name),) if name in chip_names() else ()
            for chip in chips:
                tables.show(tables.entry(chip))
            clusters = ()
            if not chips or name in cluster_names():
                if not name.endswith(".toml"):
                    known = {*cluster_names(), *chip_names(), *FRAMEWORKS}
                    if name not in known:
                        raise ConfigError(unknown_name("NAME", name, known))
                cluster, site = load_cluster_and_site(name)
                clusters = (cluster,)
                tables.show(tables.entry(cluster, site))
            found = HardwareList(clusters=clusters, chips=chips)
        write_result(found, self.json, self.csv)


@dataclass(frozen=True, slots=True, kw_only=True)
class Models(PlainCommand):
    """List published networks by name.

    Use the names with scalejax cost and search --model, and as model.name in a run.toml.
    """

    grep: Annotated[str | None, flag("TEXT")] = None
    """Only networks with this in their name, network or source, such as llama or moe."""
    json: JsonFile = None
    """Write the result here as JSON (scalejax schema)."""
    csv: CsvFile = None
    """Write the rows of the table here as CSV, in SI units."""

    def execute(self) -> None:
        """Print the table."""
        from scalejax.report.listings import models

        require_result_files(self.json, self.csv)
        found = {
            name: preset
            for name, preset in PRESETS.items()
            if _has(self.grep, name, preset.network, preset.source, *preset.sizes)
        }
        _require_found("grep", self.grep, found, PRESETS)
        tables.show(tables.models(found))
        if decoders := [name for name, each in found.items() if each.is_decoder]:
            words = ("scalejax", "cost", decoders[0], "--tokens", "1T", "--cluster", "dgx-h100")
            suggest("To see what one costs", *words, "--devices", "64..1024")
        write_result(models(found), self.json, self.csv)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frameworks(PlainCommand):
    """List the frameworks that steps are predicted for.

    Use the names with --framework; scalejax hardware NAME says what distinguishes one.
    """

    grep: Annotated[str | None, flag("TEXT")] = None
    """Only frameworks with this in their name, title or year, such as megatron or 2025."""
    json: JsonFile = None
    """Write the result here as JSON (scalejax schema)."""
    csv: CsvFile = None
    """Write the rows of the table here as CSV, in SI units."""

    def execute(self) -> None:
        """Print the table."""
        from scalejax.report.listings import frameworks

        require_result_files(self.json, self.csv)
        found = {
            name: each
            for name, each in FRAMEWORKS.items()
            if _has(self.grep, name, each.title, str(each.year))
        }
        _require_found("grep", self.grep, found, FRAMEWORKS)
        tables.show(tables.framework_list(tuple(found.values())))
        write_result(frameworks(found.values()), self.json, self.csv)


def _has(text: str | None, *values: str) -> bool:
    return text is None or any(text.lower() in value.lower() for value in values)


def _require_found(
    field: str, text: str | None, found: Mapping[str, object], known: Mapping[str, object]
) -> None:
    """Refuse a text that matches nothing, naming the nearest name.

    Raises:
        ConfigError: if nothing was found.
    """
    if not found:
        raise ConfigError(unknown_name(field, text, known))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrate(PlainCommand):
    """Measure the devices here, or fit a cluster to runs."""

    from_: Annotated[
        tuple[Path, ...], arg(name="from", metavar="RUN RUN ...", help_behavior_hint="")
    ] = ()
    """Measure nothing: fit the cluster to 2 to 5 run folders of scalejax train, to the benchmarks
    in a folder of scalejax bench, or to folders in its runs/."""
    devices: Annotated[str | None, flag("N,N,...")] = None
    """Numbers of devices of a bench to fit to, such as 1,2. By default all."""
    processes: Annotated[int, flag("N")] = 1
    """Number of processes of the benchmarks of a bench to fit to. By default 1."""
    cluster: Annotated[str | None, flag("CLUSTER")] = None
    """Cluster that --from fits: a name or a TOML file. By default the one measured here before."""
    output: Annotated[Path | None, flag("DIR")] = None
    """Folder for cluster.toml, the measured cluster, where train looks for it, and for
    cluster-fitted.toml of --from. By default this-machine in the user's cache folder."""
    cpu_devices: Annotated[int | None, flag("N")] = None
    """Divide the CPU into N virtual devices. By default as many as it has cores, at least 2."""
    json: JsonFile = None
    """Write the result here as JSON (scalejax schema)."""
    csv: CsvFile = None
    """Write a row for each cluster here as CSV, in SI units."""

    def execute(self) -> None:
        """Measure the devices or fit to runs, and write the cluster."""
        from scalejax.core.cache import user_folder

        here = user_folder() / "this-machine"
        require_result_files(self.json, self.csv)
        serialization.require_writable_folder("output", self.output or here)
        if self.from_:
            self._fit(here)
        else:
            self._measure(self.output or here)

    def _measure(self, output: Path) -> None:
        """Time operations, memory, collectives and storage, and write the cluster."""
        for name, value in (("cluster", self.cluster), ("devices", self.devices)):
            if value is not None:
                raise ConfigError(refusal(name, value, "it is for --from RUN RUN ..."))
        count = self.cpu_devices
        require_at_least("cpu_devices", count, 1)
        choose_platform()
        if os.environ.get("JAX_PLATFORMS") == "cpu":
            choose_platform(max(2, os.cpu_count() or 1) if count is None else count)
        from scalejax.measure.devices import calibrate, local_grid, stage_count

        grid = local_grid()
        with progress.measuring(stage_count(grid)) as on_progress:
            found = calibrate(output, grid, on_progress)
        paths = found.save(output)
        tables.show(tables.calibration(found.cluster, found.processes, found.notes))
        self._write(found.cluster, found.processes, found.notes)
        print(f"wrote {', '.join(path.name for path in paths)} in {output}")
        print("To predict with them:")
        print(f"scalejax predict RUN.toml --cluster {paths[0]} --devices 1,2")

    def _write(
        self, cluster: Cluster, processes: Cluster | None = None, notes: Sequence[str] = ()
    ) -> None:
        from scalejax.report.listings import Calibrated

        found = Calibrated(cluster=cluster, processes=processes, notes=tuple(notes))
        write_result(found, self.json, self.csv)

    def _fit(self, here: Path) -> None:
        """Fit a cluster to measured runs, and write it."""
        from scalejax.measure.fit import FITTED_FILE, fit_runs, measured_cluster

        runs = self._runs()
        cluster, site = find_cluster(self.cluster) if self.cluster else measured_cluster(here)
        fit = fit_runs(cluster, runs, site)
        path = (self.output or here) / FITTED_FILE
        save_cluster(fit.cluster, fit.site, path)
        tables.show(tables.fit(fit))
        self._write(fit.cluster)
        print(f"wrote {path}; train still predicts with what was measured.")
        print("To predict with it:")
        print(f"scalejax predict RUN.toml --cluster {path} --devices 1,2")

    def _runs(self) -> "list[MeasuredRun]":
        """The measured runs to fit to: run folders, or benchmarks of a bench."""
        from scalejax.measure.bench import BenchFolder, measured_runs, read_summaries
        from scalejax.measure.bench.results import is_benchmark, measured_run, read_plan
        from scalejax.measure.fit import FEWEST, MOST, read_run, read_runs

        benches = [path for path in self.from_ if BenchFolder(path=path).plan.is_file()]
        if benches and len(self.from_) > 1:
            accepted = "the folder of a bench comes alone; those in its runs/ may be several"
            raise ConfigError(refusal("from", str(benches[0]), accepted))
        if any(is_benchmark(path) for path in self.from_):
            self._refuse_counts()
            return [(measured_run if is_benchmark(p) else read_run)(p) for p in self.from_]
        if not benches:
            self._refuse_counts()
            return read_runs(self.from_)
        folder = BenchFolder(path=benches[0])
        counts = None if self.devices is None else parse_counts(self.devices)
        summaries = read_summaries(read_plan(folder), folder)
        runs = measured_runs(summaries, folder, counts, processes=self.processes)
        if not FEWEST <= len(runs) <= MOST:
            found = f"{counted(len(runs), 'benchmark')} of it" if runs else "none of its benchmarks"
            accepted = (
                f"a fit takes {FEWEST} to {MOST} measured steps, and --devices and --processes "
                f"leave {found}"
            )
            raise ConfigError(refusal("from", str(folder.path), accepted))
        return runs

    def _refuse_counts(self) -> None:
        if self.devices is not None:
            accepted = f"it is for the folder of a bench, which {self.from_[0]} is not"
            raise ConfigError(refusal("devices", self.devices, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class Validate(PlainCommand):
    """Compare predictions with published measurements.

    These are of steps, peak memory, collectives, products, attention, dispatch of experts and
    convergence.
    """

    ledgers: Annotated[Positional[tuple[Path, ...]], flag("[LEDGER ...]")] = ()
    """Ledgers: CSV files, also packed (.gz, .xz), whose columns say what they measure, or names of
    those that come with scalejax, such as step_times. By default all that come with scalejax."""
    family: Annotated[str | None, flag("F,F,...")] = None
    """Only these families, such as dlperf,llm_foundry."""
    framework: Annotated[str | None, flag("NAME")] = None
    """Framework to predict every step with; by default that of the row."""
    json: JsonFile = None
    """Write every row and the error of each family here."""
    csv: CsvFile = None
    """Write every row here as CSV, in SI units."""
    plot: Annotated[Path | None, flag("FILE")] = None
    """Plot predicted against measured times of steps here: png, svg or pdf."""
    html: Annotated[Path | None, flag("FILE.html")] = None
    """Write a page here: errors by family, framework and chip, each with its rows."""
    accuracy: Annotated[Path | None, flag("OUT.json")] = None
    """Write the errors by family, framework and chip here, to keep with a release."""
    compare: Annotated[Path | None, flag("OLD.json")] = None
    """Compare with the errors of an earlier release, a file that --accuracy wrote."""
    compile: bool = False
    """Compile steps that are neither stored nor known in closed form, 10 s to minutes each; by
    default they are skipped."""
    closed_form: bool = False
    """Use the closed form of the step even if a compiled program is stored."""
    dry_run: bool = False
    """Only say which steps can be expressed as runs; takes seconds for any ledger."""

    def execute(self) -> None:
        """Predict every row, print the tables, write the results.

        Raises:
            SystemExit: with code 1, if every row was skipped.
        """
        from scalejax.report.figures import scatter
        from scalejax.report.html.accuracy import write_accuracy
        from scalejax.report.html.charts import require_picture, save_picture
        from scalejax.validation import find_ledger, read_any, shipped_ledgers, validated
        from scalejax.validation.accuracy import Accuracy, accuracy_of
        from scalejax.xla.archive import Archive

        require_result_files(self.json, self.csv)
        for name in ("plot", "html", "accuracy"):
            serialization.require_writable(name, getattr(self, name))
        if self.plot is not None:
            require_picture("plot", self.plot)
        framework = None if self.framework is None else framework_named(self.framework)
        before = None if self.compare is None else serialization.load(Accuracy, self.compare)
        paths = [find_ledger(path) for path in self.ledgers] or list(shipped_ledgers().values())
        with progress.compiling_programs() as on_progress:
            found = validated(
                [read_any(path) for path in paths],
                families=None if self.family is None else self.family.split(","),
                framework=framework,
                archive=Archive({}) if self.closed_form else None,
                on_progress=on_progress,
                compiles=self.compile,
                is_dry=self.dry_run,
            )
        tables.show(tables.validation(found))
        accuracy = accuracy_of(found.rows, __version__)
        if before is not None:
            tables.show(tables.accuracy_changes(before, accuracy))
        write_result(found, self.json, self.csv)
        if self.accuracy is not None:
            serialization.save(accuracy, self.accuracy)
            print(f"wrote {self.accuracy}")
        if self.html is not None:
            write_accuracy(found, self.html, release=__version__, before=before)
            print(f"wrote {self.html}")
        if self.plot is not None:
            steps = [row for row in found.rows if row.quantity == "step times"]
            save_picture(scatter(steps, title=found.ledger), self.plot)
            print(f"wrote {self.plot}")
        if all(row.skip_reason is not None for row in found.rows):
            raise SystemExit(1)


def find_cluster(name: str) -> tuple[Cluster, Site]:
    """The cluster of that name in the catalogue, or in a TOML file, and its site.

    Raises:
        UnknownHardware: if there is neither; for the name of a chip, lists clusters that have it.
        ConfigError: if the file does not describe a cluster, or there are several names.
    """
    if "," in name:
        accepted = "it must be one here; predict, search, plan, cost and bench take several"
        raise ConfigError(refusal("cluster", name, accepted))
    if name in chip_names() and name not in cluster_names():
        having = [each for each in cluster_names() if load_cluster(each).chip.name == name]
        known = (
            f"those with it are {', '.join(having)}" if having else "none in the catalogue has it"
        )
        raise UnknownHardware(refusal("cluster", name, f"it is a chip; of clusters, {known}"))
    return load_cluster_and_site(name)


def take_conditions(name: str, overrides: Overrides) -> tuple[Cluster, Site, Overrides]:
    """The cluster of that name and its site, with the hardware and conditions in `overrides` set,
    and the other overrides.

    Raises:
        UnknownHardware: if there is no such cluster.
        ConfigError: if there is no such condition or part, or it cannot have that value.
    """
    of_cluster, rest = split_hardware(overrides)
    prefix = "conditions."
    conditions = {
        field.removeprefix(prefix): value
        for field, value in of_cluster.items()
        if field.startswith(prefix)
    }
    parts = {field: value for field, value in of_cluster.items() if not field.startswith(prefix)}
    cluster, site = find_cluster(name)
    return *with_conditions(with_hardware(cluster, parts), site, conditions), rest


def take_clusters(
    names: Sequence[str], overrides: Overrides
) -> tuple[dict[str, tuple[Cluster, Site]], Overrides, list[str]]:
    """The clusters of a comparison and their sites, by name as typed; the other overrides; and
    notes on clusters that are left out because they lack a part that is to be multiplied.

    Raises:
        UnknownHardware, ConfigError: as in `take_conditions`, also if all would be left out.
    """
    of_cluster, rest = split_hardware(overrides)
    lacking = {name: parts_without(find_cluster(name)[0], of_cluster) for name in names}
    if all(lacking.values()):
        lacking = dict.fromkeys(names)
    found = {name: take_conditions(name, overrides)[:2] for name in names if not lacking[name]}
    notes = [
        f"{Path(name).stem if name.endswith('.toml') else name} is left out: it has no "
        f"{part.partition('.')[0]}, so that there is no {of_cluster[part]} of {part}"
        for name, parts in lacking.items()
        for part in (parts or ())[:1]
    ]
    return found, rest, notes


def split_hardware(overrides: Overrides) -> tuple[Overrides, Overrides]:
    """The overrides for a cluster and its site, and those for a run."""
    names = {"conditions", *HARDWARE_TABLES}
    of_cluster = {
        field: value for field, value in overrides.items() if field.partition(".")[0] in names
    }
    return of_cluster, {
        field: value for field, value in overrides.items() if field not in of_cluster
    }


def cluster_list(text: str) -> list[str]:
    """The names in "A,B,C", each once.

    Raises:
        ConfigError: if one is empty.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(names):
        accepted = "it must be names with commas between, such as dgx-h100,dgx-b200"
        raise ConfigError(refusal("cluster", text, accepted))
    return names


def path_for(path: Path | None, name: str, names: Sequence[str]) -> Path | None:
    """Path of a file for one of several clusters: OUT-NAME.json for OUT.json."""
    if path is None or len(names) == 1:
        return path
    return path.with_name(f"{path.stem}-{Path(name).stem}{path.suffix}")


def with_input(site: Site, path: Path | None, config: RunConfig) -> Site:
    """The site with the input rates in `path`, if given, for the data of a run.

    Raises:
        ConfigError: if they cannot be read, or were measured on other data.
    """
    if path is None:
        return site
    from scalejax.measure.input.work import host_input

    return replace(site, input=host_input(path, config))


_MOST = 10_000_000
"""Upper limit on devices, or samples of a batch: a hundred times the largest current number."""


def parse_counts(text: str, field: str = "devices") -> list[int]:
    """The numbers in "8,64,256", and in "8..4096" 8 and all its doublings up to 4096; ascending.

    Args:
        text: as typed.
        field: the flag, for refusals.

    Raises:
        ConfigError: if `text` holds anything else, or a range that falls.
    """
    accepted = (
        f"it must be numbers of {field} from 1 to {_MOST:,} with commas between, such as 8,64,256, "
        "or doublings such as 8..4096"
    )
    parts = text.split(",")
    if any(len(part) > 1 and part.startswith("0") for part in parts[1:]):
        raise ConfigError(refusal(field, text, f"{accepted}; a thousand is 1000"))
    found: set[int] = set()
    for part in parts:
        first, dots, last = part.partition("..")
        try:
            low, high = int(first), int(last if dots else first)
        except ValueError as error:
            raise ConfigError(refusal(field, text, accepted)) from error
        if low < 1 or high < low or high > _MOST:
            raise ConfigError(refusal(field, text, accepted))
        while low <= high:
            found.add(low)
            low *= 2
    return sorted(found)
