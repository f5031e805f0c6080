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

from dataclasses import replace

from scalejax.program import Program

_F32_BYTES = 4
_ARRAYS, _DIVIDED_ARRAYS, _OWN_ARRAYS = 3, 4, 1
"""Arrays of tokens x vocabulary in float32: theirs, where tensor divides them, and ours."""


def with_eager_loss(program: Program, logits: int, *, is_divided: bool) -> Program:
    """`program`, whose memory is highest at its loss, with a loss that is not compiled.

    Args:
        program: the compiled step.
        logits: of a microbatch on one device.
        is_divided: whether devices along tensor each hold a part of them.
    """
    arrays = (_DIVIDED_ARRAYS if is_divided else _ARRAYS) - _OWN_ARRAYS
    return _with_more(program, arrays * logits * _F32_BYTES)


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
