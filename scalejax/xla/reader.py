"""Converts a compiled program (HLO) into the schedule of operations of a `Program`.

Knows the compute, memory traffic and communication of XLA's instructions; knows no time.

Left out, and why: the FLOP of element-wise operations, which are bound by bytes; the
conditions of loops (one scalar); whether a fusion that the compiler started asynchronously
(`fusion-start`: slices of stacked parameters, on a stream of their own) overlaps, since it is
counted where it starts; and the copies by which a TPU prefetches operands onto the chip, since
their bytes are counted where they are used.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from scalejax.config.moe import BlocksAtEvenLoad, blocks_at_even_load
from scalejax.config.pipeline_schedule import GATES
from scalejax.core.errors import ProfileError
from scalejax.simulator.program import (
    HOST_MEMORY,
    Collective,
    CollectiveName,
    DeviceGroup,
    ExpertBlocks,
    Loop,
    Operation,
    OperationKind,
    with_share,
)
from scalejax.xla.bytes import moved_bytes
from scalejax.xla.flop import FlopCount, count_flop
from scalejax.xla.hlo import Computation, Instruction, Module, arrays, parse_module, shape_bytes
from scalejax.xla.replica_groups import MeshAxes, permute_group, replica_group

_COLLECTIVES: dict[str, CollectiveName] = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
    # A ring forwards a broadcast as it does the parts of a gather.
    "collective-broadcast": "all_gather",
}
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "domain",
    "partition-id", "replica-id", "opt-barrier", "optimization-barrier", "add-dependency",
}  # fmt: skip
"""Instructions that cost nothing on the device."""
_FREE_CALLS = {
    "AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound",
}  # fmt: skip
"""Custom calls of a TPU's compiler that are no-ops."""
_COPIES = {
    "copy", "copy-start", "transpose", "slice", "dynamic-slice", "dynamic-update-slice",
    "concatenate", "pad", "reverse", "reshape", "gather",
}  # fmt: skip


def read_program(
    text: str,
    mesh_axes: MeshAxes,
    shares: Mapping[str, float] | None = None,
    *,
    has_host_memory: bool = True,
) -> tuple[Operation | Loop, ...]:
    """The schedule in the text of a compiled program.

    Args:
        text: result of `compiled.as_text()`.
        mesh_axes: (name, size) of each axis of the mesh it was compiled for.
        shares: fraction of the runs in which the condition of a named scope holds, by scope name.
            For other conditions, the costliest branch is counted.
        has_host_memory: whether the memory of the host is separate from the devices'.

    Raises:
        ProfileError: if the text cannot be read, or holds a loop of unknown length.
    """
    module = parse_module(text)
    reader = _Reader(module, mesh_axes, shares or {}, has_host_memory=has_host_memory)
    return tuple(reader.schedule(module.entry))


class _Reader:
    """Walks the computations of one module in order of execution."""

    def __init__(
        self,
        module: Module,
        mesh_axes: MeshAxes,
        shares: Mapping[str, float],
        *,
        has_host_memory: bool,
    ) -> None:
        self._has_host_memory = has_host_memory
        self._module = module
        self._mesh_axes = mesh_axes
        self._shares = shares
        self._uses: Counter[str] = Counter()

    def schedule(self, name: str) -> Iterator[Operation | Loop]:
        """Yield the operations of computation `name`, with calls inlined."""
        computation = self._module.computations[name]
        started: dict[str, str] = {}
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            if opcode in _FREE or _is_bookkeeping(instruction):
                continue
            if opcode == "while":
                yield self._loop(computation, instruction)
            elif opcode == "conditional":
                yield from self._branches(instruction)
            elif opcode == "call":
                yield from self.schedule(instruction.called("to_apply")[0])
            elif opcode == "async-start":
                yield from self._started(computation, instruction, started)
            elif opcode.endswith(("-done", "-update")):
                yield from self._finished(instruction, started)
            elif (direction := self._host_copy(computation, instruction)) is not None:
                yield self._copy(computation, instruction, direction, started)
            elif opcode.removesuffix("-start") in _COLLECTIVES:
                yield from self._collective(computation, instruction, instruction, started)
            else:
                yield self._operation(computation, instruction)

    def _unique(self, name: str) -> str:
        """`name`, numbered if a computation that is called twice has used it before."""
        self._uses[name] += 1
        return name if self._uses[name] == 1 else f"{name}#{self._uses[name]}"

    def _loop(self, computation: Computation, instruction: Instruction) -> Loop:
        if even := _blocks_at_even_load(instruction):
            return Loop(
                name=self._unique(instruction.name),
                trip_count=even.blocks,
                body=tuple(self.schedule(instruction.called("body")[0])),
                expert_blocks=ExpertBlocks(
                    experts=even.experts,
                    rows=even.rows,
                    experts_per_token=even.experts_per_token,
                ),
            )
        count = _trip_count(self._module, computation, instruction)
        body = tuple(self.schedule(instruction.called("body")[0]))
        if count is None:
            metadata = instruction.attributes.get("metadata", "")
            if gate := next((gate for gate in GATES if f'{gate}/while"' in metadata), None):
                return Loop(name=self._unique(gate), trip_count=1, body=body)
            source = self._module.source(instruction)
            raise ProfileError(
                f"the loop {instruction.name!r} ({source or 'of unknown source'}) runs an unknown "
                "number of times, so it cannot be costed. Use lax.scan, or lax.fori_loop with "
                "fixed bounds."
            )
        return Loop(name=self._unique(instruction.name), trip_count=count, body=body)

    def _branches(self, instruction: Instruction) -> list[Operation | Loop]:
        """Both branches with their fractions of the steps, if known; otherwise the costliest."""
        names = (
            *instruction.called("branch_computations"),
            *instruction.called("false_computation"),
            *instruction.called("true_computation"),
        )
        branches = [list(self.schedule(name)) for name in names]
        metadata = instruction.attributes.get("metadata", "")
        share = next((share for scope, share in self._shares.items() if scope in metadata), None)
        if share is None or len(branches) != 2:
            return max(branches, key=_weight)
        otherwise, holds = branches  # `lax.cond` numbers them by the value of the condition
        parts = ((otherwise, 1 - share), (holds, share))
        return [item for branch, part in parts if part for item in with_share(branch, part)]

    def _started(
        self, computation: Computation, instruction: Instruction, started: dict[str, str]
    ) -> Iterator[Operation | Loop]:
        """Yield the operations of a generic `async-start`: a collective, or compute."""
        called = self._module.computations[instruction.called("calls")[0]]
        if called.root.opcode in _COLLECTIVES:
            yield from self._collective(called, called.root, instruction, started)
        else:
            yield from self.schedule(called.name)

    def _collective(
        self,
        computation: Computation,
        instruction: Instruction,
        start: Instruction,
        started: dict[str, str],
    ) -> Iterator[Operation]:
        """Yield the collective `instruction` of `computation`, started by `start`."""
        group = self._group(instruction)
        if group.size == 1:
            return
        operands = computation.operand_shapes(instruction)
        sent = sum(map(shape_bytes, operands))
        name = _COLLECTIVES[instruction.opcode.removesuffix("-start")]
        gathered = sent * group.size if name == "all_gather" else sent
        settings = start.backend_config.get("collective_backend_config", {})
        is_sync = isinstance(settings, dict) and bool(settings.get("is_sync", False))
        operation = Operation(
            name=self._unique(start.name),
            kind="collective",
            dtype=next(arrays(operands)).dtype,
            read_bytes=sent,
            write_bytes=sent // group.size if name == "reduce_scatter" else gathered,
            collective=Collective(
                name=name,
                payload_bytes=gathered,
                group=group,
                is_async=start.opcode.endswith("-start") and not is_sync,
                # The operands of an all-to-all are the parts that go to each member.
                buffer_count=1 if name == "all_to_all" else max(1, len(operands)),
            ),
            source=self._module.source(start),
        )
        if operation.collective is not None and operation.collective.is_async:
            started[start.name] = operation.name
        yield operation

    def _group(self, instruction: Instruction) -> DeviceGroup:
        attributes = instruction.attributes
        if "source_target_pairs" in attributes:
            return permute_group(attributes["source_target_pairs"], self._mesh_axes)
        return replica_group(attributes.get("replica_groups", "{}"), self._mesh_axes)

    def _finished(self, instruction: Instruction, started: dict[str, str]) -> Iterator[Operation]:
        """Yield the wait for an asynchronous collective; other "done" instructions are free."""
        start = instruction.operands[0]
        if start not in started:
            return
        if instruction.opcode.endswith("-update"):
            started[instruction.name] = started[start]
            return
        yield Operation(
            name=self._unique(instruction.name),
            kind="wait",
            dtype=next(arrays(instruction.shape)).dtype,
            waits_for=started[start],
        )

    def _host_copy(
        self, computation: Computation, instruction: Instruction
    ) -> CollectiveName | None:
        """The direction in which an instruction copies between a device and its host; None if it
        does not, or for a CPU, whose devices are in the memory of the host."""
        if not self._has_host_memory:
            return None
        if _result_is_on_host(instruction):  # an update in place reads its old value there too
            return "copy_to_host"
        operands = (computation.instructions[name] for name in instruction.operands)
        return "copy_from_host" if any(any(each.on_host) for each in operands) else None

    def _copy(
        self,
        computation: Computation,
        instruction: Instruction,
        direction: CollectiveName,
        started: dict[str, str],
    ) -> Operation:
        """The copy that `instruction` makes or starts."""
        operands = computation.operand_shapes(instruction)
        if instruction.opcode == "copy-start":
            payload = shape_bytes(operands[0])
        else:
            payload = moved_bytes(self._module, computation, instruction)[1]
        is_async = instruction.opcode.endswith("-start")
        operation = Operation(
            name=self._unique(instruction.name),
            kind="collective",
            dtype=next(arrays(operands)).dtype,
            read_bytes=payload,
            write_bytes=payload,
            collective=Collective(
                name=direction, payload_bytes=payload, group=HOST_MEMORY, is_async=is_async
            ),
            source=self._source(instruction),
        )
        if is_async:
            started[instruction.name] = operation.name
        return operation

    def _operation(self, computation: Computation, instruction: Instruction) -> Operation:
        read_bytes, write_bytes = moved_bytes(self._module, computation, instruction)
        products = list(self._products(computation, instruction))
        kind: OperationKind = "fusion"
        dtype, shape = next(arrays(instruction.shape)).dtype, ()
        largest = max(products, key=lambda product: product.flop, default=None)
        if largest is not None:
            kind, dtype, shape = largest.kind, largest.dtype, largest.shape
        elif instruction.opcode in _COPIES:
            kind = "copy"
        elif instruction.opcode == "custom-call":
            kind = "custom"
        return Operation(
            name=self._unique(instruction.name),
            kind=kind,
            dtype=dtype,
            flop=sum(product.flop for product in products),
            read_bytes=read_bytes,
            write_bytes=write_bytes,
            shape=shape,
            convolution_pass=None if largest is None else largest.convolution_pass,
            convolution_groups=1 if largest is None else largest.convolution_groups,
            source=self._source(instruction),
        )

    def _source(self, instruction: Instruction) -> str | None:
        """Place in the user's program; for a fusion without one, that of its root."""
        source = self._module.source(instruction)
        for name in instruction.called("calls"):
            source = source or self._module.source(self._module.computations[name].root)
        return source

    def _products(self, computation: Computation, instruction: Instruction) -> Iterator[FlopCount]:
        """Yield the matrix products and convolutions in `instruction`, fused ones included."""
        found = count_flop(instruction, computation.operand_shapes(instruction))
        if found is not None:
            yield found
        for name in instruction.called("calls"):
            called = self._module.computations[name]
            for inner in called.instructions.values():
                yield from self._products(called, inner)


def _result_is_on_host(instruction: Instruction) -> bool:
    """Whether the result of an instruction, or of the operation that it starts, lies in the memory
    of the host."""
    flags = instruction.on_host
    if not flags:
        return False
    if instruction.opcode == "copy-start":  # (result, operand, context)
        return flags[0]
    return flags[-2] if instruction.opcode.endswith("-start") else any(flags)


def _is_bookkeeping(instruction: Instruction) -> bool:
    """Whether an instruction is free, or its cost is counted elsewhere."""
    if instruction.opcode in ("copy-start", "slice-start"):
        return instruction.is_on_chip
    return instruction.call_target in _FREE_CALLS


def _weight(items: list[Operation | Loop]) -> tuple[int, int]:
    """(FLOP, bytes) of operations, by which the costliest branch of a conditional is chosen."""
    flop = moved = 0
    for item in items:
        if isinstance(item, Loop):
            inner = _weight(list(item.body))
            flop, moved = flop + item.trip_count * inner[0], moved + item.trip_count * inner[1]
        else:
            flop, moved = flop + item.flop, moved + item.read_bytes + item.write_bytes
    return flop, moved


# Trip counts of loops: XLA's compilers for CPUs and GPUs annotate them; the one for TPUs does not,
# so they are inferred.

_SAME_VALUE = ("copy", "bitcast", "convert")


def _blocks_at_even_load(loop: Instruction) -> BlocksAtEvenLoad | None:
    """The blocks of experts that a loop runs over, from its name scope; None for other loops."""
    scope = re.search(r'op_name="([^"]+)"', loop.attributes.get("metadata", ""))
    return blocks_at_even_load(scope[1]) if scope else None


def _trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
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
