"""Memory that eager (uncompiled) PyTorch holds and a compiled step does not.

The loss of torchtitan of 2024 was not compiled, whether or not the blocks were (its train.py:
"compiling loss function causes CUDA errors, turning off for now"; pull request 1033 of April 2025
compiled it). Uncompiled, it holds arrays of tokens x vocabulary: the logits in the compute type,
which are freed before the backward pass but stay reserved, and in float32 the log-probabilities,
the gradient of the selected token's log-probability, and the gradient of the logits. Where tensor
divides the vocabulary (torch/distributed/tensor/parallel/loss.py,
_nll_loss_and_log_softmax_backward) the exponential of the log-probabilities is held as well. Our
compiled step holds the logits in the compute type, and one array in float32.

With selective recompute by operation names (torch/utils/checkpoint.py,
_CachingTorchDispatchMode), uncompiled blocks keep the result of every selected operation, including
the last product of a block, which no gradient needs. Independent of hardware.
"""

from collections.abc import Sequence
from dataclasses import replace

from scalejax.simulator.program import Program

_F32_BYTES = 4
_ARRAYS, DIVIDED_ARRAYS, _OWN_ARRAYS = 3, 4, 1
"""Float32 arrays of tokens x vocabulary: in PyTorch; in PyTorch with the vocabulary divided over
tensor; in our compiled step."""
VOCABULARY_FACTORS = (2, 4)
"""Multiples of the vocabulary with which steps are compiled to find their memory at the loss."""


def temporary_bytes_at_loss(temporary_bytes: Sequence[int]) -> int:
    """Temporary bytes of a step at its loss, from steps with `VOCABULARY_FACTORS` vocabularies.

    A step may peak elsewhere, such as where a whole block is recomputed. With a vocabulary that
    large its peak is at the loss and linear in the vocabulary, so it is extrapolated back to the
    actual vocabulary.
    """
    (few, many), (some, most) = VOCABULARY_FACTORS, temporary_bytes
    return some - (most - some) * (few - 1) // (many - few)


def with_eager_loss(program: Program, logits: int, at_loss: int, *, is_divided: bool) -> Program:
    """`program` with the memory of a loss that is not compiled.

    Args:
        program: the compiled step.
        logits: logits of a microbatch on one device.
        at_loss: bytes that the step holds at its loss in addition to its arguments, from
            `temporary_bytes_at_loss`.
        is_divided: whether the logits are sharded over tensor.
    """
    arrays = (DIVIDED_ARRAYS if is_divided else _ARRAYS) - _OWN_ARRAYS
    peak = program.memory.temporary_bytes
    eager = min(at_loss, peak) + arrays * logits * _F32_BYTES
    return _with_more(program, max(0, eager - peak))


def with_eager_blocks(program: Program, stream_bytes: int, layers: int) -> Program:
    """`program`, with selective recompute by operation, and the memory of uncompiled blocks.

    Args:
        program: the compiled step.
        stream_bytes: output of a block for one microbatch on one device.
        layers: number of blocks.
    """
    return _with_more(program, stream_bytes * layers)


def _with_more(program: Program, size: int) -> Program:
    memory = program.memory
    return replace(program, memory=replace(memory, temporary_bytes=memory.temporary_bytes + size))
