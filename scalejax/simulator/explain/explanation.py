"""Explanation of one step: from its FLOP at peak to the predicted time, term by term."""

from dataclasses import asdict, dataclass

from scalejax.core import drawing
from scalejax.core.serialization import JsonValue, document
from scalejax.core.tabular import Tabular
from scalejax.core.units import counted, format_seconds
from scalejax.hardware import NO_SITE, Cluster, Site
from scalejax.simulator.expert_load import of_fullest_device
from scalejax.simulator.explain.labels import in_words
from scalejax.simulator.explain.trace_match import TraceMatch
from scalejax.simulator.explain.unexpected_collectives import (
    UnexpectedCollective,
    unexpected_collectives,
)
from scalejax.simulator.explain.what_if import Improvement, improvements
from scalejax.simulator.frameworks import XLA, known_framework
from scalejax.simulator.predict import RUN_CONDITIONS, predict
from scalejax.simulator.program import Program
from scalejax.simulator.timeline.attribution import Attribution, attributions, device_terms
from scalejax.simulator.transforms.pipeline import without_bubble

MOST_OPERATIONS = 10
"""Default number of costliest operations that an explanation names."""

_DEVICE_TERMS = ("compute", "memory", "launch")
"""Terms of a prediction that `device_terms` splits further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One part of the time of a step."""

    name: str
    """Name of the term: "compute at peak", "communication data"."""
    seconds: float | None
    """Time of the term, at least 0; None if unknown."""
    is_of_step: bool
    """Whether the term is part of the step; checkpoints and failures are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostlyOperation:
    """One operation of the program and the time it adds to a step, summed over its runs."""

    name: str
    """The compiler's name for the operation."""
    what: str
    """Description of the operation: "matmul bf16 4096 x 1024 x 4096"."""
    source: str | None
    """Place in the user's program that it comes from."""
    runs: int
    """Runs per step."""
    bound: str
    """Limiting resource: "compute", "memory", "communication"."""
    seconds: float
    """Time that it adds to the step."""
    share: float
    """Fraction of the step that it adds, 0..1."""
    peak_share: float | None
    """Achieved FLOP/s over the peak of the chip: above 1 if fewer FLOP are done than counted
    (Winograd's algorithm), or if a kernel beats a peak that was itself measured. None if the
    operation has no FLOP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChoice:
    """Time and memory of a step with another choice of recompute or offload."""

    change: str
    """The field and its value: 'model.remat = "full"'; "as it is" for the run's own."""
    step_seconds: float
    """Time of one step."""
    peak_memory_bytes: int
    """Peak memory of one device, including the runtime's own reserve."""
    host_bytes: int
    """Host memory that a device uses."""
    fits: bool
    """Whether the step fits into the memory of device and host."""


@document("explanation")
@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Tabular):
    """Breakdown of a step's time, its unexpected collectives, and possible improvements."""

    program: str
    """Title of the program."""
    cluster: str
    """Name of the cluster."""
    cluster_title: str
    """Title of the cluster."""
    device_count: int
    """Devices in the run."""
    mesh_axes: tuple[tuple[str, int], ...]
    """(name, size) of each mesh axis, major to minor."""
    step_seconds: float
    """Time of one step."""
    p10_step_seconds: float | None
    """10th percentile of the step time; None if unknown."""
    p90_step_seconds: float | None
    """90th percentile of the step time; None if unknown."""
    samples_per_second: float | None
    """Samples trained per second over all devices."""
    mfu: float | None
    """Model FLOP utilisation, 0..1."""
    terms: tuple[Term, ...]
    """Terms from ideal to predicted; those of the step add up to `step_seconds`."""
    operations: tuple[CostlyOperation, ...]
    """Costliest operations, in descending order."""
    unexpected: tuple[UnexpectedCollective, ...]
    """Collectives that the layout does not call for, the costliest first."""
    improvements: tuple[Improvement, ...]
    """Speedups by a factor of two in one resource, the largest first."""
    notes: tuple[str, ...]
    """Caveats of the figures."""
    framework: str = XLA.name
    """Name of the framework whose step is explained."""
    trace: TraceMatch | None = None
    """Comparison with a profiler trace; None without one."""
    memory_choices: tuple[MemoryChoice, ...] = ()
    """The step as it is, and with each other choice of recompute and offload, by rising memory; ()
    unless requested."""

    @property
    def title(self) -> str:
        """Program, cluster, and the framework unless it is XLA."""
        step, known = f"{self.program} on {self.cluster_title}", known_framework(self.framework)
        return known.title_of(step) if known else f"{step}, by {self.framework}"

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The terms of the step, a row for each."""
        return [asdict(term) for term in self.terms]

    @property
    def _verdict(self) -> str:
        return f"{self.title}: {format_seconds(self.step_seconds)} a step"

    def __str__(self) -> str:
        """What `print` shows: the step time and its devices, the terms, and the notes."""
        where = f"on {counted(self.device_count, 'device')}"
        rows = drawing.text_of(
            [{"term": each.name, "seconds": each.seconds} for each in self.terms if each.is_of_step]
        )
        return f"{self._verdict} {where}\n{rows}{drawing.notes_text(self.notes)}"

    def _repr_html_(self) -> str:
        """What a notebook shows: the waterfall, the costliest operations, and what would help."""
        of_step = [(each.name, each.seconds) for each in self.terms if each.is_of_step]
        operations: list[dict[str, JsonValue]] = [
            {
                "operation": each.what,
                "bound": each.bound,
                "runs": each.runs,
                "time_seconds": each.seconds,
                "share": each.share,
                "source": each.source,
            }
            for each in self.operations
        ]
        better: list[dict[str, JsonValue]] = [
            {"change": each.change, "step_seconds": each.step_seconds, "speedup": each.speedup}
            for each in self.improvements
        ]
        tables = (("costliest operations", operations), ("what would help", better))
        return "".join(
            (
                drawing.heading(self._verdict),
                drawing.waterfall(of_step, "step"),
                *(drawing.heading(name) + drawing.table(rows) for name, rows in tables if rows),
                drawing.notes(self.notes),
            )
        )


def explain(
    program: Program,
    cluster: Cluster,
    *,
    site: Site = NO_SITE,
    doubled_batch: Program | None = None,
    most_operations: int = MOST_OPERATIONS,
) -> Explanation:
    """Explanation of the step time that `predict` gives for `program` on `cluster`.

    Args:
        program: the compiled step; its mesh gives the device count.
        cluster: the hardware.
        site: conditions and input of the cluster's hosts.
        doubled_batch: the step with twice the samples per device; if None, the batch is not among
            the improvements.
        most_operations: how many of the costliest operations to name.

    Raises:
        DoesNotFit: if the mesh has more devices than the cluster.
    """
    prediction = predict(program, cluster, site=site)
    loaded, _ = of_fullest_device(program, site)
    device = device_terms(without_bubble(loaded), cluster)
    rest = [entry for entry in prediction.waterfall if entry[0] not in _DEVICE_TERMS]
    every = attributions(loaded, cluster)
    costliest = sorted(every, key=lambda attribution: -attribution.step_seconds)[:most_operations]
    return Explanation(
        program=program.name,
        framework=program.framework,
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
        unexpected=unexpected_collectives(loaded, every, prediction.step_seconds),
        improvements=improvements(program, cluster, site, doubled_batch),
        notes=prediction.notes,
    )


def _costly(attribution: Attribution, step_seconds: float) -> CostlyOperation:
    operation = attribution.operation
    # The exposed time of a collective that queues behind others exceeds its own.
    is_late = attribution.step_seconds > 1.01 * attribution.seconds
    queues = operation.collective is not None and is_late
    return CostlyOperation(
        name=operation.name,
        what=in_words(operation) + (", behind others" if queues else ""),
        source=operation.source,
        runs=attribution.runs,
        bound=attribution.bound,
        seconds=attribution.step_seconds,
        share=attribution.step_seconds / step_seconds,
        peak_share=attribution.peak_seconds / attribution.seconds if operation.flop else None,
    )
