"""What came of an emulated run beside its record: staleness, traffic, failures, times.

Plain data; knows neither files nor how a run is emulated.
"""

from dataclasses import dataclass

from scalejax.config.emulation import EmulationConfig
from scalejax.core.units import counted, format_bytes, format_seconds

EMULATION = "emulation.json"
"""The file of it in the folder of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """One emulated run, as far as its record of losses does not say it."""

    config: EmulationConfig
    """What was emulated."""
    cluster: str | None
    """Whose times it goes by; None if all were given."""
    gradient_seconds: float
    """Mean time of one worker's gradient."""
    exchange_seconds: float
    """What an all-reduce adds to it."""
    virtual_seconds: float
    """Time that the run takes."""
    gradients: int
    """That were applied, each of `batch.global_batch` samples: to the parameters, or with easgd and
    independent to a worker's own."""
    updates: int
    """Of all parameters."""
    staleness: tuple[tuple[int, int], ...]
    """(updates between the reading of the parameters and that of their gradient, how many
    gradients), each server by itself; empty where every update waits for all."""
    sent_bytes: int
    """Between workers and servers."""
    dropped_gradients: int
    """That came too late to count."""
    worker_failures: int
    """Times that a worker failed."""
    server_failures: int
    """Times that a server did."""
    wall_seconds: float
    """Time that the emulation took here."""

    @property
    def device_seconds(self) -> float:
        """Time for which workers are held, all together; servers are no devices."""
        return self.virtual_seconds * self.config.workers

    @property
    def mean_staleness(self) -> float | None:
        """Of all gradients; None if there is none."""
        total = sum(count for _, count in self.staleness)
        return sum(age * count for age, count in self.staleness) / total if total else None


def in_words(config: EmulationConfig) -> str:
    """What is emulated: "downpour by 200 workers and 10 servers"."""
    servers = config.server_shards
    beside = f" and {counted(servers, 'server')}" if servers > 1 else ""
    return f"{config.algorithm.name} by {counted(config.workers, 'worker')}{beside}"


def outcome(found: Emulation) -> str:
    """What came of it, in a line."""
    words = f"{counted(found.updates, 'update')} in {format_seconds(found.virtual_seconds)} virtual"
    if found.mean_staleness is not None:
        words += f", mean staleness {found.mean_staleness:.3g}"
    if found.sent_bytes:
        words += f", {format_bytes(found.sent_bytes)} sent"
    failures = found.worker_failures + found.server_failures
    if failures:
        words += f", {counted(failures, 'failure')}"
    return f"{words}; emulated in {format_seconds(found.wall_seconds)}"
