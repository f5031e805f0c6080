"""Linear layers in fp8, by hand: which products, what they read, and what the casts add."""

from dataclasses import replace

import pytest
from program_cases import program_of

from scalejax.cost import in_float8, timeline
from scalejax.hardware import load_cluster
from scalejax.program import Loop, Operation

LINEAR = Operation(
    name="up",
    kind="matmul",
    dtype="bf16",
    flop=2 * 4096**3,
    shape=(1, 4096, 4096, 4096),
    read_bytes=2 * 2 * 4096**2,
    write_bytes=2 * 4096**2,
)
SCORES = replace(LINEAR, name="scores", shape=(32, 512, 512, 64), flop=2 * 32 * 512**2 * 64)
HEAD = replace(LINEAR, name="head")


def test_products_of_blocks_are_cast_and_nothing_else():
    """In the loop over blocks: not the products of attention, nor the output layer outside it."""
    blocks = Loop(name="blocks", trip_count=3, body=(LINEAR, SCORES))
    microbatches = Loop(name="microbatches", trip_count=2, body=(blocks, HEAD))

    program = in_float8(program_of(microbatches))

    (outer,) = program.operations
    assert isinstance(outer, Loop)
    inner, head = outer.body
    assert isinstance(inner, Loop)
    cast, product, scores = inner.body
    assert (scores, head) == (SCORES, HEAD)
    assert product == replace(LINEAR, dtype="f8e4m3fn", read_bytes=2 * 4096**2)
    assert isinstance(cast, Operation)
    # Two operands of 4096 x 4096: read in two bytes an element, written in one.
    assert (cast.read_bytes, cast.write_bytes) == (2 * 2 * 4096**2, 2 * 4096**2)
    assert "fp8" in program.notes[-1]


def test_large_products_gain_and_narrow_ones_lose():
    """Twice the rate, less what the casts move: worth it for 16k rows, not for 128."""
    cluster = load_cluster("dgx-h100")

    def gain(rows: int) -> float:
        product = replace(LINEAR, shape=(1, rows, 4096, 4096), flop=2 * rows * 4096**2)
        program = program_of(Loop(name="blocks", trip_count=100, body=(product,)))
        before = timeline(program, cluster).device_seconds
        return before / timeline(in_float8(program), cluster).device_seconds

    assert 1.2 < gain(16384) < 2
    assert gain(128) < 1


def test_chip_without_fp8_gains_nothing():
    """An A100 converts them back."""
    cluster = load_cluster("dgx-a100")
    program = program_of(Loop(name="blocks", trip_count=2, body=(LINEAR,)))

    before, after = timeline(program, cluster), timeline(in_float8(program), cluster)
    assert after.compute_seconds == pytest.approx(before.compute_seconds, rel=0.05)
    assert after.step_seconds > before.step_seconds
