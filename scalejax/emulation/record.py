"""Summary of an emulated run, besides its metrics: staleness, bytes sent, failures, times.

Plain data; knows neither files nor how a run is emulated.
"""

from dataclasses import dataclass

from scalejax.config.emulation import EmulationConfig
from scalejax.core.serialization import JsonValue, document, plain
from scalejax.core.tabular import Tabular
from scalejax.core.units import counted, format_bytes, format_seconds

EMULATION = "emulation.json"
"""File name in the folder of a run."""


@document("emulation")
@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation(Tabular):
    """Summary of one emulated run, without its losses and accuracies."""

    config: EmulationConfig
    """The emulation config."""
    cluster: str | None
    """Name of the cluster that determines the times; None if they were given."""
    gradient_seconds: float
    """Mean time of one worker's gradient."""
    exchange_seconds: float
    """Exposed time of the all-reduce of one step; named as in the records of 0.1."""
    virtual_seconds: float
    """Virtual time of the run."""
    gradients: int
    """Gradients applied, each of `batch.global_batch` samples: to the shared parameters, or with
    easgd and independent to a worker's own."""
    updates: int
    """Number of updates of all parameters."""
    staleness: tuple[tuple[int, int], ...]
    """(updates between reading the parameters and applying their gradient, number of gradients),
    for each server separately; empty if every update waits for all."""
    sent_bytes: int
    """Bytes sent between workers and servers."""
    dropped_gradients: int
    """Gradients dropped because they came too late."""
    worker_failures: int
    """Number of worker failures."""
    server_failures: int
    """Number of server failures."""
    wall_seconds: float
    """Wall time of the emulation."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """One row of all fields."""
        row = plain(self)
        return [row] if isinstance(row, dict) else []

    @property
    def device_seconds(self) -> float:
        """Virtual time times the number of workers; servers do not count as devices."""
        return self.virtual_seconds * self.config.workers

    @property
    def mean_staleness(self) -> float | None:
        """Mean staleness of all gradients; None without gradients."""
        total = sum(count for _, count in self.staleness)
        return sum(age * count for age, count in self.staleness) / total if total else None


def in_words(config: EmulationConfig) -> str:
    """Algorithm and its workers in words: "downpour by 200 workers and 10 servers"."""
    servers = config.server_shards
    beside = f" and {counted(servers, 'server')}" if servers > 1 else ""
    return f"{config.algorithm.name} by {counted(config.workers, 'worker')}{beside}"


def outcome(found: Emulation) -> str:
    """Summary of the result in one line."""
    words = f"{counted(found.updates, 'update')} in {format_seconds(found.virtual_seconds)} virtual"
    if found.mean_staleness is not None:
        words += f", mean staleness {found.mean_staleness:.3g}"
    if found.sent_bytes:
        words += f", {format_bytes(found.sent_bytes)} sent"
    failures = found.worker_failures + found.server_failures
    if failures:
        words += f", {counted(failures, 'failure')}"
    return f"{words}; emulated in {format_seconds(found.wall_seconds)}"
