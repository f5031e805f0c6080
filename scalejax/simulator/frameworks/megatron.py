"""Differences of Megatron-LM and its descendants from the program that XLA compiles.

XLA sees that nothing in the backward pass reads the output of a block, and does not recompute the
block's last product, nor its sum over the tensor axis. PyTorch's re-entrant checkpoint, which
Megatron-LM and DeepSpeed use, reruns the whole block: the 4th of 4 passes in the 96 B s l h^2 FLOP
of a step (Narayanan et al. 2021, arXiv 2104.04473, eq. 3), of which XLA saves a twelfth.

XLA pads heads to a width that the matrix units can load; PyTorch passes the products to the
library unpadded.

By default Megatron-LM applies dropout of 0.1 to the attention's scores (attention_dropout in
megatron/arguments.py), in a separate kernel after the softmax. Our networks have no dropout.

When it trains in fp16, its gradients are fp16 too, and are summed without a cast
(accumulate_allreduce_grads_in_fp32 in megatron/arguments.py, which is on for bf16 only;
communication_data_type of DeepSpeed); so are the parameters that ZeRO gathers. Ours are f32.
Independent of hardware.
"""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

from scalejax.config.parallelism import DATA
from scalejax.simulator.program import Loop, Operation, Program, each_changed

_Items = tuple[Operation | Loop, ...]
_PADDED_TO = 8
"""Multiple, in elements, to which XLA pads the operands of products (its cublas_pad_for_gemms)."""


def with_full_recompute(program: Program) -> Program:
    """`program` that recomputes the last product of each block too.

    Left out: element-wise additions to that product, about 1 % of a block. Unchanged if no pair of
    loops, one forward and one backward, holds the blocks.
    """
    return replace(program, operations=_in_full(program.operations))


_OF_STATE = ("all_reduce", "reduce_scatter", "all_gather")
_SCORE_BYTES, _MASK_BYTES = 2, 1


def with_unpadded_heads(program: Program, width: int) -> Program:
    """`program` with products of attention heads of unpadded width.

    Their FLOP and bytes stay those of the padded products, at most 4 % more.

    Args:
        program: the compiled step.
        width: elements of a head.
    """
    padded = -(-width // _PADDED_TO) * _PADDED_TO
    if padded == width:
        return program

    def bare(item: Operation) -> Operation:
        if item.kind != "matmul" or len(item.shape) != 4 or item.shape[0] == 1:
            return item
        return replace(item, shape=tuple(width if n == padded else n for n in item.shape))

    return replace(program, operations=each_changed(program.operations, bare))


def with_half_gradients(program: Program, dtype: str = "f16") -> Program:
    """`program` with half the bytes where gradients are summed over data or, with ZeRO, parameters
    are gathered; in `dtype`, which has 16 bits."""
    halved = partial(_halved, dtype=dtype)
    return replace(program, operations=each_changed(program.operations, halved))


def _halved(item: Operation, dtype: str) -> Operation:
    collective = item.collective
    if collective is None or collective.name not in _OF_STATE or item.dtype != "f32":
        return item
    if DATA not in collective.group.axes:
        return item
    return replace(
        item,
        dtype=dtype,
        collective=replace(collective, payload_bytes=collective.payload_bytes // 2),
    )


def with_attention_dropout(program: Program, tokens: int) -> Program:
    """`program` with a dropout kernel after each product of scores: forward, recompute, backward.

    The kernel reads and writes the scores, 2 bytes each, and a mask of one byte. Left out: the
    dropout of activations, which Megatron-LM fuses with an existing addition.

    Args:
        program: the compiled step, its attention not fused.
        tokens: length of a sequence.
    """
    return replace(program, operations=_dropping(program.operations, tokens))


def _dropping(items: _Items, tokens: int) -> _Items:
    changed: list[Operation | Loop] = []
    for item in items:
        if isinstance(item, Loop):
            changed.append(replace(item, body=_dropping(item.body, tokens)))
            continue
        changed.append(item)
        if item.kind == "matmul" and item.shape[1:3] == (tokens, tokens) and item.shape[0] > 1:
            scores = math.prod(item.shape[:3])
            changed.append(
                Operation(
                    name=f"{item.name}.dropout",
                    kind="fusion",
                    dtype=item.dtype,
                    read_bytes=_SCORE_BYTES * scores,
                    write_bytes=(_SCORE_BYTES + _MASK_BYTES) * scores,
                )
            )
    return tuple(changed)


def _in_full(items: _Items) -> _Items:
    """`items` with full recompute in the backward loop of each pair of loops, at any depth."""
    loops = [item for item in items if isinstance(item, Loop) and _products(item)]
    pairs = [
        (first, second)
        for first, second in pairwise(loops)
        if first.trip_count == second.trip_count and _flop(first) < _flop(second)
    ]
    if not pairs:
        return tuple(
            replace(item, body=_in_full(item.body)) if isinstance(item, Loop) else item
            for item in items
        )
    (forward, backward), *_ = pairs
    again = tuple(_again(operation) for operation in _last_product(forward))
    whole = replace(backward, body=(*again, *backward.body))
    return tuple(whole if item is backward else item for item in items)


def _last_product(forward: Loop) -> tuple[Operation, ...]:
    """The last product of a loop, and the collectives on the product's result."""
    operations = [item for item in forward.body if isinstance(item, Operation)]
    last = operations.index(_products(forward)[-1])
    return tuple(
        item
        for index, item in enumerate(operations[last:])
        if not index or item.collective is not None or item.kind == "wait"
    )


def _again(operation: Operation) -> Operation:
    """Copy of `operation` with a new name, as names are unique in a program."""
    waits_for = operation.waits_for and f"{operation.waits_for}.again"
    return replace(operation, name=f"{operation.name}.again", waits_for=waits_for)


def _products(loop: Loop) -> list[Operation]:
    return [item for item in loop.body if isinstance(item, Operation) and item.kind == "matmul"]


def _flop(loop: Loop) -> int:
    return sum(item.flop for item in loop.body if isinstance(item, Operation))
