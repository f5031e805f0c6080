"""Speedup of a step when one hardware resource, or the batch, is doubled."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from scalejax.hardware import NO_SITE, Chip, Cluster, HostInput, Site
from scalejax.simulator.device_state import with_software
from scalejax.simulator.expert_load import of_fullest_device
from scalejax.simulator.predict import predict
from scalejax.simulator.program import Program
from scalejax.simulator.site_effects import step_terms
from scalejax.simulator.timeline.timeline import Scales, what_if

FACTOR = 2
"""Factor of improvement of each resource."""
LATENCY, HOST = "latency", "host"
"""Names of the resources that are halved instead of doubled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """Predicted step with one resource improved."""

    name: str
    """Name of the resource: "network"."""
    meaning: str
    """Description of the improved quantity."""
    step_seconds: float
    """Time of the improved step."""
    speedup: float
    """Samples per second over those of the original step; steps per second if there are none."""
    fits: bool
    """Whether the step fits into the memory of a device."""

    @property
    def change(self) -> str:
        """Description of the change: "twice the network"."""
        return f"{'half' if self.name in (LATENCY, HOST) else 'twice'} the {self.name}"


def improvements(
    program: Program,
    cluster: Cluster,
    site: Site = NO_SITE,
    doubled_batch: Program | None = None,
) -> tuple[Improvement, ...]:
    """Predicted speedups of `program` on `cluster` by doubling one resource at a time.

    The program stays as it was compiled for the original hardware.

    Args:
        program: the compiled step.
        cluster: the original hardware.
        site: conditions and input of the cluster's hosts.
        doubled_batch: the step with twice the samples per device, if it was compiled.

    Returns:
        Improvements, the largest speedup first.
    """
    now = predict(program, cluster, site=site)
    found: list[Improvement] = []

    def add(name: str, meaning: str, seconds: float, *, fits: bool, samples: float = 1.0) -> None:
        speedup = samples * now.step_seconds / seconds
        found.append(
            Improvement(
                name=name, meaning=meaning, step_seconds=seconds, speedup=speedup, fits=fits
            )
        )

    is_one_node = cluster.network is None or program.device_count <= cluster.devices_per_node
    for name, meaning, change in _CHANGES:
        if name != "network" or not is_one_node:
            then = predict(program, change(cluster), site=site)
            add(name, meaning, then.step_seconds, fits=then.fits)
    if site.input is not None and site.conditions.input_samples_per_second is None:
        for name, meaning, change in _INPUT_CHANGES:
            if (changed := change(site.input)) != site.input:
                then = predict(program, cluster, site=replace(site, input=changed))
                add(name, meaning, then.step_seconds, fits=then.fits)
    if cluster.host is not None and program.memory.host_bytes:
        then = predict(program, _host_link(cluster), site=site)
        add("host link", "bandwidth to the memory of the host", then.step_seconds, fits=then.fits)
    if dict(now.waterfall).get(HOST):
        used = with_software(cluster, program.framework)
        then = predict(program, _with_chips(used, _less_dispatch), site=site)
        add(HOST, "time to set off an operation", then.step_seconds, fits=then.fits)
    if what_if(program).schedule.collectives:
        seconds = _half_latency_seconds(program, cluster, site)
        add(LATENCY, "of starting collectives, and of messages", seconds, fits=now.fits)
    if doubled_batch is not None:
        then = predict(doubled_batch, cluster, site=site)
        samples = (doubled_batch.global_batch or 1) / (program.global_batch or 1)
        add("batch", "samples per device", then.step_seconds, fits=then.fits, samples=samples)
    return tuple(sorted(found, key=lambda each: -each.speedup))


def _half_latency_seconds(program: Program, cluster: Cluster, site: Site) -> float:
    """Time of a step whose collectives have half the latency at unchanged bandwidth.

    Every collective takes latency L and, for its bytes, time B over links and network, including
    filling of pipelines. L / 2 + B is half of L + 2 B, its time at half the bandwidth. So L need
    not be known separately, which tables of measured times do not give.
    """
    program, site = of_fullest_device(program, site)
    seconds = what_if(program).timeline(_half_rates(cluster), Scales(communication=1 / FACTOR))
    terms = step_terms(program, cluster, site, seconds.step_seconds)
    added = (terms.stragglers_seconds or 0.0) + (terms.input_seconds or 0.0)
    return seconds.step_seconds + added


def _with_chips(cluster: Cluster, change: Callable[[Chip], Chip]) -> Cluster:
    shared = tuple(replace(each, chip=change(each.chip)) for each in cluster.shared)
    return replace(cluster, chip=change(cluster.chip), shared=shared)


def _less_dispatch(chip: Chip) -> Chip:
    attainable = chip.attainable
    attainable = replace(
        attainable,
        dispatch_seconds=attainable.dispatch_seconds / FACTOR,
        collective_dispatch_seconds=attainable.collective_dispatch_seconds / FACTOR,
        member_dispatch_seconds=attainable.member_dispatch_seconds / FACTOR,
        routed_dispatch_seconds=attainable.routed_dispatch_seconds / FACTOR,
    )
    return replace(chip, attainable=attainable)


def _arithmetic(chip: Chip) -> Chip:
    peaks = {dtype: FACTOR * rate for dtype, rate in chip.peak_flop_per_second.items()}
    measured = chip.measured
    faster = measured and replace(measured, compute_scale=measured.compute_scale / FACTOR)
    return replace(chip, peak_flop_per_second=peaks, measured=faster)


def _memory(chip: Chip) -> Chip:
    measured = chip.measured
    faster = measured and replace(measured, memory_scale=measured.memory_scale / FACTOR)
    rate = FACTOR * chip.memory_bytes_per_second
    return replace(chip, memory_bytes_per_second=rate, measured=faster)


def _links(cluster: Cluster, factor: float = FACTOR) -> Cluster:
    """`cluster` with `factor` times the bandwidth inside a node."""
    link = cluster.link
    host = link.host_bytes_per_second
    link = replace(
        link,
        bytes_per_second=factor * link.bytes_per_second,
        host_bytes_per_second=None if host is None else factor * host,
    )
    return replace(cluster, link=link)


def _network(cluster: Cluster, factor: float = FACTOR) -> Cluster:
    """`cluster` with `factor` times the bandwidth of its network."""
    network = cluster.network
    if network is None:
        return cluster
    rate = factor * network.bytes_per_second
    return replace(cluster, network=replace(network, bytes_per_second=rate))


def _host_link(cluster: Cluster, factor: float = FACTOR) -> Cluster:
    """`cluster` with `factor` times the bandwidth between devices and their host's memory."""
    host = cluster.host
    if host is None:
        return cluster
    return replace(cluster, host=replace(host, bytes_per_second=factor * host.bytes_per_second))


def _half_rates(cluster: Cluster) -> Cluster:
    """`cluster` with half the bandwidth of links, network and host link, and twice the time to fill
    them."""
    slow = _host_link(_network(_links(cluster, 1 / FACTOR), 1 / FACTOR), 1 / FACTOR)
    link, network = slow.link, slow.network
    link = replace(
        link,
        ramp_seconds=FACTOR * link.ramp_seconds,
        in_switch_ramp_seconds=FACTOR * link.in_switch_ramp_seconds,
    )
    network = network and replace(network, ramp_seconds=FACTOR * network.ramp_seconds)
    return replace(slow, link=link, network=network)


def _storage(given: HostInput) -> HostInput:
    rates, shared = given.rates, given.rates.shared_storage_bytes_per_second
    read = rates.read
    if read is not None and read.storage_bytes_per_second is not None:
        read = replace(read, storage_bytes_per_second=FACTOR * read.storage_bytes_per_second)
    shared = None if shared is None else FACTOR * shared
    return replace(given, rates=replace(rates, read=read, shared_storage_bytes_per_second=shared))


def _workers(given: HostInput) -> HostInput:
    return replace(given, workers=FACTOR * given.workers)


def _cores(given: HostInput) -> HostInput:
    return _workers(replace(given, rates=replace(given.rates, cores=FACTOR * given.rates.cores)))


_INPUT_CHANGES: tuple[tuple[str, str, Callable[[HostInput], HostInput]], ...] = (
    ("workers", "processes that make batches, on the cores there are", _workers),
    ("cores", "cores of each host, and workers on them", _cores),
    ("storage", "bytes/s that hosts read", _storage),
)

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
