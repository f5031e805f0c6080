"""How fast a host makes batches, what limits it, and how long devices wait for them.

The stages of the input run side by side: worker processes (or threads) read and decode, the
process that trains takes their batches and hands them to devices, storage gives bytes. The
slowest sets the pace, and all share the cores.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from scalejax.core.errors import require_above
from scalejax.hardware import HostInput, Speedups

Limit = Literal["storage", "threads", "workers", "cores", "process"]
"""What sets the pace: bytes from storage; threads, where there are no worker processes; too few of
these; every core is busy; the process that trains, which takes batches one at a time."""

MOST_WORKERS = 4096
"""Workers of one host beyond which none are looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPace:
    """How fast one host makes batches, and why no faster."""

    samples_per_second: float
    """Samples that it hands to its devices."""
    limit: Limit
    """What sets the pace."""
    stages: tuple[tuple[str, float], ...]
    """(stage, seconds of a sample): read, take, hand over; those that take none left
    out."""
    storage_bytes_per_sample: float
    """Bytes of storage that a sample takes."""


def input_wait_seconds(
    step_seconds: float, samples_per_node: float, samples_per_second: float
) -> float:
    """Time that devices wait for a batch which is prepared while they compute the one before.

    seconds = max(0, samples / rate - step)

    Left out: single late batches, which reading ahead smooths.

    Args:
        step_seconds: time of a step whose input is always there.
        samples_per_node: samples of one step that one node delivers.
        samples_per_second: samples that it can deliver.

    Raises:
        ConfigError: if the node delivers nothing.
    Source: the two stages of a pipeline run at the pace of the slower, as in Murray et al.
        2021, "tf.data: a machine learning data processing framework", arXiv 2101.12127.
    """
    require_above("samples_per_second", samples_per_second, 0)
    return max(0.0, samples_per_node / samples_per_second - step_seconds)


def input_pace(
    given: HostInput,
    samples_per_node: float,
    *,
    nodes: int = 1,
    batch_parts: float | None = None,
) -> InputPace:
    """How fast one of `nodes` hosts makes batches of `samples_per_node` samples.

    With w processor seconds of a worker for a sample, d seconds that it waits for storage, p of
    the process that trains, and s(n) the speedup of n workers side by side:

    workers: n / (w n / s(n) + d). cores: s(cores) / (w + p). process: 1 / p. storage: its
    bytes/s over the bytes of a sample. Without workers, threads: 1 / (w + d), with w as measured
    for all of them.

    Left out: random changes of images, and the cores that the step itself needs, where devices
    are the host's own.

    Args:
        given: what the host has, and has to do.
        samples_per_node: samples of one batch on one host, which share the cost of a batch.
        nodes: hosts that read the same storage at once.
        batch_parts: parts of every batch that hosts take, each of them one; if None, `nodes`.

    Raises:
        ConfigError: if the batch is empty.
    """
    require_above("samples_per_node", samples_per_node, 0)
    rates, workers, parts = given.rates, given.workers, batch_parts or nodes
    stages = _stages(given, samples_per_node, parts)
    stored = _stored_bytes(given, parts)
    storage = _storage_bytes_per_second(given, nodes)
    waiting = stored / storage if storage else 0.0
    of_process = stages.get("hand over", 0.0)
    of_worker = math.fsum(stages.values()) - of_process
    seconds: dict[Limit, float] = {"storage": waiting}
    if workers:
        alone = _speedup(rates.worker_speedups, workers, rates.cores)
        most = _speedup(rates.worker_speedups, rates.cores, rates.cores)
        seconds |= {
            "cores": (of_worker + of_process) / most,
            "process": of_process,
            "workers": of_worker / alone + waiting / workers,
        }
    else:
        seconds["threads"] = of_worker + waiting
    limit = max(seconds, key=seconds.__getitem__)  # the first of equals: more workers do not help
    return InputPace(
        samples_per_second=1 / seconds[limit] if seconds[limit] else math.inf,
        limit=limit,
        stages=tuple((name, seconds) for name, seconds in stages.items() if seconds),
        storage_bytes_per_sample=stored,
    )


def workers_needed(
    given: HostInput, pace_of: Callable[[HostInput], InputPace], samples_per_second: float
) -> int | None:
    """The fewest worker processes with which a host makes so many samples, as `pace_of` costs
    them; None if no number does."""
    most = min(MOST_WORKERS, 2 * given.rates.cores)
    for workers in range(1, most + 1):
        if pace_of(with_workers(given, workers)).samples_per_second >= samples_per_second:
            return workers
    return None


def with_workers(given: HostInput, workers: int) -> HostInput:
    """`given` with another number of worker processes."""
    return replace(given, workers=workers)


def _stages(given: HostInput, samples_per_node: float, parts: float) -> dict[str, float]:
    """Processor seconds of each stage for a sample, on a host that takes one of `parts` of every
    batch."""
    rates, work = given.rates, given.work
    stages = {}
    if rates.read is not None and (files := work.files) is not None:
        of_all = (
            files.row_groups * rates.read.seconds_per_row_group
            + files.read_bytes * rates.read.seconds_per_byte
        )
        stages["read"] = _reads(given, parts) * of_all / files.rows * parts
    take = rates.take if given.workers else rates.threads
    stages["take"] = (
        take.seconds_per_sample
        + take.seconds_per_encoded_byte * work.encoded_bytes
        + take.seconds_per_full_pixel * work.full_pixels
        + take.seconds_per_reduced_pixel * work.reduced_pixels
        + take.seconds_per_resized_pixel * work.resized_pixels
    )
    if given.workers:
        copy = rates.hand_over
        of_batch = copy.seconds_per_batch / samples_per_node
        stages["hand over"] = of_batch + copy.seconds_per_byte * work.batch_bytes
    return stages


def _reads(given: HostInput, parts: float) -> float:
    """How often row groups are decoded in an epoch, in the mean."""
    if given.work.files is None:
        return 0.0
    return given.work.files.reads(given.workers, is_first_epoch=given.is_first_epoch, hosts=parts)


def _stored_bytes(given: HostInput, parts: float) -> float:
    """Bytes of storage for a sample: of files that were read before, what memory does not hold."""
    files = given.work.files
    if files is None:
        return 0.0
    of_host = files.stored_bytes / files.shards_among(parts)
    missed = max(0.0, 1.0 - given.rates.memory_bytes / 2 / max(1.0, of_host))
    reads = _reads(given, parts)
    if not files.rows_together and not files.is_cached:  # all read it then, memory has it once
        reads /= max(1, given.workers)
    reads = max(min(1.0, reads), reads * missed) if given.is_first_epoch else reads * missed
    return reads * files.stored_bytes / files.rows * parts


def _storage_bytes_per_second(given: HostInput, nodes: int) -> float | None:
    """What storage gives to one host; None if unknown."""
    rates = given.rates
    own = rates.read and rates.read.storage_bytes_per_second
    shared = rates.shared_storage_bytes_per_second
    known = [own, shared and shared / nodes]
    return min((each for each in known if each), default=None)


def _speedup(speedups: Speedups, count: int, cores: int) -> float:
    """Of `count` side by side: more than there are cores give no more. As measured, between two
    numbers on a line; beyond the largest that was measured, as much for each core as there. No
    more than there are, which only a disturbed measurement shows."""
    count = min(count, cores)
    most, best = speedups[-1]
    if count >= most:
        return min(1.0, best / most) * count
    below = max(each for each in speedups if each[0] <= count)
    above = min(each for each in speedups if each[0] > count)
    share = (count - below[0]) / (above[0] - below[0])
    return min(float(count), below[1] + share * (above[1] - below[1]))
