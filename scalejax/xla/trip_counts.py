"""Trip counts of the loops of a compiled program.

XLA's compilers for CPUs and GPUs annotate them; that of TPUs does not, so they are inferred.
"""

from scalejax.xla.hlo import Computation, Instruction, Module

_SAME_VALUE = ("copy", "bitcast", "convert")


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Trip count of `loop`, a "while" of `computation`; None if it is unknown.

    Read from a condition "counter < constant" whose counter starts at a constant and grows by
    one, as those of `lax.scan` and `lax.fori_loop` do.
    """
    known = loop.backend_config.get("known_trip_count")
    if isinstance(known, dict):
        return int(known["n"])
    condition = module.computations.get("".join(loop.called("condition")))
    if condition is None:
        return None
    root = condition.root
    if root.opcode != "compare" or root.attributes.get("direction") != "LT":
        return None
    counter, bound = (condition.instructions[name] for name in root.operands)
    if counter.opcode != "get-tuple-element":
        return None
    index = counter.integers("index")[0]
    start = _constant(computation, _element(computation, loop.operands[0], index))
    end = _constant(condition, bound.name)
    body = module.computations[loop.called("body")[0]]
    if start is None or end is None or not _grows_by_one(body, index):
        return None
    return max(0, end - start)


def _element(computation: Computation, name: str, index: int) -> str:
    """Name of element `index` of the tuple `name`."""
    instruction = computation.origin(name, _SAME_VALUE)
    return instruction.operands[index] if instruction.opcode == "tuple" else name


def _grows_by_one(body: Computation, index: int) -> bool:
    """Whether element `index` of the result of `body` is that of its parameter, plus one."""
    step = body.origin(_element(body, body.root.name, index), _SAME_VALUE)
    if step.opcode != "add":
        return False
    left, right = step.operands
    before = body.origin(left, _SAME_VALUE)
    is_counter = before.opcode == "get-tuple-element" and before.integers("index") == (index,)
    return is_counter and _constant(body, right) == 1


def _constant(computation: Computation, name: str) -> int | None:
    instruction = computation.origin(name, _SAME_VALUE)
    is_integer = instruction.opcode == "constant" and instruction.literal.lstrip("-").isdigit()
    return int(instruction.literal) if is_integer else None
