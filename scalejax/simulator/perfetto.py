"""What a recorded trace says each operation of a step took, by the compiler's name for it.

Reads the traces of `jax.profiler`, such as `scalejax train --profile` writes. Knows no
prediction; imports JAX, whose reader it uses, only when it reads.
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
from scalejax.simulator.timeline.trace import MOST_EVENTS, Recording, StreamName, TraceEvent, record

STEP_MARK = "scalejax step"
"""Name of the annotation around each step that `train --profile` records."""

_END = "end: "  # what the event at which an operation has ended is called on CPUs
_NANOSECOND = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTrace:
    """The operations of one program, as a trace has them."""

    module: str
    """The compiler's name of the program: "jit__update"."""
    step_count: int
    """Executions of it that were recorded, on each device."""
    device_count: int
    """Devices that were recorded: those of one process."""
    platform: Literal["cpu", "cuda", "tpu"] | None
    """What was recorded; None if the trace does not say."""
    seconds_by_name: dict[str, float]
    """Time of each operation in one step on one device, all its runs in loops together. On CPUs
    operations run beside each other, so that they add up to more than the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    module: str
    name: str
    device: str
    run: str | None
    plane: str
    seconds: float


def read_trace(path: Path) -> MeasuredTrace:
    """The trace at `path`; of several programs in it, the one that took the most time.

    Args:
        path: an .xplane.pb file, or a folder with one somewhere in it; the latest is taken.

    Raises:
        ConfigError: if there is no trace, or it holds no operation of a device.
    """
    from jax.profiler import ProfileData

    file = trace_file(path)
    try:
        data = ProfileData.from_file(str(file))
    except RuntimeError as error:
        raise ConfigError(refusal("trace", str(file), "it must be an .xplane.pb file")) from error
    by_module: dict[str, list[_Event]] = defaultdict(list)
    with warnings.catch_warnings():
        # A warning that is an error cannot pass through the reader's C++: the process aborts.
        warnings.simplefilter("ignore")
        for event in _events(data):
            by_module[event.module].append(event)
    if not by_module:
        accepted = "it must hold the operations of a device, as train --profile records them"
        raise ConfigError(refusal("trace", str(path), accepted))
    module, events = max(by_module.items(), key=lambda item: sum(e.seconds for e in item[1]))
    devices = {event.device for event in events}
    runs = {event.run for event in events if event.run is not None}
    steps = len(runs) or _marked_steps(data) or 1
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
    """The file of a trace, given itself or a folder that it is in.

    Raises:
        ConfigError: if there is none.
    """
    if path.is_file():
        return path
    found = sorted(path.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not found:
        accepted = "there is no .xplane.pb in it; scalejax train RUN.toml --profile records one"
        raise ConfigError(refusal("trace", str(path), accepted))
    return found[-1]


def _platform(plane: str) -> Literal["cpu", "cuda", "tpu"] | None:
    """What a plane is of, by the profiler's name for it."""
    if plane.startswith("/device:GPU"):
        return "cuda"
    if plane.startswith("/device:TPU"):
        return "tpu"
    return "cpu" if plane == "/host:CPU" else None


def _events(data: Any) -> Iterator[_Event]:
    """Yield every run of an operation on a device."""
    for plane in data.planes:
        # On CPUs an operation may end on another thread, at an event with the number of its begin.
        ends: dict[object, float] = {}
        begun = []
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if event.name.startswith(_END):
                    ends[stats.get("_c")] = event.start_ns
                elif "hlo_op" in stats and "hlo_module" in stats:
                    begun.append((event.start_ns, event.duration_ns, stats))
        yield from _finished(plane.name, begun, ends)


def _finished(
    plane: str, begun: list[tuple[float, float, dict]], ends: dict[object, float]
) -> Iterator[_Event]:
    for start, duration, stats in begun:
        end = max(ends.get(stats.get("_p"), 0.0), start + duration)
        run, device = stats.get("run_id"), stats.get("device_ordinal", plane)
        yield _Event(
            module=str(stats["hlo_module"]),
            name=str(stats["hlo_op"]),
            device=f"{device}",
            run=None if run is None else f"{run}",
            plane=plane,
            seconds=(end - start) * _NANOSECOND,
        )


def _marked_steps(data: Any) -> int:
    return sum(
        event.name == STEP_MARK
        for plane in data.planes
        for line in plane.lines
        for event in line.events
    )


# A predicted step as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

_PROCESSES: dict[StreamName, int] = {"compute": 1, "links": 2, "network": 3}


def write_trace(
    program: Program, cluster: Cluster, path: Path, most_events: int = MOST_EVENTS
) -> None:
    """Write one predicted step of `program` on `cluster` as a trace, a process per stream.

    Args:
        program: the compiled step.
        cluster: the hardware.
        path: the JSON file.
        most_events: above so many, later iterations of loops are drawn as one event.

    Raises:
        ConfigError: if the file cannot be written.
        DoesNotFit: if a collective spans nodes that no network joins.
    """
    trace = trace_of(record(program, cluster, most_events), program, cluster)
    save_text(json.dumps(trace, separators=(",", ":")) + "\n", path)


def trace_of(recording: Recording, program: Program, cluster: Cluster) -> dict[str, JsonValue]:
    """The document: events, and what a reader must know of them."""
    most = recording.most_iterations
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "program": program.name,
            "cluster": cluster.name,
            "devices": program.device_count,
            "step_seconds": recording.step_seconds,
            "loops": "every iteration" if most is None else f"the first {most} iterations of each",
            "predicted": "one device; stragglers, input, checkpoints and failures left out",
        },
        "traceEvents": [
            *(event for name, pid in _PROCESSES.items() for event in _named(name, pid)),
            *(_event(event) for event in recording.events),
        ],
    }


def _named(stream: StreamName, pid: int) -> list[JsonValue]:
    """The events that give a process and its only thread their names and place."""
    common: dict[str, JsonValue] = {"ph": "M", "pid": pid, "tid": 0}
    return [
        {**common, "name": "process_name", "args": {"name": f"{stream} (predicted)"}},
        {**common, "name": "process_sort_index", "args": {"sort_index": pid}},
        {**common, "name": "thread_name", "args": {"name": stream}},
    ]


def _event(event: TraceEvent) -> JsonValue:
    # Whole nanoseconds, which is what Perfetto keeps: so no event reaches into the next.
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
    """What a click on the event shows."""
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
