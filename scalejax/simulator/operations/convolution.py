"""Seconds of a convolution, costed as an implicit matrix product, per pass.

Each pass is the product (groups, m, n, k) at the fraction of the peak that convolutions reach; the
chip's table of products, if it has one, gives the dependence on shape.

    forward          m = samples positions       n = outputs   k = inputs window
    input gradient   m = samples positions       n = inputs    k = outputs window
    filter gradient  m = inputs window           n = outputs   k = samples positions

Inputs and outputs are channels of a group, positions those of the forward output. A filter
gradient has few results and long sums, which libraries split so that every multiprocessor has a
part (split-k); the parts are counted into its batch.

On f32 units, square windows are multiplied by Winograd's algorithm, with fewer multiplications
than are counted as FLOP: VGG-16 on P100 was published at 1.3 times the rate that its peak allows.

Left out: that Winograd needs stride 1 (3 of 53 convolutions of ResNet-50 have another), and its
larger tiles, which save more; FFT convolution; wave quantisation. Independent of programs.
"""

from dataclasses import replace

from scalejax.hardware import Chip
from scalejax.simulator.operations.matmul import Product, ProductTime, Shape, product_time
from scalejax.simulator.program import ConvolutionPass, Operation

VECTOR_BYTES = 16
"""Widest load of one GPU thread (CUDA C++ Programming Guide, device memory accesses): channels
are padded to a multiple of it, so three bf16 channels cost as much as eight."""

_MATRIX_UNITS = (7, 0)
"""Compute capability of the first GPUs with matrix units, for 16 bits (V100)."""
_TILE = 128 * 128
"""Results of one block of a large product (CUTLASS, "Efficient GEMM in CUDA")."""
_SHORTEST_SUM = 512
"""Terms of a sum below which splitting it further gains nothing."""

_WINOGRAD = {side * side: (2 * side) ** 2 / (side + 1) ** 2 for side in (3, 5)}
"""Factor of multiplications saved, by window positions: tiles of 2 x 2 results of an r x r window
take (r + 1)^2 instead of (2 r)^2 (Lavin & Gray 2015, arXiv 1509.09308, section 4.1)."""
_WINOGRAD_CHANNELS = 16
"""Channels on either side below which its transforms cost more than they save; assumed."""


def convolution_time(operation: Operation, chip: Chip) -> ProductTime:
    """Time of a convolution on `chip`, excluding launch.

    Args:
        operation: of kind "convolution"; an unknown shape counts as one with many channels, an
            unknown pass as forward.
        chip: where it runs.
    """
    product = Product(
        shape=implicit_product(operation, chip),
        flop=round(operation.flop / winograd_saving(operation, chip)),
        moved_bytes=operation.read_bytes + operation.write_bytes,
        dtype=operation.dtype,
    )
    time = product_time(product, chip, fraction=attainable_fraction(operation, chip))
    if not is_transposed(operation, chip):
        return time
    bandwidth = chip.memory_bytes_per_second * chip.attainable.memory_fraction
    transposes = 2 * product.moved_bytes / bandwidth
    return replace(
        time,
        memory_seconds=time.memory_seconds + transposes,
        busy_seconds=time.busy_seconds + transposes,
    )


def is_transposed(operation: Operation, chip: Chip) -> bool:
    """Whether the library must transpose every array to put channels last (NHWC).

    Matrix units multiply arrays whose channels come last. Before Hopper, XLA keeps f32 arrays with
    channels first, so cuDNN transposes the inputs and outputs of a convolution; it does the same
    with 16-bit arrays that a framework keeps with channels first.

    Source: XLA, `gpu_layout_assignment.cc` (f32 convolutions are NCHW below compute capability
    9); NVIDIA, Deep Learning Performance, "Convolutional Layers User's Guide" (tensor layouts in
    memory). ResNet-50 of timm on RTX 3090 takes 1.48 times as long with channels first
    (`timm_rtx3090_training`).
    """
    if chip.cuda is None or is_depthwise(operation):
        return False
    rate_type, capability = chip.rate_type(operation.dtype), chip.cuda.compute_capability
    if rate_type == "tf32":
        return capability < (9, 0)
    is_half = rate_type in ("bf16", "f16")
    return operation.channels_first and is_half and capability >= _MATRIX_UNITS


def attainable_fraction(operation: Operation, chip: Chip) -> float:
    """Fraction of the peak for its type that a large convolution of this kind reaches on `chip`."""
    attainable, kind = chip.attainable, chip.rate_type(operation.dtype)
    if is_depthwise(operation):
        f32_peak = chip.peak_flop_per_second["f32"] * attainable.depthwise_fraction
        return min(1.0, f32_peak / chip.peak(operation.dtype))
    fraction = attainable.convolution_fraction
    if kind in ("tf32", "f32") and attainable.convolution_f32_fraction is not None:
        fraction = attainable.convolution_f32_fraction
    shares: dict[ConvolutionPass | None, float] = {
        "input_gradient": attainable.input_gradient_share,
        "filter_gradient": attainable.filter_gradient_share,
    }
    fraction *= shares.get(operation.convolution_pass, 1.0)
    return fraction * channel_use(operation.shape, operation.dtype, operation.convolution_groups)


def winograd_saving(operation: Operation, chip: Chip) -> float:
    """Counted FLOP of a convolution over the multiplications that Winograd's algorithm does.

    1 on matrix units, which multiply tiles directly.
    """
    if chip.rate_type(operation.dtype) != "f32" or len(operation.shape) != 5:
        return 1.0
    *_, inputs, outputs, window = operation.shape
    if operation.convolution_groups > 1 or min(inputs, outputs) < _WINOGRAD_CHANNELS:
        return 1.0
    return 1.0 + chip.attainable.winograd_share * (_WINOGRAD.get(window, 1.0) - 1.0)


def is_depthwise(operation: Operation) -> bool:
    """Whether every group of a convolution has one input channel."""
    if len(operation.shape) != 5 or operation.convolution_groups == 1:
        return False
    return operation.shape[2] == 1


def implicit_product(operation: Operation, chip: Chip) -> Shape | None:
    """(groups, m, n, k) of the matrix product equivalent to a convolution; None if unknown."""
    if len(operation.shape) != 5 or 0 in operation.shape or is_depthwise(operation):
        return None
    samples, positions, inputs, all_outputs, window = operation.shape
    groups = operation.convolution_groups
    outputs = max(1, all_outputs // groups)
    rows = samples * positions
    if operation.convolution_pass == "input_gradient":
        return groups, rows, inputs, outputs * window
    if operation.convolution_pass == "filter_gradient":
        m, n = inputs * window, outputs
        parts = _parts(groups * m * n, rows, chip)
        return groups * parts, m, n, -(-rows // parts)
    return groups, rows, outputs, inputs * window


def _parts(results: int, terms: int, chip: Chip) -> int:
    """Number of parts of a sum of `terms`, split so that every multiprocessor has a tile."""
    multiprocessors = chip.cuda.sm_count if chip.cuda is not None else 1
    wanted = -(-multiprocessors * _TILE // results)
    return max(1, min(wanted, terms // _SHORTEST_SUM))


def channel_use(shape: tuple[int, ...], dtype: str, groups: int = 1) -> float:
    """Fraction of a convolution's multiplications that are not padding, 0..1.

    A convolution runs as a matrix product whose rows are gathered pixel by pixel, each in
    whole vectors of channels. Channels are padded to `VECTOR_BYTES`; the padding multiplies
    zeros. So 3 input channels use 3/8 in bf16, 3/4 in f32, and 64 use all of it.

    Args:
        shape: as `Operation.shape` of a convolution; () if unknown, which counts as unpadded.
        dtype: element type of the operands.
        groups: groups of channels, each of them padded.
    """
    if len(shape) != 5:
        return 1.0
    _, _, input_channels, output_channels, _ = shape
    vector = max(1, VECTOR_BYTES * 8 // _bits(dtype))
    outputs = max(1, output_channels // groups)
    return _filled(input_channels, vector) * _filled(outputs, vector)


def _filled(count: int, multiple: int) -> float:
    return count / (-(-count // multiple) * multiple)


def _bits(dtype: str) -> int:
    """Width of an element type from XLA's name for it: 16 for "bf16", 8 for "f8e4m3fn"."""
    digits = dtype.lstrip("bfsuc")
    width = ""
    for character in digits:
        if not character.isdigit():
            break
        width += character
    return int(width) if width else 8
