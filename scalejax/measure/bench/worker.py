"""A process of one benchmark in one round: times the steps; the first process writes the result.

Started by `scalejax.launch`, alone or with its peers; a signal ends it at once, as there is nothing
to save.

Usage: python -m scalejax.measure.bench.worker BENCH_FOLDER NAME ROUND MONITOR_SECONDS
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from scalejax.core import process_group, serialization
from scalejax.core.environment import choose_platform
from scalejax.core.errors import ScalejaxError
from scalejax.core.heartbeat import Heartbeat
from scalejax.measure.bench.folder import BenchFolder
from scalejax.measure.bench.plan import Job


def main(folder: BenchFolder, name: str, repeat: int, monitor_seconds: float) -> int:
    """Time the benchmark; returns the exit code, 0."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    process_group.die_with_launcher()
    place = process_group.place_here()
    job = serialization.load(Job, folder.job(name))
    choose_platform()
    process_group.join(place)
    from scalejax.measure.bench.timed_steps import measure

    path = folder.program(name)
    with process_group.leaving_at_once(place):
        result = measure(
            job.run,
            job.settings,
            monitor_seconds=monitor_seconds,
            heartbeat=Heartbeat.from_environment(),
            # Always in the first round: a rerun may use another version, or other devices.
            on_program=None
            if repeat and path.exists()
            else lambda program: serialization.save(program, path),
        )
    if place is None or place.process == 0:
        serialization.save(result, folder.result(name, repeat))
    return 0


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    try:
        sys.exit(
            main(
                BenchFolder(path=Path(sys.argv[1])),
                sys.argv[2],
                int(sys.argv[3]),
                float(sys.argv[4]),
            )
        )
    except ScalejaxError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
