"""Timing of a function on every device of a mesh at once, waiting for its results.

Virtual devices of one CPU share its cores, so a device is timed while all others are under the
same load. Knows nothing of what is timed.
"""

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ALL = "all"
"""Name of the only axis of a measured mesh."""

_WARM_UPS = 2
_ENOUGH_SECONDS, _FEWEST_CALLS = (
    0.4,
    3,
)  # one process may stop early; several must make equally many calls


def seconds_of_function(
    function: Callable[..., Any],
    mesh: Mesh,
    shapes: Sequence[tuple[int, ...]],
    *,
    calls: int,
    dtype: Any = jnp.float32,
    repeats: int = 1,
) -> float:
    """Seconds of one call of `function` on arrays of noise, the same on every device.

    Args:
        function: takes arrays of `shapes` on one device; its results stay there.
        mesh: the devices, along `ALL`.
        shapes: shapes of the arguments on each device.
        calls: most calls to time.
        dtype: data type of the arguments.
        repeats: how often the program has `function`, each time on arrays of its own: a GPU does
            in microseconds what takes longer to call.
    """
    spec = PartitionSpec(ALL)

    def repeated(*parts: jax.Array) -> list[Any]:
        own = [part[0] for part in parts]
        groups = [own[start::repeats] for start in range(repeats)]
        return jax.tree.map(lambda out: out[None], [function(*group) for group in groups])

    each = jax.shard_map(repeated, mesh=mesh, in_specs=spec, out_specs=spec)
    arguments: list[jax.Array] = []
    for shape in shapes:
        first = filled(mesh, shape, dtype)
        arguments += [first, *(jnp.copy(first) for _ in range(repeats - 1))]
    return seconds_of_call(jax.jit(each).lower(*arguments).compile(), arguments, calls=calls)


def seconds_of_call(
    compiled: Any,
    arguments: Sequence[Any],
    *,
    calls: int,
    statistic: Callable[[Sequence[float]], float] | None = None,
) -> float:
    """Seconds of one blocking call of a compiled function.

    Args:
        compiled: result of `jax.jit(...).lower(...).compile()`.
        arguments: arguments of the call.
        calls: most calls to time.
        statistic: of the times. By default the minimum, because other programs can only make a
            call longer; with several processes the median, because they are not synchronised,
            and the minimum is a call while the others were idle.
    """
    for _ in range(_WARM_UPS):
        jax.block_until_ready(compiled(*arguments))
    times: list[float] = []
    while len(times) < calls:
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - start)
        is_enough = len(times) >= _FEWEST_CALLS and sum(times) > _ENOUGH_SECONDS
        if is_enough and jax.process_count() == 1:
            break
    statistic = statistic or (min if jax.process_count() == 1 else median)
    return statistic(times)


def filled(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array of noise with a row of `shape` on each device: multiplying ones or zeros takes less
    power, so that a GPU's clocks stay higher than in training."""
    sharding = NamedSharding(mesh, PartitionSpec(ALL))

    def noise() -> jax.Array:
        count = mesh.size * math.prod(shape)
        values = jnp.sin(jnp.arange(count, dtype=jnp.float32)).astype(dtype)
        return values.reshape(mesh.size, *shape)

    return jax.jit(noise, out_shardings=sharding)()
