"""Costs the fitting strategies of a search, in one process or in several.

The number of processes changes neither results nor their order. Knows no ranking.
"""

import gc
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Literal

from scalejax.core.errors import ScalejaxError
from scalejax.core.workers import Pool, Worker
from scalejax.hardware import Cluster, Site
from scalejax.planning.search.costs import Candidate, StrategyCosts, workspace_bytes
from scalejax.planning.search.space import Group, common_groups
from scalejax.simulator.transformer import (
    DeviceMemory,
    Strategy,
    TransformerShape,
    least_bytes,
    memory_by_zero_stage,
)

_PARTS_PER_PROCESS = 25
"""Minimum number of parts per process. A part of 100 groups takes 20 to 60 ms for GPT-3, and a
process, which takes 0.6 s to start, should save more than that."""


_COLLECTED_EVERY = 200_000, 20, 100
"""Thresholds of the cyclic garbage collector (see `gc.set_threshold`). A search makes no cycles;
scanning the objects that it keeps took 3.3 of the 21.8 s of DeepSeek-V3's on 512 devices, and now
takes 1.0."""


_IS_ALONE = Lock()
"""Held by the search that has changed how often garbage is collected."""


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Context in which the cyclic garbage collector of this process seldom runs; if it is disabled,
    or another search is under way, nothing is changed."""
    before = gc.get_threshold()
    if before[0] == 0 or not _IS_ALONE.acquire(blocking=False):
        yield
        return
    gc.set_threshold(*(max(pair) for pair in zip(before, _COLLECTED_EVERY, strict=True)))
    try:
        yield
    finally:
        gc.set_threshold(*before)
        _IS_ALONE.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpec:
    """Inputs that all groups of strategies of a search share."""

    shape: TransformerShape
    """The network."""
    cluster: Cluster
    """The devices."""
    site: Site
    """Conditions and input of its hosts."""
    moments: Literal[0, 1, 2]
    """Arrays like the parameters that the optimizer keeps."""


def candidates(
    spec: SearchSpec, parts: Sequence[Sequence[Group]], processes: int
) -> Generator[list[Candidate]]:
    """Yield the fitting candidates of each part, in order.

    Args:
        spec: network, cluster, site and optimizer state.
        parts: groups of similar strategies; neighbours share most operations.
        processes: maximum number of processes; fewer are used for few parts.

    Raises:
        DoesNotFit: if a collective spans nodes that no network connects.
        ScalejaxError: if a process ends.
    """
    processes = min(processes, len(parts) // _PARTS_PER_PROCESS)
    if processes > 1:
        yield from _in_processes(spec, parts, processes)
        return
    costing = _SpecCosts(spec)
    for part in parts:
        yield costing(part)


def _in_processes(
    spec: SearchSpec, parts: Sequence[Sequence[Group]], processes: int
) -> Iterator[list[Candidate]]:
    found: dict[int, list[Candidate]] = {}
    following = 0
    with Pool(lambda number: Worker(_SpecCosts(spec)), processes) as pool:
        # Two parts for each process, so that none waits while its result is ranked here.
        for index, kind, value in pool.work(parts, ahead=2):
            if kind == "failed" and value.return_code is not None:
                raise ScalejaxError(f"A process of the search ended: {value.reason}.") from value
            if kind != "answer":
                raise value
            found[index] = value
            while following in found:
                yield found.pop(following)
                following += 1


class _SpecCosts:
    """Fitting candidates of groups of strategies, costed in one process; shared operations are
    cached between parts."""

    def __init__(self, spec: SearchSpec) -> None:
        self._question = spec
        self._costs = StrategyCosts(spec.shape, spec.cluster, spec.site)

    def __call__(self, groups: Sequence[Group]) -> list[Candidate]:
        found: list[Candidate] = []
        with collecting_seldom():
            for group in groups:
                found += fitting_candidates(self._costs, self._question, group)
        return found


def fitting_candidates(costs: StrategyCosts, spec: SearchSpec, group: Group) -> list[Candidate]:
    """The strategies of a group that fit, costed."""
    memory_of, fits = _fitting(spec, group)
    return costs.candidates(fits, memory_of) if fits else []


def _fitting(
    spec: SearchSpec, group: Group
) -> tuple[dict[Literal[0, 1, 2], DeviceMemory], list[Strategy]]:
    """Memory of a group by ZeRO stage, and its strategies that fit; a lower bound alone excludes
    most stages."""
    shape, chip, moments = spec.shape, spec.cluster.chip, spec.moments
    free = chip.memory_bytes - chip.runtime_reserve_bytes - workspace_bytes(chip)
    ones = [
        group.strategy(moments, zero_stage, 1)
        for zero_stage in group.zero_stages
        if least_bytes(
            shape,
            group.split,
            sequence_parallel=group.sequence_parallel,
            zero_stage=zero_stage,
            moments=moments,
        )
        <= free
    ]
    memory_of = memory_by_zero_stage(shape, ones)
    return memory_of, [
        group.strategy(moments, zero_stage, chunks)
        for zero_stage, held in memory_of.items()
        for chunks in group.chunk_counts
        if held.batch_bytes
        + held.state_bytes(zero_stage)
        + held.temporary_bytes(zero_stage, chunks)
        <= free
    ]


def fastest_common(spec: SearchSpec, count: int, samples: int) -> Candidate | None:
    """The fastest of the common layouts; larger tensor axes are tried until one size fits, or two
    sizes if there is at most one sample per device, so that data can use no more devices."""
    best: Candidate | None = None
    fitting, wanted = 0, 1 if samples > count else 2
    for _, found in common_groups(spec.shape, count, samples, spec.cluster.devices_per_node):
        (fits,) = candidates(spec, [found], 1)
        fitting += bool(fits)
        for each in fits:
            if best is None or each.step_seconds < best.step_seconds:
                best = each
        if fitting == wanted:
            break
    return best
