"""Workspace of convolution kernels on CPUs, beyond the memory that the compiler assigned.

A convolution of XLA's CPU runtime (Eigen) copies its input with padding and dilation filled in,
and its kernel: seen in the growth of the process, for strides 1 and 2 and all three passes, to
the megabyte (`experiments/memory_against_run`). The compiler's account has neither. Kernels of
other back ends have their workspace in the program.
"""

import math

from scalejax.xla.flop import padded_sides
from scalejax.xla.hlo import Array, Module, bytes_of

AT_ONCE = 2
"""Convolutions that run concurrently: the two gradients of a layer are independent."""


def convolution_workspace_bytes(module: Module) -> int:
    """Peak workspace of the convolutions of a CPU program: that of the `AT_ONCE` largest."""
    scratch = []
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode != "convolution":
                continue
            lhs, rhs = computation.operand_shapes(instruction)[:2]
            if isinstance(lhs, Array) and isinstance(rhs, Array):
                sides = padded_sides(instruction, lhs)
                grown = math.prod(padded / side for padded, side in sides if side)
                scratch.append(bytes_of(lhs.dtype, round(lhs.elements * grown)) + rhs.bytes)
    return sum(sorted(scratch, reverse=True)[:AT_ONCE])
