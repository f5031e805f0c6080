"""Throughput of a host's input pipeline, its bottleneck, and how long devices wait for batches.

The stages of the input run in parallel: worker processes (or threads) read and decode, the
training process takes their batches and copies them to devices, storage delivers bytes. The
slowest is the bottleneck, and all share the cores. Uses measured rates of a host; reads no data.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from scalejax.core.errors import require_above
from scalejax.hardware import HostInput, Speedups

Limit = Literal["storage", "threads", "workers", "cores", "process"]
"""Bottleneck: storage bandwidth; threads, if there are no worker processes; too few workers; all
cores busy; the training process, which takes batches one at a time."""

MOST_WORKERS = 4096
"""Largest number of workers per host that is considered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPace:
    """Input throughput of one host, and its bottleneck."""

    samples_per_second: float
    """Samples delivered to the host's devices per second."""
    limit: Limit
    """Bottleneck of the throughput."""
    stages: tuple[tuple[str, float], ...]
    """(stage, processor seconds per sample): read, take, hand over; stages of 0 omitted."""
    storage_bytes_per_sample: float
    """Bytes read from storage per sample."""
    storage_seconds_per_sample: float = 0.0
    """Wait for storage per sample; 0 if the rate of storage is unknown."""


def input_wait_seconds(
    step_seconds: float,
    samples_per_node: float,
    samples_per_second: float,
    taken_seconds: float = 0.0,
) -> float:
    """Time that devices wait for a batch that is prepared while they compute the previous one.

    seconds = max(0, samples / rate - step, taken)

    Left out: single late batches, which prefetching evens out.

    Args:
        step_seconds: time of a step whose input is always ready.
        samples_per_node: samples per step that one node delivers.
        samples_per_second: samples per second that the node can deliver.
        taken_seconds: time that the input of a batch takes from the step's own cores.

    Raises:
        ConfigError: if the node delivers nothing.
    Source: the two stages of a pipeline run at the pace of the slower, as in Murray et al.
        2021, "tf.data: a machine learning data processing framework", arXiv 2101.12127.
    """
    require_above("samples_per_second", samples_per_second, 0)
    return max(0.0, samples_per_node / samples_per_second - step_seconds, taken_seconds)


def taken_seconds(given: HostInput, pace: InputPace, samples_per_node: float) -> float:
    """Time that the input of one batch takes from a step on the cores of its host: all of its work,
    divided among the cores.

    Without workers, threads that decode images keep all cores busy; everything else is measured as
    the time of one core.

    Left out: cores that a small step leaves idle, and nodes that are processes of one machine.

    Args:
        given: rates of the host.
        pace: the result of `input_pace`.
        samples_per_node: samples of the batch on this host.
    """
    of_all_cores = {"take"} if given.rates.is_of_images and not given.workers else set()
    return samples_per_node * math.fsum(
        seconds if stage in of_all_cores else seconds / given.rates.cores
        for stage, seconds in pace.stages
    )


def input_pace(
    given: HostInput,
    samples_per_node: float,
    *,
    nodes: int = 1,
    batch_parts: float | None = None,
) -> InputPace:
    """Input throughput of one of `nodes` hosts, in batches of `samples_per_node` samples.

    With w processor seconds of a worker per sample, d seconds that it waits for storage, p
    processor seconds of the training process, and s(n) the speedup of n parallel workers, the
    limits are

    workers: n / (w n / s(n) + d). cores: s(cores) / (w + p). process: 1 / p. storage: its
    bytes/s over the bytes of a sample. Without workers, threads: 1 / (w + d), with w measured for
    all threads together.

    Left out: random augmentation of images, and that a step on the host's CPU slows down while the
    input runs (`taken_seconds`).

    Args:
        given: measured rates of the host, its workers, and its work per sample.
        samples_per_node: samples of one batch on one host, which share the batch's fixed cost.
        nodes: hosts that read from shared storage at once.
        batch_parts: parts of every batch, one of which each host takes; if None, `nodes`.

    Raises:
        ConfigError: if the batch is empty.
    """
    require_above("samples_per_node", samples_per_node, 0)
    rates, workers, parts = given.rates, given.workers, batch_parts or nodes
    stages = _stages(given, samples_per_node, parts)
    stored = _stored_bytes(given, parts)
    own = rates.read and rates.read.storage_bytes_per_second
    shared = rates.shared_storage_bytes_per_second
    known = [each for each in (own, shared and shared / nodes) if each]
    storage = min(known, default=None)  # share of one host; None if unknown
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
    limit = max(seconds, key=seconds.__getitem__)  # the first if equal: more workers do not help
    return InputPace(
        samples_per_second=1 / seconds[limit] if seconds[limit] else math.inf,
        limit=limit,
        stages=tuple((name, seconds) for name, seconds in stages.items() if seconds),
        storage_bytes_per_sample=stored,
        storage_seconds_per_sample=waiting,
    )


def stage_seconds(
    given: HostInput, samples_per_node: float, *, nodes: int = 1, batch_parts: float | None = None
) -> tuple[tuple[str, float], ...]:
    """(stage, seconds) of one batch of a host, made by one worker or by the threads of the training
    process: storage, which includes the work of reading and the wait; decode; hand over, which
    includes the copy to the device. Augmentation is not included.

    Args:
        given: as for `input_pace`, like the other arguments.
        samples_per_node: samples of the batch on one host.
        nodes: hosts that read from shared storage at once.
        batch_parts: parts of every batch; if None, `nodes`.
    """
    pace = input_pace(given, samples_per_node, nodes=nodes, batch_parts=batch_parts)
    stages = dict(pace.stages)
    read = stages.get("read", 0.0) + pace.storage_seconds_per_sample
    of_sample = {"storage": read} | {
        name: stages.get(of, 0.0) for name, of in (("decode", "take"), ("hand over", "hand over"))
    }
    return tuple((name, samples_per_node * each) for name, each in of_sample.items() if each)


def workers_needed(
    given: HostInput, pace_of: Callable[[HostInput], InputPace], samples_per_second: float
) -> int | None:
    """Fewest worker processes that reach `samples_per_second` according to `pace_of`; None if no
    number does."""
    most = min(MOST_WORKERS, 2 * given.rates.cores)
    for workers in range(1, most + 1):
        if pace_of(with_workers(given, workers)).samples_per_second >= samples_per_second:
            return workers
    return None


def with_workers(given: HostInput, workers: int) -> HostInput:
    """`given` with another number of worker processes."""
    return replace(given, workers=workers)


def _stages(given: HostInput, samples_per_node: float, parts: float) -> dict[str, float]:
    """Processor seconds of each stage per sample, on a host that takes one of `parts` parts of
    every batch."""
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
    """Mean number of times that a row group is decoded per epoch."""
    if given.work.files is None:
        return 0.0
    return given.work.files.reads(given.workers, is_first_epoch=given.is_first_epoch, hosts=parts)


def _stored_bytes(given: HostInput, parts: float) -> float:
    """Bytes read from storage per sample; after the first read, only page cache misses."""
    files = given.work.files
    if files is None:
        return 0.0
    of_host = files.stored_bytes / files.shards_among(parts)
    missed = max(0.0, 1.0 - given.rates.memory_bytes / 2 / max(1.0, of_host))
    reads = _reads(given, parts)
    if not files.rows_together and not files.is_cached:  # all workers read it; memory holds it once
        reads /= max(1, given.workers)
    reads = max(min(1.0, reads), reads * missed) if given.is_first_epoch else reads * missed
    return reads * files.stored_bytes / files.rows * parts


def _speedup(speedups: Speedups, count: int, cores: int) -> float:
    """Speedup of `count` parallel workers, capped at the cores and at `count` itself.

    Linear between two measured counts; beyond the largest, in proportion to it. A speedup above
    the number of workers appears only in disturbed measurements.
    """
    count = min(count, cores)
    most, best = speedups[-1]
    if count >= most:
        return min(1.0, best / most) * count
    counts, gains = zip(*speedups, strict=True)
    return min(float(count), float(np.interp(count, counts, gains)))
