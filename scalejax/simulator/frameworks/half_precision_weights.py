"""Programs of frameworks that hold weights and gradients in half precision.

Our step holds parameters in f32, stacked over layers: each microbatch casts them, clears a buffer
for their gradients, and adds these to sums in f32. Megatron-LM in fp16 holds them in fp16, next to
the f32 master copy that the optimizer updates (Float16OptimizerWithFloat16Params in
megatron/optimizer/optimizer.py, FP16_Optimizer of DeepSpeed); products read them without a cast,
and their results are added to fp16 gradients.

The slices of these stacks in our loop over layers, which PyTorch does not need, are kept: they
stand in for the traffic between kernels that PyTorch does not fuse, which is not counted here.
Independent of hardware.
"""

from collections.abc import Iterator
from dataclasses import replace

from scalejax.simulator.program import Loop, Operation, Program

_Items = tuple[Operation | Loop, ...]
_HALF, _FULL = 2, 4  # bytes of an element


def with_half_weights(program: Program) -> Program:
    """`program` without casts and clearing of weights, and with gradients summed in fp16.

    Weights are distinguished from activations by the bytes of their stacks. Left out: biases and
    scales, a thousandth of the weights.

    Args:
        program: the compiled step, its layers in loops.
    """
    return replace(program, operations=_in_half(program.operations))


def _in_half(items: _Items) -> _Items:
    """`items` with the operations of a microbatch, at any depth, in half precision."""
    forward = next((each for each in items if isinstance(each, Loop) and _is_of_layers(each)), None)
    if forward is None:
        return tuple(
            replace(item, body=_in_half(item.body)) if isinstance(item, Loop) else item
            for item in items
        )
    stacked = {count * forward.trip_count for count in _weights(forward.body)}
    buffers = stacked | set(_weights(items)[:1])  # the token embedding, in the logits' product
    return tuple(_changed(items, buffers))


def _changed(items: _Items, buffers: set[int]) -> Iterator[Operation | Loop]:
    """`items` of a microbatch in half precision; `buffers` are the element counts of weights."""
    for item in items:
        if isinstance(item, Loop) or item.kind != "fusion":
            yield item
        elif _is_summed(item, buffers):
            count = item.write_bytes // _FULL
            yield replace(item, read_bytes=2 * _HALF * count, write_bytes=_HALF * count)
        elif not _is_cast_or_cleared(item, buffers):
            yield item


def _is_of_layers(loop: Loop) -> bool:
    holds_loops = any(isinstance(item, Loop) for item in loop.body)
    return not holds_loops and bool(_weights(loop.body))


def _weights(items: _Items) -> list[int]:
    """Elements of the weight matrix in each product of a forward pass."""
    products = [each for each in items if isinstance(each, Operation) and each.kind == "matmul"]
    shapes = [each.shape for each in products if len(each.shape) == 4]
    return [n * k for batch, _, n, k in shapes if batch == 1]


def _is_summed(item: Operation, buffers: set[int]) -> bool:
    """Whether an operation adds half-precision gradients to their sums in f32."""
    count = item.write_bytes // _FULL
    return item.read_bytes == (_FULL + _HALF) * count and count in buffers


def _is_cast_or_cleared(item: Operation, buffers: set[int]) -> bool:
    count = item.write_bytes // _HALF
    return item.read_bytes in (0, _FULL * count) and count in buffers
