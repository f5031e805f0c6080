"""The command that emulates training by many workers in virtual time.

Starts without JAX, and imports it when it runs.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff

from scalejax.cli.command import Overrides, RunFileCommand, flag
from scalejax.cli.predict import find_cluster, take_conditions
from scalejax.config.migrate import load_run_file
from scalejax.config.run import RunConfig, load_config
from scalejax.core import progress
from scalejax.core.environment import choose_platform
from scalejax.core.errors import ConfigError, refusal
from scalejax.hardware import Cluster
from scalejax.report.terminal import tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulate(RunFileCommand):
    """Train by many virtual workers: real gradients, virtual time.

    Asynchronous and historical ways to train, such as Downpour SGD, with the real model and data,
    while a clock follows the cost model. A flag with a dot replaces a field of the file, such as
    --emulation.algorithm.n_push 5, or of --conditions.
    """

    algorithm: Annotated[str | None, flag("NAME")] = None
    """How the workers train together: downpour, sandblaster, synchronous, stale_synchronous,
    local_sgd, easgd, hogwild, delayed, independent, or kvstore and variable_update by the names
    of MXNet and tf_cnn_benchmarks. By default that of the file's [emulation]."""
    workers: Annotated[int | None, flag("N")] = None
    """How many there are. By default as the file says, or 1."""
    cluster: Annotated[str | None, flag("CLUSTER")] = None
    """Whose times it goes by: a name in the catalogue (see scalejax hardware), or a TOML file.
    By default that of the file's [emulation], or the times in its timing."""
    folder: Annotated[Path | None, flag("DIR")] = None
    """Where its record goes. By default runs/ and the names of the file and the algorithm."""
    events: FlagCreatePairsOff[bool] = False
    """Keep every instruction of the arithmetic with its virtual time, in events.parquet."""
    replay: Annotated[Path | None, flag("DIR")] = None
    """Emulate nothing: compute the run in this folder again from its events.parquet, and hold
    that against its record."""

    def execute(self, overrides: Overrides) -> None:
        """Emulate, print what came of it, and say where the record is."""
        fields, conditions = self._fields(overrides)
        config = load_config(self.run_file, fields)
        cluster = _cluster(config, conditions)
        choose_platform(None)
        from scalejax.emulation.run_folder import emulate, replay_folder
        from scalejax.report.terminal import sweep as sweep_tables
        from scalejax.training.record import RunRecord
        from scalejax.training.reporter import reporter_for

        if self.replay is not None:
            lines = replay_folder(config, self.replay)
            print(f"{self.replay}: all {lines} lines of losses and accuracies are the same.")
            return
        algorithm = config.emulation.algorithm.name if config.emulation else ""
        folder = self.folder or Path("runs") / f"{self.run_file.stem}-{algorithm}"
        found = emulate(
            config,
            folder,
            cluster=cluster,
            reporter=reporter_for(sys.stderr),
            keeps_events=self.events,
            compiling=lambda: progress.compiling(1),
        )
        tables.show(sweep_tables.emulation(found, RunRecord.load(folder)))
        print(f"scalejax report {folder} draws its curves.")

    def _fields(self, overrides: Overrides) -> tuple[Overrides, Overrides]:
        """What replaces fields of the file, and the conditions of the cluster."""
        fields: Overrides = {}
        if self.algorithm not in (None, _algorithm_in(self.run_file)):
            fields["emulation.algorithm"] = {"name": self.algorithm}  # none of another's fields
        for name in ("workers", "cluster"):
            if getattr(self, name) is not None:
                fields[f"emulation.{name}"] = getattr(self, name)
        conditions: Overrides = {}
        for name, value in overrides.items():
            (conditions if name.startswith("conditions.") else fields)[name] = value
        return fields, conditions


def _algorithm_in(path: Path) -> str | None:
    """The name of the algorithm in a run.toml, if it has one."""
    if not path.is_file():
        return None
    emulation = load_run_file(path).get("emulation")
    algorithm = emulation.get("algorithm") if isinstance(emulation, dict) else None
    name = algorithm.get("name") if isinstance(algorithm, dict) else None
    return name if isinstance(name, str) else None


def _cluster(config: RunConfig, conditions: Overrides) -> Cluster | None:
    """The cluster that `config` names, under these conditions.

    Raises:
        ConfigError: if there are conditions and no cluster.
    """
    if config.emulation is not None and config.emulation.cluster is not None:
        cluster, _ = take_conditions(find_cluster(config.emulation.cluster), conditions)
        return cluster
    for name, value in conditions.items():
        raise ConfigError(refusal(name, value, "it is of a cluster: give --cluster NAME"))
    return None
