"""Programs by hand, whose times a reader checks on paper, and real ones that were kept."""

import gzip
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hardware_cases import CHIP, cluster_of
from hypothesis import strategies as st

from scalejax.core.errors import ScalejaxError
from scalejax.core.serialization import build
from scalejax.hardware import Cluster
from scalejax.simulator.program import Collective, DeviceGroup, Loop, MemoryUse, Operation, Program
from scalejax.xla.archive import read_archive, write_archive
from scalejax.xla.cache import case_key
from scalejax.xla.job import Compiled, RunJob
from scalejax.xla.worker_pool import run_jobs

PROGRAMS = Path(__file__).parents[1] / "golden" / "programs"
KEPT = PROGRAMS / "tests.jsonl.xz"
REMAKES = bool(os.environ.get("REMAKE_PROGRAMS"))
"""Whether to compile what tests ask for, and to keep it in `KEPT`."""
PAPER = cluster_of()
NO_MEMORY = MemoryUse(argument_bytes=0, output_bytes=0, alias_bytes=0, temporary_bytes=0)


def program_of(*operations: Operation | Loop, devices: int = 8) -> Program:
    """A step of `operations` on a data axis."""
    return Program(
        name="a step by hand",
        backend="closed_form",
        target="paper",
        compiler="none",
        mesh_axes=(("data", devices),),
        operations=operations,
        memory=NO_MEMORY,
    )


def matmul(name: str, milliseconds: float) -> Operation:
    """Work for so many milliseconds on the paper chip, 100 TFLOP/s."""
    return Operation(name=name, kind="matmul", dtype="bf16", flop=round(milliseconds * 1e11))


def fusion(name: str, milliseconds: float) -> Operation:
    """Traffic for so many milliseconds on the paper chip, 1 TB/s."""
    return Operation(name=name, kind="fusion", dtype="bf16", read_bytes=round(milliseconds * 1e9))


def gather(
    name: str, milliseconds: float, *, is_async: bool = True, axis: str = "fsdp"
) -> Operation:
    """An all-gather for so many milliseconds on two paper chips: half of it at 100 GB/s."""
    seconds = milliseconds * 1e-3 - 1e-6  # one hop of a microsecond
    collective = Collective(
        name="all_gather",
        payload_bytes=round(2 * seconds * 100e9),
        group=DeviceGroup(extents=((2, 1),), axes=(axis,)),
        is_async=is_async,
    )
    return Operation(name=name, kind="collective", dtype="bf16", collective=collective)


def wait(name: str) -> Operation:
    """Wait for the collective of that name."""
    return Operation(name=f"{name}-done", kind="wait", dtype="bf16", waits_for=name)


def contended(fraction: float) -> Cluster:
    """Paper, where compute loses so much of its speed beside a collective."""
    chip = replace(CHIP, attainable=replace(CHIP.attainable, contention_fraction=fraction))
    return cluster_of(chip=chip)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Operation | Loop, ...]:
    """Any order of work, starts and waits, partly inside a loop."""
    items: list[Operation] = []
    for index in range(draw(st.integers(1, 8))):
        what = draw(st.sampled_from(["matmul", "fusion", "async", "sync"]))
        size = draw(st.floats(0.01, 10.0))
        if what == "matmul":
            items.append(matmul(f"m{index}", size))
        elif what == "fusion":
            items.append(fusion(f"f{index}", size))
        else:
            axis = draw(st.sampled_from(["data", "fsdp"]))
            items.append(gather(f"g{index}", size, is_async=what == "async", axis=axis))
            if what == "async" and draw(st.booleans()):
                items.insert(draw(st.integers(0, len(items))), wait(f"g{index}"))
    cut = draw(st.integers(0, len(items)))
    loop = Loop(name="loop", trip_count=draw(st.integers(0, 7)), body=tuple(items[cut:]))
    return (*items[:cut], loop)


def resnet50_on_256() -> Program:
    """The step of ResNet-50, 256 images per device, as compiled for 256 H100."""
    text = gzip.decompress((PROGRAMS / "resnet50_bf16_256_data256_sm_90.json.gz").read_bytes())
    return build(Program, json.loads(text))


def kept_jobs(
    jobs: Sequence[RunJob],
    on_done: Callable[[int, Compiled], None],
    on_error: Callable[[int, ScalejaxError], None] | None = None,
) -> None:
    """In place of `scalejax.xla.worker_pool.run_jobs`: what the compiler made of each job once."""
    del on_error  # what was kept compiles
    if REMAKES:
        made: dict[str, Program] = {}
        run_jobs(jobs, lambda i, each: made.update({case_key(jobs[i]): each.program}))
        archive = read_archive(KEPT)
        known = {key: archive.program(key) for key in archive.lines}
        write_archive({key: each for key, each in (known | made).items() if each}, KEPT)
        read_archive.cache_clear()
    for position, job in enumerate(jobs):
        program = read_archive(KEPT).program(case_key(job))
        assert program is not None, (
            f"{KEPT.name} does not hold {job.title}. If what the test compiles was changed on "
            "purpose, run it with REMAKE_PROGRAMS=1."
        )
        on_done(position, Compiled(program=program))


def require_same(kept: Program, compiled: Program) -> None:
    """Hold what was kept against what the compiler makes today: FLOP, bytes, exchanges."""
    # Another generation of the compiler fuses a little differently.
    tolerance = 0 if compiled.compiler == kept.compiler else 0.05
    figures: tuple[Callable[[Program], int], ...] = (
        lambda each: each.flop,
        lambda each: each.memory.peak_bytes,
        lambda each: sum(times for _, times in each.walk()),
        lambda each: sum((op.read_bytes + op.write_bytes) * times for op, times in each.walk()),
        *(
            lambda each, name=name: each.collective_bytes(name)
            for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        ),
    )
    for figure in figures:
        assert figure(kept) == pytest.approx(figure(compiled), rel=tolerance)
    assert kept.model_flop == compiled.model_flop
