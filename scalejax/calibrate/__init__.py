"""Measures the devices that are here and writes them down as hardware of the catalogue.

The files in a folder: `cluster.toml` for the devices of one process, `processes.toml` for
processes of one device each that exchange over loopback, and the chips that both name.
"""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import jax

from scalejax.calibrate import exchange, host, machine, probes
from scalejax.calibrate.exchange import Exchange
from scalejax.calibrate.probes import GRID, TINY_GRID, Grid
from scalejax.documents import JsonValue, plain, save_toml
from scalejax.errors import ConfigError
from scalejax.hardware import Chip, Cluster, Link, Network, RunConditions, SharedChip

__all__ = ["GRID", "TINY_GRID", "Calibration", "Grid", "calibrate", "stage_count"]

NAME = "this-machine"
_STORED_BYTES = 2**26
_COPIED_BYTES = 2**26
_PROCESS_COUNTS = (2, 4)

OnStage = Callable[[str], None]
"""Called with the name of each piece of work as it begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured."""

    cluster: Cluster
    """The devices of one process as a cluster of one node."""
    processes: Cluster | None
    """Processes of one device each as nodes; None if they were not measured."""
    host_to_device_bytes_per_second: float
    """Rate of a copy to a device."""
    notes: tuple[str, ...] = ()
    """What could not be measured, and why."""

    def save(self, folder: Path) -> tuple[Path, ...]:
        """Write the files; returns their paths.

        Raises:
            ConfigError: if the folder cannot be written.
        """
        chips = [("chip.toml", self.cluster.chip)]
        chips += [(f"chip-{each.device_count}.toml", each.chip) for each in self.cluster.shared]
        for name, chip in chips:
            save_toml(chip, folder / name)
        names = [name for name, _ in chips]
        save_toml(_by_file(self.cluster, names), folder / "cluster.toml")
        if self.processes is not None:
            save_toml(_by_file(self.processes, names), folder / "processes.toml")
            names.append("processes.toml")
        return tuple(folder / name for name in ("cluster.toml", *names))


def _by_file(cluster: Cluster, chip_files: Sequence[str]) -> dict[str, JsonValue]:
    """`cluster` with its chips by the names of their files."""
    tables = plain(cluster)
    shared = [
        {"device_count": each.device_count, "chip": name}
        for each, name in zip(cluster.shared, chip_files[1:], strict=True)
    ]
    return {**tables, "chip": chip_files[0], "shared": shared}  # type: ignore[dict-item]


def busy_counts() -> list[int]:
    """Numbers of busy devices that are measured: one, and as many as share the cores."""
    if jax.default_backend() != "cpu":
        return [len(jax.local_devices())]
    return sorted({1, min(len(jax.local_devices()), os.cpu_count() or 1)})


def stage_count(grid: Grid) -> int:
    """How often `on_stage` will be called."""
    each = machine.probe_count(grid, jax.devices()[0])
    return len(busy_counts()) * each + _exchange_stages() + 2


def calibrate(
    folder: Path, grid: Grid = GRID, on_stage: OnStage = lambda name: None
) -> Calibration:
    """The devices of this process, measured.

    Args:
        folder: on the storage that is to be measured.
        grid: which shapes are timed.
        on_stage: called as each piece of work begins.

    Raises:
        ConfigError: if `folder` cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = _source()
    chips = []
    for count in busy_counts():
        name = f"operations on {count} device{'s' if count > 1 else ''}"
        mesh = machine.mesh_of(jax.local_devices()[:count])
        chips.append(machine.measure_chip(mesh, grid, source, lambda name=name: on_stage(name)))
    on_stage("storage")
    storage = host.storage_bytes_per_second(folder, _STORED_BYTES)
    on_stage("copies between host and device")
    to_device, to_host = host.copy_bytes_per_second(_COPIED_BYTES)
    conditions = RunConditions(
        storage_bytes_per_second=storage, device_to_host_bytes_per_second=to_host
    )
    inside = _inside(grid.calls, on_stage)
    notes: tuple[str, ...] = ()
    try:
        between = _between(grid.calls, on_stage)
    except ConfigError as error:  # the rest is good without
        between, notes = [], (f"nothing was measured between processes: {error}",)
    return Calibration(
        cluster=_cluster(chips, inside, conditions, source),
        processes=_cluster(chips, between, conditions, source, nodes=True) if between else None,
        host_to_device_bytes_per_second=to_device,
        notes=notes,
    )


def _source() -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%d")
    versions = ", ".join(f"{name} {version(name)}" for name in ("scalejax", "jax", "jaxlib"))
    return (
        f"scalejax calibrate, {now}, {platform.machine()} with {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}, {versions}"
    )


def _exchange_counts() -> list[int]:
    """Devices between which all-reduces are timed within this process."""
    counts = {2, 4, len(jax.local_devices())}
    return sorted(count for count in counts if 1 < count <= len(jax.local_devices()))


def _process_counts() -> list[int]:
    if jax.default_backend() != "cpu":
        return []  # their devices are this process's
    return [count for count in _PROCESS_COUNTS if count <= max(2, os.cpu_count() or 1)]


def _exchange_stages() -> int:
    return len(_exchange_counts()) * len(exchange.SIZES) + len(_process_counts())


def _inside(calls: int, on_stage: OnStage) -> list[Exchange]:
    found = []
    for count in _exchange_counts():
        mesh = machine.mesh_of(jax.local_devices()[:count])
        for size in exchange.SIZES:
            on_stage(f"collectives between {count} devices")
            seconds = probes.all_reduce_seconds(mesh, size, 2 * calls)
            found.append(Exchange(device_count=count, size_bytes=size, seconds=seconds))
    return found


def _between(calls: int, on_stage: OnStage) -> list[Exchange]:
    found = []
    for count in _process_counts():
        on_stage(f"collectives between {count} processes")
        found += exchange.between_processes(count, calls=calls)
    return found


def _cluster(
    chips: list[Chip],
    exchanges: list[Exchange],
    conditions: RunConditions,
    source: str,
    *,
    nodes: bool = False,
) -> Cluster:
    """One process of many devices, or (`nodes`) many processes of one."""
    first, *others = chips
    memory = first.memory_bytes_per_second
    ring = exchange.fit_ring(exchanges) if exchanges else None
    rate = ring.bytes_per_second if ring else memory
    is_shared = jax.default_backend() == "cpu"
    most = None if is_shared else len(jax.local_devices())
    return Cluster(
        name=f"{NAME}-processes" if nodes else NAME,
        title=f"{first.title}, {'processes' if nodes else 'devices of one process'}, as measured",
        chip=first,
        devices_per_node=1 if nodes else max(len(jax.local_devices()), 1 if most else 512),
        link=Link(kind="host", bytes_per_second=memory if nodes else rate),
        network=Network(bytes_per_second=rate) if nodes else None,
        library=exchange.library_of(
            f"{NAME}-{'gloo' if nodes else 'shared-memory'}",
            "all-reduce of this machine, as measured",
            ring or exchange.Ring(base_seconds=0, hop_seconds=0, bytes_per_second=rate, residual=0),
            source,
        ),
        max_device_count=most,
        conditions=conditions,
        shared=tuple(
            SharedChip(device_count=count, chip=chip)
            for count, chip in zip(busy_counts()[1:], others, strict=True)
        ),
        sources={"*": source},
    )
