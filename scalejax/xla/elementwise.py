"""What kind of element-wise work each operation of a compiled program is, from its text.

On a CPU that decides its bytes per second beside their number: one that transposes takes six times
as long as one that scales, reductions and transcendental functions two to three times. Knows no
device.
"""

from collections.abc import Iterator
from typing import Literal

from scalejax.xla.hlo import Computation, Instruction, Module, arrays, parse_module

ElementwiseKind = Literal["simple", "transcendental", "transposition", "reduction"]

_SLOWEST_FIRST: tuple[ElementwiseKind, ...] = ("transposition", "reduction", "transcendental")
_TRANSCENDENTAL = (
    *("exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "power"),
    *("atan2", "cbrt", "cosine", "erf", "sine", "tan", "tanh"),
)


def elementwise_kinds(text: str) -> dict[str, ElementwiseKind]:
    """The kind of each instruction in the text of a compiled program, by its name; those that are
    simple are left out.

    One that does several things to at least half of the elements of its largest array is of the
    slowest: a transposition of the last dimension, a reduction over it, a transcendental function.

    Raises:
        ProfileError: if a line is no HLO.
    """
    module = parse_module(text)
    found: dict[str, ElementwiseKind] = {}
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            inner = list(_inside(module, computation, instruction))
            most = max((size for _, _, size in inner), default=0)
            kinds = {_kind(where, each) for where, each, size in inner if 2 * size >= most}
            for kind in _SLOWEST_FIRST:
                if kind in kinds:
                    found[instruction.name] = kind
                    break
    return found


def _inside(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction, int]]:
    """The instruction or, of a fusion, those fused, each with its computation and the elements of
    its largest array."""
    if instruction.opcode == "fusion":
        for name in instruction.called("calls"):
            called = module.computations[name]
            for each in called.instructions.values():
                yield from _inside(module, called, each)
        return
    shapes = (instruction.shape, *computation.operand_shapes(instruction))
    sizes = [array.elements for shape in shapes for array in arrays(shape)]
    yield computation, instruction, max(sizes, default=0)


def _kind(computation: Computation, instruction: Instruction) -> ElementwiseKind:
    if instruction.opcode in _TRANSCENDENTAL:
        return "transcendental"
    dimensions = instruction.integers("dimensions")
    if instruction.opcode == "transpose" and dimensions[-1:] != (len(dimensions) - 1,):
        return "transposition"
    if instruction.opcode in ("reduce", "reduce-window"):
        last = len(next(arrays(computation.operand_shapes(instruction)[0])).dims) - 1
        if instruction.opcode == "reduce-window" or last in dimensions:
            return "reduction"
    return "simple"
