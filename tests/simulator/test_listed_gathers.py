"""Parameters gathered one by one into lists, as by DeepSpeed of 2021: by hand."""

from dataclasses import replace

import pytest
from hardware_cases import CHIP, cluster_of
from program_cases import gather, matmul, program_of, wait

from scalejax.simulator.frameworks.overlap import with_listed_gathers
from scalejax.simulator.program import Loop
from scalejax.simulator.timeline.timeline import timeline

FORWARD = Loop(name="forward", trip_count=3, body=(gather("f", 2), matmul("m", 5), wait("f")))


def backward() -> Loop:
    """Three layers that gather for 2 ms and scatter gradients of two buffers for 1, behind 9."""
    scatter = gather("s", 1)
    assert scatter.collective is not None
    found = replace(scatter.collective, name="reduce_scatter", buffer_count=2)
    scatter = replace(scatter, collective=found)
    body = (gather("b", 2), matmul("n", 9), wait("b"), scatter, wait("s"))
    return Loop(name="backward", trip_count=3, body=body)


@pytest.mark.parametrize(("recomputes", "gathers"), [(False, 2), (True, 3)])
def test_nothing_computes_while_parameters_are_gathered_into_lists(recomputes: bool, gathers: int):
    """Of 3 x (5 + 9) ms and the last of three scatters, all gathers and scatters are seen; and the
    views and copies, 10 us apart: for two devices 4 of each gather, 8 of a scatter of two."""
    attainable = replace(CHIP.attainable, launch_seconds=1e-5)
    cluster = cluster_of(chip=replace(CHIP, attainable=attainable, memory_bytes_per_second=1e18))
    program = program_of(FORWARD, backward())

    listed = with_listed_gathers(program, recomputes=recomputes)

    assert timeline(program, cluster).step_seconds == pytest.approx(45e-3 + 6e-5)
    exposed = 3 * (gathers * 2e-3 + 1e-3)
    apart = 1e-5 * (6 + 3 * (4 * gathers + 8))
    assert timeline(listed, cluster).step_seconds == pytest.approx(42e-3 + exposed + apart)
    names = [item.name for item, _ in listed.walk()]
    assert len(names) == len(set(names))


def test_other_collectives_stay_as_they_are():
    """Sums over data, of a step that is not sharded."""
    other = gather("g", 2, axis="data")
    program = program_of(other, matmul("m", 1), wait("g"))

    assert with_listed_gathers(program, recomputes=True) == program
