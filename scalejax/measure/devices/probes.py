"""Microbenchmarks of devices: matmuls, convolutions, memory bandwidth, launches, all-reduces.

Every probe is a small program typical of training steps. Rates are per device, with all devices
of the mesh under the same load.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalejax.core.environment import release_pages
from scalejax.measure.devices.timing import (
    ALL,
    filled,
    filling,
    seconds_of_call,
    seconds_of_function,
)

MatmulRow = tuple[int, int, int, int, float]
ConvolutionRow = tuple[int, int, int, int, int, float]

STREAM_PASSES = 16
"""Passes of an element-wise operation in one program, so that no memory is allocated meanwhile."""
TILE = 64
"""Rows and columns of transposed blocks, such as heads and their size."""
_WRITTEN_BYTES_PER_SECOND = 100e9  # to cached memory: much faster than the first touch
_CHAIN = 33  # products so small that only their launch takes time
_STEP_PRODUCT = 1024  # width of a product that takes milliseconds
BUFFERS = 8
"""Arrays all-reduced after it: parameters of a small network."""
_REPEATS = 32  # of an operation within one program, on an accelerator
_REPEATED_BYTES = 2**31  # limit on arguments and results of these repeats
_LEAST_SECONDS = 1e-6  # smallest time that a median of several calls can resolve
STATE = 24
"""Arrays in an empty step: parameters and moments of a small network."""

Parts = tuple[float, float, float, float]
"""Seconds of four steps: with a product and sums over devices, with only the product, with only the
sums, and with neither."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution to time: square images and windows, padded so that strides divide."""

    samples: int
    """Number of images."""
    size: int
    """Height and width of each image."""
    channels_in: int
    """Channels of the input."""
    channels_out: int
    """Channels of the output."""
    window: int
    """Height and width of the window."""
    stride: int
    """Pixels from one window to the next."""

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """The shape, as in `program.Operation.shape`."""
        outputs = -(-self.size // self.stride)
        return self.samples, outputs**2, self.channels_in, self.channels_out, self.window**2

    @property
    def flop(self) -> int:
        """FLOP of each of its three passes, padding included."""
        samples, outputs, channels_in, channels_out, window = self.shape
        return 2 * samples * outputs * channels_in * channels_out * window


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Shapes to time."""

    matmul: tuple[tuple[int, int, int, int], ...]
    """(batch, m, n, k) of products."""
    convolutions: tuple[Convolution, ...]
    """Convolutions, each in all three passes."""
    stream_bytes: tuple[int, ...]
    """Bytes read and written by element-wise operations."""
    touched_bytes: tuple[int, ...]
    """Bytes of temporary memory of a program; () if the allocator keeps its pages for the next."""
    attention: tuple[tuple[int, int, int, int], ...] = ()
    """(samples, tokens, heads, head size) of causal attention in one kernel, forward and
    backward."""
    calls: int
    """Number of timed calls of each program."""


_CONVOLUTIONS = (
    (32, 1, 16, 3, 2),
    (32, 3, 64, 3, 1),
    (32, 16, 32, 3, 1),
    (16, 32, 64, 3, 2),
    (16, 64, 64, 3, 1),
    (8, 64, 128, 3, 2),
    (8, 128, 128, 3, 1),
    (16, 64, 128, 1, 1),
)
"""Size, channels in and out, window and stride, as the fields of `Convolution`."""

GRID = Grid(
    matmul=(
        *((1, m, n, k) for m, n, k in product((16, 128, 1024), repeat=3)),
        *((64, m, n, k) for m, n, k in product((16, 64), repeat=3)),
        (8, 256, 256, 64),
        (8, 256, 64, 256),
    ),
    convolutions=tuple(
        Convolution(samples, *each) for samples, each in product((8, 64), _CONVOLUTIONS)
    ),
    stream_bytes=tuple(2**power for power in (15, 18, 20, 22, 24)),
    touched_bytes=tuple(2**20 * size for size in (4, 16, 30, 34, 64, 128)),
    calls=12,
)
"""Shapes typical of a training step on a CPU, in powers of two."""
ACCELERATOR_GRID = Grid(
    matmul=(
        *((1, size, size, size) for size in (1024, 2048, 4096, 8192)),
        (1, 8192, 3072, 768),
        (1, 8192, 768, 3072),
        (1, 768, 3072, 8192),
        (1, 8192, 16_384, 4096),
        (1, 8192, 4096, 16_384),
        (1, 4096, 16_384, 8192),
        (1, 256, 4096, 4096),
        (128, 1024, 1024, 64),
    ),
    convolutions=tuple(
        Convolution(128, *each)
        for each in (
            (224, 3, 64, 7, 2),
            (56, 64, 64, 3, 1),
            (56, 64, 256, 1, 1),
            (28, 128, 128, 3, 1),
            (14, 1024, 256, 1, 1),
            (7, 512, 512, 3, 1),
        )
    ),
    stream_bytes=tuple(2**power for power in (18, 21, 24, 26, 28, 30)),  # the last is beyond caches
    touched_bytes=(),
    attention=((2, 4096, 16, 128), (2, 4096, 16, 64)),
    calls=12,
)
"""Shapes typical of a training step of transformers and ResNet-50 on a GPU. Each product is
compiled in several variants to choose from, which takes 1 to 2 s."""
TINY_GRID = Grid(
    matmul=((1, 64, 64, 64), (1, 256, 256, 256)),
    convolutions=(
        Convolution(samples=4, size=8, channels_in=8, channels_out=8, window=3, stride=1),
    ),
    stream_bytes=(2**16, 2**22),
    touched_bytes=(2**22,),
    calls=3,
)
"""Smallest grid that exercises every probe, for tests."""


def call_seconds(mesh: Mesh, calls: int) -> float:
    """Seconds of calling a nearly empty program."""
    return seconds_of_function(lambda x: x + 1, mesh, [(4,)], calls=5 * calls)


Probe = tuple[Callable[..., Any], list[tuple[int, ...]]]
"""A function, and the shapes of its arguments on one device."""


def product_of(shape: tuple[int, int, int, int]) -> Probe:
    """A matrix product of shape (batch, m, n, k).

    If k is the largest, the left operand is transposed, as in weight gradients, which contract over
    all samples.
    """
    batch, m, n, k = shape
    is_gradient = k > max(m, n)
    left = (batch, k, m) if is_gradient else (batch, m, k)
    formula = "bkm,bkn->bmn" if is_gradient else "bmk,bkn->bmn"
    return lambda x, y: jnp.einsum(formula, x, y), [left, (batch, k, n)]


def matmul_row(
    mesh: Mesh,
    shape: tuple[int, int, int, int],
    dtype: Any,
    empty_seconds: float,
    calls: int,
    launch: float = 0.0,
) -> MatmulRow:
    """Measured rate of matrix products of shape (batch, m, n, k), without their `launch`."""
    seconds = _seconds_of_one(
        product_of(shape), mesh, overheads=(empty_seconds, launch), calls=calls, dtype=dtype
    )
    return (*shape, 2 * math.prod(shape) / seconds)


def convolution_row(
    mesh: Mesh,
    convolution: Convolution,
    kind: str,
    empty_seconds: float,
    calls: int,
    dtype: Any = jnp.float32,
    launch: float = 0.0,
) -> ConvolutionRow:
    """Measured rate of one pass: forward, input_gradient or filter_gradient, without `launch`."""
    probe = convolution_of(convolution, kind, dtype)
    seconds = _seconds_of_one(
        probe, mesh, overheads=(empty_seconds, launch), calls=calls, dtype=dtype
    )
    return (*convolution.shape, convolution.flop / seconds)


def _arrays(c: Convolution) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of the image, the kernel and the gradient of the result."""
    outputs = -(-c.size // c.stride)
    image = (c.samples, c.size, c.size, c.channels_in)
    kernel = (c.window, c.window, c.channels_in, c.channels_out)
    return image, kernel, (c.samples, outputs, outputs, c.channels_out)


def convolution_of(convolution: Convolution, kind: str, dtype: Any = jnp.float32) -> Probe:
    """One pass of a convolution: forward, input_gradient or filter_gradient."""
    c = convolution
    image, kernel, cotangent = _arrays(c)

    def forward(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, y, (c.stride, c.stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def input_gradient(y: jax.Array, out: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: forward(x, y), jnp.ones(image, dtype))[1](out)[0]

    def filter_gradient(x: jax.Array, out: jax.Array) -> jax.Array:
        return jax.vjp(lambda y: forward(x, y), jnp.ones(kernel, dtype))[1](out)[0]

    passes: dict[str, Probe] = {
        "forward": (forward, [image, kernel]),
        "input_gradient": (input_gradient, [kernel, cotangent]),
        "filter_gradient": (filter_gradient, [image, cotangent]),
    }
    return passes[kind]


def attention_rate(
    mesh: Mesh, shape: tuple[int, int, int, int], empty_seconds: float, calls: int
) -> float:
    """FLOP/s of causal attention in one kernel in bf16, forward and backward together.

    The FLOP are those of `xla.flop`: two products of the scores forward and five backward, half of
    each, as what the mask hides is skipped.

    Args:
        mesh: the devices, NVIDIA GPUs that have cuDNN's kernel.
        shape: (samples, tokens, heads, head size).
        empty_seconds: seconds of an empty call, from `call_seconds`.
        calls: most calls to time.
    """
    samples, tokens, heads, size = shape

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array) -> Any:
        attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
        mixed, backward = jax.vjp(attend, q, k, v)
        return mixed, backward(out)

    seconds = _seconds_of_one(
        (gradients, [shape] * 4),
        mesh,
        overheads=(empty_seconds, 0.0),
        calls=calls,
        dtype=jnp.bfloat16,
    )
    return 7 * samples * heads * tokens**2 * size / seconds


def scale(y: jax.Array) -> jax.Array:
    """The cheapest of `FUSIONS`: simple arithmetic."""
    return 2 * y + 1


FUSIONS = (scale, jnp.tanh, lambda y: jnp.swapaxes(y, 1, 2) + 1)
"""Typical element-wise operations: simple arithmetic, transcendental, transposition."""


def row_sums(y: jax.Array) -> jax.Array:
    """A reduction over the last dimension, which reads its argument and writes one column of it."""
    return y.at[..., 0].add(jnp.sum(y, axis=-1))


def stream_rate(
    mesh: Mesh,
    moved_bytes: int,
    empty_seconds: float,
    calls: int,
    fusions: Sequence[Callable[[jax.Array], jax.Array]] = FUSIONS,
    launch: float = 0.0,
) -> float:
    """Bytes/s of operations that move `moved_bytes`, half read and half written.

    It is the geometric mean over `fusions`, without the `launch` of the operation. On a GPU, whose
    allocator keeps memory, several arrays replace several passes over one: a loop would copy what
    is transposed.
    """
    count = max(1, moved_bytes // (8 * TILE**2))
    moved, shapes = 8 * TILE**2 * count, [(count, TILE, TILE)]
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    logs = []
    for function in fusions:
        if is_cpu:
            seconds = seconds_of_function(in_passes(function), mesh, shapes, calls=calls)
            seconds = _beyond(seconds, empty_seconds) / STREAM_PASSES
        else:
            seconds = _seconds_of_one(
                (function, shapes),
                mesh,
                overheads=(empty_seconds, launch),
                calls=calls,
                dtype=jnp.float32,
            )
        logs.append(math.log(moved / seconds))
    return math.exp(math.fsum(logs) / len(logs))


def in_passes(
    function: Callable[[jax.Array], jax.Array], passes: int = STREAM_PASSES
) -> Callable[[jax.Array], jax.Array]:
    """`function` applied to its own result, `passes` times in all."""
    return lambda x: jax.lax.fori_loop(0, passes, lambda _, y: function(y), x)


def first_touch_seconds(mesh: Mesh, size_bytes: int, empty_seconds: float, calls: int) -> float:
    """Seconds of the first write to `size_bytes` of newly allocated memory.

    If the system reclaims memory at the end of a program and maps it page by page, the first write
    costs far more than later ones.
    """
    seconds = seconds_of_function(touch(size_bytes), mesh, [(4,)], calls=min(calls, 5))
    return max(seconds - empty_seconds - size_bytes / _WRITTEN_BYTES_PER_SECOND, 0.0)


def touch(size_bytes: int) -> Callable[[jax.Array], jax.Array]:
    """A function that writes `size_bytes` of temporary memory.

    The memory is not a result: once Python frees a result, a call on several devices maps it again,
    unlike the temporary memory of a step (4 to 8 times the page faults on eight, seen for 15 MB
    each).
    """

    def touched(x: jax.Array) -> jax.Array:
        values = x[0] + jnp.arange(max(8, size_bytes // 4), dtype=jnp.float32)
        # A branch takes all values as they lie in memory.
        return jax.lax.cond(x[0] < 0, lambda y: y[4:8], lambda y: y[:4], values)

    return touched


def launch_seconds(mesh: Mesh, calls: int) -> float:
    """Seconds of launching one empty operation within a program."""

    one, many = (
        seconds_of_function(partial(_chain, length=n), mesh, [(4, 4)], calls=5 * calls)
        for n in (1, _CHAIN)
    )
    return max(many - one, 0.0) / (_CHAIN - 1)


def _chain(x: jax.Array, length: int) -> jax.Array:
    """`length` products, each with the result of the previous one."""
    y = x
    for _ in range(length):
        y = y @ x
    return y


def step_overhead_seconds(mesh: Mesh, launch: float, calls: int) -> float:
    """Seconds of overhead of a nearly empty step, without its few operations.

    This is the host work of a step: checking arguments, dispatching them and receiving results.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return 0.0  # done while the device still computes the previous step
    state = [filled(mesh, (4,), jnp.float32) for _ in range(STATE)]
    step = jax.jit(lambda *arrays: [array + 1 for array in arrays]).lower(*state).compile()
    seconds = seconds_of_call(step, state, calls=5 * calls)
    return max(seconds - STATE * launch, 0.0)


def all_reduce_round(mesh: Mesh, size_bytes: int, calls: int) -> Callable[[], Parts]:
    """Compile steps with an all-reduce of `size_bytes` per device; returns a function to time them.

    A CPU runs an all-reduce for each of `BUFFERS` buffers, a GPU one for all of them. The buffers
    exist only while they are timed: those of all sizes and device counts take gigabytes.
    """
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    shapes = [(_STEP_PRODUCT, _STEP_PRODUCT), (max(1, size_bytes // 4),)]
    fill_product, fill_buffer = (filling(mesh, shape, jnp.float32) for shape in shapes)
    count = BUFFERS if is_cpu else 1
    product, buffer = jax.eval_shape(fill_product), jax.eval_shape(fill_buffer)
    spec = PartitionSpec(ALL)
    given = [
        jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=NamedSharding(mesh, spec))
        for each in (product, *[buffer] * count)
    ]

    def step(x: jax.Array, *values: jax.Array, product: bool, sums: bool) -> list[jax.Array]:
        computed = (x[0] @ x[0] if product else x[0])[0, 0]
        mine = [value[0] + computed for value in values]
        found = jax.lax.psum(mine, ALL) if sums else mine
        return [each[None] for each in found]

    def compiled(**parts: bool) -> Any:
        each = jax.shard_map(partial(step, **parts), mesh=mesh, in_specs=spec, out_specs=spec)
        return jax.jit(each).lower(*given).compile()

    steps = [
        compiled(product=product, sums=sums) for product in (True, False) for sums in (True, False)
    ]

    def seconds() -> Parts:
        arguments = [fill_product(), *(fill_buffer() for _ in range(count))]
        found = [seconds_of_call(each, arguments, calls=calls, statistic=median) for each in steps]
        del arguments
        release_pages()
        return found[0], found[1], found[2], found[3]

    return seconds


def all_reduce_seconds(mesh: Mesh, size_bytes: int, calls: int) -> float:
    """Seconds of an all-reduce of `size_bytes` per device, in one round of timing."""
    platform = mesh.devices.flat[0].platform
    return seconds_of_all_reduce(all_reduce_round(mesh, size_bytes, calls)(), platform)


def seconds_of_all_reduce(parts: Parts, platform: str) -> float:
    """Seconds of one of the all-reduces of `all_reduce_round`, from the times of their steps.

    It runs after a matrix product. On idle cores an all-reduce can be ten times faster; in a step,
    its threads wait for cores that are still computing, and for the slowest device. The result is
    at least a tenth of the step with only sums: a smaller difference of two times is noise.
    """
    after_product, product, sums, neither = parts
    seconds = max(after_product - product, _beyond(sums, neither), _LEAST_SECONDS)
    return seconds / (BUFFERS if platform == "cpu" else 1)


_SMALL_PRODUCT = 256


def reduction(size_bytes: int, *, is_reduced: bool) -> Probe:
    """A small step: a product, and `BUFFERS` buffers of `size_bytes` that wait for it, summed over
    all devices if `is_reduced`."""

    def step(x: jax.Array, *values: jax.Array) -> list[jax.Array]:
        mine = [value + (x @ x)[0, 0] for value in values]
        return jax.lax.psum(mine, ALL) if is_reduced else mine

    return step, [(_SMALL_PRODUCT, _SMALL_PRODUCT), *[(max(1, size_bytes // 4),)] * BUFFERS]


def _seconds_of_one(
    probe: Probe, mesh: Mesh, *, overheads: tuple[float, float], calls: int, dtype: Any
) -> float:
    """Seconds of one operation; on an accelerator, where it is short compared with a call, the
    program repeats it as often as its arguments and results fit.

    Args:
        probe: the operation.
        mesh: the devices.
        overheads: seconds of a call, and of launching one more operation.
        calls: most calls to time.
        dtype: data type of its arguments.
    """
    function, shapes = probe
    call, launch = overheads
    if mesh.devices.flat[0].platform == "cpu":
        return _beyond(seconds_of_function(function, mesh, shapes, calls=calls, dtype=dtype), call)
    given, results = _arguments_and_results(function, shapes, dtype)
    moved_bytes = sum(math.prod(each.shape) * each.dtype.itemsize for each in (*given, *results))
    repeats = max(1, min(_REPEATS, _REPEATED_BYTES // moved_bytes))
    seconds = seconds_of_function(function, mesh, shapes, calls=calls, dtype=dtype, repeats=repeats)
    empty = empty_seconds(function, mesh, shapes, calls=calls, dtype=dtype, repeats=repeats)
    return _beyond(seconds, max(empty, call + (repeats - 1) * launch)) / repeats


def _arguments_and_results(
    function: Callable[..., Any], shapes: Sequence[tuple[int, ...]], dtype: Any
) -> tuple[list[jax.ShapeDtypeStruct], list[jax.ShapeDtypeStruct]]:
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return given, jax.tree.leaves(jax.eval_shape(function, *given))


def empty_seconds(
    function: Callable[..., Any],
    mesh: Mesh,
    shapes: Sequence[tuple[int, ...]],
    *,
    calls: int,
    dtype: Any,
    repeats: int,
) -> float:
    """Seconds of a call with as many arrays as `repeats` of `function` take and return, all small:
    each array adds microseconds."""
    count = len(_arguments_and_results(function, shapes, dtype)[1])

    def small(*arrays: jax.Array) -> list[jax.Array]:
        return [arrays[index % len(arrays)] + index for index in range(count)]

    return seconds_of_function(
        small, mesh, [(4,)] * len(shapes), calls=calls, dtype=dtype, repeats=repeats
    )


def _beyond(seconds: float, empty_seconds: float) -> float:
    """Seconds of an operation without the call overhead, at least a tenth of the total."""
    return max(seconds - empty_seconds, seconds / 10)
