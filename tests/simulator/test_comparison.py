"""Comparisons of two steps that a reader can work out on paper.

The paper chip does 100 TFLOP/s; two of them gather 100 GB in a second per device.
"""

from dataclasses import replace

import pytest
from hardware_cases import cluster_of
from program_cases import PAPER, gather, matmul, program_of

from scalejax.core.errors import ConfigError
from scalejax.simulator.comparison import Bounds, Comparison, compare
from scalejax.simulator.program import Collective, DeviceGroup, Loop, MemoryUse, Operation, Program

LOOSE = Bounds(max_slowdown=9, max_memory_growth=9, max_bytes_growth=9)
NONE = Bounds(max_slowdown=0, max_memory_growth=0, max_bytes_growth=0)


def reduce_over(axes: tuple[str, ...], payload_bytes: int, *, size: int = 2, share: float = 1.0):
    """An all-reduce of so many bytes."""
    name = f"all-reduce.{'.'.join(axes)}.{payload_bytes}"
    return Operation(
        name=name,
        kind="collective",
        dtype="f32",
        share=share,
        source="net.py:7",
        collective=Collective(
            name="all_reduce",
            payload_bytes=payload_bytes,
            group=DeviceGroup(extents=((size, 1),), axes=axes),
            is_async=False,
            share=share,
        ),
    )


def with_memory(peak_bytes: int) -> Program:
    """A step of 10 ms that holds so many bytes."""
    memory = MemoryUse(argument_bytes=0, output_bytes=0, alias_bytes=0, temporary_bytes=peak_bytes)
    return replace(program_of(matmul("m", 10)), memory=memory)


def bytes_of(found: Comparison) -> dict[str, tuple[int, int]]:
    """Bytes of A and B by axes."""
    return {each.axes: (each.before_bytes, each.after_bytes) for each in found.axes}


def test_a_step_beside_itself_is_no_change():
    """Ratio 1, nothing appeared, nothing is beyond a bound of 0."""
    program = program_of(matmul("m", 10), gather("g", 2, is_async=False))

    found = compare(program, program, PAPER, NONE)

    assert found.time_ratio == 1
    assert found.changes == found.exceeded == ()
    assert found.before_flop == found.after_flop == 10 * 1e11


def test_collective_that_appears_is_named_with_its_axis_and_time():
    """10 ms of products and 2 of gathering over fsdp; B gathers 6 ms over tensor besides."""
    a = program_of(matmul("m", 10), gather("g", 2, is_async=False))
    b = program_of(
        matmul("m", 10),
        gather("g", 2, is_async=False),
        gather("h", 6, is_async=False, axis="tensor"),
    )

    found = compare(a, b, PAPER)

    assert found.before.step_seconds == pytest.approx(12e-3)
    assert found.after.step_seconds == pytest.approx(18e-3)
    assert found.time_ratio == pytest.approx(1.5)
    # half of the payload at 100 GB/s, in 6 ms less the microsecond of a hop
    assert bytes_of(found) == {"tensor": (0, 1_199_800_000), "fsdp": (399_800_000,) * 2}
    (change,) = found.changes
    assert (change.name, change.axes, change.payload_bytes) == (
        "all_gather",
        "tensor",
        1_199_800_000,
    )
    assert (change.before_runs, change.after_runs) == (0, 1)
    assert change.added_seconds == pytest.approx(6e-3)
    slower, more = found.exceeded
    assert slower == "the step takes 1.5 times as long (max_slowdown=0.02)"
    assert more.startswith("collectives over tensor move 1.1 GiB more, 0 B before")


def test_collective_that_goes_is_no_excess():
    """The other way round: faster, and within all bounds."""
    a = program_of(matmul("m", 10), gather("g", 2, is_async=False))
    b = program_of(matmul("m", 10))

    found = compare(a, b, PAPER)

    (change,) = found.changes
    assert (change.before_runs, change.after_runs) == (1, 0)
    assert change.added_seconds == pytest.approx(-2e-3)
    assert found.time_ratio == pytest.approx(10 / 12)
    assert found.exceeded == ()


def test_runs_in_loops_and_shares_of_steps_count():
    """Four layers of 1 MB, and 8 MB every eighth step, are 5 MB in a step of A; 6 layers in B."""

    def layers(count: int) -> Program:
        loop = Loop(name="l", trip_count=count, body=(reduce_over(("data",), 1_000_000),))
        rare = reduce_over(("data",), 8_000_000, share=1 / 8)
        return program_of(matmul("m", 10), loop, rare)

    found = compare(layers(4), layers(6), PAPER, LOOSE)

    assert bytes_of(found) == {"data": (5_000_000, 7_000_000)}
    (change,) = found.changes
    assert (change.payload_bytes, change.before_runs, change.after_runs) == (1_000_000, 4, 6)
    assert change.source == "net.py:7"
    assert found.exceeded == ()


def test_groups_of_several_axes_of_none_and_of_one_device():
    """Products of axes are one name, groups that are none "other"; one device moves nothing."""
    program = program_of(
        matmul("m", 10),
        reduce_over(("data", "fsdp"), 300, size=8),
        reduce_over((), 200, size=3),
        reduce_over((), 100, size=1),
    )

    found = compare(program_of(matmul("m", 10)), program, PAPER, LOOSE)

    assert bytes_of(found) == {"data x fsdp": (0, 300), "other": (0, 200)}
    assert [each.axes for each in found.changes] == ["data x fsdp", "other"]


@pytest.mark.parametrize(("milliseconds", "is_exceeded"), [(10.19, False), (10.21, True)])
def test_slowdown_is_bounded(milliseconds: float, is_exceeded: bool):
    """By 2 % where nothing else is said."""
    found = compare(program_of(matmul("m", 10)), program_of(matmul("m", milliseconds)), PAPER)

    assert bool(found.exceeded) == is_exceeded


@pytest.mark.parametrize(
    ("after", "exceeded"),
    [
        (3_019_000_000, ()),  # 4.019 of 4 GB with the gigabyte of the runtime
        (3_100_000_000, ("peak memory is 1.025 times",)),
        (9_100_000_000, ("peak memory is 2.525 times", "the step does not fit into memory")),
    ],
)
def test_memory_growth_is_bounded(after: int, exceeded: tuple[str, ...]):
    """By 2 % of all that is held, and by the 10 GB of the chip."""
    found = compare(with_memory(3_000_000_000), with_memory(after), PAPER)

    assert len(found.exceeded) == len(exceeded)
    assert all(map(str.startswith, found.exceeded, exceeded))


def test_a_step_that_fits_no_more_is_beyond_every_bound():
    """8.9 GB and the runtime's one fit; 9.1 do not."""
    found = compare(with_memory(8_900_000_000), with_memory(9_100_000_000), PAPER, LOOSE)

    (sentence,) = found.exceeded
    assert sentence.startswith("the step does not fit into memory any more")


def test_bytes_are_bounded_axis_by_axis_but_for_scalars():
    """3 % more over tensor is beyond 2 %; eight bytes where there were four are not, with 1 MB
    elsewhere; nor are they if they are new."""
    rest = (matmul("m", 1000), reduce_over(("data",), 1_000_000))
    a = program_of(*rest, reduce_over(("tensor",), 100_000), reduce_over(("fsdp",), 4))
    b = program_of(
        *rest,
        reduce_over(("tensor",), 103_000),
        reduce_over(("fsdp",), 8),
        reduce_over(("context",), 8),
    )

    (sentence,) = compare(a, b, PAPER).exceeded

    assert sentence.startswith("collectives over tensor move 2.9 KiB more, 97.7 KiB before")
    assert compare(a, b, PAPER, Bounds(max_bytes_growth=0.04)).exceeded == ()


def test_new_axis_is_bounded_by_all_bytes_of_before():
    """30 kB over tensor are 3 % of the megabyte over data; beside no bytes, any are too many."""
    rest = (matmul("m", 1000), reduce_over(("data",), 1_000_000))
    a, b = program_of(*rest), program_of(*rest, reduce_over(("tensor",), 30_000))

    assert len(compare(a, b, PAPER).exceeded) == 1
    assert compare(a, b, PAPER, Bounds(max_bytes_growth=0.04)).exceeded == ()
    assert len(compare(program_of(rest[0]), b, PAPER, LOOSE).exceeded) == 2


def test_where_the_batch_differs_the_time_of_a_sample_is_bounded():
    """Twice the samples in 1.8 times the time are a gain."""
    a = replace(program_of(matmul("m", 10)), global_batch=64)
    b = replace(program_of(matmul("m", 18)), global_batch=128)

    found = compare(a, b, PAPER)

    assert found.time_ratio == pytest.approx(0.9)
    assert found.exceeded == ()
    assert "global batch: A 64, B 128" in found.notes
    assert "the bound on the step time holds for the time of one sample" in found.notes


def test_notes_say_what_else_differs_and_whose_caveat_it_is():
    """Another compiler makes another program of one step."""
    a = replace(program_of(matmul("m", 10)), model_flop=1)
    call = Operation(name="c", kind="custom", dtype="f32", read_bytes=10)
    b = replace(program_of(matmul("m", 10), call), model_flop=1, compiler="another")

    notes = compare(a, b, PAPER).notes

    assert "compiled by: A none, B another" in notes
    assert any(note.startswith("1 custom calls") and note.endswith("(B)") for note in notes)
    assert sum(note.startswith("MFU against") for note in notes) == 1


@pytest.mark.parametrize(
    ("b", "message"),
    [
        (program_of(matmul("m", 1), devices=4), "devices of B=4 is refused: A is for 8"),
        (replace(program_of(matmul("m", 1)), backend="cuda"), "backend of B='cuda' is refused"),
    ],
)
def test_steps_that_do_not_compare_are_refused(b: Program, message: str):
    """Of other numbers of devices, or other compilers."""
    with pytest.raises(ConfigError, match=message):
        compare(program_of(matmul("m", 1)), b, PAPER)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["max_slowdown", "max_memory_growth", "max_bytes_growth"])
def test_bounds_are_numbers_from_0(name: str, value: float):
    """Named in the refusal."""
    with pytest.raises(ConfigError, match=f"{name}=.*at least 0, and finite"):
        Bounds(**{name: value})


def test_cluster_matters():
    """The same two steps on links of half the bandwidth: 6 ms over tensor are 12."""
    a = program_of(matmul("m", 10))
    b = program_of(matmul("m", 10), gather("h", 6, is_async=False, axis="tensor"))
    link = replace(PAPER.link, bytes_per_second=50e9)

    assert compare(a, b, cluster_of(link=link)).time_ratio == pytest.approx(2.2, rel=1e-3)
