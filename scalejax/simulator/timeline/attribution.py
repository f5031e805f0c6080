"""Attribution of the step time to operations of the program, and to limits of the chip.

Together with contention, the wait for the host and the overhead of the step, the attributed seconds
add up to the step of `timeline`.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from scalejax.hardware import Chip, Cluster
from scalejax.simulator.collectives.placement import collective_seconds
from scalejax.simulator.device_state import under_load
from scalejax.simulator.operations.roofline import operation_time
from scalejax.simulator.program import Operation, Program
from scalejax.simulator.timeline.timeline import timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Step time attributed to one operation, summed over its runs."""

    operation: Operation
    """The operation, with its name and its source."""
    runs: int
    """Runs per step."""
    bound: Literal["compute", "memory", "communication"]
    """Limiting resource."""
    seconds: float
    """Time of the operation, including launches; for a collective, with the overlapped part."""
    step_seconds: float
    """Time that it adds to the step; for a collective, the exposed part."""
    peak_seconds: float
    """Time of its FLOP at the peak of the chip."""


def attributions(program: Program, cluster: Cluster) -> tuple[Attribution, ...]:
    """Step time attributed to every operation of `program` on `cluster`, in schedule order.

    Contention and the overhead of the step belong to no operation.

    Raises:
        DoesNotFit: if a collective spans nodes that no network joins.
    """
    cluster = under_load(cluster, program)
    exposed = dict(timeline(program, cluster).exposed_by_name)
    runs: Counter[str] = Counter()
    by_name: dict[str, Operation] = {}
    for operation, times in program.walk():
        if operation.kind != "wait" and times:
            runs[operation.name] += times
            by_name.setdefault(operation.name, operation)
    return tuple(
        _attribution(operation, runs[name], cluster, exposed.get(name, 0.0))
        for name, operation in by_name.items()
    )


def _attribution(operation: Operation, runs: int, cluster: Cluster, exposed: float) -> Attribution:
    if operation.collective is not None:
        return Attribution(
            operation=operation,
            runs=runs,
            bound="communication",
            seconds=runs * collective_seconds(operation.collective, cluster),
            step_seconds=exposed,
            peak_seconds=0.0,
        )
    time = operation_time(operation, cluster.chip)
    return Attribution(
        operation=operation,
        runs=runs,
        bound=time.bound,
        seconds=runs * time.seconds,
        step_seconds=runs * time.seconds,
        peak_seconds=runs * _peak_seconds(operation, cluster.chip),
    )


def device_terms(program: Program, cluster: Cluster) -> tuple[tuple[str, float], ...]:
    """(term, seconds) of a step without communication, from ideal to predicted.

    compute at peak: all FLOP at the peak of their types. attainable rates: additional time of
    compute-bound operations. memory: additional time of memory-bound operations, which take at
    least their bytes over the bandwidth. launch: the gaps between operations. Together they are
    `Timeline.compute_seconds`, `memory_seconds` and `launch_seconds`.
    """
    chip = under_load(cluster, program).chip
    terms = dict.fromkeys(("compute at peak", "attainable rates", "memory", "launch"), 0.0)
    for operation, runs in program.walk():
        if operation.collective is not None or operation.kind == "wait":
            continue
        time = operation_time(operation, chip)
        # Measured rates may exceed a peak that was itself measured; so may Winograd's.
        peak = min(_peak_seconds(operation, chip), time.busy_seconds)
        beyond = "attainable rates" if time.bound == "compute" else "memory"
        terms["compute at peak"] += runs * peak
        terms[beyond] += runs * (time.busy_seconds - peak)
        terms["launch"] += runs * time.launch_seconds
    return tuple(terms.items())


def _peak_seconds(operation: Operation, chip: Chip) -> float:
    return operation.flop / chip.peak(operation.dtype) if operation.flop else 0.0
