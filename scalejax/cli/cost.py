"""The command `cost`: what a whole run costs on clusters and numbers of devices.

Imported without JAX, which is imported when it runs.
"""

import re
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional

from scalejax.cli.command import (
    CsvFile,
    JsonFile,
    Overrides,
    OverridingCommand,
    flag,
    require_result_files,
    to_type,
    write_result,
)
from scalejax.cli.plan import for_each
from scalejax.cli.predict import cluster_list, parse_counts, split_hardware, take_clusters
from scalejax.config.model import DecoderConfig
from scalejax.config.presets import costed_note
from scalejax.config.run import RunConfig, given_name, load_config
from scalejax.core import progress, serialization
from scalejax.core.environment import machine_cores
from scalejax.core.errors import ConfigError, DoesNotFit, refusal, require_import_path
from scalejax.core.units import parse_count
from scalejax.report.terminal import tables
from scalejax.simulator.frameworks import framework_named
from scalejax.training.record import facts_of

if TYPE_CHECKING:
    from scalejax.planning.run_cost import CostOption, CostRow, RunCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost(OverridingCommand):
    """Say what a run costs: days, dollars, energy, CO2.

    A row for each cluster and number of devices, each with its own best layout; the global batch is
    the same in all. A published decoder has its published batch, context and tokens, if these are
    known here, in bfloat16. A flag with a dot replaces a field of the run, of --conditions or of
    the hardware, such as --network.bytes_per_second 2x.
    """

    subject: Annotated[Positional[str], flag("MODEL|RUN.toml|MODULE:NAME")]
    """Published decoder (gpt3-1.3b), llama-like:N=1b, a run file, or the import path of a
    RunConfig or of a function that returns one (my_runs:large)."""
    cluster: Annotated[str, flag("A,B,...")]
    """Names in the catalogue (see scalejax hardware), or TOML files of your own."""
    devices: Annotated[str, flag("N..M")]
    """Numbers of devices: 64,256,1024, or 64..1024 for every doubling."""
    tokens: Annotated[str | None, flag("T")] = None
    """Tokens to train on, such as 300B or 15T. By default as published, or the run's epochs."""
    epochs: Annotated[float | None, flag("E")] = None
    """Passes over the data of a run file or of MODULE:NAME, instead of tokens."""
    global_batch: Annotated[int | None, flag("B")] = None
    """Samples per update. By default as published, or as in the run."""
    framework: Annotated[str, flag("NAME")] = "xla"
    """Framework that trains it, such as megatron-lm (see scalejax hardware)."""
    price: Annotated[str | None, flag("PRICE")] = None
    """Your price of one device-hour, in any currency; one for all clusters, or P,P,... for each. By
    default the list price in the cluster's file, in dollars."""
    watts: Annotated[str | None, flag("W")] = None
    """Your power of a device with its share of host, network and cooling; one for all, or W,W,...
    By default that in the cluster's file."""
    pue: Annotated[float | None, flag("F")] = None
    """Power of the data centre over that of its machines, such as 1.2."""
    grid_intensity: Annotated[float | None, flag("GRAMS_PER_KWH")] = None
    """Grams of CO2 per kWh of electricity, such as 400: adds the CO2."""
    confirm: Annotated[int, flag("K")] = 1
    """Number of the best layouts of each row that are compiled, 10 to 30 s each; the fastest is
    taken. Up to 3 if the next may be faster than the best, as compiled. By default 1; 0 for none,
    which is less exact."""
    facts: Annotated[Path | None, flag("FACTS.json")] = None
    """Counts and shapes of the data, stored as facts.json in a run folder."""
    json: JsonFile = None
    """Write the rows and notes here."""
    csv: CsvFile = None
    """Write the rows here, in SI units."""
    output: Annotated[Path | None, flag("DIR")] = None
    """Folder for the run file of each row, which predict, plan and train take."""

    def execute(self, overrides: Overrides) -> None:
        """Search and compile each row, print the tables, write the files."""
        from scalejax.planning.run_cost import Work, cost_run, published_tokens
        from scalejax.planning.search.run import require_not_searched
        from scalejax.report.terminal import cost as cost_tables

        require_result_files(self.json, self.csv)
        serialization.require_writable_folder("output", self.output)
        framework = framework_named(self.framework)
        counts = parse_counts(self.devices)
        tokens = None if self.tokens is None else parse_count("tokens", self.tokens)
        options, rest, left_out = self._options(overrides)
        config, name, path, notes = self._run(rest)
        if isinstance(config.model, DecoderConfig):
            accepted = "cost tries every value; leave it out, or ask predict for one"
            require_not_searched(rest, accepted)
        if name == self.subject:
            tokens = published_tokens(name, tokens=tokens, epochs=self.epochs)
        facts = facts_of(config, path or Path(), rest, self.facts)
        if (costed := costed_note(name, config.model, facts)) is not None and path is not None:
            notes.insert(0, costed)
        notes += left_out
        rows = len(options) * len(counts)
        with progress.costing() as on_progress, progress.compiling(rows) as on_compiled:
            report, runs = cost_run(
                config,
                list(options.values()),
                counts,
                Work(tokens=tokens, epochs=self.epochs),
                name=name,
                framework=framework,
                facts=facts,
                confirm=self.confirm,
                processes=machine_cores(),
                notes=notes,
                on_progress=on_progress,
                on_compiled=on_compiled,
            )
        files = self._write_runs(report, runs, name)
        report = replace(
            report,
            rows=tuple(
                replace(row, run_file=None if file is None else str(file))
                for row, file in zip(report.rows, files, strict=True)
            ),
        )
        tables.show(cost_tables.costed(report))
        self._write(report)
        if all(row.misfit is not None for row in report.rows):
            raise DoesNotFit("nothing fits on any of these clusters and numbers of devices.")
        self._show_next(report, name, list(options), overrides)

    def _run(self, overrides: Overrides) -> tuple[RunConfig, str, Path | None, list[str]]:
        """The run, its name, its file, and notes on what was assumed."""
        from scalejax.planning.run_cost import named_decoder
        from scalejax.planning.time_to_target.language import LIKE_LLAMA

        batch: Overrides = (
            {} if self.global_batch is None else {"batch.global_batch": self.global_batch}
        )
        overrides = {**overrides, **batch}
        if self.subject.endswith(".toml"):
            path = Path(self.subject)
            tables_of = serialization.load_toml(path)
            missing: Overrides = {}
            if "schedule" not in tables_of:
                missing["schedule.base_learning_rate"] = 1e-4
            if "optimizer" not in tables_of:
                missing["optimizer.name"] = "adamw"
            config = load_config(path, {**missing, **overrides})
            return config, given_name(path, overrides) or config.model.name, path, []
        if ":" in self.subject and not self.subject.startswith(LIKE_LLAMA):
            return *_imported(self.subject, overrides), None, []
        config, notes = named_decoder(self.subject, overrides)
        return config, self.subject, None, notes

    def _options(
        self, overrides: Overrides
    ) -> tuple[dict[str, "CostOption"], Overrides, list[str]]:
        """The clusters with their rates, by their names as typed; the overrides of the run; and
        notes on clusters that are left out."""
        from scalejax.planning.bill import rates_of
        from scalejax.planning.run_cost import CostOption

        names = cluster_list(self.cluster)
        prices = for_each("price", self.price, len(names))
        watts = for_each("watts", self.watts, len(names))
        found, rest, left_out = take_clusters(names, overrides)
        options = {}
        for name, price, power in zip(names, prices, watts, strict=True):
            if name not in found:
                continue
            cluster, site = found[name]
            rates = rates_of(
                cluster,
                price_per_device_hour=price,
                watts_per_device=power,
                pue=self.pue,
                grid_grams_per_kwh=self.grid_intensity,
            )
            options[name] = CostOption(cluster=cluster, rates=rates, site=site)
        return options, rest, left_out

    def _write_runs(
        self, report: "RunCost", runs: list[RunConfig | None], name: str
    ) -> list[Path | None]:
        """Write the run file of each row that has one, and return its path."""
        files: list[Path | None] = [None] * len(runs)
        if self.output is None:
            return files
        for place, (row, run) in enumerate(zip(report.rows, runs, strict=True)):
            if run is not None:
                path = self.output / _file_name(name, row)
                serialization.save_toml(run, path)
                files[place] = path
        return files

    def _write(self, report: "RunCost") -> None:
        write_result(report, self.json, self.csv)
        for row in report.rows:
            if row.run_file is not None:
                print(f"wrote {row.run_file}")

    def _show_next(
        self, report: "RunCost", name: str, clusters: list[str], overrides: Overrides
    ) -> None:
        """Print what to type next.

        Args:
            report: the answer.
            name: name of the network.
            clusters: the clusters as typed, in the order of the rows.
            overrides: all fields that were replaced.
        """
        best = report.soonest if report.cheapest is None else report.cheapest
        if best is None:
            return
        row = report.rows[best]
        words = ["scalejax", "explain", row.run_file or f"DIR/{_file_name(name, row)}"]
        words += ["--cluster", clusters[best * len(clusters) // len(report.rows)]]
        words += ["--devices", str(row.device_count)]
        if framework_named(self.framework) != framework_named("xla"):
            words += ["--framework", self.framework]
        for field, value in split_hardware(overrides)[0].items():
            words += [f"--{field}", str(value)]
        if row.run_file is None:
            print("With --output DIR, the run file of each row is written too.")
        print(to_type("To see why", words))


def _file_name(name: str, row: "CostRow") -> str:
    """Name of the run file of a row."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    return f"{stem}-{row.cluster}-{row.device_count}.toml"


def _imported(where: str, overrides: Overrides) -> tuple[RunConfig, str]:
    """The run at an import path, and its name.

    Raises:
        ConfigError: if there is none.
    """
    from scalejax.config.run import with_fields

    require_import_path("subject", where, "my_runs:large")
    module, _, name = where.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(import_module(module), name)
        if callable(found):
            found = found()
    except Exception as error:  # whatever its code raises
        accepted = f"it cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(refusal("subject", where, accepted)) from error
    finally:
        sys.path.remove(str(Path.cwd()))
    if not isinstance(found, RunConfig):
        accepted = f"it is {type(found).__name__}, and must be a RunConfig or return one"
        raise ConfigError(refusal("subject", where, accepted))
    return (with_fields(found, overrides) if overrides else found), name
