"""Notes on the input of a step: whether devices wait for it, the bottleneck, and a remedy."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from scalejax.core.units import format_bytes_per_second, format_count, format_seconds
from scalejax.hardware import Cluster, HostInput, Site
from scalejax.simulator.input import (
    InputPace,
    input_pace,
    taken_seconds,
    with_workers,
    workers_needed,
)
from scalejax.simulator.program import Program
from scalejax.simulator.site_effects import batch_parts, is_host, node_count, samples_per_node

NEAR = 1.25
"""Ratio of a host's input throughput to its devices' below which there is a note on it."""


def input_notes(
    program: Program, cluster: Cluster, site: Site, step_seconds: float
) -> tuple[str, ...]:
    """Notes on the input of `program` on `cluster`; none if it is far from being a bottleneck.

    Args:
        program: the compiled step.
        cluster: where it runs.
        site: conditions and input of the cluster's hosts.
        step_seconds: time of a step whose input is always ready.
    """
    given, samples = site.input, samples_per_node(program, cluster)
    by_hand = site.conditions.input_samples_per_second is not None
    if given is None or samples is None or by_hand:
        return ()
    nodes, parts = node_count(program, cluster), batch_parts(program, cluster)
    wanted = samples / step_seconds
    pace_of = partial(input_pace, samples_per_node=samples, nodes=nodes, batch_parts=parts)
    pace = pace_of(given)
    notes = [_verdict(given, pace, pace_of, wanted)]
    if is_host(cluster):
        taken = format_seconds(taken_seconds(given, pace, samples))
        notes.append(
            f"the devices are the CPU, whose cores make the input too: it takes {taken} of a step"
        )
    if given.is_augmented:
        notes.append(
            "the rates of the input leave out the run's augmentation: scalejax data bench RUN.toml "
            "tells how long that takes"
        )
    first = replace(given, is_first_epoch=True)
    slower = pace_of(first)
    if not given.is_first_epoch and slower.samples_per_second < min(
        wanted, pace.samples_per_second / NEAR
    ):
        notes.append(f"the first epoch is {_verdict(first, slower, pace_of, wanted)}")
    return tuple(note for note in notes if note)


def _verdict(
    given: HostInput, pace: InputPace, pace_of: Callable[[HostInput], InputPace], wanted: float
) -> str | None:
    rate = pace.samples_per_second
    if rate >= NEAR * wanted:
        return None
    makes = f"a host makes {format_count(rate)} samples/s"
    if rate >= wanted:
        return (
            f"nearly input-bound: {makes}, and its devices take {format_count(wanted)}; "
            f"{_reason(given, pace)}"
        )
    return (
        f"input-bound: {makes}, and its devices could take {format_count(wanted)}; "
        f"{_reason(given, pace)}; {_remedy(given, pace, pace_of, wanted)}; as it is, "
        f"{1 - rate / wanted:.0%} of the time of the devices, and of their price, is waiting"
    )


def _reason(given: HostInput, pace: InputPace) -> str:
    stage, _ = max(pace.stages, key=lambda each: each[1], default=("take", 0.0))
    rates = given.rates
    match pace.limit:
        case "storage":
            bytes_per_second = pace.samples_per_second * pace.storage_bytes_per_sample
            return f"storage gives {format_bytes_per_second(bytes_per_second)} and no more"
        case "cores":
            return f"all of its {rates.cores} cores are busy, most of all with {_IN_WORDS[stage]}"
        case "process":
            return "the process that trains takes and copies batches no faster"
        case "workers":
            plural = "s do" if given.workers > 1 else " does"
            return f"its {given.workers} worker{plural} no more, most of all {_IN_WORDS[stage]}"
        case "threads":
            return f"threads of one process do no more, most of all {_IN_WORDS[stage]}"


def _remedy(
    given: HostInput, pace: InputPace, pace_of: Callable[[HostInput], InputPace], wanted: float
) -> str:
    workers = workers_needed(given, pace_of, wanted)
    if workers is not None and workers != given.workers:
        return f"{workers} workers (input.workers) would keep up"
    if pace.limit == "storage":
        needed = format_bytes_per_second(wanted * pace.storage_bytes_per_sample)
        return f"storage of {needed} would keep up, or a cache on a local disk"
    all_cores = with_workers(given, given.rates.cores)
    best = pace_of(all_cores)
    if best.samples_per_second <= pace.samples_per_second:
        return "more workers would not help; more cores, or smaller images, would"
    return (
        f"no number of workers keeps up: with {all_cores.workers}, it makes "
        f"{format_count(best.samples_per_second)}, as {_reason(all_cores, best)}"
    )


_IN_WORDS = {
    "read": "reading row groups",
    "take": "decoding",
    "hand over": "handing batches over",
}
