"""Checks that a measured step or trace belongs to the chip and the device count of a cluster.

Times on one kind of chip say nothing about another. Knows clusters; predicts nothing.
"""

from pathlib import Path
from typing import Literal

from scalejax.core.errors import ConfigError, refusal
from scalejax.core.units import counted
from scalejax.hardware import Chip, Cluster
from scalejax.simulator.perfetto import MeasuredTrace, read_trace, trace_file
from scalejax.simulator.program import Program, load_program
from scalejax.training.record import RunFolder

ChipKind = Literal["cuda", "tpu", "cpu"]

_KINDS: dict[str, ChipKind] = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "tpu": "tpu"}
"""Kind of chip by the JAX platform name that `scalejax calibrate` writes."""
_TITLES: dict[str, str] = {"cuda": "NVIDIA GPUs", "tpu": "TPUs", "cpu": "CPUs"}


def chip_kind(chip: Chip) -> ChipKind | None:
    """Kind of the chip; None if its description does not say."""
    if chip.cuda is not None:
        return None if chip.cuda.stands_in else "cuda"
    return "tpu" if chip.tpu is not None else _KINDS.get(chip.name)


def refuse_other_kind(
    field: str, where: str, cluster: Cluster, *, backend: str, target: str | None = None
) -> None:
    """Refuse a measurement from a different kind of chip than that of `cluster`.

    A chip whose description gives no kind is accepted.

    Args:
        field: the field that named the run.
        where: its value, for the message.
        cluster: the cluster to compare its times with.
        backend: compiler backend of the measured step: "cuda".
        target: the chip it was compiled for, as in `Program.target`; None if unknown.

    Raises:
        ConfigError: if the kinds differ, or the instruction sets of two GPUs do.
    """
    kind = chip_kind(cluster.chip)
    cuda = cluster.chip.cuda if kind == "cuda" else None
    own = "" if cuda is None else "sm_{}{}".format(*cuda.compute_capability)
    is_other_kind = kind is not None and kind != backend
    is_other_gpu = kind == "cuda" and bool(own) and target is not None and target != own
    if is_other_kind or is_other_gpu:
        has = f"{_TITLES[kind or 'cpu']}{f' ({own})' if own else ''}"
        ran = _TITLES.get(backend, backend)
        instructions = f" ({target})" if backend == "cuda" and target else ""
        accepted = (
            f"its step ran on {ran}{instructions}, and {cluster.name} has {has}; "
            "--cluster must be what it ran on"
        )
        raise ConfigError(refusal(field, where, accepted))


# Recorded traces to compare with a prediction.


def recorded_trace(path: Path, cluster: Cluster, device_count: int) -> MeasuredTrace:
    """The trace at `path`, checked against `device_count` devices of `cluster`.

    A trace holds the devices of one process. The total device count is known if the trace lies in
    the folder of its run; otherwise it is assumed to be `device_count`.

    Raises:
        ConfigError: if there is no trace, or its number or kind of devices is different.
    """
    trace = read_trace(path)
    program = _program_of_run(trace_file(path))
    devices = trace.device_count if program is None else program.device_count
    may_be_more = program is None and device_count % devices == 0
    if devices != device_count and not may_be_more:
        accepted = (
            f"{str(path)!r} is of {counted(devices, 'device')}; compare it with --devices {devices}"
        )
        raise ConfigError(refusal("devices", device_count, accepted))
    backend = trace.platform if program is None else program.backend
    if backend is not None:
        target = None if program is None else program.target
        refuse_other_kind("trace", str(path), cluster, backend=backend, target=target)
    return trace


def _program_of_run(file: Path) -> Program | None:
    """The program of the run whose folder contains `file`; None if there is no such run."""
    for folder in file.resolve().parents:
        files = RunFolder(path=folder)
        if files.program.is_file() and files.holds_run:
            return load_program(files.program)
    return None
