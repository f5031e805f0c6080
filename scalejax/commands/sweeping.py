"""The command that trains many runs of one file.

Starts without JAX, which its workers alone import.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, UseAppendAction, arg

from scalejax import documents, sweep_tables, tables, waiting
from scalejax.commands.command import Overrides, RunFileCommand, flag
from scalejax.errors import ScalejaxError, require_at_least
from scalejax.sweep import (
    Grammar,
    SweepFolder,
    SweepPlan,
    parse_grammar,
    plan_sweep,
    read_rows,
    run_sweep,
    write_results,
)
from scalejax.sweep.plan import begin_sweep, parse_target


def _repeated(letter: str, metavar: str) -> object:
    return arg(aliases=[f"-{letter}"], metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep(RunFileCommand):
    """Train every combination of values, side by side.

    Values are JSON. Every combination of -V is merged over -P; each -E, in order, replaces
    parameters of the runs that match its condition, or forks them into cases. A flag with a dot
    is a -P whose value may be TOML.
    """

    variable: UseAppendAction[Annotated[tuple[str, ...], _repeated("V", "FIELD=[VALUE,...]")]] = ()
    """Values to combine, such as 'seed=[0,1,2]'. May be repeated."""
    parameter: UseAppendAction[Annotated[tuple[str, ...], _repeated("P", "FIELD=VALUE")]] = ()
    """A value for every run. May be repeated."""
    extension: UseAppendAction[Annotated[tuple[str, ...], _repeated("E", "JSON")]] = ()
    """{"condition": {FIELD: VALUE or [VALUES]}, "parameters": {...}, "cases": [{...}, ...]}.
    May be repeated."""
    folder: Annotated[Path | None, flag("DIR")] = None
    """Where everything goes. By default sweeps/ and the name of the file."""
    plan: FlagCreatePairsOff[bool] = False
    """Print the plan, and train nothing."""
    resume: FlagCreatePairsOff[bool] = False
    """Go on with the sweep in the folder."""
    target: Annotated[str | None, flag("METRIC=VALUE")] = None
    """What the runs are to reach, such as test_accuracy=0.88; adds steps and samples to it."""
    processes: Annotated[int | None, flag("N")] = None
    """Processes at once. By default as many as there are cores and memory for."""
    cpu_devices: Annotated[int | None, flag("N")] = None
    """Divide the CPU into N virtual devices for each run."""
    one_by_one: FlagCreatePairsOff[bool] = False
    """Train each run in a program of its own, also where runs could share one."""

    def execute(self, overrides: Overrides) -> None:
        """Plan, train what is left to do, write and print the results."""
        if self.processes is not None:
            require_at_least("processes", self.processes, 1)
        typed = parse_grammar(self.parameter, self.variable, self.extension)
        sweep = plan_sweep(
            self.run_file,
            Grammar(
                parameters=overrides | typed.parameters,
                variables=typed.variables,
                extensions=typed.extensions,
            ),
            one_by_one=self.one_by_one,
            cpu_devices=self.cpu_devices,
            target=parse_target(self.target),
        )
        tables.show(sweep_tables.plan(sweep))
        if self.plan:
            return
        folder = SweepFolder(path=self.folder or Path("sweeps") / self.run_file.stem)
        documents.require_writable_folder("folder", folder.path)
        begin_sweep(sweep, folder, resume=self.resume)
        self._train(sweep, folder)

    def _train(self, sweep: SweepPlan, folder: SweepFolder) -> None:
        try:
            with waiting.training(len(sweep.jobs), len(sweep.runs)) as on_part:
                problems = run_sweep(sweep, folder, processes=self.processes, on_part=on_part)
        except KeyboardInterrupt:
            done = sum(row.is_finished for row in read_rows(sweep, folder))
            print(
                f"{done} of {len(sweep.runs)} runs are finished in {folder.path}; "
                "the same command with --resume goes on",
                file=sys.stderr,
            )
            raise
        rows = read_rows(sweep, folder)
        write_results(sweep, folder, rows)
        print()
        tables.show(sweep_tables.results(sweep, rows))
        print(f"wrote {folder.results}, evaluations.parquet and timings.parquet beside it")
        self._draw(sweep, folder)
        if problems:
            raise ScalejaxError("\n".join(problems) + "\n--resume tries again what failed.")

    def _draw(self, sweep: SweepPlan, folder: SweepFolder) -> None:
        from scalejax.sweep_plots import save_curves, save_finals

        rows = read_rows(sweep, folder)
        if any(row.evaluations for row in rows if row.is_finished):
            save_finals(rows, path=folder.path / "final.png")
            save_curves(rows, path=folder.path / "curves.png")
            print(f"wrote {folder.path / 'final.png'} and curves.png")
