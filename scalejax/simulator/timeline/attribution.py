"""What each operation of a program adds to its step, and what each part of the chip costs.

The figures behind an explanation: with contention, the wait for the host and the overhead, they
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
    """What one operation adds to a step, all its runs together."""

    operation: Operation
    """The operation, with its name and its source."""
    runs: int
    """How often it runs in a step."""
    bound: Literal["compute", "memory", "communication"]
    """What limits it."""
    seconds: float
    """Time that it takes, its launches included; of a collective also what compute hides."""
    step_seconds: float
    """Time by which the step is longer for it: of a collective, what compute stood still for."""
    peak_seconds: float
    """Time that its FLOP would take at the peak of the chip."""


def attributions(program: Program, cluster: Cluster) -> tuple[Attribution, ...]:
    """The charge of every operation of `program` on `cluster`, in schedule order.

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
    """(term, seconds) of a step that exchanges nothing, from ideal to predicted.

    compute at peak: all FLOP at the peak of their types. attainable rates: what operations that
    arithmetic limits take beyond. memory: what operations that memory limits take beyond, which
    are at least their bytes over the bandwidth. launch: the gaps between operations. Together
    they are `Timeline.compute_seconds`, `memory_seconds` and `launch_seconds`.
    """
    chip = under_load(cluster, program).chip
    terms = dict.fromkeys(("compute at peak", "attainable rates", "memory", "launch"), 0.0)
    for operation, runs in program.walk():
        if operation.collective is not None or operation.kind == "wait":
            continue
        time = operation_time(operation, chip)
        # Measured rates may lie above a peak that was itself measured; so may Winograd's.
        peak = min(_peak_seconds(operation, chip), time.busy_seconds)
        beyond = "attainable rates" if time.bound == "compute" else "memory"
        terms["compute at peak"] += runs * peak
        terms[beyond] += runs * (time.busy_seconds - peak)
        terms["launch"] += runs * time.launch_seconds
    return tuple(terms.items())


def _peak_seconds(operation: Operation, chip: Chip) -> float:
    return operation.flop / chip.peak(operation.dtype) if operation.flop else 0.0
