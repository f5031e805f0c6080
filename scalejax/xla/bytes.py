"""Bytes that one HLO operation reads and writes, with slices and in-place updates resolved.

A fusion that slices a large operand (one layer of stacked parameters) reads the slice; a
fusion that ends by updating a slice of its operand in place writes the update. Computed by a
backward pass over the fused computation, from the needed elements of each result to those of its
operands. Caches and repeated reads are not considered.
"""

from collections.abc import Callable, Sequence

from scalejax.xla.flop import FUSED_ATTENTION
from scalejax.xla.hlo import (
    Array,
    Computation,
    Instruction,
    Module,
    Shape,
    arrays,
    bytes_of,
    shape_bytes,
)

_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = ("dynamic-update-slice", "scatter")
_VIEWS = ("bitcast", "reshape", "copy", "convert", "transpose")
"""Operations that pass on their operand's elements one to one."""


def moved_bytes(
    module: Module, computation: Computation, instruction: Instruction
) -> tuple[int, int]:
    """(bytes read, bytes written) by `instruction` of `computation`."""
    shapes = computation.operand_shapes(instruction)
    if instruction.opcode in ("fusion", "fusion-start"):
        return _fusion_traffic(module.computations[instruction.called("calls")[0]], module)
    if instruction.opcode in _UPDATES:
        update = shape_bytes(_update_shape(instruction, shapes))
        return update, update
    result = _result_shape(computation, instruction)
    needs = _needs(instruction, shapes, elements(result))
    reads = sum(_bytes(shape, need) for shape, need in zip(shapes, needs, strict=True))
    return reads, shape_bytes(result)


def elements(shape: Shape) -> int:
    """Elements of all arrays of a shape."""
    return sum(array.elements for array in arrays(shape))


def _bytes(shape: Shape, need: int) -> int:
    if isinstance(shape, Array):
        return bytes_of(shape.dtype, need)
    return shape_bytes(shape) if need else 0


def _result_shape(computation: Computation, instruction: Instruction) -> Shape:
    """Result shape of `instruction`, without the workspace that cuBLAS and cuDNN calls append."""
    if _is_fused_attention(instruction):  # several results before the workspace
        return tuple(array for array in arrays(instruction.shape) if array.dtype != "u8")
    if instruction.opcode == "get-tuple-element":
        whole = computation.instructions[instruction.operands[0]]
        is_workspace = (
            _is_library_call(whole)
            and not _is_fused_attention(whole)
            and instruction.integers("index") != (0,)
        )
        return () if is_workspace else instruction.shape
    return next(arrays(instruction.shape)) if _is_library_call(instruction) else instruction.shape


def _is_fused_attention(instruction: Instruction) -> bool:
    return instruction.call_target.startswith(FUSED_ATTENTION)


def _is_library_call(instruction: Instruction) -> bool:
    return instruction.call_target.startswith(("__cublas", "__cudnn"))


def _fusion_traffic(computation: Computation, module: Module) -> tuple[int, int]:
    written, in_place, needed = 0, set[str](), dict.fromkeys(computation.instructions, 0)
    for name in _results(computation):
        update = _in_place_update(computation, name)
        if update is None:
            result = _result_shape(computation, computation.instructions[name])
            written += shape_bytes(result)
            needed[name] = elements(result)
        else:
            shapes = computation.operand_shapes(update)
            written += shape_bytes(_update_shape(update, shapes))
            in_place.add(update.name)
    _propagate(computation, module, needed, in_place)
    read = sum(
        _bytes(instruction.shape, needed[name])
        for name, instruction in computation.instructions.items()
        if instruction.opcode == "parameter"
    )
    return read, written


def _propagate(
    computation: Computation, module: Module, needed: dict[str, int], in_place: set[str]
) -> None:
    """Propagate `needed`, elements of each instruction, backwards to their operands."""
    slices: set[tuple[tuple[str, ...], str]] = set()
    for instruction in reversed(computation.instructions.values()):
        if instruction.opcode == "parameter":
            continue
        shapes = computation.operand_shapes(instruction)
        if instruction.name in in_place:
            needs = _in_place_needs(instruction, shapes)
        elif not needed[instruction.name]:
            continue
        elif instruction.opcode == "fusion":
            needs = _nested_needs(instruction, module, needed[instruction.name])
        else:
            needs = _needs(instruction, shapes, needed[instruction.name])
        is_slice = instruction.opcode in _SLICES
        key = (instruction.operands, instruction.attributes.get("slice", ""))
        for position, (name, shape, need) in enumerate(
            zip(instruction.operands, shapes, needs, strict=True)
        ):
            if is_slice and position == 0 and key not in slices:
                slices.add(key)
                needed[name] = min(elements(shape), needed[name] + need)
            else:
                needed[name] = max(needed[name], need)


def _nested_needs(instruction: Instruction, module: Module, need: int) -> list[int]:
    """Elements of each operand that `need` elements of a fusion within a fusion require (TPU)."""
    computation = module.computations[instruction.called("calls")[0]]
    needed = dict.fromkeys(computation.instructions, 0)
    for name in _results(computation):
        needed[name] = min(need, elements(computation.instructions[name].shape))
    _propagate(computation, module, needed, set())
    parameters = [each for each in computation.instructions.values() if each.opcode == "parameter"]
    parameters.sort(key=lambda parameter: int(parameter.literal))
    return [needed[parameter.name] for parameter in parameters]


def _results(computation: Computation) -> tuple[str, ...]:
    root = computation.root
    return root.operands if root.opcode == "tuple" else (root.name,)


def _in_place_update(computation: Computation, name: str) -> Instruction | None:
    """The in-place update of a parameter that computes `name`; None if there is no such update."""
    instruction = computation.origin(name, _VIEWS)
    if instruction.opcode not in _UPDATES:
        return None
    target = computation.origin(instruction.operands[0], _VIEWS)
    return instruction if target.opcode == "parameter" else None


def _update_shape(instruction: Instruction, shapes: Sequence[Shape]) -> Shape:
    """Shape that an update writes: operand 1 of a dynamic-update-slice; the updates of a scatter
    of n arrays (n targets, indices, n updates)."""
    if instruction.opcode == "dynamic-update-slice":
        return shapes[1]
    return tuple(shapes[len(shapes) // 2 + 1 :])


def _in_place_needs(instruction: Instruction, shapes: Sequence[Shape]) -> list[int]:
    targets = 1 if instruction.opcode == "dynamic-update-slice" else len(shapes) // 2
    return [0 if i < targets else elements(shape) for i, shape in enumerate(shapes)]


def _needs(instruction: Instruction, shapes: Sequence[Shape], need: int) -> list[int]:
    """Elements of each operand that `need` elements of the result require."""
    sizes = [elements(shape) for shape in shapes]
    rule = _RULES.get(instruction.opcode)
    if rule is not None:
        return rule(sizes, need)
    total = elements(instruction.shape)
    # Element by element where operand and result are alike; otherwise all of it, to be safe.
    return [min(size, need) if size <= total else size for size in sizes]


def _slice_needs(sizes: list[int], need: int) -> list[int]:
    return [min(sizes[0], need), *sizes[1:]]


def _update_needs(sizes: list[int], need: int) -> list[int]:
    return [max(0, need - sizes[1]), *(min(size, need) for size in sizes[1:])]


def _whole(sizes: list[int], need: int) -> list[int]:
    return sizes


_RULES: dict[str, Callable[[list[int], int], list[int]]] = {
    **dict.fromkeys(_SLICES, _slice_needs),
    "dynamic-update-slice": _update_needs,
    "dot": _whole,
    "convolution": _whole,
    "scatter": _whole,
    "sort": _whole,
    "call": _whole,
    "custom-call": _whole,
}
