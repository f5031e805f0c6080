"""Timing of a function on every device of a mesh at once, waiting for its results.

Virtual devices of one CPU share its cores, so a device is timed while all others are under the
same load. Knows nothing of what is timed.
"""

import math
import time
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ALL = "all"
"""Name of the only axis of a measured mesh."""

_WARM_UPS = 2
_ENOUGH_SECONDS, _FEWEST_CALLS = (
    0.4,
    3,
)  # one process may stop early; several must all make as many calls


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
        repeats: how often the program runs `function`, each time on arrays of its own: a GPU needs
            only microseconds for what takes longer to call.
    """
    compiled = compiled_function(function, mesh, shapes, dtype=dtype, repeats=repeats)
    arguments: list[jax.Array] = []
    for shape in shapes:
        first = filled(mesh, shape, dtype)
        arguments += [first, *(jnp.copy(first) for _ in range(repeats - 1))]
    return seconds_of_call(compiled, arguments, calls=calls)


def compiled_function(
    function: Callable[..., Any],
    mesh: Mesh,
    shapes: Sequence[tuple[int, ...]],
    *,
    dtype: Any = jnp.float32,
    repeats: int = 1,
) -> Any:
    """`function` compiled for every device of `mesh` at once; arguments as for
    `seconds_of_function`."""
    spec = PartitionSpec(ALL)

    def repeated(*parts: jax.Array) -> list[Any]:
        own = [part[0] for part in parts]
        groups = [own[start::repeats] for start in range(repeats)]
        return jax.tree.map(lambda out: out[None], [function(*group) for group in groups])

    each = jax.shard_map(repeated, mesh=mesh, in_specs=spec, out_specs=spec)
    sharding = NamedSharding(mesh, spec)
    given = [
        jax.ShapeDtypeStruct((mesh.size, *shape), dtype, sharding=sharding)
        for shape in shapes
        for _ in range(repeats)
    ]
    return jax.jit(each).lower(*given).compile()


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
        statistic: statistic of the times. By default the minimum, because other programs can only
            make a call longer; with several processes the median, because they are not
            synchronised, and the minimum is a call while the others were idle.
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


def seconds_in_turn(
    calls: Sequence[Callable[[], Any]],
    *,
    rounds: int,
    seconds: float,
    turn_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Mean seconds of functions that are called one after the other, again and again.

    Other work on this machine slows all of them alike. The mean is used because the time of a step
    is the sum of its parts' times even if other programs take turns on the cores with some of them;
    a minimum is that of an undisturbed call.

    Args:
        calls: functions without arguments; each waits for its results.
        rounds: most timed turns of each, after one that is not timed; there is at least one.
        seconds: time in which further rounds must end, judged by the longest so far. Several
            processes, which must make equally many calls, agree on a number that the first calls
            of the slowest suggest.
        turn_seconds: for how long a short function is called again in its turn; not with several
            processes.
        clock: clock that times each call, in seconds.
    """
    begin = time.perf_counter()
    for call in calls:
        call()
    is_alone = jax.process_count() == 1
    spent: list[list[float]] = [[] for _ in calls]
    longest = slowest_process(time.perf_counter() - begin)
    if not is_alone:
        rounds = min(rounds, max(1, int(seconds / longest)))
    end = time.perf_counter() + seconds
    for done in range(rounds):
        start_of_round = time.perf_counter()
        if is_alone and done and start_of_round + longest > end:
            break
        for call, found in zip(calls, spent, strict=True):
            turn = 0.0
            while not turn or (is_alone and turn < turn_seconds):
                start = clock()
                call()
                found.append(clock() - start)
                turn += found[-1]
        longest = max(longest, time.perf_counter() - start_of_round)
    return [fmean(found) for found in spent]


def slowest_process(seconds: float) -> float:
    """The largest value that any process measured; every process must call it."""
    if jax.process_count() == 1:
        return seconds
    return float(multihost_utils.process_allgather(np.float32(seconds)).max())


def noise(mesh: Mesh, shape: tuple[int, ...]) -> jax.Array:
    """An f32 array like that of `filled`, made without a program, whose compilation takes time."""
    count = math.prod(shape)
    values = np.resize(np.sin(np.arange(min(count, 2**16), dtype=np.float32)), (1, *shape))
    rows = np.broadcast_to(values, (mesh.size, *shape))
    return jax.device_put(rows, NamedSharding(mesh, PartitionSpec(ALL)))


def filled(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array of noise with a row of `shape` on each device: multiplying ones or zeros takes less
    power, so a GPU's clocks would stay higher than in training."""
    return filling(mesh, shape, dtype)()


def filling(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> Callable[[], jax.Array]:
    """The program of `filled`, which its first call compiles; every call makes an array."""
    sharding = NamedSharding(mesh, PartitionSpec(ALL))

    def noise() -> jax.Array:
        count = mesh.size * math.prod(shape)
        values = jnp.sin(jnp.arange(count, dtype=jnp.float32)).astype(dtype)
        return values.reshape(mesh.size, *shape)

    return jax.jit(noise, out_shardings=sharding)
