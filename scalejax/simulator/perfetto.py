"""Seconds per operation from a `jax.profiler` trace, and predicted steps as Perfetto traces.

Reads the traces that `scalejax train --profile` writes, for which it imports JAX's reader only
when needed. Writes a predicted step as a JSON trace that Perfetto opens.
"""

import json
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scalejax.core.errors import ConfigError, refusal
from scalejax.core.serialization import JsonValue, save_text
from scalejax.hardware import Cluster
from scalejax.simulator.program import Operation, Program
from scalejax.simulator.timeline.trace import (
    MOST_EVENTS,
    StepTrace,
    StreamName,
    TraceEvent,
    trace_step,
)

STEP_MARK = "scalejax step"
"""Name of the annotation around each step that `train --profile` records."""

_END = "end: "  # prefix of the event that ends an operation on CPUs
_NANOSECOND = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTrace:
    """Measured time of each operation of one program, from a profiler trace."""

    module: str
    """The compiler's name for the program: "jit__update"."""
    step_count: int
    """Recorded executions on each device."""
    device_count: int
    """Recorded devices: those of one process."""
    platform: Literal["cpu", "cuda", "tpu"] | None
    """Platform of the devices; None if the trace does not say."""
    seconds_by_name: dict[str, float]
    """Time of each operation per step on one device, summed over all its runs in loops. Operations
    overlap on CPUs, so their times add up to more than the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunEvent:
    module: str
    name: str
    device: str
    run: object
    plane: str
    seconds: float


def read_trace(path: Path) -> MeasuredTrace:
    """Measured operations of the trace at `path`; if it holds several programs, of the longest.

    Args:
        path: an .xplane.pb file, or a folder that contains one; the latest is used.

    Raises:
        ConfigError: if there is no trace, or it contains no operations of a device.
    """
    from jax.profiler import ProfileData

    file = trace_file(path)
    try:
        data = ProfileData.from_file(str(file))
    except RuntimeError as error:
        raise ConfigError(refusal("trace", str(file), "it must be an .xplane.pb file")) from error
    by_module: dict[str, list[_RunEvent]] = defaultdict(list)
    with warnings.catch_warnings():
        # A warning turned into an error cannot pass the reader's C++: the process aborts.
        warnings.simplefilter("ignore")
        for event in _events(data):
            by_module[event.module].append(event)
    if not by_module:
        accepted = "it must hold the operations of a device, as train --profile records them"
        raise ConfigError(refusal("trace", str(path), accepted))
    module, events = max(by_module.items(), key=lambda item: sum(e.seconds for e in item[1]))
    devices = {event.device for event in events}
    runs = {event.run for event in events if event.run is not None}
    steps = len(runs) or sum(event.name == STEP_MARK for event in _all_events(data)) or 1
    totals: dict[str, float] = defaultdict(float)
    for event in events:
        totals[event.name] += event.seconds / (steps * len(devices))
    return MeasuredTrace(
        module=module,
        step_count=steps,
        device_count=len(devices),
        platform=_platform(events[0].plane),
        seconds_by_name=dict(totals),
    )


def trace_file(path: Path) -> Path:
    """Path of the trace file at `path`, a file or a folder that contains one.

    Raises:
        ConfigError: if there is no trace.
    """
    if path.is_file():
        return path
    found = sorted(path.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not found:
        accepted = "there is no .xplane.pb in it; scalejax train RUN.toml --profile records one"
        raise ConfigError(refusal("trace", str(path), accepted))
    return found[-1]


def _platform(plane: str) -> Literal["cpu", "cuda", "tpu"] | None:
    """Platform of a plane, from the profiler's name for it."""
    if plane.startswith("/device:GPU"):
        return "cuda"
    if plane.startswith("/device:TPU"):
        return "tpu"
    return "cpu" if plane == "/host:CPU" else None


def _events(data: Any) -> Iterator[_RunEvent]:
    """Yield every run of an operation on a device."""
    for plane in data.planes:
        # On CPUs an operation may end on another thread, at an event with the id of its start.
        ends: dict[object, float] = {}
        started = []
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if event.name.startswith(_END):
                    ends[stats.get("_c")] = event.start_ns
                elif "hlo_op" in stats and "hlo_module" in stats:
                    started.append((event.start_ns, event.duration_ns, stats))
        for start, duration, stats in started:
            end = max(ends.get(stats.get("_p"), 0.0), start + duration)
            yield _RunEvent(
                module=str(stats["hlo_module"]),
                name=str(stats["hlo_op"]),
                device=str(stats.get("device_ordinal", plane.name)),
                run=stats.get("run_id"),
                plane=plane.name,
                seconds=(end - start) * _NANOSECOND,
            )


def _all_events(data: Any) -> Iterator[Any]:
    return (event for plane in data.planes for line in plane.lines for event in line.events)


# A predicted step as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

_PROCESSES: dict[StreamName, int] = {
    "compute": 1,
    "links": 2,
    "network": 3,
    "to host": 4,
    "from host": 5,
}
_OF_HOST: tuple[StreamName, ...] = ("to host", "from host")
"""Streams that are shown only if the step copies to or from the host."""


def write_trace(
    program: Program, cluster: Cluster, path: Path, most_events: int = MOST_EVENTS
) -> None:
    """Write one predicted step of `program` on `cluster` as a trace, a process per stream.

    Args:
        program: the compiled step.
        cluster: the hardware.
        path: the JSON file.
        most_events: limit above which later iterations of loops are merged into one event.

    Raises:
        ConfigError: if the file cannot be written.
        DoesNotFit: if a collective spans nodes that no network joins.
    """
    document = trace_of(trace_step(program, cluster, most_events), program, cluster)
    save_text(json.dumps(document, separators=(",", ":")) + "\n", path)


def trace_of(trace: StepTrace, program: Program, cluster: Cluster) -> dict[str, JsonValue]:
    """JSON document of a Perfetto trace: events and metadata."""
    most = trace.most_iterations
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "program": program.name,
            "cluster": cluster.name,
            "devices": program.device_count,
            "step_seconds": trace.step_seconds,
            "loops": "every iteration" if most is None else f"the first {most} iterations of each",
            "predicted": "one device; stragglers, input, checkpoints and failures left out",
        },
        "traceEvents": [
            *(
                event
                for name, pid in _PROCESSES.items()
                if name not in _OF_HOST or any(each.stream == name for each in trace.events)
                for event in _named(name, pid)
            ),
            *(_event(event) for event in trace.events),
        ],
    }


def _named(stream: StreamName, pid: int) -> list[JsonValue]:
    """Metadata events that name and order a process and its only thread."""
    common: dict[str, JsonValue] = {"ph": "M", "pid": pid, "tid": 0}
    return [
        {**common, "name": "process_name", "args": {"name": f"{stream} (predicted)"}},
        {**common, "name": "process_sort_index", "args": {"sort_index": pid}},
        {**common, "name": "thread_name", "args": {"name": stream}},
    ]


def _event(event: TraceEvent) -> JsonValue:
    # Whole nanoseconds, which is what Perfetto keeps, so that no event extends into the next.
    start, end = (round(t * 1e9) for t in (event.start_seconds, event.end_seconds))
    arguments: dict[str, JsonValue] = {}
    if event.iteration:
        arguments["iteration"] = ", ".join(map(str, event.iteration))
    if event.operation is not None:
        arguments |= _arguments(event.operation)
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.bound,
        "pid": _PROCESSES[event.stream],
        "tid": 0,
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "args": {"bound": event.bound, **arguments},
    }


def _arguments(operation: Operation) -> dict[str, JsonValue]:
    """Arguments of an event, which Perfetto shows when it is clicked."""
    arguments: dict[str, JsonValue] = {"kind": operation.kind, "dtype": operation.dtype}
    if operation.source is not None:
        arguments["source"] = operation.source
    if (collective := operation.collective) is not None:
        return arguments | {
            "collective": collective.name,
            "payload_bytes": collective.payload_bytes,
            "axes": " x ".join(collective.group.axes),
            "devices": collective.group.size,
        }
    if operation.shape:
        arguments["shape"] = list(operation.shape)
    return arguments | {
        "flop": operation.flop,
        "read_bytes": operation.read_bytes,
        "write_bytes": operation.write_bytes,
    }
