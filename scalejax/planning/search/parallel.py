"""Costs the fitting strategies of a search, in one process or in several.

The number of processes changes neither results nor their order. Knows no ranking.
"""

import gc
import os
import signal
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Literal

from scalejax.core.environment import end_with_caller
from scalejax.core.errors import ScalejaxError
from scalejax.hardware import Cluster
from scalejax.planning.search.costs import Candidate, StrategyCosts, workspace_bytes
from scalejax.planning.search.space import Group
from scalejax.simulator.transformer import Strategy, TransformerShape, memory_by_zero_stage

_PARTS_PER_PROCESS = 25
"""Minimum number of parts per process. A part of 100 groups takes 20 to 60 ms for GPT-3, and a
process, which takes 0.6 s to start, should save more than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpec:
    """Inputs that all groups of strategies of a search share."""

    shape: TransformerShape
    """The network."""
    cluster: Cluster
    """The devices."""
    global_batch: int
    """Samples of an update."""
    moments: Literal[0, 1, 2]
    """Arrays like the parameters that the optimizer keeps."""


def candidates(
    spec: SearchSpec, parts: Sequence[Sequence[Group]], processes: int
) -> Generator[list[Candidate]]:
    """Yield the fitting candidates of each part, in order.

    Args:
        spec: network, cluster, batch and optimizer state.
        parts: groups of similar strategies; neighbours share most operations.
        processes: maximum number of processes; fewer are used for few parts.

    Raises:
        DoesNotFit: if a collective spans nodes that no network joins.
        ScalejaxError: if the system ends a process.
    """
    processes = min(processes, len(parts) // _PARTS_PER_PROCESS)
    if processes > 1:
        yield from _in_processes(spec, parts, processes)
        return
    costing = _SpecCosts(spec)
    for part in parts:
        yield costing.candidates(part)


def _in_processes(
    spec: SearchSpec, parts: Sequence[Sequence[Group]], processes: int
) -> Iterator[list[Candidate]]:
    pool = ProcessPoolExecutor(
        # Not forked: a caller has threads, of JAX for one.
        processes,
        get_context("spawn"),
        initializer=_start_worker,
        initargs=(spec, os.getpid()),
    )
    futures: list[Future[list[Candidate]]] = []
    try:
        with _interrupts_held():
            futures = [pool.submit(_cost_in_worker, part) for part in parts]
        for future in futures:
            yield future.result()
    except BrokenProcessPool as error:
        if futures and futures[0].exception() is error:
            raise ScalejaxError(
                "No process of the search answered: a script that searches with several needs "
                'if __name__ == "__main__": around what it does; or memory ran out. '
                "processes=1 needs neither."
            ) from error
        raise ScalejaxError(
            "A process of the search was ended, most likely because memory ran out."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Start processes with SIGINT blocked: only their caller handles Ctrl-C, and ends them.

    Child processes inherit the signals that this thread blocks.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _SpecCosts:
    """Costs groups of strategies in one process; shared operations are cached between parts."""

    def __init__(self, spec: SearchSpec) -> None:
        self._question = spec
        self._costs = StrategyCosts(spec.shape, spec.cluster)

    def candidates(self, groups: Sequence[Group]) -> list[Candidate]:
        """Fitting candidates of `groups`."""
        found: list[Candidate] = []
        for group in groups:
            if fits := _fitting(self._question, group):
                found += self._costs.candidates(fits)
        return found


def _fitting(spec: SearchSpec, group: Group) -> list[Strategy]:
    """Strategies of a group that fit; most are excluded by their parameters alone."""
    shape, chip, moments = spec.shape, spec.cluster.chip, spec.moments
    free = chip.memory_bytes - chip.runtime_reserve_bytes - workspace_bytes(chip)
    layout = group.layout
    least = shape.layers * sum(shape.matrices) / layout.pipeline / layout.tensor / layout.fsdp
    if 4 * least * (1 + moments / layout.data) > free:
        return []
    ones = [group.strategy(spec.global_batch, moments, stage, 1) for stage in group.zero_stages]
    return [
        group.strategy(spec.global_batch, moments, zero_stage, chunks)
        for zero_stage, held in memory_by_zero_stage(shape, ones).items()
        for chunks in group.chunk_counts
        if held.batch_bytes
        + held.state_bytes(zero_stage)
        + held.temporary_bytes(zero_stage, chunks)
        <= free
    ]


_worker_costs: _SpecCosts
"""Cache of a process that was started for a search."""


def _start_worker(spec: SearchSpec, caller: int) -> None:
    """Get ready to answer `spec` of process `caller`, in a process of its own."""
    global _worker_costs
    end_with_caller(caller)
    gc.disable()
    _worker_costs = _SpecCosts(spec)


def _cost_in_worker(groups: Sequence[Group]) -> list[Candidate]:
    """Answer it for some groups, in that process."""
    return _worker_costs.candidates(groups)
