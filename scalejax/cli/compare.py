"""The command `compare`: two revisions of a training step, on devices that you do not have.

Imported without JAX, which is imported when it runs.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from scalejax.cli.command import (
    CsvFile,
    JsonFile,
    Overrides,
    OverridingCommand,
    flag,
    require_result_files,
    write_result,
)
from scalejax.cli.predict import take_conditions
from scalejax.core import progress, serialization
from scalejax.simulator.comparison import Bounds
from scalejax.simulator.frameworks import framework_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare(OverridingCommand):
    """Compare two revisions of a step, for GPUs that you do not have.

    A and B are each RUN.toml, RUN.toml@COMMIT, with the code and run file of the commit, or
    FILE.json, a program. Exits with 1 if B exceeds a bound. A flag with a dot replaces a field of
    both run files, or of --conditions.
    """

    a: Annotated[Positional[str], flag("A")]
    """The step before."""
    b: Annotated[Positional[str], flag("B")]
    """The step after."""
    cluster: Annotated[str, flag("CLUSTER")]
    """Name in the catalogue (see scalejax hardware), or a TOML file of your own."""
    devices: Annotated[int | None, flag("N")] = None
    """Number of devices. By default as in the program, or in the layout of the run file."""
    framework: Annotated[str, flag("NAME")] = "xla"
    """Framework that trains the run files, such as megatron-lm (see scalejax hardware)."""
    max_slowdown: Annotated[float, flag("F")] = Bounds().max_slowdown
    """Largest growth of the step time as a fraction. By default 0.02."""
    max_memory_growth: Annotated[float, flag("F")] = Bounds().max_memory_growth
    """Largest growth of the peak memory as a fraction. By default 0.02."""
    max_bytes_growth: Annotated[float, flag("F")] = Bounds().max_bytes_growth
    """Largest growth of the bytes of collectives over any mesh axes as a fraction, of all bytes if
    A has none over those axes. By default 0.02; a thousandth of all bytes is tolerated."""
    json: JsonFile = None
    """Write the comparison here as JSON."""
    csv: CsvFile = None
    """Write both predictions here as CSV, in SI units."""
    save_program: Annotated[Path | None, flag("FILE.json")] = None
    """Write the program of B here, to compare with later."""

    def execute(self, overrides: Overrides) -> None:
        """Find or compile both steps, print the comparison; exit with 1 beyond a bound."""
        from scalejax.planning.compare_revisions import CASES, Request, compare_revisions
        from scalejax.report.terminal import comparison as comparison_tables
        from scalejax.report.terminal import tables

        require_result_files(self.json, self.csv)
        serialization.require_writable("save_program", self.save_program)
        bounds = Bounds(
            max_slowdown=self.max_slowdown,
            max_memory_growth=self.max_memory_growth,
            max_bytes_growth=self.max_bytes_growth,
        )
        cluster, site, overrides = take_conditions(self.cluster, overrides)
        request = Request(
            cluster=cluster,
            cluster_name=self.cluster,
            site=site,
            device_count=self.devices,
            framework=framework_named(self.framework),
            overrides=overrides,
        )
        with progress.compiling(CASES) as on_progress:
            found, after = compare_revisions(
                self.a, self.b, request, bounds=bounds, on_progress=on_progress
            )
        tables.show(comparison_tables.comparison(found, cluster, titles=(self.a, self.b)))
        write_result(found, self.json, self.csv)
        if self.save_program is not None:
            serialization.save(after, self.save_program)
            print(f"wrote {self.save_program}")
        if found.exceeded:
            sys.stdout.flush()  # fails here if the reader has exited
            raise SystemExit(1)
