"""The command that emulates training by many workers in virtual time.

Starts without JAX, and imports it when it runs.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from scalejax import tables, waiting
from scalejax.commands.command import Overrides, RunFileCommand, flag
from scalejax.commands.costs import find_cluster, take_conditions
from scalejax.config import load_config
from scalejax.jax_platform import choose_platform


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulate(RunFileCommand):
    """Train by many virtual workers: real gradients, virtual time.

    Asynchronous and historical ways to train, such as Downpour SGD, with the real model and data,
    while a clock follows the cost model. A flag with a dot replaces a field of the file, such as
    --emulation.algorithm.n_push 5, or of --conditions.
    """

    algorithm: Annotated[str | None, flag("NAME")] = None
    """How the workers train together: downpour, synchronous, ... By default that of the file's
    [emulation]."""
    workers: Annotated[int | None, flag("N")] = None
    """How many there are. By default as the file says, or 1."""
    cluster: Annotated[str | None, flag("CLUSTER")] = None
    """Whose times it goes by: a name in the catalogue (see scalejax hardware), or a TOML file.
    By default that of the file's [emulation], or the times in its timing."""
    folder: Annotated[Path | None, flag("DIR")] = None
    """Where its record goes. By default runs/ and the names of the file and the algorithm."""

    def execute(self, overrides: Overrides) -> None:
        """Emulate, print what came of it, and say where the record is."""
        given: Overrides = {}
        if self.algorithm is not None:
            given["emulation.algorithm"] = {"name": self.algorithm}
        if self.workers is not None:
            given["emulation.workers"] = self.workers
        if self.cluster is not None:
            given["emulation.cluster"] = self.cluster
        conditions = {name for name in overrides if name.startswith("conditions.")}
        fields = {name: value for name, value in overrides.items() if name not in conditions}
        config = load_config(self.run_file, given | fields)
        named = config.emulation and config.emulation.cluster
        cluster = None
        if named is not None:
            cluster, _ = take_conditions(
                find_cluster(named), {name: overrides[name] for name in conditions}
            )
        choose_platform(None)
        from scalejax import emulation_tables
        from scalejax.emulate.folder import emulate
        from scalejax.progress import reporter_for
        from scalejax.record import RunRecord

        algorithm = config.emulation.algorithm.name if config.emulation else ""
        folder = self.folder or Path("runs") / f"{self.run_file.stem}-{algorithm}"
        found = emulate(
            config,
            folder,
            cluster=cluster,
            reporter=reporter_for(sys.stderr),
            compiling=lambda: waiting.compiling(1),
        )
        tables.show(emulation_tables.emulation(found, RunRecord.load(folder)))
        print(f"scalejax report {folder} draws its curves.")
