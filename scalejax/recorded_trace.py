"""A recorded trace that a prediction is to be held against: of so many devices, of the same kind.

Knows where `scalejax train --profile` leaves traces. Imports JAX only when it reads one.
"""

from pathlib import Path

from scalejax.chip_kind import refuse_other_kind
from scalejax.documents import load
from scalejax.errors import ConfigError, refusal
from scalejax.hardware import Cluster
from scalejax.program import Program
from scalejax.record import RunFolder
from scalejax.trace_import import MeasuredTrace, read_trace, trace_file
from scalejax.units import counted


def recorded_trace(path: Path, cluster: Cluster, device_count: int) -> MeasuredTrace:
    """The trace at `path`, if it can be of a step on `device_count` devices of `cluster`.

    A trace holds the devices of one process. On how many the step ran in all is known where the
    trace lies in the folder of its run; elsewhere so many processes are taken to have run as
    make up `device_count`.

    Raises:
        ConfigError: if there is no trace, or it is of another number or kind of devices.
    """
    trace = read_trace(path)
    program = _program_of_run(trace_file(path))
    devices = trace.device_count if program is None else program.device_count
    may_be_more = program is None and device_count % devices == 0
    if devices != device_count and not may_be_more:
        accepted = (
            f"{str(path)!r} is of {counted(devices, 'device')}; compare it with --devices {devices}"
        )
        raise ConfigError(refusal("devices", device_count, accepted))
    backend = trace.platform if program is None else program.backend
    if backend is not None:
        target = None if program is None else program.target
        refuse_other_kind("trace", str(path), cluster, backend=backend, target=target)
    return trace


def _program_of_run(file: Path) -> Program | None:
    """The step of the run in whose folder `file` lies; None if it lies in none."""
    for folder in file.resolve().parents:
        files = RunFolder(path=folder)
        if files.program.is_file() and files.holds_run:
            return load(Program, files.program)
    return None
