"""Collectives that frameworks overlap with products, on steps of a few operations."""

from dataclasses import replace

import pytest
from program_cases import PAPER, fusion, gather, matmul, program_of, wait

from scalejax.simulator.frameworks.overlap import (
    with_overlapped_layers,
    with_overlapped_state,
    with_overlapped_tensor,
    with_sums_in_last_pass,
)
from scalejax.simulator.program import Collective, DeviceGroup, Loop, Operation, Program
from scalejax.simulator.timeline.timeline import timeline


def scatter(name: str, milliseconds: float, axis: str) -> Operation:
    """A reduce-scatter that takes as long as the gather does."""
    likewise = gather(name, milliseconds, axis=axis)
    assert likewise.collective is not None
    return replace(likewise, collective=replace(likewise.collective, name="reduce_scatter"))


def names(program: Program) -> list[str]:
    """Of all operations, in order."""
    return [operation.name for operation, _ in program.walk()]


def collective_bytes(program: Program) -> int:
    """By all collectives."""
    found = (each.collective for each, _ in program.walk())
    return sum(each.payload_bytes for each in found if isinstance(each, Collective))


def test_product_begins_with_what_is_gathered_and_is_summed_as_it_goes():
    """Between two devices half of each collective is hidden: 10 ms of products, 4 + 4 of theirs,
    of which the compiler's order hides nothing, and this one 2 + 2."""
    step = program_of(
        gather("tokens", 4, axis="tensor"),
        wait("tokens"),
        matmul("up", 5),
        matmul("down", 5),
        scatter("sum", 4, "tensor"),
        wait("sum"),
    )

    beside = with_overlapped_tensor(step)

    first = ["tokens.part", "tokens.part.done", "tokens.others", "up", "tokens.others.done"]
    last = ["sum.others", "down", "sum.others.done", "sum.part", "sum.part.done"]
    assert names(beside) == [*first, *last]
    assert collective_bytes(beside) == collective_bytes(step)
    assert timeline(step, PAPER).step_seconds == pytest.approx(18e-3, rel=1e-3)
    assert timeline(beside, PAPER).step_seconds == pytest.approx(14e-3, rel=1e-3)


def test_what_has_no_product_beside_it_stays():
    """A sum after a loop, a gather before nothing, and all that crosses another axis."""
    step = program_of(
        Loop(name="blocks", trip_count=2, body=(matmul("up", 1),)),
        scatter("sum", 4, "tensor"),
        wait("sum"),
        gather("parameters", 4, axis="data"),
        wait("parameters"),
    )

    assert with_overlapped_tensor(step) == step


def test_state_is_gathered_and_summed_beside_the_passes():
    """Gathers end after the first pass, sums begin before the last, those of a layer with it."""
    body = (matmul("back", 1), scatter("layer", 1, "data"), fusion("norm", 1), wait("layer"))
    step = program_of(
        gather("parameters", 2, axis="data"),
        wait("parameters"),
        Loop(name="forward", trip_count=2, body=(matmul("up", 1),)),
        Loop(name="backward", trip_count=2, body=body),
        scatter("gradients", 2, "data"),
        wait("gradients"),
        fusion("update", 1),
    )

    beside = with_overlapped_state(step)

    passes = ["up", "parameters-done", "gradients", "layer", "back", "norm", "layer-done"]
    assert names(beside) == ["parameters", *passes, "gradients-done", "update"]
    assert timeline(step, PAPER).step_seconds == pytest.approx(11e-3, rel=0.01)
    assert timeline(beside, PAPER).step_seconds == pytest.approx(8e-3, rel=0.01)


def test_state_over_data_and_context_is_beside_the_passes():
    """The distributed optimizer shards over both (Megatron-LM)."""

    def over_both(item: Operation) -> Operation:
        assert item.collective is not None
        group = DeviceGroup(extents=((2, 1), (2, 2)), axes=("data", "context"))
        return replace(item, collective=replace(item.collective, group=group))

    step = program_of(
        Loop(name="forward", trip_count=2, body=(matmul("up", 1),)),
        Loop(name="backward", trip_count=2, body=(matmul("back", 1),)),
        over_both(scatter("gradients", 2, "data")),
        wait("gradients"),
    )

    assert names(with_overlapped_state(step)) == ["up", "gradients", "back", "gradients-done"]


def test_state_of_one_loop_over_microbatches_is_beside_all_of_them():
    """Which stands for the first and the last of them."""
    step = program_of(
        gather("parameters", 2, axis="data"),
        wait("parameters"),
        Loop(name="microbatches", trip_count=4, body=(matmul("both", 1),)),
        scatter("gradients", 2, "data"),
        wait("gradients"),
    )

    beside = with_overlapped_state(step)

    middle = ["gradients", "both", "parameters-done"]
    assert names(beside) == ["parameters", *middle, "gradients-done"]


def test_gradients_are_summed_beside_the_last_backward_pass():
    """3 microbatches of 2 + 4 ms, and a sum over data of 3, twice what a gather takes: the last
    backward pass hides it."""
    forward = Loop(name="forward", trip_count=2, body=(matmul("up", 1),))
    backward = Loop(name="backward", trip_count=2, body=(matmul("up.gradient", 2),))
    likewise = gather("sum", 1.5, axis="data")
    assert likewise.collective is not None
    summed = replace(likewise, collective=replace(likewise.collective, name="all_reduce"))

    for count in (1, 3):
        passes = (Loop(name="microbatches", trip_count=count, body=(forward, backward)),)
        step = program_of(*(passes if count > 1 else (forward, backward)), summed, wait("sum"))
        step = replace(step, backend="closed_form")
        beside = with_sums_in_last_pass(step)

        own = timeline(step, PAPER).step_seconds - count * 6e-3
        assert own > 2e-3
        assert timeline(beside, PAPER).step_seconds == pytest.approx(count * 6e-3, rel=1e-3)
        assert collective_bytes(beside) == collective_bytes(step)
        assert len(set(names(beside))) == len(names(beside))
        assert with_sums_in_last_pass(replace(step, backend="cuda")).backend == "cuda"
    staged = replace(step, mesh_axes=(("pipeline", 2), *step.mesh_axes))
    assert with_sums_in_last_pass(staged) == staged


def test_gathers_over_fsdp_run_one_layer_ahead():
    """Four layers of 5 ms that each wait for 4 ms: 36 ms as compiled, 20 ms ahead; a gather of 8 ms
    a layer is the longer, 32 ms. A compiled step stays, as its schedule is the compiler's."""

    def step(milliseconds: float) -> Program:
        body = (gather("next", milliseconds, axis="fsdp"), wait("next"), matmul("layer", 5))
        return replace(
            program_of(Loop(name="layers", trip_count=4, body=body)), backend="closed_form"
        )

    for milliseconds, alone, ahead in ((4, 36e-3, 20e-3), (8, 52e-3, 32e-3)):
        program = step(milliseconds)
        assert timeline(program, PAPER).step_seconds == pytest.approx(alone, rel=1e-3)
        beside = with_overlapped_layers(program)
        assert timeline(beside, PAPER).step_seconds == pytest.approx(ahead, rel=1e-3)
    compiled = replace(step(4), backend="cuda")
    assert with_overlapped_layers(compiled) == compiled


def test_parameters_gathered_at_the_end_are_beside_the_first_forward_pass():
    """3 microbatches of 2 + 4 ms, and 3 ms of gathers, of which the next step's first forward pass
    hides 2 (Megatron-LM's --overlap-param-gather)."""
    forward = Loop(name="forward", trip_count=2, body=(matmul("up", 1),))
    backward = Loop(name="backward", trip_count=2, body=(matmul("up.gradient", 2),))
    step = program_of(
        Loop(name="microbatches", trip_count=3, body=(forward, backward)),
        fusion("update.up", 1),
        gather("update.gather", 3, axis="data"),
        wait("update.gather"),
    )

    beside = with_overlapped_state(step)

    first = ["up.first", "update.gather-done", "up.gradient.first"]
    assert names(beside) == ["update.gather", *first, "up", "up.gradient", "update.up"]
    assert timeline(step, PAPER).step_seconds == pytest.approx(22e-3, rel=0.01)
    assert timeline(beside, PAPER).step_seconds == pytest.approx(20e-3, rel=0.01)


def test_state_over_the_expert_axis_is_beside_the_passes_and_tokens_are_not():
    """Devices of the expert axis compute other samples: gradients of all but experts are summed
    over it too, as loads and weights of experts are within a layer, which wait for each other."""
    loads = gather("loads", 1, axis="expert")
    assert loads.collective is not None
    summed = replace(loads, collective=replace(loads.collective, name="all_reduce"))
    step = program_of(
        Loop(name="forward", trip_count=2, body=(matmul("up", 1), summed, wait("loads"))),
        Loop(name="backward", trip_count=2, body=(matmul("back", 1),)),
        replace(summed, name="update.sum.up.of_stage"),
        wait("update.sum.up.of_stage"),
        gather("update.gather", 1, axis="expert"),
        wait("update.gather"),
    )

    forward = ["up", "loads", "loads-done", "update.gather-done"]
    backward = ["update.sum.up.of_stage", "back", "update.sum.up.of_stage-done"]
    assert names(with_overlapped_state(step)) == ["update.gather", *forward, *backward]
