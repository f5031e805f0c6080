"""What buys what: the step with one part of the hardware, or the batch, twice as large."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from scalejax.hardware import Chip, Cluster
from scalejax.predict import predict
from scalejax.program import Program

FACTOR = 2
"""By how much each part is improved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """A step with one thing improved."""

    name: str
    """What is improved: "network"."""
    meaning: str
    """In which way, for people."""
    step_seconds: float
    """Time of a step then."""
    speedup: float
    """Samples per second then, over those now; of a program without samples, steps."""
    fits: bool
    """Whether the step fits into the memory of a device."""


def improvements(
    program: Program, cluster: Cluster, doubled_batch: Program | None = None
) -> tuple[Improvement, ...]:
    """What each part, twice as good, would do to a step of `program` on `cluster`.

    The hardware changes and the program stays: a compiler would make the same step of it.

    Args:
        program: the compiled step.
        cluster: what it runs on.
        doubled_batch: the same step with twice the samples per device, if it was compiled.

    Returns:
        The largest gain first.
    """
    now = predict(program, cluster)
    found = []
    for name, meaning, change in _CHANGES:
        if name == "network" and (
            cluster.network is None or program.device_count <= cluster.devices_per_node
        ):
            continue
        then = predict(program, change(cluster))
        found.append(
            Improvement(
                name=name,
                meaning=meaning,
                step_seconds=then.step_seconds,
                speedup=now.step_seconds / then.step_seconds,
                fits=then.fits,
            )
        )
    if doubled_batch is not None:
        then = predict(doubled_batch, cluster)
        samples = (doubled_batch.global_batch or 1) / (program.global_batch or 1)
        found.append(
            Improvement(
                name="batch",
                meaning="samples per device",
                step_seconds=then.step_seconds,
                speedup=samples * now.step_seconds / then.step_seconds,
                fits=then.fits,
            )
        )
    return tuple(sorted(found, key=lambda each: -each.speedup))


def _with_chips(cluster: Cluster, change: Callable[[Chip], Chip]) -> Cluster:
    shared = tuple(replace(each, chip=change(each.chip)) for each in cluster.shared)
    return replace(cluster, chip=change(cluster.chip), shared=shared)


def _arithmetic(chip: Chip) -> Chip:
    peaks = {dtype: FACTOR * rate for dtype, rate in chip.peak_flop_per_second.items()}
    measured = chip.measured
    if measured is not None:
        measured = replace(measured, compute_scale=measured.compute_scale / FACTOR)
    return replace(chip, peak_flop_per_second=peaks, measured=measured)


def _memory(chip: Chip) -> Chip:
    measured = chip.measured
    if measured is not None:
        measured = replace(measured, memory_scale=measured.memory_scale / FACTOR)
    rate = FACTOR * chip.memory_bytes_per_second
    return replace(chip, memory_bytes_per_second=rate, measured=measured)


def _links(cluster: Cluster) -> Cluster:
    link = cluster.link
    host = link.host_bytes_per_second
    faster = replace(
        link,
        bytes_per_second=FACTOR * link.bytes_per_second,
        host_bytes_per_second=None if host is None else FACTOR * host,
    )
    return replace(cluster, link=faster)


def _network(cluster: Cluster) -> Cluster:
    if cluster.network is None:
        return cluster
    rate = FACTOR * cluster.network.bytes_per_second
    return replace(cluster, network=replace(cluster.network, bytes_per_second=rate))


_CHANGES: tuple[tuple[str, str, Callable[[Cluster], Cluster]], ...] = (
    ("arithmetic", "FLOP/s of the chip", lambda cluster: _with_chips(cluster, _arithmetic)),
    ("memory", "bandwidth of the chip's memory", lambda cluster: _with_chips(cluster, _memory)),
    (
        "chip",
        "both: FLOP/s and memory bandwidth",
        lambda cluster: _with_chips(cluster, lambda chip: _memory(_arithmetic(chip))),
    ),
    ("links", "bandwidth inside a node", _links),
    ("network", "network cards of each node", _network),
)
