"""FLOP of matrix products and convolutions in HLO, in all forms that the compiler emits.

Knows `dot`, `convolution` and the library calls that replace them on NVIDIA GPUs (cuBLAS,
cuDNN), QR factorisations, and the convolutions as which a TPU's compiler writes matrix products.
A multiplication and the addition of its result are two operations. Products with the padding of a
convolution are counted, as is usual (ResNet-50 at 224 x 224: 4.1 G multiply-adds); products with
the zeros that a dilation inserts are not, since no library computes them.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from scalejax.simulator.program import ConvolutionPass
from scalejax.xla.hlo import Array, Instruction, Shape, arrays

_SOLVERS = ("cusolver_", "cublas_", "hipsolver_", "lapack_")
"""Prefixes of the call targets of JAX's linear algebra."""
FUSED_ATTENTION = "__cudnn$fmha"
"""Prefix of the call targets of cuDNN's fused attention, forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCount:
    """FLOP and shape of one matrix product, convolution or fused attention."""

    kind: Literal["matmul", "convolution", "attention"]
    """Kind of operation."""
    dtype: str
    """Type of the operands; "f32_highest" where f32 may not be rounded to tf32."""
    flop: int
    """FLOP of the operation."""
    shape: tuple[int, ...]
    """See `program.Operation.shape`."""
    convolution_pass: ConvolutionPass | None = None
    """Which pass a convolution belongs to; None for a matrix product."""
    convolution_groups: int = 1
    """Groups into which a convolution divides its channels."""


def count_flop(instruction: Instruction, operands: Sequence[Shape]) -> FlopCount | None:
    """FLOP count of `instruction`; None if it is none of the kinds of `FlopCount`.

    Args:
        instruction: one line of the program.
        operands: shapes of its operands.
    """
    found = _count_flop(instruction, operands)
    if found is not None and found.dtype == "f32" and _is_highest(instruction):
        return replace(found, dtype="f32_highest")
    return found


def _is_highest(instruction: Instruction) -> bool:
    """Whether the user requested full f32 precision, which tf32 units do not have."""
    asked = instruction.attributes.get("operand_precision", "")
    return "highest" in asked or '"HIGHEST"' in json.dumps(instruction.backend_config)


def _count_flop(instruction: Instruction, operands: Sequence[Shape]) -> FlopCount | None:
    if instruction.opcode == "dot":
        dimensions = {
            name: instruction.integers(f"{name}_dims")
            for name in ("lhs_contracting", "rhs_contracting", "lhs_batch", "rhs_batch")
        }
        return _product(operands, dimensions)
    if instruction.opcode == "convolution":
        return _convolution(instruction, operands)
    if instruction.opcode == "custom-call":
        target = instruction.call_target
        if target.startswith(("__cublas$gemm", "__cublas$lt$matmul")):
            return _product(operands, _library_dimensions(instruction))
        if target.startswith("__cudnn$conv"):
            return _library_convolution(instruction, operands, target)
        if target.startswith(FUSED_ATTENTION):
            return _fused_attention(instruction, operands, target)
        if target.startswith(_SOLVERS) and ("geqrf" in target or "orgqr" in target):
            return _orthogonal_factor(operands)
    return None


def _library_dimensions(instruction: Instruction) -> dict[str, tuple[int, ...]]:
    config = instruction.backend_config.get("gemm_backend_config", {})
    numbers = config.get("dot_dimension_numbers", {}) if isinstance(config, dict) else {}
    return {
        name: tuple(int(axis) for axis in numbers.get(f"{name}_dimensions", ()))
        for name in ("lhs_contracting", "rhs_contracting", "lhs_batch", "rhs_batch")
    }


def _product(operands: Sequence[Shape], dimensions: dict[str, tuple[int, ...]]) -> FlopCount | None:
    lhs, rhs = operands[0], operands[1]
    if not (isinstance(lhs, Array) and isinstance(rhs, Array)):
        return None
    batch = math.prod(lhs.dims[axis] for axis in dimensions["lhs_batch"])
    k = math.prod(lhs.dims[axis] for axis in dimensions["lhs_contracting"])
    m = _rest(lhs, dimensions["lhs_batch"] + dimensions["lhs_contracting"])
    n = _rest(rhs, dimensions["rhs_batch"] + dimensions["rhs_contracting"])
    return FlopCount(
        kind="matmul", dtype=lhs.dtype, flop=2 * batch * m * n * k, shape=(batch, m, n, k)
    )


def _rest(array: Array, used: tuple[int, ...]) -> int:
    return math.prod(size for axis, size in enumerate(array.dims) if axis not in used)


@dataclass(frozen=True, slots=True)
class _Labels:
    """Labels of the dimensions of input, kernel and output: "b01f_01io->b01f"."""

    text: str

    def size(self, array: Array, part: int, label: str) -> int:
        """Length of the dimension `label` of the input (part 0), kernel (1) or output (2)."""
        return array.dims[re.split("_|->", self.text)[part].index(label)]

    def spatial(self, array: Array, part: int) -> list[int]:
        """Lengths of the spatial dimensions, in their order."""
        labels = re.split("_|->", self.text)[part]
        return [array.dims[labels.index(d)] for d in sorted(labels) if d.isdigit()]


def _convolution(instruction: Instruction, operands: Sequence[Shape]) -> FlopCount:
    """FLOP count of an HLO convolution; gradients are convolutions with dilations, too.

    FLOP = 2 x samples x output channels x input channels of a group x pairs of an output and a
    window position that do not meet a hole of the dilated input.
    """
    output, (lhs, rhs) = next(arrays(instruction.shape)), list(map(_only_array, operands[:2]))
    labels = _Labels(instruction.attributes["dim_labels"])
    lengths = (labels.spatial(lhs, 0), labels.spatial(rhs, 1), labels.spatial(output, 2))
    sides = _sides(instruction.attributes.get("window", "{}"), *lengths)
    samples, channels = labels.size(output, 2, "b"), labels.size(output, 2, "f")
    inputs = labels.size(rhs, 1, "i")
    if "/dot_general" in instruction.attributes.get("metadata", ""):
        product = _product_as_convolution(sides, samples, channels, inputs, lhs.dtype)
        if product is not None:
            return product
    outputs = math.prod(side.outputs for side in sides)
    windows = math.prod(side.windows for side in sides)
    groups = max(_groups(instruction, "feature"), _groups(instruction, "batch"))
    kind = _pass_of(outputs, windows, math.prod(side.holes for side in sides))
    shape = (samples, outputs, inputs, channels, windows)
    if kind == "input_gradient":
        positions = math.prod(side.inputs for side in sides)
        shape = (samples, positions, channels // groups, inputs * groups, windows)
    elif kind == "filter_gradient":
        shape = (inputs, windows, samples, channels, outputs)
    return FlopCount(
        kind="convolution",
        dtype=lhs.dtype,
        flop=2 * samples * channels * inputs * math.prod(side.pairs for side in sides),
        shape=shape,
        convolution_pass=kind,
        convolution_groups=groups,
    )


def _pass_of(outputs: int, windows: int, holes: int) -> ConvolutionPass:
    """Pass of a convolution, inferred from its numbers of positions.

    The kernel of a filter gradient is the gradient of the output, with more positions than the
    resulting filter. A dilated input is spread out by a stride. An input gradient
    of stride 1 looks like a forward convolution and costs as much; a forward convolution over
    the whole of its input looks like a filter gradient.
    """
    if windows > outputs:
        return "filter_gradient"
    return "input_gradient" if holes > 1 else "forward"


def _groups(instruction: Instruction, name: str) -> int:
    return int(instruction.attributes.get(f"{name}_group_count", "1"))


@dataclass(frozen=True, slots=True)
class _Side:
    """One spatial dimension of a convolution: lengths, stride, dilations, padding."""

    inputs: int
    """Length of the input."""
    windows: int
    """Length of the window."""
    outputs: int
    """Length of the output."""
    stride: int
    """Steps of the window from one output to the next."""
    spread: int
    """Steps from one position of the window to the next."""
    holes: int
    """Steps from one element of the input to the next; between them are zeros."""
    padding: int
    """Steps before the first element of the input."""

    @property
    def pairs(self) -> int:
        """Pairs of output and window position that meet an input element or its padding."""
        if self.holes == 1:
            return self.outputs * self.windows
        # Places repeat modulo the holes: count the window positions of each remainder.
        remainders = Counter(p * self.spread % self.holes for p in range(self.windows))
        return sum(
            remainders[(self.padding - output * self.stride) % self.holes]
            for output in range(self.outputs)
        )


def _sides(window: str, inputs: list[int], windows: list[int], outputs: list[int]) -> list[_Side]:
    """The spatial dimensions of `{size=3x3 stride=2x2}`, given the lengths of the three parts."""
    rank = len(outputs)
    strides, spreads, holes = (
        window_of(window, name, rank) for name in ("stride", "rhs_dilate", "lhs_dilate")
    )
    paddings = [before for before, _ in paddings_of(window, rank)]
    numbers = zip(inputs, windows, outputs, strides, spreads, holes, paddings, strict=True)
    return [_Side(*each) for each in numbers]


def padded_sides(instruction: Instruction, lhs: Array) -> list[tuple[int, int]]:
    """(padded and dilated, original) length of each spatial dimension of a convolution's input."""
    window = instruction.attributes.get("window", "{}")
    sides = _Labels(instruction.attributes["dim_labels"]).spatial(lhs, 0)
    holes = window_of(window, "lhs_dilate", len(sides))
    return [
        ((side - 1) * hole + 1 + before + after, side)
        for side, hole, (before, after) in zip(
            sides, holes, paddings_of(window, len(sides)), strict=True
        )
    ]


def _product_as_convolution(
    sides: Sequence[_Side], samples: int, channels: int, inputs: int, dtype: str
) -> FlopCount | None:
    """FLOP count of a matrix product that a TPU's compiler emits as a convolution.

    Its further dimensions are those of the convolution: one that only the left operand has counts
    toward m, only the right toward n, both but not the result toward k, all three toward the batch.
    None if one of them is a sliding window.
    """
    batch, m, n, k = 1, samples, channels, inputs
    for side in sides:
        if side.windows == 1:
            m *= side.outputs
        elif side.inputs == 1 and side.outputs == side.windows:
            n *= side.windows
        elif side.outputs == 1:
            k *= side.windows
        elif side.pairs == side.outputs == side.windows:
            batch *= side.outputs
        else:
            return None
    return FlopCount(kind="matmul", dtype=dtype, flop=2 * batch * m * n * k, shape=(batch, m, n, k))


def _library_convolution(
    instruction: Instruction, operands: Sequence[Shape], target: str
) -> FlopCount:
    """FLOP count of a cuDNN convolution; gradients keep the forward pass's labels and window.

    All three kinds take 2 x elements of the forward output x window positions x input channels
    of a group.
    """
    result, (first, second) = next(arrays(instruction.shape)), list(map(_only_array, operands[:2]))
    kind: ConvolutionPass = "forward"
    kernel, output = second, result
    if "BackwardInput" in target:
        kind, kernel, output = "input_gradient", second, first
    elif "BackwardFilter" in target:
        kind, kernel, output = "filter_gradient", result, second
    labels = _Labels(instruction.attributes["dim_labels"])
    windows, inputs = math.prod(labels.spatial(kernel, 1)), labels.size(kernel, 1, "i")
    return FlopCount(
        kind="convolution",
        dtype=first.dtype,
        flop=2 * output.elements * windows * inputs,
        shape=(
            labels.size(output, 2, "b"),
            math.prod(labels.spatial(output, 2)),
            inputs,
            labels.size(output, 2, "f"),
            windows,
        ),
        convolution_pass=kind,
        convolution_groups=_groups(instruction, "feature"),
    )


def _orthogonal_factor(operands: Sequence[Shape]) -> FlopCount:
    """FLOP count of a QR factorisation (geqrf), or of Q made of its reflectors (orgqr): for m rows
    and n <= m columns 2 m n^2 - 2 n^3 / 3 each, and likewise for fewer rows than columns.

    Costed as a product of unknown shape in full float32. Left out: half of the work is products of
    a matrix and a vector in panels, one column after the other, so that small factors take longer
    (by how much was not measured).

    Source: Golub & Van Loan 2013, "Matrix Computations", 4th edition, section 5.2.2.
    """
    array = _only_array(operands[0])
    *batch, rows, columns = array.dims
    longer, shorter = max(rows, columns), min(rows, columns)
    flop = math.prod(batch) * (6 * longer * shorter**2 - 2 * shorter**3) // 3
    dtype = "f32_highest" if array.dtype == "f32" else array.dtype
    return FlopCount(kind="matmul", dtype=dtype, flop=flop, shape=())


def _fused_attention(
    instruction: Instruction, operands: Sequence[Shape], target: str
) -> FlopCount | None:
    """FLOP count of a cuDNN call of fused attention, or of its gradient.

    The forward pass has two products of 2 batch m n k each, the backward pass five: the scores
    again, and two gradients for each product. Three of the five have the head size of queries, two
    that of values. A causal mask halves them: what lies beyond it is skipped (the blocks on the
    diagonal are not: 1 + 128 / tokens of that, under 7 % from 2048 tokens on), as is what lies
    before a sliding window.

    Source: Dao 2023, "FlashAttention-2", arXiv 2307.08691, sections 3.1 and 4.1.
    """
    config = instruction.backend_config.get("cudnn_fmha_backend_config")
    if not isinstance(config, dict):
        return None
    sizes = [int(size) for size in config["intermediate_tensor_shape"]["dimensions"]]
    samples, heads, queries, keys = sizes
    query = _only_array(operands[0])
    of_queries, of_values = (3, 2) if "Backward" in target else (1, 1)
    value_size = _only_array(operands[2]).dims[-1] if len(operands) > 2 else query.dims[-1]
    depth = of_queries * query.dims[-1] + of_values * value_size
    flop = 2 * samples * heads * queries * keys * depth
    if "CAUSAL" in str(config.get("mask_type", "")):
        flop //= 2
        window = int(config.get("sliding_window_length", 0))
        if 0 < window < keys:  # half of the square, less half of that before the window
            flop = flop * (keys**2 - (keys - window) ** 2) // keys**2
    return FlopCount(
        kind="attention",
        dtype=query.dtype,
        flop=flop,
        shape=(samples * heads, queries, keys, query.dims[-1]),
    )


def _only_array(shape: Shape) -> Array:
    return next(arrays(shape))


def window_of(text: str, name: str, rank: int) -> list[int]:
    """One number per spatial dimension, from `{size=3x3 stride=2x2}`; 1 where it is not given."""
    match = re.search(rf"\b{name}=([\dx]+)", text)
    return [int(part) for part in match[1].split("x")] if match else [1] * rank


def paddings_of(text: str, rank: int) -> list[tuple[int, int]]:
    """Padding before and after each spatial dimension, from `{pad=3_2x3_2}`."""
    match = re.search(r"\bpad=([\d_x\-]+)", text)
    parts = match[1].split("x") if match else ["0_0"] * rank
    return [(int(before), int(after)) for before, after in (part.split("_") for part in parts)]
