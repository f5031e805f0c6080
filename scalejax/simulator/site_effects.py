"""Time that a site adds to a step and a run: stragglers, input stalls, checkpoints, failures.

Depends on a site and on the sizes of a node and a program, not on the program's operations.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from scalejax.config.parallelism import AXES, BATCH_AXES, DATA
from scalejax.core.errors import ConfigError, refusal
from scalejax.hardware import Cluster, RunConditions, Site
from scalejax.simulator.input import (
    input_pace,
    input_wait_seconds,
    stage_seconds,
    taken_seconds,
)
from scalejax.simulator.program import Program
from scalejax.simulator.reliability import (
    best_interval_seconds,
    checkpoint_goodput,
    goodput,
    step_deviation_seconds,
    straggler_seconds,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTerms:
    """Time that site conditions add to an undisturbed step; None if unknown."""

    stragglers_seconds: float | None
    """Time that devices wait for the slowest one."""
    input_seconds: float | None
    """Time that devices wait for their batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTerms:
    """Time of checkpoints and failures per step that counts; None if unknown."""

    checkpoints_seconds: float | None
    """Time for checkpoints, per step."""
    failures_seconds: float | None
    """Time for lost work and restarts, per step."""
    goodput: float | None
    """Fraction of the time of the run spent on steps that count, as far as the terms above are
    known."""


def step_terms(program: Program, cluster: Cluster, site: Site, step_seconds: float) -> StepTerms:
    """Time that stragglers and input add to a step of `step_seconds`."""
    conditions = site.conditions
    stragglers = wait = None
    deviation = step_deviation_seconds(cluster.chip, conditions, step_seconds)
    if deviation is not None:
        stragglers = straggler_seconds(deviation, program.device_count)
    rate, samples = conditions.input_samples_per_second, samples_per_node(program, cluster)
    taken = 0.0
    if samples is not None and rate is None and site.input is not None:
        nodes, parts = node_count(program, cluster), batch_parts(program, cluster)
        pace = input_pace(site.input, samples, nodes=nodes, batch_parts=parts)
        rate = pace.samples_per_second
        if is_host(cluster):
            taken = taken_seconds(site.input, pace, samples)
    if samples is not None and rate is not None:
        wait = input_wait_seconds(step_seconds + (stragglers or 0.0), samples, rate, taken)
    return StepTerms(stragglers_seconds=stragglers, input_seconds=wait)


def is_host(cluster: Cluster) -> bool:
    """Whether the devices are the CPU of their host, whose cores also run the input: true if
    `calibrate` measured the cluster on CPUs, whatever the chip is called now; on GPUs it measures
    other all-reduces."""
    return cluster.link.kind == "host" and cluster.library.runs_buffers_one_by_one


def input_stages(program: Program, cluster: Cluster, site: Site) -> tuple[tuple[str, float], ...]:
    """(stage, seconds) of the input of one batch of a node; empty if its rates are unknown."""
    samples = samples_per_node(program, cluster)
    if samples is None or site.input is None:
        return ()
    nodes, parts = node_count(program, cluster), batch_parts(program, cluster)
    return stage_seconds(site.input, samples, nodes=nodes, batch_parts=parts)


def samples_per_node(program: Program, cluster: Cluster) -> float | None:
    """Samples per step that a node delivers (the largest of all nodes); None if unknown.

    Devices along axes that do not divide the batch take the same samples: a node delivers them
    once, and so does each of the nodes that such an axis spans.
    """
    if program.global_batch is None:
        return None
    return program.global_batch * _batch_share(program.mesh_axes, cluster.devices_per_node)


def batch_parts(program: Program, cluster: Cluster) -> float:
    """Number of parts of the batch, one of which each node delivers; nodes may share a part."""
    return 1 / _batch_share(program.mesh_axes, cluster.devices_per_node)


@lru_cache(maxsize=1024)
def _batch_share(mesh_axes: tuple[tuple[str, int], ...], devices_per_node: int) -> float:
    """Largest fraction of the batch that the devices of one node take; neighbours in the mesh are
    neighbours in a node. Axes with unknown names divide the batch."""
    sizes = tuple(size for _, size in mesh_axes)
    divides = [name in BATCH_AXES or name not in AXES for name, _ in mesh_axes]
    parts = tuple(
        size if is_divided else 1 for size, is_divided in zip(sizes, divides, strict=True)
    )
    shards = np.broadcast_to(np.arange(math.prod(parts)).reshape(parts), sizes).ravel()
    shards = np.pad(shards, (0, -len(shards) % devices_per_node), mode="edge")
    of_nodes = np.sort(shards.reshape(-1, devices_per_node), axis=1)
    held = 1 + np.count_nonzero(np.diff(of_nodes, axis=1), axis=1).max()
    return float(held) / math.prod(parts)


def node_count(program: Program, cluster: Cluster) -> int:
    """Nodes that the program runs on."""
    return math.ceil(program.device_count / cluster.devices_per_node)


def run_terms(program: Program, cluster: Cluster, site: Site, step_seconds: float) -> RunTerms:
    """Time that checkpoints and failures add to a run of steps of `step_seconds`.

    Raises:
        ConfigError: if checkpoints are due faster than storage can write them, or failures come
            faster than the run makes progress.
    """
    conditions = site.conditions
    mtbf = None
    if conditions.node_mtbf_seconds is not None:
        mtbf = conditions.node_mtbf_seconds / node_count(program, cluster)
    stall = stall_seconds(program, conditions)
    interval = conditions.checkpoint_interval_seconds
    if interval is None and stall is not None and mtbf is not None:
        interval = max(best_interval_seconds(stall, mtbf), _write_seconds(program, conditions))
    if stall is None or interval is None:
        return RunTerms(checkpoints_seconds=None, failures_seconds=None, goodput=None)
    if interval < _write_seconds(program, conditions):
        accepted = f"writing one takes {_write_seconds(program, conditions):.4g} s"
        raise ConfigError(refusal("conditions.checkpoint_interval_seconds", interval, accepted))
    checkpoints = step_seconds * stall / interval
    if mtbf is None or conditions.restart_seconds is None:
        left = checkpoint_goodput(interval, stall)
        return RunTerms(checkpoints_seconds=checkpoints, failures_seconds=None, goodput=left)
    latency = max(0.0, _write_seconds(program, conditions) - stall)
    left = goodput(interval, stall, conditions.restart_seconds, mtbf, latency_seconds=latency)
    return RunTerms(
        checkpoints_seconds=checkpoints,
        failures_seconds=step_seconds / left - step_seconds - checkpoints,
        goodput=left,
    )


def stall_seconds(program: Program, conditions: RunConditions) -> float | None:
    """Time that training stalls for one checkpoint; None if unknown.

    Each device of one replica copies its own part of the state to its host, all at once; if
    checkpoints are not asynchronous, all devices wait for the storage.
    """
    size = checkpoint_bytes(program, conditions)
    if size is None:
        return None
    if conditions.device_to_host_bytes_per_second is not None:
        return size / state_shards(program) / conditions.device_to_host_bytes_per_second
    if conditions.storage_bytes_per_second is not None:
        return size / conditions.storage_bytes_per_second
    return None


def checkpoint_bytes(program: Program, conditions: RunConditions) -> float | None:
    """Bytes of one checkpoint: as given, or the state that the step updates in place.

    If the program does not give the size of its state, the device's donated buffers are counted
    once per shard (parameters replicated over shards are counted once for each, and sharding of
    state over the data axis is not visible).
    """
    if conditions.checkpoint_bytes is not None:
        return conditions.checkpoint_bytes
    if program.state_bytes is not None:
        return program.state_bytes
    return program.memory.alias_bytes * state_shards(program) or None


def state_shards(program: Program) -> int:
    """Devices over which one replica of the state is sharded: along all axes except data."""
    sizes = dict(program.mesh_axes)
    if not sizes.keys() <= set(AXES):
        return 1
    return program.device_count // sizes.get(DATA, 1)


def _write_seconds(program: Program, conditions: RunConditions) -> float:
    """Time until a checkpoint is on storage, as far as it is known."""
    size = checkpoint_bytes(program, conditions)
    if size is None or conditions.storage_bytes_per_second is None:
        return 0.0
    return size / conditions.storage_bytes_per_second
