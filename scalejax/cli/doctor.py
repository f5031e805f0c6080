"""The command `doctor`: checks the machine for problems that break runs or slow them down.

Imported without JAX, which is imported when it runs.
"""

import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from scalejax.cli.command import (
    CsvFile,
    JsonFile,
    PlainCommand,
    flag,
    require_result_files,
    write_result,
)
from scalejax.cli.predict import find_cluster
from scalejax.core import process_group, progress
from scalejax.core.environment import choose_platform, has_accelerator
from scalejax.hardware import Cluster, load_cluster
from scalejax.measure.doctor import Findings, examine, is_any_bad, stage_count
from scalejax.report.terminal import bench as bench_tables
from scalejax.report.terminal import tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Doctor(PlainCommand):
    """Check this machine for problems that slow or break runs.

    Versions, devices and their rates, memory, disks, ports, environment variables; under srun or
    mpirun also clocks and the connections between processes. Exit codes: 0 if nothing is bad, 1 if
    something is.
    """

    cluster: Annotated[str | None, flag("CLUSTER")] = None
    """Expected devices: a cluster's name (see scalejax hardware), or a TOML file. By default the
    one that matches the names of the devices; for a CPU, the one that scalejax calibrate
    measured."""
    folder: Annotated[Path, flag("DIR")] = Path("runs")
    """Folder of run records. By default runs."""
    cpu_devices: Annotated[int | None, flag("N")] = None
    """Divide the CPU into N virtual devices. By default two, or one for each of several
    processes."""
    json: JsonFile = None
    """Write the findings here as well."""
    csv: CsvFile = None
    """Write a row for each finding here as CSV."""

    def execute(self) -> None:
        """Check, print the table, write the findings; exits with 1 if something is bad."""
        from scalejax.core.cache import user_folder

        require_result_files(self.json, self.csv)
        environment = dict(os.environ)  # before anything in it is set here
        place = process_group.place_here()
        cluster = find_cluster(self.cluster)[0] if self.cluster else None
        choose_platform()
        if not has_accelerator() or self.cpu_devices is not None:
            choose_platform(self.cpu_devices or (2 if place is None else 1))
            cluster = cluster or _calibrated(user_folder(), place is not None)
        process_group.join(place)
        is_first = place is None or place.process == 0
        with (
            process_group.leaving_at_once(place),
            progress.measuring(stage_count())
            if is_first
            else nullcontext(progress.no_display) as on_progress,
        ):
            found = examine(
                self.folder,
                user_folder(),
                environment,
                cluster=cluster,
                place=place,
                on_progress=on_progress,
            )
        with process_group.leaving_at_once(place):
            # A process reports alone if it could not reach the others.
            if is_first or all(each.processes for each in found):
                tables.show(bench_tables.findings(found))
            if is_first:
                write_result(Findings(findings=tuple(found)), self.json, self.csv)
            sys.stdout.flush()  # before JAX waits for the others, perhaps too long
            raise SystemExit(1 if is_any_bad(found) else 0)


def _calibrated(folder: Path, between_processes: bool) -> Cluster | None:
    """The cluster that `scalejax calibrate` measured on this CPU; None if there is none."""
    name = "processes.toml" if between_processes else "cluster.toml"
    path = folder / "this-machine" / name
    cluster = load_cluster(os.fspath(path)) if path.is_file() else None
    return cluster if cluster is not None and cluster.chip.name == "cpu" else None
