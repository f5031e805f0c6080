"""Search over parallelism strategies of a transformer: the fastest, cheapest or smallest.

Every strategy for the devices is checked against the memory of a device, and those that fit are
costed as `predict` would cost their whole `Program`. Arithmetic on plain data; knows no JAX
network, no compiler and no files.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from scalejax.core.errors import require_at_least
from scalejax.core.progress import OnProgress, Progress, no_display
from scalejax.hardware import NO_SITE, Cluster, Site
from scalejax.planning.search.costs import Candidate, StrategyCosts, workspace_bytes
from scalejax.planning.search.parallel import SearchSpec, candidates, collecting_seldom
from scalejax.planning.search.space import groups, left_out, strategies
from scalejax.simulator.memory import memory_verdict
from scalejax.simulator.predict import RUN_CONDITIONS
from scalejax.simulator.transformer import Strategy, TransformerShape, memory_use

__all__ = [
    "Candidate",
    "Objective",
    "SearchResult",
    "StrategyCosts",
    "breakdown_difference",
    "deduplicated",
    "left_out",
    "pareto",
    "search",
    "strategies",
    "workspace_bytes",
]

Objective = Literal["time", "cost", "memory"]
"""Quantity to minimise: step time, device-hours (or their price) per sample, memory."""

_GROUPS_OF_A_PART = 100
_ALIKE = 1e-3
"""Relative difference of step times below which they count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Ranked result of a search."""

    ranked: tuple[Candidate, ...]
    """All strategies that fit, the best first."""
    considered: int
    """Number of strategies for the devices, fitting or not."""
    nearest: tuple[Strategy, float] | None
    """If none fits, the strategy that needs least memory, and its memory over the device's."""


def search(
    shape: TransformerShape,
    cluster: Cluster,
    device_counts: tuple[int, ...],
    global_batch: int,
    *,
    site: Site = NO_SITE,
    objective: Objective = "time",
    moments: Literal[0, 1, 2] = 2,
    processes: int = 1,
    on_progress: OnProgress = no_display,
) -> SearchResult:
    """Search result with every strategy that fits, the best first.

    Args:
        shape: the network.
        cluster: the devices.
        device_counts: device counts; strategies for all counts are ranked together.
        global_batch: samples per update.
        site: conditions and input of its hosts.
        objective: quantity to minimise.
        moments: arrays like the parameters that the optimizer keeps.
        processes: maximum number of processes.
        on_progress: called at the start, and periodically with the strategies costed so far.

    Raises:
        ConfigError: if there are no devices, no samples, or no processes.
        DoesNotFit: if the cluster has fewer devices.
        ScalejaxError: if the system ends a process.
    """
    require_at_least("global_batch", global_batch, 1)
    require_at_least("processes", processes, 1)
    for count in device_counts:
        require_at_least("devices", count, 1)
        cluster.require_devices(count)
    every = [group for count in device_counts for group in groups(shape, count, global_batch)]
    parts = [every[i : i + _GROUPS_OF_A_PART] for i in range(0, len(every), _GROUPS_OF_A_PART)]
    spec = SearchSpec(shape=shape, cluster=cluster, site=site, moments=moments)
    ranked: list[Candidate] = []
    done, considered = 0, sum(map(len, every))
    on_progress(Progress(done=done, total=considered))
    with collecting_seldom(), closing(candidates(spec, parts, processes)) as answers:
        for part, found in zip(parts, answers, strict=True):
            ranked += found
            done += sum(map(len, part))
            on_progress(Progress(done=done, total=considered))
    ranked.sort(key=_KEYS[objective])
    nearest = None
    if not ranked:
        nearest = _nearest(shape, cluster, device_counts, global_batch, moments)
    return SearchResult(ranked=tuple(ranked), considered=considered, nearest=nearest)


_KEYS: dict[Objective, Callable[[Candidate], tuple[float, float]]] = {
    "time": lambda each: (each.step_seconds, each.peak_memory_bytes),
    "cost": lambda each: (each.device_hours_per_sample, each.step_seconds),
    "memory": lambda each: (each.peak_memory_bytes, each.step_seconds),
}


def pareto(candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Pareto front of candidates in time and memory, the fastest first."""
    front: list[Candidate] = []
    for each in sorted(candidates, key=_KEYS["time"]):
        if not front or each.peak_memory_bytes < front[-1].peak_memory_bytes:
            front.append(each)
    return tuple(front)


def deduplicated(ranked: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Candidates without near-duplicates, in order.

    Among strategies that differ only in their ZeRO stage, and in time by less than a thousandth,
    the one that needs least memory replaces the first.
    """
    kept: list[Candidate] = []
    places: dict[Hashable, list[int]] = {}
    for each in ranked:
        same = places.setdefault(_without_zero_stage(each.strategy), [])
        for place in same:
            other = kept[place]
            if abs(each.step_seconds - other.step_seconds) < _ALIKE * other.step_seconds:
                if each.peak_memory_bytes < other.peak_memory_bytes:
                    kept[place] = each
                break
        else:
            same.append(len(kept))
            kept.append(each)
    return tuple(kept)


def _without_zero_stage(strategy: Strategy) -> Hashable:
    """Key of a strategy without its ZeRO stage."""
    return (
        strategy.split,
        strategy.recompute,
        strategy.sequence_parallel,
        strategy.context_strategy,
        strategy.pipeline_chunks,
    )


def breakdown_difference(
    own: Sequence[tuple[str, float | None]], best: Sequence[tuple[str, float | None]]
) -> tuple[tuple[str, float], ...]:
    """(term, seconds) difference of each term of a step from the best step's, the largest first.

    Differences below a thousandth of the best step, and terms outside the step, are left out.

    Args:
        own: `Prediction.waterfall` of a strategy.
        best: `Prediction.waterfall` of the best strategy.
    """
    mine, winners = (
        {name: seconds or 0.0 for name, seconds in terms if name not in RUN_CONDITIONS}
        for terms in (own, best)
    )
    names = dict.fromkeys((*mine, *winners))
    changes = [(name, mine.get(name, 0.0) - winners.get(name, 0.0)) for name in names]
    least = _ALIKE * math.fsum(winners.values())
    return tuple(sorted((each for each in changes if abs(each[1]) > least), key=lambda e: -e[1]))


def _nearest(
    shape: TransformerShape,
    cluster: Cluster,
    device_counts: tuple[int, ...],
    global_batch: int,
    moments: Literal[0, 1, 2],
) -> tuple[Strategy, float] | None:
    """The strategy that needs least memory, and its memory over the device's."""
    workspace = workspace_bytes(cluster.chip)
    best: tuple[Strategy, float] | None = None
    for count in device_counts:
        for strategy in strategies(shape, count, global_batch, moments=moments):
            memory = memory_use(shape, strategy, workspace_bytes=workspace)
            verdict = memory_verdict(memory, cluster.chip)
            ratio = verdict.peak_bytes / verdict.memory_bytes
            if best is None or ratio < best[1]:
                best = strategy, ratio
    return best
