"""What a TPU's compiler writes otherwise than those of GPUs and CPUs, a line or two of each."""

import pytest

from scalejax.core.errors import ProfileError
from scalejax.simulator.program import Loop, Operation
from scalejax.xla.reader import read_program

MESH = (("data", 1),)


def only_operation(lines: str, header: str = "") -> Operation:
    """The operation of an entry computation that consists of `lines`."""
    items = read_program(f"HloModule m\n\n{header}\nENTRY %e () -> f32[] {{\n{lines}\n}}\n", MESH)
    (item,) = items
    assert isinstance(item, Operation)
    return item


@pytest.mark.parametrize(
    ("lhs", "rhs", "result", "window", "shape"),
    [
        # An ordinary product: 64 x 256 times 256 x 512.
        ("64,256", "256,512", "64,512", "dim_labels=bf_io->bf", (1, 64, 512, 256)),
        # Rows in two dimensions: 32 x 128.
        (
            "32,128,256",
            "256,512,1",
            "32,128,512",
            "window={size=1}, dim_labels=0bf_io0->0bf",
            (1, 32 * 128, 512, 256),
        ),
        # The gradient of that kernel: summed over 32 x 128 rows.
        (
            "32,256,128",
            "32,128,512",
            "256,512,1",
            "window={size=32}, dim_labels=0bf_0io->bf0",
            (1, 256, 512, 32 * 128),
        ),
        # Columns in two further dimensions, 3 x 2, which only the right operand has.
        (
            "1,1,128,256",
            "256,3,2,64",
            "128,3,2,64",
            "window={size=3x2 pad=2_2x1_1 rhs_reversal=1x1}, dim_labels=01bf_i01o->b01f",
            (1, 128, 3 * 2 * 64, 256),
        ),
        # 32 products of their own, as attention makes them.
        (
            "32,128,64",
            "32,100,64",
            "32,128,100",
            "window={size=32 stride=31 lhs_dilate=32}, dim_labels=0bf_0oi->0bf",
            (32, 128, 100, 64),
        ),
    ],
)
def test_a_product_written_as_a_convolution_is_a_product(lhs, rhs, result, window, shape):
    """FLOP and dimensions are those of the product that was asked for, padding not counted."""
    operation = only_operation(
        f"  %a = bf16[{lhs}] parameter(0)\n"
        f"  %b = bf16[{rhs}] parameter(1)\n"
        f"  ROOT %c = bf16[{result}] convolution(%a, %b), {window}, "
        'metadata={op_name="jit(f)/dot_general"}'
    )

    batch, m, n, k = shape
    assert (operation.kind, operation.shape) == ("matmul", shape)
    assert operation.flop == 2 * batch * m * n * k


def test_a_convolution_stays_one():
    """What slides a window is no product, whatever it is called."""
    operation = only_operation(
        "  %a = bf16[8,14,14,64] parameter(0)\n"
        "  %b = bf16[3,3,64,64] parameter(1)\n"
        "  ROOT %c = bf16[8,14,14,64] convolution(%a, %b), window={size=3x3 pad=1_1x1_1}, "
        'dim_labels=b01f_01io->b01f, metadata={op_name="jit(f)/dot_general"}'
    )

    assert operation.kind == "convolution"
    assert operation.flop == 2 * 8 * 14 * 14 * 9 * 64 * 64


LOOP = """HloModule m

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8] get-tuple-element(%p), index=1
  %same = s32[]{{:S(6)}} copy(%i)
  %one = s32[] constant({step})
  %next = s32[] add(%same, %one)
  %y = f32[8] negate(%x)
  ROOT %t = (s32[], f32[8]) tuple(%next, %y)
}}

%condition (q: (s32[], f32[8])) -> pred[] {{
  %q = (s32[], f32[8]) parameter(0)
  %end = s32[] constant(6)
  %j = s32[] get-tuple-element(%q), index=0
  ROOT %less = pred[] compare(%j, %end), direction={direction}
}}

ENTRY %e (a: f32[8]) -> (s32[], f32[8]) {{
  %a = f32[8] parameter(0)
  %zero = s32[] constant(2)
  %start = (s32[], f32[8]) tuple(%zero, %a)
  ROOT %w = (s32[], f32[8]) while(%start), condition=%condition, body=%body
}}
"""


def test_the_length_of_a_loop_is_read_from_its_condition():
    """From 2 to below 6 by ones: four times."""
    (loop,) = read_program(LOOP.format(step=1, direction="LT"), MESH)

    assert isinstance(loop, Loop)
    assert loop.trip_count == 4
    assert [item.name for item in loop.body] == ["same", "next", "y"]


@pytest.mark.parametrize(("step", "direction"), [(2, "LT"), (1, "NE")])
def test_the_length_of_other_loops_stays_unknown(step, direction):
    """Steps of two, or another comparison, are nothing that JAX writes: no guess is made."""
    with pytest.raises(ProfileError, match="an unknown number of times"):
        read_program(LOOP.format(step=step, direction=direction), MESH)


def test_operands_brought_on_chip_count_once():
    """The copy ahead of use (memory space 1) is free; the operation that uses it pays."""
    operation = only_operation(
        "  %a = f32[1024]{0:T(1024)} parameter(0)\n"
        "  %s = (f32[1024]{0:T(1024)S(1)}, f32[1024]{0:T(1024)}, u32[]{:S(2)}) copy-start(%a)\n"
        "  %d = f32[1024]{0:T(1024)S(1)} copy-done(%s)\n"
        '  %v = f32[1024]{0:S(1)} custom-call(%d), custom_call_target="ConcatBitcast"\n'
        "  ROOT %n = f32[1024]{0:T(1024)} negate(%v)"
    )

    assert (operation.name, operation.read_bytes, operation.write_bytes) == ("n", 4096, 4096)


def test_a_slice_in_a_fusion_within_a_fusion_reads_the_slice():
    """One layer of eight stacked ones, sliced where only the inner fusion sees it."""
    header = (
        "%inner (p: f32[8,100]) -> f32[1,100] {\n"
        "  %p = f32[8,100] parameter(0)\n"
        "  ROOT %s = f32[1,100] slice(%p), slice={[2:3], [0:100]}\n"
        "}\n\n"
        "%outer (q: f32[8,100]) -> f32[1,100] {\n"
        "  %q = f32[8,100] parameter(0)\n"
        "  %f = f32[1,100] fusion(%q), kind=kLoop, calls=%inner\n"
        "  ROOT %n = f32[1,100] negate(%f)\n"
        "}\n"
    )
    operation = only_operation(
        "  %a = f32[8,100] parameter(0)\n"
        "  ROOT %o = f32[1,100] fusion(%a), kind=kLoop, calls=%outer",
        header,
    )

    assert (operation.read_bytes, operation.write_bytes) == (400, 400)
