"""Worker process of a sweep: trains one job after another.

Jobs arrive as JSON lines on standard input, progress and results are sent as JSON lines on standard
output; all other output goes to standard error. When standard input ends, the scheduler is gone,
and the worker exits at once: checkpoints are on disk, and a resumed sweep must not find it still
training.

Usage: python -m scalejax.sweep.worker SWEEP_FOLDER MEMORY_BYTES
"""

import json
import os
import queue
import sys
import threading
import traceback
from pathlib import Path
from typing import TextIO

from scalejax.config.run import ResolvedRun
from scalejax.core.environment import limit_arenas
from scalejax.core.errors import ScalejaxError
from scalejax.sweep.folder import SweepFolder
from scalejax.sweep.plan import read_runs
from scalejax.training.record import EvaluationMeasurement, Measurement, TrainMeasurement
from scalejax.training.reporter import Silent


class _Steps(Silent):
    """A `Reporter` that sends the progress of the job, and no more."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._total_steps = 1

    def begin(self, step: int, total_steps: int) -> None:
        """Store the total number of steps."""
        self._total_steps = total_steps

    def say(self, text: str) -> None:
        """Print to the log."""
        print(text, file=sys.stderr, flush=True)

    def measured(self, measurement: Measurement) -> None:
        """Send the fraction that is done."""
        if isinstance(measurement, EvaluationMeasurement | TrainMeasurement):
            _send(self._out, {"part": measurement.step / self._total_steps})


def main(folder: Path, memory_bytes: int) -> int:
    """Train the jobs of standard input, each within `memory_bytes`; returns the exit code."""
    limit_arenas()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not mix with the messages
    jobs: queue.Queue[list[int]] = queue.Queue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    files = SweepFolder(path=folder)
    runs, _ = read_runs(files)
    while True:
        indices = jobs.get()
        if not indices:
            return 0
        try:
            _train(files, runs, indices, _Steps(out), memory_bytes)
        except ScalejaxError as error:
            _send(out, {"refused": str(error)})
        except Exception as error:  # noqa: BLE001  one job fails, and the others continue
            traceback.print_exc()
            _send(out, {"refused": f"{type(error).__name__}: {error}"})
        else:
            _send(out, {"done": indices})


def _listen(jobs: "queue.Queue[list[int]]") -> None:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    os._exit(1)


def _train(
    files: SweepFolder,
    runs: list[ResolvedRun],
    indices: list[int],
    reporter: _Steps,
    memory_bytes: int,
) -> None:
    """Train the runs of `indices` to their end, resuming those that began."""
    # JAX is imported once, after the first job has arrived.
    if len(indices) == 1:
        from scalejax.training.train import train

        (index,) = indices
        run, folder = runs[index], files.run(index)
        if run.config.emulation is not None:
            from scalejax.emulation.run_folder import emulate

            emulate(run.config, folder.path, reporter=reporter, begins_anew=True)
            return
        train(
            run.config,
            folder.path,
            device_count=run.layout.device_count,
            resume=folder.holds_run,
            reporter=reporter,
            leave=os._exit,
        )
        return
    from scalejax.sweep.vmapped import train_together

    train_together(
        [runs[index] for index in indices],
        [files.run(index) for index in indices],
        files.shared_checkpoints(indices[0]),
        reporter,
        memory_bytes=_of_device(memory_bytes),
        leave=os._exit,
    )


def _of_device(memory_bytes: int) -> int:
    """Memory limit of a program: that of the accelerator, or else `memory_bytes`."""
    import jax

    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("bytes_limit", memory_bytes)


def _send(out: TextIO, message: object) -> None:
    print(json.dumps(message), file=out, flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
