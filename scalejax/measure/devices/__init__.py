"""Calibration: measures the local devices and writes them as hardware files of the catalogue.

Files in the folder: `cluster.toml` for the devices of one process, `processes.toml` for
processes of one device each that communicate over loopback, and the chips that both name.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from scalejax.core.errors import ConfigError
from scalejax.core.progress import OnProgress, Progress, no_display
from scalejax.core.serialization import JsonValue, save_toml
from scalejax.core.units import counted
from scalejax.hardware import (
    Chip,
    Cluster,
    Link,
    Network,
    RunConditions,
    SharedChip,
    Site,
    save_cluster,
)
from scalejax.measure.devices import collectives, host, machine, probes
from scalejax.measure.devices.collectives import MeasuredCollective
from scalejax.measure.devices.probes import ACCELERATOR_GRID, GRID, TINY_GRID, Grid
from scalejax.measure.devices.processes import Between, between_processes

__all__ = [
    "ACCELERATOR_GRID",
    "GRID",
    "TINY_GRID",
    "Calibration",
    "Grid",
    "calibrate",
    "local_grid",
    "stage_count",
]

NAME = "this-machine"
_STORED_BYTES = 2**26
_COPIED_BYTES = 2**26
_PROCESS_COUNTS = (2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measured hardware of this machine."""

    cluster: Cluster
    """The devices of one process as a cluster of one node."""
    processes: Cluster | None
    """Processes of one device each as nodes; None if they were not measured."""
    site: Site
    """Rates of this machine's storage, and of copies from a device."""
    host_to_device_bytes_per_second: float
    """Rate of a copy to a device."""
    notes: tuple[str, ...] = ()
    """Notes on what could not be measured, and why."""

    def save(self, folder: Path) -> tuple[Path, ...]:
        """Write the files; returns their paths.

        Raises:
            ConfigError: if the folder cannot be written.
        """
        save_toml(self.cluster.chip, folder / "chip.toml")
        names = ["cluster.toml", "chip.toml", *_save(self.cluster, self.site, folder, "cluster")]
        if self.processes is not None:
            names += ["processes.toml", *_save(self.processes, self.site, folder, "processes")]
        return tuple(folder / name for name in names)


def _save(cluster: Cluster, site: Site, folder: Path, name: str) -> list[str]:
    """Write `cluster` with its site and, in separate files, its shared chips; returns these."""
    shared: list[JsonValue] = []
    for each in cluster.shared:
        file = f"{name}-chip-{each.device_count}.toml"
        save_toml(each.chip, folder / file)
        shared.append({"device_count": each.device_count, "chip": file})
    save_cluster(cluster, site, folder / f"{name}.toml", {"chip": "chip.toml", "shared": shared})
    return [str(each["chip"]) for each in shared]  # type: ignore[index]


def busy_counts() -> list[int]:
    """Numbers of devices to measure under load: one, and as many as share the cores."""
    if jax.default_backend() != "cpu":
        return [len(jax.local_devices())]
    return sorted({1, min(len(jax.local_devices()), os.cpu_count() or 1)})


def local_grid() -> Grid:
    """The shapes to time on the local devices; attention only if they have its fused kernel."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return GRID
    found = machine.architecture(device)
    has_kernel = found is not None and found.compute_capability >= (8, 0)
    return ACCELERATOR_GRID if has_kernel else replace(ACCELERATOR_GRID, attention=())


def stage_count(grid: Grid) -> int:
    """Number of calls of `on_progress`."""
    each = machine.probe_count(grid, jax.devices()[0])
    inside = len(_device_counts()) * len(collectives.SIZES)
    between = len(_process_counts()) * (each + len(collectives.SIZES))
    return len(busy_counts()) * each + inside + between + 2


def calibrate(folder: Path, grid: Grid = GRID, on_progress: OnProgress = no_display) -> Calibration:
    """Calibration of the devices of this process.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import mkdtemp
        >>> from scalejax import calibrate, load_cluster
        >>> from scalejax.measure.devices import TINY_GRID
        >>> folder = Path(mkdtemp())
        >>> found = calibrate(folder, TINY_GRID)  # a minute; more without TINY_GRID
        >>> paths = found.save(folder / "this-machine")
        >>> load_cluster(str(paths[0])).name
        'this-machine'

    Args:
        folder: a folder on the storage to be measured.
        grid: shapes to time.
        on_progress: called as each stage begins.

    Raises:
        ConfigError: if `folder` cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = host.source_of("scalejax calibrate", ("scalejax", "jax", "jaxlib"))
    chips = {}
    for count in busy_counts():
        where = f"on {counted(count, 'device')}"
        mesh = machine.mesh_of(jax.local_devices()[:count])
        chips[count] = machine.measure_chip(
            mesh,
            grid,
            source,
            lambda each, where=where: on_progress(replace(each, part=f"{each.part} {where}")),
        )
    on_progress(Progress(part="storage"))
    storage = host.storage_bytes_per_second(folder, _STORED_BYTES)
    on_progress(Progress(part="copies between host and device"))
    to_device, to_host = host.copy_bytes_per_second(_COPIED_BYTES)
    conditions = RunConditions(
        storage_bytes_per_second=storage, device_to_host_bytes_per_second=to_host
    )
    inside = _inside(grid.calls, on_progress)
    notes = []
    cluster, note = _cluster(chips, inside, source)
    if note:
        notes.append(f"between devices of one process: {note}")
    try:
        between = _between(grid, source, on_progress)
    except ConfigError as error:  # the rest is still valid
        between = {}
        notes.append(f"nothing was measured between processes: {error}")
    processes = None
    if between:
        alone, _ = min(chips.items())
        process_chips = {alone: chips[alone]} | {n: each.chip for n, each in between.items()}
        measured = [found for each in between.values() for found in each.collectives]
        processes, note = _cluster(process_chips, measured, source, nodes=True)
        if note:
            notes.append(f"between processes: {note}")
    return Calibration(
        cluster=cluster,
        processes=processes,
        site=Site(conditions=conditions),
        host_to_device_bytes_per_second=to_device,
        notes=tuple(notes),
    )


def _device_counts() -> list[int]:
    """Device counts of the all-reduces timed within this process."""
    counts = {2, 4, len(jax.local_devices())}
    return sorted(count for count in counts if 1 < count <= len(jax.local_devices()))


def _process_counts() -> list[int]:
    if jax.default_backend() != "cpu":
        return []  # their devices are this process's
    return [count for count in _PROCESS_COUNTS if count <= max(2, os.cpu_count() or 1)]


def _inside(calls: int, on_progress: OnProgress) -> list[MeasuredCollective]:
    rounds = {}
    for count in _device_counts():
        mesh = machine.mesh_of(jax.local_devices()[:count])
        for size in collectives.SIZES:
            on_progress(Progress(part=f"collectives between {count} devices"))
            each = 4 * calls // collectives.ROUNDS
            rounds[count, size] = probes.all_reduce_round(mesh, size, each)
    if not rounds:
        return []
    platform = jax.default_backend()
    return collectives.timed_in_rounds(
        rounds, lambda parts: probes.seconds_of_all_reduce(parts, platform)
    )


def _between(grid: Grid, source: str, on_progress: OnProgress) -> dict[int, Between]:
    return {
        count: between_processes(count, grid, source, on_progress) for count in _process_counts()
    }


def _cluster(
    chips: dict[int, Chip],
    measured: list[MeasuredCollective],
    source: str,
    *,
    nodes: bool = False,
) -> tuple[Cluster, str | None]:
    """A cluster of one process with many devices, or (`nodes`) of many processes with one each; and
    a note on numbers that its file cannot hold as measured."""
    (_, first), *others = sorted(chips.items())
    memory = first.memory_bytes_per_second
    ring, note = None, None
    if measured:
        ring, note = collectives.as_accepted(collectives.fit_ring(measured))
    rate = ring.bytes_per_second if ring else memory
    is_shared = jax.default_backend() == "cpu"
    most = None if is_shared else len(jax.local_devices())
    cluster = Cluster(
        name=f"{NAME}-processes" if nodes else NAME,
        title=f"{first.title}, {'processes' if nodes else 'devices of one process'}, as measured",
        chip=first,
        devices_per_node=1 if nodes else max(len(jax.local_devices()), 1 if most else 512),
        link=Link(kind="host", bytes_per_second=memory if nodes else rate),
        network=Network(bytes_per_second=rate) if nodes else None,
        library=collectives.library_of(
            f"{NAME}-{'gloo' if nodes else 'shared-memory'}",
            "all-reduce of this machine, as measured",
            ring
            or collectives.Ring(base_seconds=0, hop_seconds=0, bytes_per_second=rate, residual=0),
            source,
            runs_buffers_one_by_one=is_shared,  # as XLA's CPU runtime does
        ),
        max_device_count=most,
        shared=tuple(SharedChip(device_count=count, chip=chip) for count, chip in others),
        sources={"*": source},
    )
    return cluster, note
