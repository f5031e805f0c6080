"""Program with linear layers in 8-bit or 4-bit floating point, derived from the program in bf16.

This is what the trainer trains (`models/float8.py`), as frameworks run it. The compiler's own
program differs in the casts, which it fuses where it can, and in sums of largest values over
devices; and some chips cannot be compiled for. Every product of a linear layer, forward and in both
gradients, runs at the chip's fp8 rate, after its two operands have been cast to 8 bits. Attention,
as in Transformer Engine and torchao, and the output layer stay in bf16, as do all sums and gathers.
A gradient that two products share is cast twice, which counts a sixth too many cast bytes.

If each operand's scale follows from its present values ("float8"), its largest value (amax) must be
known before the cast, so the operand is read once more, as in a kernel of Transformer Engine and in
XLA's program, which reads activations and gradients again but finds the largest values of matrices
on the way. If the scale follows from the last steps ("float8_delayed"), and in blocks, the cast
finds it; left out is the sum over devices of all largest values, once a step (12 bytes a product).
In blocks the scales are counted too: 4 bytes for 128 values, a byte for 32 (MXFP8). In 4 bits,
blocks of 16 share a scale of a byte (NVFP4), and all linear layers are products in 4 bits: left out
are the few that recipes keep in 16, and the transforms of gradients before they are rounded.
Independent of hardware.

Source: Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv 2209.05433; NVIDIA 2025,
"Pretraining Large Language Models with NVFP4", arXiv 2509.25149, section 2.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from scalejax.config.model import NarrowType
from scalejax.core.errors import ConfigError, refusal
from scalejax.simulator.program import Loop, Operation, Program
from scalejax.simulator.transforms.pipeline import gate_of

FP8 = "f8e4m3fn"
"""XLA's name for the type."""
_WIDE_BYTES = 2  # of an element of bf16
_TYPES: dict[NarrowType, tuple[str, str, float]] = {
    "float8": (FP8, "fp8", 1.0),
    "float8_delayed": (FP8, "fp8", 1.0),
    "float8_blockwise": (FP8, "fp8", 1 + 4 / 128),
    "mxfp8": (FP8, "fp8", 1 + 1 / 32),
    "float4": ("f4e2m1fn", "fp4", 0.5 + 1 / 16),
}
"""XLA's name for each type, its short name, and the bytes of an element with its share of the
scale."""

_READ_BEFORE: tuple[NarrowType, ...] = ("float8",)
"""Types whose scale is known only when the whole operand has been read."""

_ENDS = ("first_part", "last_part")
"""Gates of the embedding and the output layer."""


def in_float8(
    program: Program, kind: NarrowType = "float8", adapter_rank: int | None = None
) -> Program:
    """`program` with the products of its linear layers in fp8, or fp4.

    Linear layers are the products of single matrices in the program's loops over blocks: the loops
    that contain such products in no inner loop, even if they contain loops over blocks of keys, and
    the passes of a pipeline's timetable apart from their first and last part. Operations outside of
    them, such as the output layer, are unchanged, and so is a single block that the compiler takes
    out of its loop (that of `model.mtp`, a single dense layer before experts). Products of experts
    are linear layers too, whether grouped or in a loop over blocks.

    Args:
        program: the compiled step of a transformer whose blocks are scanned, in bf16.
        kind: type of the products.
        adapter_rank: rank of its adapters (LoRA), whose products stay in bf16; None without them.

    Raises:
        ConfigError: if no product of the program belongs to a linear layer.
    """
    cast = partial(_cast, kind=kind, adapter_rank=adapter_rank)
    operations = tuple(_in_loops(item, cast) for item in program.operations)
    dtype, name, _ = _TYPES[kind]
    if not any(_is_in(item, lambda inner: inner.dtype == dtype) for item in operations):
        accepted = f"no loop over blocks of {program.name} has products to take in it"
        raise ConfigError(refusal("model.compute_dtype", kind, accepted))
    note = f"linear layers in {name}: derived from the program in bf16"
    return replace(program, operations=operations, notes=(*program.notes, note))


def _in_loops(
    item: Operation | Loop,
    cast: Callable[[Operation | Loop], tuple[Operation | Loop, ...]],
) -> Operation | Loop:
    """A loop with the products of its blocks cast; operations outside of loops are unchanged."""
    if not isinstance(item, Loop) or (gate := gate_of(item)) in _ENDS:
        return item
    has_blocks_inside = any(
        inner.expert_blocks is None and gate_of(inner) not in _ENDS and _is_in(inner, _is_linear)
        for inner in item.body
        if isinstance(inner, Loop)
    )
    # All products of a pass belong to blocks, which are no loop if a chunk has only one.
    is_of_blocks = gate is not None or not has_blocks_inside
    body: list[Operation | Loop] = []
    for inner in item.body:
        if isinstance(inner, Loop):
            # Experts are linear layers of the block that contains them; attention is not.
            is_searched = has_blocks_inside or inner.expert_blocks is not None
            body.append(_in_loops(inner, cast) if is_searched else inner)
        else:
            body.extend(cast(inner) if is_of_blocks else (inner,))
    return replace(item, body=tuple(body))


def _is_in(item: Operation | Loop, wanted: Callable[[Operation], bool]) -> bool:
    """Whether `item` is, or contains at any depth, an operation that is `wanted`."""
    if isinstance(item, Loop):
        return any(_is_in(inner, wanted) for inner in item.body)
    return wanted(item)


def _is_linear(item: Operation) -> bool:
    """Whether an operation is the product of a single matrix, or of the matrices of experts."""
    is_product = item.kind == "matmul" and len(item.shape) == 4
    return is_product and (item.shape[0] == 1 or item.grouped_pass is not None)


def with_float8_products(
    operations: Iterable[Operation | Loop],
    kind: NarrowType = "float8",
    adapter_rank: int | None = None,
) -> tuple[Operation | Loop, ...]:
    """`operations` of a block with its linear layers, including experts, in fp8 or fp4."""
    found: list[Operation | Loop] = []
    for item in operations:
        if isinstance(item, Loop) and item.expert_blocks is not None:
            body = with_float8_products(item.body, kind, adapter_rank)
            found.append(replace(item, body=body))
        else:
            found += _cast(item, kind, adapter_rank)
    return tuple(found)


def _cast(
    item: Operation | Loop, kind: NarrowType, adapter_rank: int | None
) -> tuple[Operation | Loop, ...]:
    """A product of activations and a weight matrix in fp8 after a cast; other items unchanged."""
    if isinstance(item, Loop) or item.dtype != "bf16" or not _is_linear(item):
        return (item,)
    batch, m, n, k = item.shape
    if adapter_rank in (m, n, k):
        return (item,)
    # For a grouped product: the matrices of all experts, and rows as wide as either side.
    operands = batch * (m * (n if item.grouped_pass == "input_gradient" else k) + k * n)
    if item.grouped_pass == "weight_gradient":
        operands = batch * m * (n + k)
    dtype, _, element_bytes = _TYPES[kind]
    narrow = math.ceil(element_bytes * operands)
    cast = Operation(
        name=f"{item.name}.cast",
        kind="fusion",
        dtype=dtype,
        read_bytes=_WIDE_BYTES * operands,
        write_bytes=narrow,
        source=item.source,
    )
    saved = _WIDE_BYTES * operands - narrow
    product = replace(item, dtype=dtype, read_bytes=max(narrow, item.read_bytes - saved))
    if kind not in _READ_BEFORE:
        return cast, product
    # Each of the three products of a layer shares both of its operands with another one.
    amax = replace(
        cast, name=f"{item.name}.amax", read_bytes=_WIDE_BYTES * operands // 2, write_bytes=8
    )
    return amax, cast, product
