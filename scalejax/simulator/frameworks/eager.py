"""What PyTorch holds, where it is not compiled, that a compiler does not.

The loss of torchtitan of 2024 was not compiled, whether or not the blocks were (its train.py:
"compiling loss function causes CUDA errors, turning off for now"; pull request 1033 of April 2025
compiled it). Arrays of tokens x vocabulary are then the logits as they come out of the product,
which are freed before the backward pass but stay reserved, and in float32 log-probabilities, the
gradient of the choice of a token, and the gradient of the logits. Where tensor divides the
vocabulary (torch/distributed/tensor/parallel/loss.py, _nll_loss_and_log_softmax_backward) the
exponential of the log-probabilities is beside them. Ours holds the logits as they come, and one
array in float32.

Blocks that are not compiled keep the result of every operation that recompute by operation names
(torch/utils/checkpoint.py, _CachingTorchDispatchMode), and so that of the last product of a block,
which no gradient needs. Knows nothing of hardware.
"""

from collections.abc import Sequence
from dataclasses import replace

from scalejax.simulator.program import Program

_F32_BYTES = 4
_ARRAYS, DIVIDED_ARRAYS, _OWN_ARRAYS = 3, 4, 1
"""Arrays of tokens x vocabulary in float32: theirs, where tensor divides them, and ours."""
WORDIER = (2, 4)
"""Times the vocabulary with which steps are compiled to know what they hold at their loss."""


def level_at_loss(temporary_bytes: Sequence[int]) -> int:
    """What a step holds at its loss, from steps with `WORDIER` times the words.

    A step may hold more elsewhere, such as where a whole block is computed again. With so many
    words its peak is at the loss, and grows by as much with every word: a straight line leads
    back to the words that it has.
    """
    (few, many), (some, most) = WORDIER, temporary_bytes
    return some - (most - some) * (few - 1) // (many - few)


def with_eager_loss(program: Program, logits: int, at_loss: int, *, is_divided: bool) -> Program:
    """`program` with a loss that is not compiled.

    Args:
        program: the compiled step.
        logits: of a microbatch on one device.
        at_loss: bytes besides its arguments that it holds at its loss, as `level_at_loss`.
        is_divided: whether devices along tensor each hold a part of them.
    """
    arrays = (DIVIDED_ARRAYS if is_divided else _ARRAYS) - _OWN_ARRAYS
    peak = program.memory.temporary_bytes
    eager = min(at_loss, peak) + arrays * logits * _F32_BYTES
    return _with_more(program, max(0, eager - peak))


def with_eager_blocks(program: Program, stream_bytes: int, layers: int) -> Program:
    """`program`, recomputed by operation, with blocks that are not compiled.

    Args:
        program: the compiled step.
        stream_bytes: of what a block gives, of a microbatch on one device.
        layers: blocks.
    """
    return _with_more(program, stream_bytes * layers)


def _with_more(program: Program, size: int) -> Program:
    memory = program.memory
    return replace(program, memory=replace(memory, temporary_bytes=memory.temporary_bytes + size))
