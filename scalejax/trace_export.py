"""A predicted step as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Knows the file format and words each event; the times come from `cost.recording`. Format:
"Trace Event Format", Google, with complete events (ph "X") in microseconds.
"""

import json
from pathlib import Path

from scalejax.cost.recording import MOST_EVENTS, Moment, Recording, StreamName, record
from scalejax.documents import JsonValue, save_text
from scalejax.hardware import Cluster
from scalejax.program import Operation, Program

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
            *(_event(moment) for moment in recording.moments),
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


def _event(moment: Moment) -> JsonValue:
    # Whole nanoseconds, which is what Perfetto keeps: so no event reaches into the next.
    start, end = (round(t * 1e9) for t in (moment.start_seconds, moment.end_seconds))
    arguments: dict[str, JsonValue] = {}
    if moment.iteration:
        arguments["iteration"] = ", ".join(map(str, moment.iteration))
    if moment.operation is not None:
        arguments |= _arguments(moment.operation)
    return {
        "ph": "X",
        "name": moment.name,
        "cat": moment.bound,
        "pid": _PROCESSES[moment.stream],
        "tid": 0,
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "args": {"bound": moment.bound, **arguments},
    }


def _arguments(operation: Operation) -> dict[str, JsonValue]:
    """What a click on the event shows."""
    arguments: dict[str, JsonValue] = {"kind": operation.kind, "dtype": operation.dtype}
    if operation.source is not None:
        arguments["source"] = operation.source
    if (exchange := operation.collective) is not None:
        return arguments | {
            "collective": exchange.name,
            "payload_bytes": exchange.payload_bytes,
            "axes": " x ".join(exchange.group.axes),
            "devices": exchange.group.size,
        }
    if operation.shape:
        arguments["shape"] = list(operation.shape)
    return arguments | {
        "flop": operation.flop,
        "read_bytes": operation.read_bytes,
        "write_bytes": operation.write_bytes,
    }
