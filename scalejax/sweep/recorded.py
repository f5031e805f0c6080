"""A sweep as its folder tells of it: the plan that was written there, and what its runs have left.

Knows the files; plans nothing anew.
"""

from pathlib import Path

from scalejax.documents import build
from scalejax.sweep.folder import SweepFolder
from scalejax.sweep.plan import PlannedRun, SweepPlan, Target, read_runs, varied_fields, written
from scalejax.sweep.results import RunRow, read_rows


def recorded_sweep(path: Path) -> tuple[SweepPlan, list[RunRow]]:
    """The plan of the sweep in the folder `path`, and a row for each of its runs.

    Raises:
        ConfigError: if there is no sweep, or a file of it is damaged.
    """
    folder = SweepFolder(path=path)
    document = written(folder)
    resolved, cpu_devices = read_runs(folder)
    listed = document.get("runs")
    fields = [dict(each) for each in listed if isinstance(each, dict)] if listed else []  # type: ignore[union-attr]
    names = list(dict.fromkeys(name for each in fields for name in each))
    varied = varied_fields(names, [run.config for run in resolved])
    target = document.get("target")
    plan = SweepPlan(
        text=folder.run_file.read_text(encoding="utf-8"),
        runs=tuple(
            PlannedRun(index=index, fields=fields[index], varied=varied[index], run=run)
            for index, run in enumerate(resolved)
        ),
        repeated=0,
        jobs=(),
        cpu_devices=cpu_devices,
        target=None if target is None else build(Target, target, where="target"),
    )
    return plan, read_rows(plan, folder)
