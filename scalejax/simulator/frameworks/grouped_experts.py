"""Experts as PyTorch's frameworks train them: grouped products, and tokens sent to their experts.

Scalejax multiplies the rows of an expert in blocks, one after another in a loop, because XLA has no
grouped product without extra work (`scalejax.models.moe`); without a capacity it gathers all tokens
over the expert axis. Megatron-LM, torchtitan and others run the products of all experts of a device
as one kernel (--moe-grouped-gemm, torch._grouped_mm), and send each token to its experts and back
(--moe-token-dispatcher-type alltoall). Independent of hardware.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

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
from scalejax.simulator.transformer.operations import UPDATE
from scalejax.simulator.transforms.pipeline import gate_of

_Items = tuple[Operation | Loop, ...]
_WIDE_BYTES = 4  # of an element of float32
_SUMS = re.compile(r"\.(up|down)\.gradient\.(zero|cast)$")
"""Names, in closed form, of what clears sums of matrix gradients, and casts them."""


class Capacity(NamedTuple):
    """Places that each expert has for the tokens of one sample, filled or not.

    One product with a mask over tokens and places puts tokens there, and another with the weights
    of experts sums the results (Lepikhin et al. 2020, "GShard", arXiv 2006.16668, algorithm 1).
    """

    factor: float
    """Places over assignments, at least."""
    samples: int
    """Samples of a microbatch on a device."""
    sample_tokens: int
    """Tokens of a sample."""
    width: int
    """Width of a token."""

    def product(self, name: str, dtype: str, tokens: RoutedTokens) -> Operation:
        """The product that puts tokens into places or sums them from there, or the gradient of
        either; all have the same sides."""
        places = math.ceil(self.sample_tokens * tokens.experts_per_token * self.factor)
        shape = (self.samples, places, self.width, self.sample_tokens)
        return Operation(
            name=name, kind="matmul", dtype=dtype, flop=2 * math.prod(shape), shape=shape
        )


def with_grouped_experts(
    program: Program,
    tokens: RoutedTokens,
    token_bytes: int,
    *,
    element_bytes: int = 2,
    recomputed_products: int = 0,
    has_matrices_once: bool = False,
    capacity: Capacity | None = None,
) -> Program:
    """`program` with grouped products in place of loops over blocks, and tokens sent to experts.

    There are two products forward and two for each gradient, however many the compiled step
    computes again for its backward pass, plus those that the framework recomputes. Other work on
    the rows (gathers, the activation, sums by token) keeps its bytes and is launched once instead
    of once per block; copies of a matrix for each block, and sums of its gradient by block, are
    removed, as a grouped kernel reads and writes each matrix once. Gathers of tokens over the
    expert axis become all-to-alls of one copy per expert, and so do sums; copies and conversions of
    all gathered tokens are removed. Memory is left as compiled.

    Args:
        program: a compiled step.
        tokens: the tokens of a microbatch on a device, and their routing.
        token_bytes: bytes of one token between layers.
        element_bytes: bytes of an element of a token.
        recomputed_products: products that run again before the backward pass: 0; 1, gate and up; or
            2, all of them.
        has_matrices_once: whether the kernels read gathered matrices in place and write their
            gradients once, in the type of the operands (megablox: gmm and tgmm): no slices of
            matrices, casts to 8 bits once per expert, no sums to clear and cast.
        capacity: capacity to which experts are padded; products then move tokens there and back.
    """
    devices = dict(program.mesh_axes).get(EXPERT, 1)
    gathered = tokens.tokens * token_bytes * devices if devices > 1 else 0
    way = _Way(tokens, gathered, element_bytes, recomputed_products, has_matrices_once, capacity)
    is_split = any(gate_of(loop) == "weights_pass" for loop in _loops(program.operations))
    only: dict[str, GroupedPass] = {}
    if is_split:
        only = {"backward_pass": "input_gradient", "weights_pass": "weight_gradient"}
    return replace(program, operations=_grouped(program.operations, way, only))


def _loops(items: Iterable[Operation | Loop]) -> Iterator[Loop]:
    """Yield all loops, including nested ones."""
    for item in items:
        if isinstance(item, Loop):
            yield item
            yield from _loops(item.body)


class _Way(NamedTuple):
    """How experts are grouped."""

    tokens: RoutedTokens
    """Tokens of a device."""
    gathered: int
    """Bytes of the tokens of all devices of the expert axis; 0 without an expert axis."""
    element_bytes: int
    """Bytes of an element of a token."""
    recomputed: int
    """Products that run again."""
    has_matrices_once: bool
    """Whether matrices are read in place, and their gradients written once."""
    capacity: Capacity | None
    """Places of experts, if they have a capacity."""


def _grouped(
    items: Iterable[Operation | Loop],
    way: _Way,
    only: Mapping[str, GroupedPass],
    gradient: GroupedPass | None = None,
) -> _Items:
    """`items` with experts grouped; `gradient` is the only gradient they compute, if there is just
    one, and `only` the same for loops inside, by their gate."""
    made: list[Operation | Loop] = []
    items = tuple(items)
    of_experts = [index for index, item in enumerate(items) if _is_of_experts(item)]
    has_backward = any(_is_backward(item) for item in items if isinstance(item, Loop))
    for index, item in enumerate(items):
        if isinstance(item, Loop) and item.expert_blocks is not None:
            made.extend(_at_once(item, item.expert_blocks, way, has_backward, gradient))
        elif isinstance(item, Loop):
            inner = only.get(gate_of(item) or "") or gradient
            made.append(replace(item, body=_grouped(item.body, way, only, inner)))
        elif item.collective is not None:
            is_of_update = item.name.startswith(f"{UPDATE}.")  # no tokens, but parameters
            sent = item.collective if is_of_update else _sent(item.collective, way)
            made.append(replace(item, collective=sent))
        else:
            is_between = bool(of_experts) and of_experts[0] < index < of_experts[-1]
            is_sum = bool(of_experts) and way.has_matrices_once and _SUMS.search(item.name)
            if not is_sum and not (of_experts and _is_of_all(item, way, is_between)):
                made.append(item)
    return tuple(made)


def _is_of_experts(item: Operation | Loop) -> bool:
    """Whether `item` is a loop over blocks of experts, or a collective over their axis."""
    if isinstance(item, Loop):
        return item.expert_blocks is not None
    return item.collective is not None and item.collective.group.axes == (EXPERT,)


def _is_of_all(item: Operation, way: _Way, is_between: bool) -> bool:
    """Whether an operation of a layer copies, converts or clears all gathered tokens. Clears only
    write; the others come between the collectives over the expert axis and read no more than they
    write, or twice as much in float32. Types distinguish them from work on a device's own data,
    which may have as many bytes in a wider type."""
    if item.flop or not way.gathered or not (is_between or not item.read_bytes):
        return False
    is_float32 = item.dtype == "f32"
    if item.read_bytes > (1 if is_float32 else 2) * item.write_bytes:
        return False
    if item.write_bytes == way.gathered:
        return is_float32 == (way.element_bytes == _WIDE_BYTES)
    # Sums are in float32.
    is_wider = way.element_bytes < _WIDE_BYTES and is_float32
    return is_wider and item.write_bytes == 2 * way.gathered


def _sent(collective: Collective, way: _Way) -> Collective:
    """The all-to-all that replaces a gather, or a sum, of all tokens over the expert axis; what is
    gathered with them (weights and indices of experts) is included. Others are unchanged."""
    if collective.group.axes != (EXPERT,):
        return collective
    if collective.name not in ("all_gather", "reduce_scatter"):
        return collective
    # Tokens may be in a type twice as wide, with weights and indices next to them.
    tokens, gathered = way.tokens, way.gathered
    wide = collective.payload_bytes // gathered
    if not 1 <= wide <= 2:
        return collective
    sent = gathered // collective.group.size * tokens.experts_per_token * wide
    if way.capacity is not None:
        sent = round(sent * way.capacity.factor)
    return replace(collective, name="all_to_all", payload_bytes=sent, tokens=tokens)


def _at_once(
    loop: Loop,
    blocks: ExpertBlocks,
    way: _Way,
    has_backward: bool,
    gradient: GroupedPass | None,
) -> list[Operation]:
    """The operations of a loop over blocks, each once for the rows of all blocks.

    For a loop that makes only one `gradient`, other products are left out.

    A backward loop may compute a forward product again, and so may a loop next to one
    (`has_backward`), as XLA keeps no rows: these products are left out, and `way.recomputed` of
    them, the widest first, are put before the backward pass.
    """
    recomputed = way.recomputed
    body = [item for item in loop.body if isinstance(item, Operation)]
    of_matrix = _products_by_matrix(loop, blocks)
    is_backward = _is_backward(loop)
    is_again = has_backward and not is_backward and len(of_matrix) == 1
    is_backward |= gradient is not None
    if is_again and not recomputed:
        return []
    passes: dict[str, GroupedPass] = {}
    for products in of_matrix.values() if not is_again else ():
        if not is_backward:
            passes |= dict.fromkeys((item.name for item in products), "forward")
            continue
        sums = [item for item in products if _sums_over_rows(item, blocks.rows)] or products[-1:]
        if gradient == "input_gradient":
            sums = []
        # The input's gradient depends on what is computed again, so it comes after that.
        others = [item for item in products if item not in sums][-1:]
        if gradient != "weight_gradient":
            passes |= dict.fromkeys((item.name for item in others), "input_gradient")
        if gradient != "input_gradient":
            passes |= dict.fromkeys((item.name for item in sums[:1]), "weight_gradient")
    factor = None if way.capacity is None else way.capacity.factor
    grouped = partial(
        _grouped_product, blocks_at_once=loop.trip_count, blocks=blocks, factor=factor
    )
    made: list[Operation] = []
    if way.capacity is not None:
        first = next(item for item in body if _is_product(item))
        # For tokens, results and the mask; the forward product into places runs again.
        runs = 3 + bool(recomputed) if is_backward else 2
        for index in range(runs):
            name = f"{loop.name}.places.{index}"
            made.append(way.capacity.product(name, first.dtype, way.tokens))
    for size in sorted(of_matrix, reverse=True)[:recomputed] if is_backward else ():
        for item in of_matrix[size]:
            if passes.get(item.name) == "input_gradient":
                again = grouped(item, which="input_gradient")
                which = None if again.grouped_pass is None else "forward"
                made.append(replace(again, name=f"{item.name}.again", grouped_pass=which))
    for item in body:
        if _is_product(item):
            if which := passes.get(item.name):
                made.append(grouped(item, which=which))
        elif way.has_matrices_once and (product := _cast_product(item, body)) is not None:
            made.append(_cast_once(item, product, loop.trip_count, blocks))
        elif not _copies_matrix(item, of_matrix, way):
            made.append(
                replace(
                    item,
                    read_bytes=item.read_bytes * loop.trip_count,
                    write_bytes=item.write_bytes * loop.trip_count,
                    flop=item.flop * loop.trip_count,
                )
            )
    return made


def _copies_matrix(item: Operation, of_matrix: Mapping[int, list[Operation]], way: _Way) -> bool:
    """Whether an operation copies the matrix of a block, or adds to the matrix's gradient."""
    if way.has_matrices_once and "slice" in item.name.split("."):
        return True
    return item.write_bytes in {_element_bytes(item) * size for size in of_matrix}


def _cast_product(item: Operation, body: Iterable[Operation]) -> Operation | None:
    """The product in a block whose operands `item` casts to 8 bits; None if there is none."""
    name, _, part = item.name.rpartition(".")
    if part not in ("cast", "amax"):
        return None
    return next((each for each in body if each.name == name and _is_product(each)), None)


def _cast_once(item: Operation, product: Operation, times: int, blocks: ExpertBlocks) -> Operation:
    """The cast of a product's operands for all blocks, in which each matrix is cast once."""
    _, m, n, k = product.shape
    matrix = 0 if _sums_over_rows(product, blocks.rows) else _matrix(product, blocks.rows)
    share = matrix / ((m + n) * k)
    runs = times * (1 - share) + min(times, blocks.experts) * share
    return replace(
        item,
        read_bytes=round(item.read_bytes * runs),
        write_bytes=round(item.write_bytes * runs),
    )


def _element_bytes(item: Operation) -> int:
    return _WIDE_BYTES if item.dtype == "f32" else 2


def _products_by_matrix(loop: Loop, blocks: ExpertBlocks) -> dict[int, list[Operation]]:
    """The products of a loop over blocks, keyed by the elements of the expert's matrix that they
    multiply or differentiate: gate and up together, and down, which has half as many."""
    made: dict[int, list[Operation]] = {}
    for item in loop.body:
        if isinstance(item, Operation) and _is_product(item):
            made.setdefault(_matrix(item, blocks.rows), []).append(item)
    return made


def _is_backward(loop: Loop) -> bool:
    """Whether a loop over blocks computes gradients: two or more products per matrix."""
    blocks = loop.expert_blocks
    if blocks is None:
        return False
    return any(len(products) > 1 for products in _products_by_matrix(loop, blocks).values())


def _is_product(item: Operation) -> bool:
    return item.kind == "matmul" and len(item.shape) == 4 and item.shape[0] == 1


def _sums_over_rows(item: Operation, rows: int) -> bool:
    """Whether a product of a block is a matrix gradient, judging by its shape."""
    _, m, n, k = item.shape
    return k == rows and rows not in (m, n)


def _sides(item: Operation, rows: int) -> tuple[int, int]:
    """(outer, inner) of a product of a block: the sides of the expert's matrix."""
    _, m, n, k = item.shape
    if m == rows:
        return n, k
    return (m, k) if n == rows else (m, n)


def _matrix(item: Operation, rows: int) -> int:
    """Elements of the matrix of one expert."""
    return math.prod(_sides(item, rows))


def _grouped_product(
    item: Operation,
    blocks_at_once: int,
    blocks: ExpertBlocks,
    factor: float | None,
    which: GroupedPass,
) -> Operation:
    rows = round(blocks_at_once * blocks.rows * (factor or 1.0))
    outer, inner = _sides(item, blocks.rows)
    if which == "input_gradient":  # shapes are those of the forward product
        outer, inner = inner, outer
    return replace(
        item,
        shape=(blocks.experts, math.ceil(rows / blocks.experts), outer, inner),
        flop=2 * rows * outer * inner,
        # Experts of equal capacity are a batch of plain products.
        grouped_pass=which if factor is None else None,
        read_bytes=0,  # its cost counts operands and result once each
        write_bytes=0,
    )
