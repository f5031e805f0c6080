"""Experts as PyTorch's frameworks train them: grouped products, and tokens sent to their experts.

Scalejax multiplies the rows of an expert in blocks, one after the other in a loop, as XLA has no
grouped product that does no more work than that (`scalejax.models.moe`); and without a capacity it
gathers all tokens over the expert axis. Megatron-LM, torchtitan and others run the products of all
experts of a device as one kernel (--moe-grouped-gemm, torch._grouped_mm), and send each token to
its experts and back (--moe-token-dispatcher-type alltoall). Knows nothing of hardware.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from scalejax.config.parallelism import EXPERT
from scalejax.simulator.program import (
    Collective,
    ExpertBlocks,
    GroupedPass,
    Loop,
    Operation,
    Program,
    RoutedTokens,
)

_Items = tuple[Operation | Loop, ...]


def with_grouped_experts(program: Program, tokens: RoutedTokens, token_bytes: int) -> Program:
    """`program` with grouped products in place of loops over blocks, and tokens that are sent.

    Work on the rows besides products (gathers, the activation, sums by token) keeps its bytes and
    is launched once in place of once a block; copies of a matrix for each block, and sums of its
    gradient by block, are gone, as a grouped kernel reads and writes each matrix once. Gathers of
    tokens over the expert axis become all-to-alls of a copy for each expert, and so do sums;
    copies and conversions of all gathered tokens are gone. Memory is left as compiled.

    Args:
        program: a compiled step.
        tokens: the tokens of a microbatch on a device, and their routing.
        token_bytes: bytes of one token between layers.
    """
    devices = dict(program.mesh_axes).get(EXPERT, 1)
    gathered = tokens.tokens * token_bytes * devices if devices > 1 else 0
    return replace(program, operations=_grouped(program.operations, tokens, gathered))


def _grouped(items: Iterable[Operation | Loop], tokens: RoutedTokens, gathered: int) -> _Items:
    """`items` with experts grouped; `gathered` are the bytes of all tokens of the expert axis."""
    made: list[Operation | Loop] = []
    items = tuple(items)
    is_of_experts = any(isinstance(item, Loop) and item.expert_blocks for item in items)
    for item in items:
        if isinstance(item, Loop) and item.expert_blocks is not None:
            made.extend(_at_once(item, item.expert_blocks))
        elif isinstance(item, Loop):
            made.append(replace(item, body=_grouped(item.body, tokens, gathered)))
        elif item.collective is not None:
            made.append(replace(item, collective=_sent(item.collective, tokens, gathered)))
        elif not (is_of_experts and _is_of_all(item, gathered)):
            made.append(item)
    return tuple(made)


def _is_of_all(item: Operation, gathered: int) -> bool:
    """Whether an operation of a layer copies, converts or clears all gathered tokens."""
    sizes = (gathered, 2 * gathered)  # in the compute type, and in one twice as wide
    return not item.flop and gathered > 0 and item.write_bytes in sizes


def _sent(collective: Collective, tokens: RoutedTokens, gathered: int) -> Collective:
    """The all-to-all in place of a gather, or a sum, of all tokens over the expert axis; what is
    gathered with them (weights and indices of experts) goes along. Others are unchanged."""
    if collective.group.axes != (EXPERT,):
        return collective
    if collective.name not in ("all_gather", "reduce_scatter"):
        return collective
    # Tokens may be in a type twice as wide, and have weights and indices beside them.
    wide = collective.payload_bytes // gathered
    if not 1 <= wide <= 2:
        return collective
    sent = gathered // collective.group.size * tokens.experts_per_token * wide
    return replace(collective, name="all_to_all", payload_bytes=sent, tokens=tokens)


def _at_once(loop: Loop, blocks: ExpertBlocks) -> list[Operation]:
    """The operations of a loop over blocks, each once for the rows of all blocks."""
    body = [item for item in loop.body if isinstance(item, Operation)]
    products = [item for item in body if _is_product(item)]
    passes: dict[str, GroupedPass] = {item.name: _pass(item, blocks.rows) for item in products}
    is_backward = "weight_gradient" in passes.values()
    matrices = {_matrix(item, blocks.rows) for item in products}
    matrix_bytes = {width * size for size in matrices for width in (2, 4)}
    made: list[Operation] = []
    for item in body:
        if _is_product(item):
            which = passes[item.name]
            if is_backward and which == "forward":
                which = "input_gradient"
            made.append(_grouped_product(item, loop.trip_count, blocks, which))
        elif item.write_bytes not in matrix_bytes:
            made.append(
                replace(
                    item,
                    read_bytes=item.read_bytes * loop.trip_count,
                    write_bytes=item.write_bytes * loop.trip_count,
                    flop=item.flop * loop.trip_count,
                )
            )
    return made


def _is_product(item: Operation) -> bool:
    return item.kind == "matmul" and len(item.shape) == 4 and item.shape[0] == 1


def _pass(item: Operation, rows: int) -> GroupedPass:
    """Whether a product of a block sums over its rows; else it is forward, or of the input."""
    _, m, n, k = item.shape
    return "weight_gradient" if k == rows and rows not in (m, n) else "forward"


def _sides(item: Operation, rows: int) -> tuple[int, int]:
    """(outer, inner) of a product of a block, those of the expert's matrix."""
    _, m, n, k = item.shape
    if m == rows:
        return n, k
    return (m, k) if n == rows else (m, n)


def _matrix(item: Operation, rows: int) -> int:
    """Elements of the matrix of one expert."""
    return math.prod(_sides(item, rows))


def _grouped_product(
    item: Operation, blocks_at_once: int, blocks: ExpertBlocks, which: GroupedPass
) -> Operation:
    rows = blocks_at_once * blocks.rows
    outer, inner = _sides(item, blocks.rows)
    if which == "input_gradient":  # shapes are those of the forward product
        outer, inner = inner, outer
    return replace(
        item,
        shape=(blocks.experts, math.ceil(rows / blocks.experts), outer, inner),
        flop=2 * rows * outer * inner,
        grouped_pass=which,
        read_bytes=0,  # its cost counts operands and result, each once
        write_bytes=0,
    )
