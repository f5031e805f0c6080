"""Parser of the text of a compiled XLA program (HLO) into computations of instructions.

Knows the grammar of the text and nothing of the meaning of instructions. Reads the notation of
jaxlib 0.10 and 0.12: attributes that differ between versions (layouts, metadata, backend settings)
are kept as text and parsed on demand.
"""

import json
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path, PurePath

from scalejax.core.errors import ProfileError

_PACKAGE = Path(__file__).parents[1]
_WORKER = _PACKAGE / "xla" / "worker.py"

_ITEM_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}


def item_bits(dtype: str) -> int:
    """Bits of one element: 16 for "bf16", 8 for "f8e4m3fn", 4 for "s4"."""
    if dtype in _ITEM_BITS:
        return _ITEM_BITS[dtype]
    match = re.match(r"[a-z]+(\d+)", dtype)
    if match is None:
        raise ProfileError(f"the compiled program holds elements of unknown type {dtype!r}.")
    return int(match[1])


@dataclass(frozen=True, slots=True)
class Array:
    """Type and dimensions of one array."""

    dtype: str
    """Element type, as XLA names it: "bf16"."""
    dims: tuple[int, ...]
    """Length of each dimension; () for a scalar."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Size in memory, packed."""
        return bytes_of(self.dtype, self.elements)


def bytes_of(dtype: str, elements: int) -> int:
    """Size of a number of elements, packed."""
    return -(-elements * item_bits(dtype) // 8)


Shape = Array | tuple["Shape", ...]
"""An array, or a (nested) tuple of them."""


def arrays(shape: Shape) -> Iterator[Array]:
    """Yield the arrays of a shape, in order."""
    if isinstance(shape, Array):
        yield shape
    else:
        for part in shape:
            yield from arrays(part)


def shape_bytes(shape: Shape) -> int:
    """Size of all arrays of a shape."""
    return sum(array.bytes for array in arrays(shape))


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of a computation: `%name = shape opcode(operands), attributes`."""

    name: str
    """Name of the instruction, unique in the computation."""
    shape: Shape
    """Shape of the result."""
    opcode: str
    """HLO opcode: "fusion", "all-reduce-start"."""
    operands: tuple[str, ...]
    """Names of the instructions whose results are operands."""
    literal: str
    """The operands as written: the number of a parameter, the value of a constant."""
    rest: str
    """The attributes as written."""
    is_root: bool
    """Whether its result is that of the computation."""
    is_on_chip: bool = False
    """Whether any part of its result lies in the memory on a TPU's chip (memory space 1)."""
    on_host: tuple[bool, ...] = ()
    """Whether each array of its result lies in the memory of the host (memory space 5); () if
    none does."""

    @cached_property
    def attributes(self) -> dict[str, str]:
        """Text of each attribute by name: {"dimensions": "{0}"}."""
        # XLA writes a reordered mesh as two parts, "mesh[...], device_ids=(...) {...}".
        text = _REORDERED.sub(r"],device_ids=\1 {", self.rest)
        parts = (part.split("=", 1) for part in _split(text))
        return {part[0]: part[1] for part in parts if len(part) == 2}

    @cached_property
    def backend_config(self) -> dict[str, object]:
        """Settings of the backend; empty if there are none, or they are not JSON."""
        try:
            config = json.loads(self.attributes.get("backend_config", "{}"))
        except json.JSONDecodeError:  # a user's own custom call may keep any text here
            return {}
        return config if isinstance(config, dict) else {}

    @property
    def call_target(self) -> str:
        """The function that a custom call calls; "" for other instructions."""
        return self.attributes.get("custom_call_target", "").strip('"')

    def integers(self, attribute: str) -> tuple[int, ...]:
        """The numbers of an attribute such as `lhs_contracting_dims={1}`; () if absent."""
        return tuple(int(text) for text in re.findall(r"-?\d+", self.attributes.get(attribute, "")))

    def called(self, attribute: str) -> tuple[str, ...]:
        """Names of the computations in an attribute such as `calls=%fused_add`; () if absent."""
        return tuple(_NAMES.findall(self.attributes.get(attribute, "")))


@dataclass(frozen=True, kw_only=True)
class Computation:
    """A sequence of instructions; in a compiled program its order is the schedule."""

    name: str
    """Its name, unique in the module."""
    instructions: dict[str, Instruction]
    """The instructions by name, in order."""

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose result is that of the computation."""
        return next(i for i in self.instructions.values() if i.is_root)

    def operand_shapes(self, instruction: Instruction) -> tuple[Shape, ...]:
        """Shapes of the operands of `instruction`."""
        return tuple(self.instructions[name].shape for name in instruction.operands)

    def origin(self, name: str, through: Collection[str]) -> Instruction:
        """The instruction whose result `name` passes on through operations of these opcodes."""
        instruction = self.instructions[name]
        while instruction.opcode in through:
            instruction = self.instructions[instruction.operands[0]]
        return instruction


@dataclass(kw_only=True)
class Module:
    """A compiled program."""

    entry: str
    """Name of the computation that runs."""
    computations: dict[str, Computation]
    """All computations, by name."""
    partition_count: int
    """Devices that run the program together."""
    frames: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Frames of the user's stack: (location, number of the caller's frame)."""

    def source(self, instruction: Instruction) -> str | None:
        """Place in the user's program: "file.py:line", else a name scope; None if unknown."""
        metadata = instruction.attributes.get("metadata", "")
        if match := re.search(r"stack_frame_id=(\d+)", metadata):
            if location := self._location(int(match[1])):
                return location
        elif match := re.search(r'source_file="([^"]*)" source_line=(\d+)', metadata):
            return f"{PurePath(match[1]).name}:{match[2]}"
        match = re.search(r'op_name="((?:[^"\\]|\\.)+)"', metadata)
        return match[1] if match else None

    def _location(self, frame: int) -> str | None:
        """The innermost frame that is the user's or scalejax's own, else the innermost."""
        innermost = None
        while frame in self.frames:
            location, caller = self.frames[frame]
            frame = min(caller, frame - 1)  # callers come first: this never cycles
            path, line = location.rsplit(":", 1)
            short = f"{PurePath(path).name}:{line}"
            if not _is_of_library(path):
                return short
            innermost = innermost or short
        return innermost


def _is_of_library(path: str) -> bool:
    """Whether a file is library code: of Python, of an installed package other than scalejax
    (which may be installed or a checkout), or the compile worker."""
    if path.startswith("<frozen ") or path == str(_WORKER):
        return True
    return "site-packages" in path and not PurePath(path).is_relative_to(_PACKAGE)


_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_NAMES = re.compile(r"%([\w.\-]+)")
_MARKS = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\]]|, ')
_REORDERED = re.compile(r"\], device_ids=(\(.*?\)\)?) \{")
_SHAPE_PARTS = re.compile(r"\(|\)|(\w+)\[([^\]]*)\]")
_ARRAYS = re.compile(r"\w+\[[^\]]*\](?:\{[^}]*\})?")
_FRAME = re.compile(r"(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
_LOCATION = re.compile(r"(\d+) \{file_name_id=(\d+).*? line=(\d+)")
_FILE = re.compile(r'(\d+) "(.*)"$')


def parse_module(text: str) -> Module:
    """The module in the text of `compiled.as_text()`.

    Raises:
        ProfileError: if a line is not HLO.
    """
    computations: dict[str, Computation] = {}
    entry, current = "", None
    preamble: list[str] = []
    for line in text.splitlines():
        if current is not None and line.startswith(" "):
            instruction = _parse_instruction(line)
            current.instructions[instruction.name] = instruction
        elif match := _HEADER.match(line):
            current = Computation(name=match[2], instructions={})
            computations[current.name] = current
            entry = current.name if match[1] else entry
        elif current is None:
            preamble.append(line)
    if not entry:
        raise ProfileError("the compiler's text holds no entry computation.")
    partitions = re.search(r"num_partitions=(\d+)", preamble[0] if preamble else "")
    return Module(
        entry=entry,
        computations=computations,
        partition_count=int(partitions[1]) if partitions else 1,
        frames=_parse_frames(preamble),
    )


def _parse_instruction(line: str) -> Instruction:
    head = _INSTRUCTION.match(line)
    if head is None:
        raise ProfileError(f"the compiler's text holds a line that is not HLO: {line[:200]!r}.")
    start = head.end()
    shape_end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    opcode = _OPCODE.match(line, shape_end)
    if opcode is None:
        raise ProfileError(f"the compiler's text holds a line that is not HLO: {line[:200]!r}.")
    operands_end = _closing(line, opcode.end() - 1)
    literal = line[opcode.end() : operands_end - 1]
    return Instruction(
        name=head[2],
        shape=parse_shape(line[start:shape_end]),
        opcode=opcode[1],
        operands=tuple(_NAMES.findall(literal)),
        literal=literal,
        rest=line[operands_end:].removeprefix(", "),
        is_root=head[1] is not None,
        is_on_chip="S(1)" in line[start:shape_end],
        on_host=_on_host(line[start:shape_end]),
    )


def _on_host(shape: str) -> tuple[bool, ...]:
    """Whether each array of a shape lies in the memory of the host; () if none does."""
    if "S(5)" not in shape:
        return ()
    return tuple("S(5)" in array for array in _ARRAYS.findall(shape))


@cache
def parse_shape(text: str) -> Shape:
    """The shape written as `(f32[2,3]{1,0}, token[])`; layouts are dropped."""
    open_tuples: list[list[Shape]] = [[]]
    for part in _SHAPE_PARTS.finditer(re.sub(r"\{[^{}]*\}", "", text)):
        if part[0] == "(":
            open_tuples.append([])
        elif part[0] == ")":
            closed = tuple(open_tuples.pop())
            open_tuples[-1].append(closed)
        else:  # "<=8" is a dimension of at most 8
            dims = tuple(int(d.strip("<= ")) for d in part[2].split(",") if d)
            open_tuples[-1].append(Array(part[1], dims))
    return open_tuples[0][0]


def _closing(text: str, start: int) -> int:
    """Position after the bracket that closes the one at `start`."""
    depth = 0
    for mark in _MARKS.finditer(text, start):
        if mark[0] in "({[":
            depth += 1
        elif mark[0] in ")}]":
            depth -= 1
            if depth == 0:
                return mark.end()
    raise ProfileError(f"the compiler's text holds a line that does not end: {text[:200]!r}.")


def _split(text: str) -> Iterator[str]:
    """Yield the parts of `text` between commas outside brackets and quotes."""
    depth, begin = 0, 0
    for mark in _MARKS.finditer(text):
        if mark[0] in "({[":
            depth += 1
        elif mark[0] in ")}]":
            depth -= 1
        elif mark[0] == ", " and depth == 0:
            yield text[begin : mark.start()]
            begin = mark.end()
    if begin < len(text):
        yield text[begin:]


def _parse_frames(preamble: list[str]) -> dict[int, tuple[str, int]]:
    """Stack frames from the tables before the first computation: files, locations, frames."""
    files: dict[str, str] = {}
    locations: dict[str, str] = {}
    frames: dict[int, tuple[str, int]] = {}
    section = ""
    for line in preamble:
        if line and not line[0].isdigit():
            section = line
        elif section == "FileNames" and (match := _FILE.match(line)):
            files[match[1]] = match[2]
        elif section == "FileLocations" and (match := _LOCATION.match(line)):
            locations[match[1]] = f"{files[match[2]]}:{match[3]}"
        elif section == "StackFrames" and (match := _FRAME.match(line)):
            # A frame's caller is printed one too high; that of the outermost frame is itself.
            frames[int(match[1])] = (locations[match[2]], int(match[3] or 1) - 1)
    return frames
