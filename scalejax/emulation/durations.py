"""Durations of the parts of an emulated step, predicted from the compiled step on a cluster.

A worker's gradient takes the predicted time of the step compiled for its chip. Knows programs and
clusters; nothing of events.
"""

from dataclasses import replace

from scalejax.config.emulation import EmulationConfig, TimingConfig
from scalejax.config.run import ResolvedRun, resolve, with_fields
from scalejax.core.errors import ConfigError, refusal
from scalejax.core.progress import OnProgress, no_display
from scalejax.emulation.virtual_cluster import Durations
from scalejax.hardware import NO_SITE, Cluster, Site, load_library
from scalejax.simulator.collectives import find_route
from scalejax.simulator.device_state import under_load
from scalejax.simulator.reliability import step_deviation_seconds
from scalejax.simulator.site_effects import step_terms
from scalejax.simulator.timeline.timeline import what_if
from scalejax.xla import ProfileJob, profile_many

# Checks of hosts: algorithms limited to one host, and the rates needed within a host.


def require_one_machine(emulation: EmulationConfig, workers_per_host: int) -> None:
    """Refuse several hosts for an algorithm that is limited to one.

    Raises:
        ConfigError: naming an algorithm that works on several.
    """
    found = emulation.algorithm.one_machine
    if found is None or emulation.workers <= workers_per_host:
        return
    field, value, instead = found
    accepted = (
        f"it is of one machine, and of emulation.workers={emulation.workers} a host has "
        f"{workers_per_host}: take {instead}, or at most {workers_per_host} workers"
    )
    raise ConfigError(refusal(f"emulation.algorithm.{field}", value, accepted))


def require_rates(emulation: EmulationConfig, workers_per_host: int) -> None:
    """Refuse communication within a host whose rate is not given.

    Raises:
        ConfigError: naming what is missing.
    """
    mode = emulation.algorithm
    if (
        mode.all_reduce_ranges is not None
        and emulation.core.is_all_reduced
        and emulation.timing.collective_seconds is None
        and mode.link_rate is None
        and min(workers_per_host, emulation.workers) > 1
    ):
        raise ConfigError(
            "emulation.algorithm.host_bytes_per_second is missing: workers share a host, "
            "and send at its rate. Give it, emulation.timing.collective_seconds, or --cluster."
        )


def durations_of(
    run: ResolvedRun,
    emulation: EmulationConfig,
    cluster: Cluster | None,
    *,
    site: Site = NO_SITE,
    on_progress: OnProgress = no_display,
) -> Durations:
    """Durations of all actions of the workers of `emulation`.

    Synchronous workers with an all-reduce use the step compiled for all of them: the collective
    is its exposed communication, the gradient is the rest. Otherwise a worker uses the step
    compiled for one device and its minibatch, including the update (ignores that servers do it:
    < 5 % of a step). A message between a worker and a server takes the link of the worker's node,
    the latency of a remote call, and the link of the server's host, one after the other, since a
    server starts when the whole message has arrived.

    Args:
        run: the run, on one device.
        emulation: the workers and their algorithm.
        cluster: hardware of the workers; if None, `emulation.timing` gives all times.
        site: conditions and input of the cluster's hosts.
        on_progress: called when the step is compiled.

    Raises:
        ConfigError: if neither gives the time of a gradient, or the bandwidth between workers of
            one host; or if the algorithm is limited to one machine, and the workers are on several.
        DoesNotFit: if the cluster has fewer devices than workers.
        ProfileError: if the compiler refuses the step.
    """
    given = emulation.timing
    if cluster is None:
        if given.gradient_seconds is None:
            raise ConfigError(
                "emulation.cluster is missing: give --cluster NAME (see scalejax hardware), or say "
                "how long a gradient takes by --emulation.timing.gradient_seconds SECONDS."
            )
        alone = emulation.workers if emulation.algorithm.one_machine else 1
        per_host = given.workers_per_host or alone
        require_one_machine(emulation, per_host)
        require_rates(emulation, per_host)
        placed = replace(given, workers_per_host=per_host)
        return _given(placed, emulation, gradient=given.gradient_seconds)
    cluster.require_devices(emulation.workers, field="emulation.workers")
    require_one_machine(emulation, given.workers_per_host or cluster.devices_per_node)
    gradient, gradient_sync = _compiled(run, emulation, cluster, site, on_progress)
    method = load_library("parameter-server").methods[0]
    per_host = min(emulation.workers, given.workers_per_host or cluster.devices_per_node)
    host = find_route(cluster, members=per_host, members_per_node=per_host, nodes=1)
    network = cluster.network
    if network is None:
        link = cluster.link
        rate = link.host_bytes_per_second or link.bytes_per_second * link.attainable_fraction
        latency = method.link_hop_seconds
    else:
        rate = network.bytes_per_second * network.attainable_fraction
        latency = method.network_hop_seconds + network.message_seconds
    found = TimingConfig(
        gradient_seconds=gradient,
        collective_seconds=gradient_sync,
        latency_seconds=latency,
        worker_bytes_per_second=rate,
        server_bytes_per_second=rate,
        workers_per_host=cluster.devices_per_node,
        update_seconds=given.update_seconds,
    )
    names = TimingConfig.__dataclass_fields__
    stated = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    both = replace(found, **stated)
    if given.gradient_seconds is not None:
        gradient = given.gradient_seconds
    seconds = gradient + gradient_sync
    deviation = step_deviation_seconds(cluster.chip, site.conditions, seconds)
    durations = _given(both, emulation, gradient=gradient, deviation=deviation or 0.0)
    return replace(
        durations,
        link_bytes_per_second=host.link_bytes_per_second,
        host_bytes_per_second=host.host_bytes_per_second,
        hop_seconds=_hop_seconds(cluster),
    )


def _hop_seconds(cluster: Cluster) -> float:
    """Latency of a message within a node, by the method that is fastest for large messages."""
    methods = [
        each for each in cluster.library.methods if each.algorithm not in ("nvls", "pairwise")
    ]
    return max(methods, key=lambda method: method.bandwidth_fraction).link_hop_seconds


def _given(
    timing: TimingConfig, emulation: EmulationConfig, *, gradient: float, deviation: float = 0.0
) -> Durations:
    """Durations given by `timing`; 0 or unlimited if not given."""
    if emulation.stragglers.cv is not None:
        deviation = gradient * emulation.stragglers.cv
    return Durations(
        gradient_seconds=gradient,
        gradient_deviation_seconds=deviation,
        collective_seconds=timing.collective_seconds or 0.0,
        update_seconds=timing.update_seconds,
        latency_seconds=timing.latency_seconds or 0.0,
        worker_bytes_per_second=timing.worker_bytes_per_second,
        server_bytes_per_second=timing.server_bytes_per_second,
        workers_per_host=timing.workers_per_host or 1,
    )


def _compiled(
    run: ResolvedRun,
    emulation: EmulationConfig,
    cluster: Cluster,
    site: Site,
    on_progress: OnProgress,
) -> tuple[float, float]:
    """Seconds of a gradient, and of the exposed communication."""
    devices, samples = 1, run.split.global_batch
    if emulation.core.is_all_reduced:
        devices = emulation.workers
    else:
        samples //= emulation.sharing_workers
    fields = {"layout.data": devices, "batch.global_batch": samples, "emulation": None}
    job = ProfileJob(
        run=resolve(with_fields(run.config, fields), devices, run.dataset), cluster=cluster
    )
    (program,) = profile_many([job], on_progress)
    cluster = under_load(cluster, program)
    times = what_if(program).timeline(cluster)
    terms = step_terms(program, cluster, site, times.step_seconds)
    gradient_sync = times.exposed_seconds + times.contention_seconds
    gradient = times.step_seconds - gradient_sync + (terms.input_seconds or 0.0)
    return gradient, gradient_sync
