"""Operations in the text of a compiled program, to be timed separately: matrix products and
convolutions in a form that can be called, and the kind of work of element-wise operations.

Besides its sizes, the time of a call on a CPU depends on which dimensions are summed over, on the
order of the others, and for a convolution on strides, padding and holes: gradients of filters run
as convolutions whose images are channels. The kind of an element-wise operation determines its
bytes per second: one that transposes takes six times as long as one that scales, reductions and
transcendental functions two to three times. Knows no device.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from scalejax.simulator.program import ConvolutionPass
from scalejax.xla.flop import count_flop, paddings_of, window_of
from scalejax.xla.hlo import Array, Computation, Instruction, Module, arrays, parse_module

if TYPE_CHECKING:
    import jax

Pairs = tuple[tuple[int, int], ...]
Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductCall:
    """A matrix product of two arrays."""

    operands: tuple[Sizes, Sizes]
    """Shapes of its arguments."""
    contracting: tuple[Sizes, Sizes]
    """Dimensions of each that are summed over."""
    batch: tuple[Sizes, Sizes]
    """Dimensions of each that both arguments and the result have."""

    def run(self, x: "jax.Array", y: "jax.Array") -> "jax.Array":
        """The product."""
        from jax import lax

        return lax.dot_general(x, y, (self.contracting, self.batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionCall:
    """A convolution of two arrays, as the compiler wrote it: gradients are convolutions, too."""

    operands: tuple[Sizes, Sizes]
    """Shapes of its arguments."""
    labels: str
    """Dimensions of arguments and result: "b01f_01io->b01f"."""
    strides: Sizes
    """Steps of the window from one position of the result to the next."""
    padding: Pairs
    """Steps before and after the first argument."""
    holes: tuple[Sizes, Sizes]
    """Steps from one element of each argument to the next, with zeros between them."""
    groups: tuple[int, int]
    """Groups into which it divides channels, and samples."""

    def run(self, x: "jax.Array", y: "jax.Array") -> "jax.Array":
        """The convolution."""
        from jax import lax

        first, last = self.labels.split("->")
        image, kernel = first.split("_")
        named = [part.translate(str.maketrans("bfio", "NCIO")) for part in (image, kernel, last)]
        return lax.conv_general_dilated(
            x,
            y,
            self.strides,
            self.padding,
            lhs_dilation=self.holes[0],
            rhs_dilation=self.holes[1],
            dimension_numbers=(named[0], named[1], named[2]),
            feature_group_count=self.groups[0],
            batch_group_count=self.groups[1],
        )

    def with_half_the_samples(self, convolution_pass: ConvolutionPass) -> "ConvolutionCall | None":
        """The same with half of the samples of a batch; None if it has only one, or groups."""
        image, kernel = self.labels.split("->")[0].split("_")
        of_image, of_kernel = map(list, self.operands)
        places = [(of_image, image.index("b"))]
        if convolution_pass == "filter_gradient":  # which is summed over samples
            places = [(of_image, image.index("f")), (of_kernel, kernel.index("i"))]
        if self.groups != (1, 1) or any(sizes[place] < 2 for sizes, place in places):
            return None
        for sizes, place in places:
            sizes[place] //= 2
        return replace(self, operands=(tuple(of_image), tuple(of_kernel)))


Call = ProductCall | ConvolutionCall
Key = tuple[ConvolutionPass | None, Sizes]
"""Pass and shape of a convolution, or None and the shape of a product, as in `Operation`."""


def calls_of(text: str) -> dict[Key, tuple[tuple[Call, int], ...]]:
    """The f32 products and convolutions in the text of a compiled program, and how often each
    occurs, the most frequent first.

    If the compiler swapped the arguments of a convolution, which reverses its window, the call is
    that before the swap, which the compiler swaps again: it includes the reversal of its filter.

    Raises:
        ProfileError: if a line is not HLO.
    """
    found: dict[Key, Counter[Call]] = {}
    for computation in parse_module(text).computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode not in ("dot", "convolution"):
                continue
            shapes = computation.operand_shapes(instruction)
            counted = count_flop(instruction, shapes)
            first, second = shapes[:2]
            if counted is None or not isinstance(first, Array) or not isinstance(second, Array):
                continue
            if {first.dtype, second.dtype} != {"f32"}:
                continue
            key = counted.convolution_pass, counted.shape
            if (call := _call(instruction, (first.dims, second.dims))) is not None:
                found.setdefault(key, Counter())[call] += 1
    return {key: tuple(calls.most_common()) for key, calls in found.items()}


def _call(instruction: Instruction, operands: tuple[Sizes, Sizes]) -> Call | None:
    if instruction.opcode == "dot":
        numbers: Mapping[str, tuple[Sizes, Sizes]] = {
            name: (
                instruction.integers(f"lhs_{name}_dims"),
                instruction.integers(f"rhs_{name}_dims"),
            )
            for name in ("contracting", "batch")
        }
        return ProductCall(operands=operands, **numbers)
    window = instruction.attributes.get("window", "{}")
    rank = len(operands[0]) - 2
    strides, image_holes, kernel_holes = (
        tuple(window_of(window, name, rank)) for name in ("stride", "lhs_dilate", "rhs_dilate")
    )
    call = ConvolutionCall(
        operands=operands,
        labels=instruction.attributes["dim_labels"],
        strides=strides,
        padding=tuple(paddings_of(window, rank)),
        holes=(image_holes, kernel_holes),
        groups=(
            int(instruction.attributes.get("feature_group_count", "1")),
            int(instruction.attributes.get("batch_group_count", "1")),
        ),
    )
    if "rhs_reversal" not in window:
        return call
    is_whole = set(window_of(window, "rhs_reversal", rank)) == {1}
    return _before_swap(call) if is_whole and call.groups == (1, 1) else None


def _before_swap(call: ConvolutionCall) -> ConvolutionCall:
    """The convolution that becomes `call`, with its window reversed, when its arguments are
    swapped.

    Source: XLA, `AlgebraicSimplifierVisitor::SwapConvOperands`.
    """
    first, last = call.labels.split("->")
    image, kernel = first.split("_")
    padding = []
    for place, (before, after) in enumerate(call.padding):
        longer, shorter = (
            1 + (sizes[labels.index(str(place))] - 1) * holes[place]
            for sizes, labels, holes in zip(call.operands, (image, kernel), call.holes, strict=True)
        )
        padding.append((before + longer - shorter, after + longer - shorter))
    of_image = kernel.translate(str.maketrans("oi", "bf"))
    of_kernel = image.translate(str.maketrans("bf", "oi"))
    of_result = last.translate(str.maketrans("bf", "fb"))
    return replace(
        call,
        operands=call.operands[::-1],
        labels=f"{of_image}_{of_kernel}->{of_result}",
        padding=tuple(padding),
        holes=call.holes[::-1],
    )


ElementwiseKind = Literal["simple", "transcendental", "transposition", "reduction"]

_SLOWEST_FIRST: tuple[ElementwiseKind, ...] = ("transposition", "reduction", "transcendental")
_TRANSCENDENTAL = (
    *("exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "power"),
    *("atan2", "cbrt", "cosine", "erf", "sine", "tan", "tanh"),
)


def elementwise_kinds(text: str) -> dict[str, ElementwiseKind]:
    """The kind of each instruction in the text of a compiled program, by its name; those that are
    simple are left out.

    An instruction that does several things to at least half of the elements of its largest array
    is of the slowest kind: a transposition of the last dimension, a reduction over it, a
    transcendental function.

    Raises:
        ProfileError: if a line is not HLO.
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
    """Yield the instruction or, for a fusion, the fused ones, each with its computation and the
    elements of its largest array."""
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
