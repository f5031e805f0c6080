"""The work of a worker of a sweep: `JobTrainer` trains one job after another.

A worker whose scheduler is gone exits at once: checkpoints are on disk, and a resumed sweep must
not find it still training.
"""

import json
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from scalejax.config.run import ResolvedRun
from scalejax.core.environment import has_accelerator, limit_arenas
from scalejax.core.errors import ScalejaxError
from scalejax.core.serialization import save_text
from scalejax.core.workers import report
from scalejax.sweep.folder import SweepFolder
from scalejax.sweep.plan import read_runs
from scalejax.training.record import Evaluated, Measurement, TrainMeasurement
from scalejax.training.reporter import Silent
from scalejax.xla.worker_pool import free_bytes

PART_FOR_PROGRAMS = 0.75
"""Share of the free memory for the programs of the workers. The memory analysis of a compiled
program lacks the interpreter with JAX (350 MB per worker, observed), batches in flight, the
compiler and other processes; that a quarter suffices for them is an estimate, not measured."""


class _Steps(Silent):
    """A `Reporter` that sends the fraction of the job that is done."""

    def __init__(self) -> None:
        self._total_steps = 1

    def begin(self, step: int, total_steps: int) -> None:
        """Store the total number of steps."""
        self._total_steps = total_steps

    def say(self, text: str) -> None:
        """Print to the log."""
        print(text, file=sys.stderr, flush=True)

    def measured(self, measurement: Measurement) -> None:
        """Send the fraction of the job that is done."""
        if isinstance(measurement, Evaluated | TrainMeasurement):
            report(measurement.step / self._total_steps)


class JobTrainer:
    """Trains jobs of the sweep in `folder`, each within `memory_bytes`; `modules` are those of
    its plan."""

    def __init__(self, folder: SweepFolder, memory_bytes: int, modules: Sequence[str]) -> None:
        self._folder = folder
        self._memory_bytes = memory_bytes
        self._modules = modules
        self._runs: list[ResolvedRun] = []

    def __call__(self, indices: Sequence[int]) -> None:
        """Train the runs of `indices` to their end, resuming those that began."""
        try:
            if not self._runs:
                limit_arenas()
                for name in self._modules:
                    import_module(name)
                self._runs = read_runs(self._folder)
            self._train(indices)
        except ScalejaxError:
            raise
        except Exception as error:  # one job fails, and the others continue
            traceback.print_exc()
            raise ScalejaxError(f"{type(error).__name__}: {error}") from error

    def _train(self, indices: Sequence[int]) -> None:
        files, runs = self._folder, self._runs
        # JAX is imported once, after the first job has arrived.
        if len(indices) == 1:
            from scalejax.training.train import train

            (index,) = indices
            run, folder = runs[index], files.run(index)
            if run.config.emulation is not None:
                from scalejax.emulation.run_folder import emulate

                emulate(run.config, folder.path, reporter=_Steps(), begins_anew=True)
                return
            train(
                run.config,
                folder.path,
                device_count=run.layout.device_count,
                resume=folder.holds_run,
                reporter=_Steps(),
                leave=os._exit,
            )
            return
        from scalejax.sweep.vmapped import train_together

        train_together(
            [runs[index] for index in indices],
            [files.run(index) for index in indices],
            files.shared_checkpoints(indices[0]),
            _Steps(),
            memory_bytes=_of_device(self._memory_bytes),
            leave=os._exit,
        )


def train_slurm_job() -> None:
    """Train the runs of a SLURM job of a sweep, with the devices of the node.

    Arguments of the process: the folder of the sweep; as JSON the runs, modules to import, virtual
    CPU devices if requested, and the number of devices if there is no accelerator; and the file for
    the reason if they are refused.
    """
    folder, text, refused = sys.argv[1:]
    asked = json.loads(text)
    if asked["cpu_devices"] is not None or not has_accelerator():
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_NUM_CPU_DEVICES"] = str(asked["cpu_devices"] or asked["devices"])
    memory_bytes = int(PART_FOR_PROGRAMS * free_bytes())
    try:
        JobTrainer(SweepFolder(path=Path(folder)), memory_bytes, asked["modules"])(asked["indices"])
    except ScalejaxError as error:
        save_text(str(error), Path(refused))
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _of_device(memory_bytes: int) -> int:
    """Memory limit of a program: that of the accelerator, or else `memory_bytes`."""
    import jax

    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("bytes_limit", memory_bytes)
