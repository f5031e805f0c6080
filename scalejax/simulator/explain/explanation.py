"""One step taken apart: from the arithmetic that no chip does faster to the predicted time."""

from dataclasses import dataclass

from scalejax.hardware import Cluster
from scalejax.simulator.explain.labels import in_words
from scalejax.simulator.explain.trace_match import TraceMatch
from scalejax.simulator.explain.unexpected_collectives import (
    UnexpectedCollective,
    unexpected_collectives,
)
from scalejax.simulator.explain.what_if import Improvement, improvements
from scalejax.simulator.predict import RUN_CONDITIONS, predict
from scalejax.simulator.program import Program, without_bubble
from scalejax.simulator.timeline.attribution import Attribution, attributions, device_terms

MOST_OPERATIONS = 10
"""Costliest operations that an explanation names, unless told otherwise."""

_DEVICE_TERMS = ("compute", "memory", "launch")
"""Terms of a prediction that `device_terms` splits further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One part of the time of a step."""

    name: str
    """What takes it: "compute at peak", "communication data"."""
    seconds: float | None
    """How long, at least 0; None if it is unknown."""
    is_of_step: bool
    """Whether it is part of the step; checkpoints and failures come on top of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostlyOperation:
    """One operation of the program and what it adds to a step, all its runs together."""

    name: str
    """The compiler's name for it."""
    what: str
    """What it does, in words: "matmul bf16 4096 x 1024 x 4096"."""
    source: str | None
    """Where the user's program asked for it."""
    runs: int
    """How often it runs in a step."""
    bound: str
    """What limits it: "compute", "memory", "communication"."""
    seconds: float
    """Time by which the step is longer for it."""
    share: float
    """The same as a part of the step, 0..1."""
    peak_share: float | None
    """FLOP over those that the peak of the chip allows in its time: above 1 where fewer are done
    than counted (Winograd's algorithm), or a kernel beats a peak that was itself measured. None
    if it multiplies nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Where the time of a step goes, what is odd about it, and what would shorten it."""

    program: str
    """What runs, for people."""
    cluster: str
    """Name of the cluster."""
    cluster_title: str
    """Name of the cluster, for people."""
    device_count: int
    """Devices in the run."""
    mesh_axes: tuple[tuple[str, int], ...]
    """(name, size) of each mesh axis, major to minor."""
    step_seconds: float
    """Time of one step."""
    p10_step_seconds: float | None
    """Time that is undercut once in ten times; None if unknown."""
    p90_step_seconds: float | None
    """Time that is exceeded once in ten times; None if unknown."""
    samples_per_second: float | None
    """Samples trained per second over all devices."""
    mfu: float | None
    """Model FLOP utilisation, 0..1."""
    terms: tuple[Term, ...]
    """From ideal to predicted; those of the step add up to `step_seconds`."""
    operations: tuple[CostlyOperation, ...]
    """The operations that add most, the costliest first."""
    unexpected: tuple[UnexpectedCollective, ...]
    """Exchanges that the layout does not call for, the costliest first."""
    improvements: tuple[Improvement, ...]
    """What a factor of two would buy, the largest gain first."""
    notes: tuple[str, ...]
    """What a reader must know to trust the figures as far as they go."""
    trace: TraceMatch | None = None
    """A recorded step beside this one; None if there is none to compare with."""


def explain(
    program: Program,
    cluster: Cluster,
    *,
    doubled_batch: Program | None = None,
    most_operations: int = MOST_OPERATIONS,
) -> Explanation:
    """Why a step of `program` takes as long on `cluster` as `predict` says.

    Args:
        program: the compiled step; its mesh says how many devices.
        cluster: the hardware.
        doubled_batch: the same step with twice the samples per device; if None, nothing is
            said of the batch.
        most_operations: how many of the costliest operations to name.

    Raises:
        DoesNotFit: if the mesh has more devices than the cluster.
    """
    prediction = predict(program, cluster)
    device = device_terms(without_bubble(program), cluster)
    rest = [entry for entry in prediction.waterfall if entry[0] not in _DEVICE_TERMS]
    every = attributions(program, cluster)
    costliest = sorted(every, key=lambda attribution: -attribution.step_seconds)[:most_operations]
    return Explanation(
        program=program.name,
        cluster=cluster.name,
        cluster_title=cluster.title,
        device_count=program.device_count,
        mesh_axes=program.mesh_axes,
        step_seconds=prediction.step_seconds,
        p10_step_seconds=prediction.p10_step_seconds,
        p90_step_seconds=prediction.p90_step_seconds,
        samples_per_second=prediction.samples_per_second,
        mfu=prediction.mfu,
        terms=tuple(
            Term(name=name, seconds=seconds, is_of_step=name not in RUN_CONDITIONS)
            for name, seconds in (*device, *rest)
        ),
        operations=tuple(
            _costly(attribution, prediction.step_seconds)
            for attribution in costliest
            if attribution.step_seconds > 0
        ),
        unexpected=unexpected_collectives(program, every, prediction.step_seconds),
        improvements=improvements(program, cluster, doubled_batch),
        notes=prediction.notes,
    )


def _costly(attribution: Attribution, step_seconds: float) -> CostlyOperation:
    operation = attribution.operation
    return CostlyOperation(
        name=operation.name,
        what=in_words(operation) + _queue(attribution),
        source=operation.source,
        runs=attribution.runs,
        bound=attribution.bound,
        seconds=attribution.step_seconds,
        share=attribution.step_seconds / step_seconds,
        peak_share=attribution.peak_seconds / attribution.seconds if operation.flop else None,
    )


def _queue(attribution: Attribution) -> str:
    """Says of an exchange that compute waits longer for it than it takes: others come first."""
    if (
        attribution.operation.collective is None
        or attribution.step_seconds <= 1.01 * attribution.seconds
    ):
        return ""
    return ", behind others"
