"""The command `emulate`: trains with many virtual workers in virtual time.

Imported without JAX, which is imported when it runs.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff

from scalejax.cli.command import (
    CsvFile,
    JsonFile,
    Overrides,
    RunFileCommand,
    flag,
    require_result_files,
    write_result,
)
from scalejax.cli.predict import split_hardware, take_conditions
from scalejax.config.migrate import load_run_file
from scalejax.config.run import RunConfig, load_config
from scalejax.core import progress
from scalejax.core.environment import choose_platform
from scalejax.core.errors import ConfigError, refusal
from scalejax.core.folder import FileIn
from scalejax.emulation.record import EMULATION
from scalejax.hardware import NO_SITE, Cluster, Site
from scalejax.report.terminal import tables
from scalejax.training.record import RunFolder, RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulate(RunFileCommand):
    """Train with many virtual workers: real gradients, virtual time.

    Asynchronous and historical algorithms, such as Downpour SGD, train the real model on real data,
    while a virtual clock follows the cost model. A flag with a dot replaces a field of the file,
    such as --emulation.algorithm.n_push 5, or of --conditions.
    """

    algorithm: Annotated[str | None, flag("NAME")] = None
    """Algorithm: downpour, sandblaster, synchronous, stale_synchronous, local_sgd, easgd, hogwild,
    delayed, independent, or kvstore and variable_update, the modes of MXNet and tf_cnn_benchmarks.
    By default as in the file's [emulation]."""
    workers: Annotated[int | None, flag("N")] = None
    """Number of workers. By default as in the file, or 1."""
    cluster: Annotated[str | None, flag("CLUSTER")] = None
    """Cluster whose times are predicted: a name in the catalogue (see scalejax hardware), or a TOML
    file. By default as in the file's [emulation], or the times in its timing."""
    folder: Annotated[Path | None, flag("DIR")] = None
    """Folder of the run record. By default runs/ and the names of the file and the algorithm."""
    events: FlagCreatePairsOff[bool] = False
    """Write the instruction log, every instruction with its virtual time, to events.parquet."""
    replay: Annotated[Path | None, flag("DIR")] = None
    """Emulate nothing: replay events.parquet of this folder, and compare the result with its
    record."""
    json: JsonFile = None
    """Write the result here as JSON (scalejax schema)."""
    csv: CsvFile = None
    """Write it here as CSV, in SI units."""

    def execute(self, overrides: Overrides) -> None:
        """Emulate, and print the results and the folder of the record."""
        fields, conditions = self._fields(overrides)
        config = load_config(self.run_file, fields)
        algorithm = config.emulation.algorithm.name if config.emulation else ""
        folder = self.folder or Path("runs") / f"{self.run_file.stem}-{algorithm}"
        names = {*FileIn.names(RunFolder), EMULATION}
        require_result_files(self.json, self.csv, folder, names)
        cluster, site = _cluster(config, conditions)
        choose_platform(None)
        from scalejax.emulation.run_folder import emulate, replay_folder
        from scalejax.report.terminal import sweep as sweep_tables
        from scalejax.training.reporter import reporter_for

        if self.replay is not None:
            lines = replay_folder(config, self.replay)
            print(f"{self.replay}: all {lines} lines of losses and accuracies are the same.")
            return
        found = emulate(
            config,
            folder,
            cluster=cluster,
            site=site,
            reporter=reporter_for(sys.stderr),
            keeps_events=self.events,
            compiling=lambda: progress.compiling(1),
        )
        tables.show(sweep_tables.emulation(found, RunRecord.load(folder)))
        write_result(found, self.json, self.csv)
        print(f"scalejax report {folder} draws its curves.")

    def _fields(self, overrides: Overrides) -> tuple[Overrides, Overrides]:
        """The overrides of fields of the file, and those of conditions of the site."""
        fields: Overrides = {}
        if self.algorithm not in (None, _algorithm_in(self.run_file)):
            fields["emulation.algorithm"] = {"name": self.algorithm}  # drops the other's fields
        for name in ("workers", "cluster"):
            if getattr(self, name) is not None:
                fields[f"emulation.{name}"] = getattr(self, name)
        of_cluster, of_file = split_hardware(overrides)
        return fields | of_file, of_cluster


def _algorithm_in(path: Path) -> str | None:
    """The name of the algorithm in a run.toml, if it has one."""
    if not path.is_file():
        return None
    emulation = load_run_file(path).get("emulation")
    algorithm = emulation.get("algorithm") if isinstance(emulation, dict) else None
    name = algorithm.get("name") if isinstance(algorithm, dict) else None
    return name if isinstance(name, str) else None


def _cluster(config: RunConfig, conditions: Overrides) -> tuple[Cluster | None, Site]:
    """The cluster that `config` names, and its site with these conditions set.

    Raises:
        ConfigError: if there are conditions and no cluster.
    """
    if config.emulation is not None and config.emulation.cluster is not None:
        cluster, site, _ = take_conditions(config.emulation.cluster, conditions)
        return cluster, site
    for name, value in conditions.items():
        raise ConfigError(refusal(name, value, "it is of a cluster: give --cluster NAME"))
    return None, NO_SITE
