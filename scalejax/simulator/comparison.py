"""Comparison of two programs of one step on one cluster: time, bytes of collectives, FLOP, memory.

Arithmetic on two programs and a cluster, independent of files, commits, compilers and display. A
is the program before, B the program after.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scalejax.core import drawing
from scalejax.core.errors import ConfigError, refusal, require_at_least
from scalejax.core.serialization import JsonValue, document
from scalejax.core.tabular import Tabular
from scalejax.core.units import format_bytes
from scalejax.hardware import NO_SITE, Cluster, Site
from scalejax.simulator.expert_load import of_fullest_device
from scalejax.simulator.predict import Prediction, predict
from scalejax.simulator.program import HOST_MEMORY, CollectiveName, Program
from scalejax.simulator.timeline.attribution import attributions

OTHER = "other"
"""Name in place of mesh axes for groups of devices that are not a product of axes."""

LEAST_BYTES_SHARE = 1e-3
"""Bytes added on an axis, as a fraction of all bytes of collectives of B, below which no bound is
exceeded: scalars and indices, whose number may double unnoticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much worse B may be than A."""

    max_slowdown: float = 0.02
    """Largest growth of the step time, as a fraction of A's step time."""
    max_memory_growth: float = 0.02
    """Largest growth of the peak memory, as a fraction of A's peak memory."""
    max_bytes_growth: float = 0.02
    """Largest growth of the bytes of collectives over any axes, as a fraction of A's bytes over the
    same axes; over axes without any in A, as a fraction of all of A's bytes."""

    def __post_init__(self) -> None:
        for name in ("max_slowdown", "max_memory_growth", "max_bytes_growth"):
            require_at_least(name, getattr(self, name), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisBytes:
    """Payloads of all collectives over the same mesh axes, per step."""

    axes: str
    """Names of the axes, "data x fsdp", or `OTHER`."""
    before_bytes: int
    """Payload bytes of A, averaged over all steps."""
    after_bytes: int
    """Payload bytes of B, averaged over all steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveChange:
    """Collectives of one kind, over the same axes and of the same size, whose number of runs
    differs between A and B."""

    name: CollectiveName
    """Kind of collective."""
    axes: str
    """Names of the axes, or `OTHER`."""
    payload_bytes: int
    """Payload of one run."""
    before_runs: float
    """Runs per step of A, averaged over all steps; 0 for a new collective."""
    after_runs: float
    """Runs per step of B, averaged over all steps; 0 for a removed collective."""
    added_seconds: float
    """Their exposed time in the step of B, less that in the step of A."""
    source: str | None
    """Place in the user's program that the first of them comes from; B's if B has one."""


@document("comparison")
@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Tabular):
    """A step of A and a step of B on one cluster, and where B exceeds a bound."""

    before: Prediction
    """Prediction of A."""
    after: Prediction
    """Prediction of B."""
    time_ratio: float
    """Step time of B over that of A; time per sample if the global batches differ."""
    before_flop: int
    """FLOP of one device in one step of A, recompute included."""
    after_flop: int
    """FLOP of one device in one step of B, recompute included."""
    axes: tuple[AxisBytes, ...]
    """Bytes by mesh axes, the most bytes first."""
    changes: tuple[CollectiveChange, ...]
    """Collectives whose number of runs changed, the most bytes added or removed first."""
    bounds: Bounds
    """How much worse B may be."""
    exceeded: tuple[str, ...]
    """What exceeds its bound, as sentences without full stops; () if nothing does."""
    notes: tuple[str, ...]
    """Caveats of the figures."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The main figures, a row for each of the two steps."""
        both = (("A", self.before, self.before_flop), ("B", self.after, self.after_flop))
        return [
            {
                "step": name,
                "step_seconds": each.step_seconds,
                "peak_memory_bytes": each.peak_memory_bytes,
                "device_flop": flop,
                "communication_seconds": each.communication_seconds,
                "fits": each.fits,
            }
            for name, each, flop in both
        ]

    def _repr_html_(self) -> str:
        """What a notebook shows: both steps, and what exceeds a bound."""
        beyond = "; ".join(self.exceeded) or "nothing is beyond its bound"
        return "".join(
            (
                drawing.heading(f"B takes {self.time_ratio:.3g} times as long as A: {beyond}"),
                drawing.table(self.to_rows()),
                drawing.notes(self.notes),
            )
        )


def compare(
    a: Program,
    b: Program,
    cluster: Cluster,
    bounds: Bounds | None = None,
    *,
    site: Site = NO_SITE,
) -> Comparison:
    """Comparison of the steps that `predict` gives for `a` and `b` on `cluster`.

    Args:
        a: the program before.
        b: the program after.
        cluster: the hardware.
        bounds: how much worse `b` may be; if None, the defaults of `Bounds`.
        site: conditions and input of the cluster's hosts.

    Raises:
        ConfigError: if the programs have different numbers of devices or compiler backends.
        DoesNotFit: if the mesh has more devices than the cluster.
    """
    if a.device_count != b.device_count:
        accepted = f"A is for {a.device_count}, and steps compare on equally many"
        raise ConfigError(refusal("devices of B", b.device_count, accepted))
    if a.backend != b.backend:
        accepted = f"that of A is {a.backend!r}, and what each makes of one step differs"
        raise ConfigError(refusal("compiler backend of B", b.backend, accepted))
    bounds = bounds or Bounds()
    before, after = (predict(each, cluster, site=site) for each in (a, b))
    kinds_before, kinds_after = (
        _by_kind(of_fullest_device(each, site)[0], cluster) for each in (a, b)
    )
    axes = _axes(kinds_before, kinds_after)
    batch_ratio = _batch_ratio(before, after)
    ratio = after.step_seconds / before.step_seconds * batch_ratio
    return Comparison(
        before=before,
        after=after,
        time_ratio=ratio,
        before_flop=a.flop,
        after_flop=b.flop,
        axes=axes,
        changes=_changes(kinds_before, kinds_after),
        bounds=bounds,
        exceeded=(
            *_slowdown(ratio, batch_ratio, bounds),
            *_memory_growth(before, after, bounds),
            *_bytes_growth(axes, batch_ratio, bounds),
        ),
        notes=(*_differences(a, b), *_merged(before.notes, after.notes)),
    )


def _batch_ratio(before: Prediction, after: Prediction) -> float:
    """Samples in a step of A over those in a step of B; 1 if unknown."""
    if before.global_batch is None or after.global_batch is None:
        return 1.0
    return before.global_batch / after.global_batch


def _slowdown(ratio: float, batch_ratio: float, bounds: Bounds) -> Iterator[str]:
    what = "the step" if batch_ratio == 1 else "a sample"
    if ratio > 1 + bounds.max_slowdown:
        yield f"{what} takes {ratio:.4g} times as long (max_slowdown={bounds.max_slowdown:g})"


def _memory_growth(before: Prediction, after: Prediction, bounds: Bounds) -> Iterator[str]:
    used, most = after.peak_memory_bytes, bounds.max_memory_growth
    if used > (1 + most) * before.peak_memory_bytes:
        times = used / before.peak_memory_bytes
        yield f"peak memory is {times:.4g} times as much (max_memory_growth={most:g})"
    if before.fits and not after.fits:
        held = f"{format_bytes(used)} of {format_bytes(after.memory_bytes)}"
        yield f"the step does not fit into memory any more: it needs {held} on each device"


def _bytes_growth(axes: Sequence[AxisBytes], batch_ratio: float, bounds: Bounds) -> Iterator[str]:
    most, least = bounds.max_bytes_growth, LEAST_BYTES_SHARE * sum(x.after_bytes for x in axes)
    all_before = sum(each.before_bytes for each in axes)
    for each in axes:
        # Some bytes grow with the batch and some do not, so B may have what its batch allows.
        added = each.after_bytes * min(1.0, batch_ratio) - each.before_bytes
        if added > max(least, most * (each.before_bytes or all_before)):
            then = f"{format_bytes(each.before_bytes)} before"
            yield (
                f"collectives over {each.axes} move {format_bytes(added)} more, {then} "
                f"(max_bytes_growth={most:g})"
            )


@dataclass(slots=True)
class _Runs:
    """Collectives of one kind in one program."""

    runs: float = 0.0
    seconds: float = 0.0
    source: str | None = None


_Kind = tuple[CollectiveName, str, int]
"""Collectives that count as the same: kind, mesh axes, payload bytes."""


def _by_kind(program: Program, cluster: Cluster) -> dict[_Kind, _Runs]:
    found: dict[_Kind, _Runs] = {}
    for each in attributions(program, cluster):
        collective = each.operation.collective
        if collective is None or (collective.group.size == 1 and collective.group != HOST_MEMORY):
            continue
        axes = " x ".join(collective.group.axes) or OTHER
        total = found.setdefault((collective.name, axes, collective.payload_bytes), _Runs())
        total.runs += each.runs * collective.share
        total.seconds += each.step_seconds
        total.source = total.source or each.operation.source
    return found


def _axes(before: Mapping[_Kind, _Runs], after: Mapping[_Kind, _Runs]) -> tuple[AxisBytes, ...]:
    names = dict.fromkeys(axes for _, axes, _ in (*before, *after))
    pairs = (
        AxisBytes(
            axes=axes, before_bytes=_bytes_over(axes, before), after_bytes=_bytes_over(axes, after)
        )
        for axes in names
    )
    return tuple(sorted(pairs, key=lambda each: -max(each.before_bytes, each.after_bytes)))


def _bytes_over(axes: str, kinds: Mapping[_Kind, _Runs]) -> int:
    return round(sum(kind[2] * found.runs for kind, found in kinds.items() if kind[1] == axes))


def _changes(
    before: Mapping[_Kind, _Runs], after: Mapping[_Kind, _Runs]
) -> tuple[CollectiveChange, ...]:
    changes = []
    for kind in dict.fromkeys((*before, *after)):
        old, new = before.get(kind, _Runs()), after.get(kind, _Runs())
        if old.runs != new.runs:
            name, axes, payload_bytes = kind
            changes.append(
                CollectiveChange(
                    name=name,
                    axes=axes,
                    payload_bytes=payload_bytes,
                    before_runs=old.runs,
                    after_runs=new.runs,
                    added_seconds=new.seconds - old.seconds,
                    source=new.source or old.source,
                )
            )
    return tuple(
        sorted(
            changes,
            key=lambda each: -each.payload_bytes * abs(each.after_runs - each.before_runs),
        )
    )


def _differences(a: Program, b: Program) -> Iterator[str]:
    """Notes on what differs between the programs in addition to the step."""
    for what, of_a, of_b in (
        ("compiled by", a.compiler, b.compiler),
        ("compiled for", a.target, b.target),
        ("trained by", a.framework, b.framework),
        ("global batch", a.global_batch, b.global_batch),
    ):
        if of_a != of_b:
            yield f"{what}: A {of_a}, B {of_b}"
    if a.global_batch and b.global_batch and a.global_batch != b.global_batch:
        yield "the bound on the step time holds for the time of one sample"


def _merged(before: Sequence[str], after: Sequence[str]) -> Iterator[str]:
    """Notes on both programs; those that apply to only one carry its name."""
    for note in dict.fromkeys((*before, *after)):
        names = [name for name, notes in (("A", before), ("B", after)) if note in notes]
        yield note if len(names) == 2 else f"{note} ({names[0]})"
