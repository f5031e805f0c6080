"""Program with linear layers in 8-bit floating point, derived from the program in bf16.

A costing type: the trainer does not train in it. Every product of a linear layer, forward and of
both gradients, runs at the chip's rate for fp8, after its two operands have been cast to 8 bits.
Attention, as in Transformer Engine and torchao, and the output layer stay in bf16; so do all sums
and gathers. The largest value of an operand (amax), by which it is scaled, is computed by the
operation that produces it. A gradient that two products share is cast twice, a sixth too much of
the cast bytes. Knows nothing of hardware.

Source: Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv 2209.05433.
"""

from collections.abc import Iterable
from dataclasses import replace

from scalejax.simulator.program import Loop, Operation, Program

FP8 = "f8e4m3fn"
"""XLA's name of the type."""
_WIDE_BYTES = 2  # of an element of bf16
_NOTE = "linear layers in fp8: derived from the program in bf16"


def in_float8(program: Program) -> Program:
    """`program` with the products of its linear layers in fp8.

    Linear layers are the products of single matrices in its innermost loops, over blocks;
    operations outside of them, such as the output layer, are unchanged. Products of experts are
    linear layers too, grouped or in a loop over blocks.

    Args:
        program: the compiled step of a transformer whose blocks are scanned, in bf16.
    """
    operations = tuple(_in_loops(item) for item in program.operations)
    return replace(program, operations=operations, notes=(*program.notes, _NOTE))


def _in_loops(item: Operation | Loop) -> Operation | Loop:
    if not isinstance(item, Loop):
        return item
    if any(isinstance(inner, Loop) and inner.expert_blocks is None for inner in item.body):
        return replace(item, body=tuple(map(_in_loops, item.body)))
    body: list[Operation | Loop] = []
    for inner in item.body:  # experts are linear layers of the block that they are in
        body.extend((_in_loops(inner),) if isinstance(inner, Loop) else _cast(inner))
    return replace(item, body=tuple(body))


def with_float8_products(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """`operations` of a block with its linear layers in fp8."""
    return tuple(each for item in operations for each in _cast(item))


def _cast(item: Operation) -> tuple[Operation, ...]:
    """A product of activations and a weight matrix in fp8 after a cast; other items unchanged."""
    if item.kind != "matmul" or item.dtype != "bf16" or len(item.shape) != 4:
        return (item,)
    batch, m, n, k = item.shape
    if batch > 1 and item.grouped_pass is None:
        return (item,)
    # Of a grouped product the matrices of all experts, and rows as wide as either side.
    operands = batch * (m * (n if item.grouped_pass == "input_gradient" else k) + k * n)
    if item.grouped_pass == "weight_gradient":
        operands = batch * m * (n + k)
    cast = Operation(
        name=f"{item.name}.cast",
        kind="fusion",
        dtype=FP8,
        read_bytes=_WIDE_BYTES * operands,
        write_bytes=operands,
        source=item.source,
    )
    product = replace(item, dtype=FP8, read_bytes=max(operands, item.read_bytes - operands))
    return cast, product
