"""Bytes of fusions that slice, update in place, or read what they seem not to need."""

from scalejax.xla.bytes import moved_bytes
from scalejax.xla.hlo import parse_module

LAYER = 512 * 1024
"""Elements of one layer of a stack of six."""


def moved(body: str, result: str, *operands: str):
    """Traffic of a fusion of `body`, its parameters p0, p1, ... having these shapes."""
    parameters = [f"  %p{i} = {shape} parameter({i})" for i, shape in enumerate(operands)]
    names = ", ".join(f"%p{i}" for i in range(len(operands)))
    text = "\n".join(
        [
            "HloModule m",
            "%fused (p: f32[]) -> f32[] {",
            *parameters,
            *(f"  {line.strip()}" for line in body.strip().splitlines()),
            "}",
            "ENTRY %main (p: f32[]) -> f32[] {",
            *parameters,
            f"  ROOT %fusion = {result} fusion({names}), kind=kLoop, calls=%fused",
            "}",
        ]
    )
    module = parse_module(text)
    entry = module.computations["main"]
    return moved_bytes(module, entry, entry.root)


def test_a_slice_of_a_stack_is_read_and_not_the_stack():
    """One layer of six, and the scalar that says which."""
    assert moved(
        """%zero = s32[] constant(0)
        %one = bf16[1,512,1024]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero)
        ROOT %layer = f32[512,1024]{1,0} convert(%one)""",
        "f32[512,1024]{1,0}",
        "bf16[6,512,1024]{2,1,0}",
        "s32[]",
    ) == (2 * LAYER + 4, 4 * LAYER)


def test_a_slice_behind_a_conversion_is_still_a_slice():
    """The conversion is done for the elements that are asked for."""
    assert moved(
        """%all = f32[6,512,1024]{2,1,0} convert(%p0)
        ROOT %one = f32[1,512,1024]{2,1,0} dynamic-slice(%all, %p1, %p1, %p1)""",
        "f32[1,512,1024]{2,1,0}",
        "bf16[6,512,1024]{2,1,0}",
        "s32[]",
    ) == (2 * LAYER + 4, 4 * LAYER)


def test_two_slices_of_one_stack_are_both_read_and_a_repeated_one_once():
    """Layers i and j; layer i twice is one read."""
    body = """%a = bf16[1,512,1024]{2,1,0} dynamic-slice(%p0, %p1, %p2, %p2)
        %b = bf16[1,512,1024]{2,1,0} dynamic-slice(%p0, %SECOND, %p2, %p2)
        ROOT %sum = bf16[1,512,1024]{2,1,0} add(%a, %b)"""
    shapes = ("bf16[1,512,1024]{2,1,0}", "bf16[6,512,1024]{2,1,0}", "s32[]", "s32[]")

    assert moved(body.replace("%SECOND", "%p2"), *shapes)[0] == 4 * LAYER + 8
    assert moved(body.replace("%SECOND", "%p1"), *shapes)[0] == 2 * LAYER + 8


def test_an_update_in_place_writes_the_update():
    """The stack is neither read nor written but for one layer."""
    assert moved(
        """%layer = bf16[1,512,1024]{2,1,0} bitcast(%p1)
        ROOT %all = bf16[6,512,1024]{2,1,0} dynamic-update-slice(%p0, %layer, %p2, %p2, %p2)""",
        "bf16[6,512,1024]{2,1,0}",
        "bf16[6,512,1024]{2,1,0}",
        "bf16[512,1024]{1,0}",
        "s32[]",
    ) == (2 * LAYER + 4, 2 * LAYER)


def test_an_update_of_something_computed_writes_it_all():
    """Where there is nothing to update in place, the rest of the result is read and written."""
    assert moved(
        """%doubled = bf16[6,512,1024]{2,1,0} add(%p0, %p0)
        ROOT %all = bf16[6,512,1024]{2,1,0} dynamic-update-slice(%doubled, %p1, %p2, %p2, %p2)""",
        "bf16[6,512,1024]{2,1,0}",
        "bf16[6,512,1024]{2,1,0}",
        "bf16[1,512,1024]{2,1,0}",
        "s32[]",
    ) == (2 * 6 * LAYER + 4, 2 * 6 * LAYER)


def test_a_sum_reads_all_that_it_sums():
    """A reduction reads its operand whole, however small its result."""
    assert moved(
        """%zero = f32[] constant(0)
        ROOT %sum = f32[512]{0} reduce(%p0, %zero), dimensions={1}, to_apply=%add""",
        "f32[512]{0}",
        "f32[512,1024]{1,0}",
    ) == (4 * LAYER, 4 * 512)


def test_rows_of_a_table_are_read_and_not_the_table():
    """An embedding reads as many rows as there are tokens."""
    assert moved(
        "ROOT %rows = f32[16,1024]{1,0} gather(%p0, %p1), offset_dims={1}",
        "f32[16,1024]{1,0}",
        "f32[50304,1024]{1,0}",
        "s32[16,1]{1,0}",
    ) == (4 * 16 * 1024 + 4 * 16, 4 * 16 * 1024)


def test_the_workspace_of_a_library_call_is_not_written():
    """cuBLAS is lent 32 MiB, which it may or may not touch."""
    assert moved(
        """%layer = bf16[1024,512]{1,0} bitcast(%p1)
        ROOT %product = (bf16[64,512]{1,0}, s8[33554432]{0}) custom-call(%p0, %layer), """
        'custom_call_target="__cublas$gemm"',
        "(bf16[64,512]{1,0}, s8[33554432]{0})",
        "bf16[64,1024]{1,0}",
        "bf16[1,1024,512]{2,1,0}",
    ) == (2 * 64 * 1024 + 2 * LAYER, 2 * 64 * 512)


def test_a_workspace_handed_on_in_a_tuple_is_not_written_either():
    """The compiler sometimes takes a call's results apart and puts them together again."""
    assert moved(
        """%both = (bf16[64,512]{1,0}, s8[33554432]{0}) custom-call(%p0, %p1), \
custom_call_target="__cublas$gemm"
        %product = bf16[64,512]{1,0} get-tuple-element(%both), index=0
        %workspace = s8[33554432]{0} get-tuple-element(%both), index=1
        ROOT %again = (bf16[64,512]{1,0}, s8[33554432]{0}) tuple(%product, %workspace)""",
        "(bf16[64,512]{1,0}, s8[33554432]{0})",
        "bf16[64,1024]{1,0}",
        "bf16[1024,512]{1,0}",
    ) == (2 * 64 * 1024 + 2 * LAYER, 2 * 64 * 512)


def test_fused_attention_moves_no_scores():
    """It reads queries, keys and values, and writes their mixture and one number per row."""
    shape, rows = "bf16[2,1024,8,128]{3,2,1,0}", 2 * 8 * 1024
    text = f"""HloModule m
ENTRY %main (p: f32[]) -> f32[] {{
  %q = {shape} parameter(0)
  %k = {shape} parameter(1)
  %v = {shape} parameter(2)
  ROOT %fmha = (bf16[2,8,1024,128]{{3,1,2,0}}, f32[2,8,1024]{{2,1,0}}, u8[4096]{{0}}) \
custom-call(%q, %k, %v), custom_call_target="__cudnn$fmhaSoftmax"
}}"""
    module = parse_module(text)
    entry = module.computations["main"]

    read_bytes, write_bytes = moved_bytes(module, entry, entry.root)
    assert read_bytes == 3 * rows * 128 * 2
    assert write_bytes == rows * 128 * 2 + rows * 4  # the workspace does not count
