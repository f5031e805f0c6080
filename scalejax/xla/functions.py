"""A user's function as a job for a worker: pickled with its arguments' shapes and shardings.

Any function can be sent, even one typed into a notebook or into standard input. JAX is imported
only where a call is described, in a process that has it already.
"""

import base64
import inspect
import io
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import cloudpickle

from scalejax.config.parallelism import DATA
from scalejax.core.errors import ConfigError, refusal, require_multiple
from scalejax.core.units import format_bytes

Builder = Callable[[Any], tuple[Any, tuple[Any, ...]]]
"""A function of a mesh that returns (jitted function, its arguments as shapes with shardings)."""

_MOST_BYTES = 256 * 2**20
"""Size of a pickled function above which it has surely closed over arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A function and what it is called with, without the arrays themselves."""

    builder: Builder
    """Builds it over a mesh."""
    mesh_axes: dict[str, int]
    """Devices along each axis of the mesh, major to minor."""
    name: str
    """Name of the function."""
    global_batch: int | None
    """Rows of the arguments that are sharded over the data axis; None if shardings were given."""
    batch_names: tuple[str, ...] = ()
    """Names of those arguments; "argument 2" where the function does not name the third."""


class _Pickler(cloudpickle.Pickler):
    """Pickles jitted functions with their attributes, which `jax.jit` needs and which would be lost
    (seen with jax 0.10.2 and 0.12.0)."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj).__name__ == "PjitFunction":
            return _restored, (obj.__reduce_ex__(2), dict(vars(obj)))
        return super().reducer_override(obj)


def _restored(reduced: tuple[Any, ...], attributes: dict[str, Any]) -> Any:
    """A jitted function, from its reduced form and its attributes."""
    make, arguments, *state = reduced
    function = make(*arguments)
    if state and state[0] is not None:
        function.__setstate__(state[0])
    vars(function).update(attributes)
    return function


def pickled(function: Callable[..., Any], name: str) -> str:
    """`function` as text, for a worker.

    Raises:
        ConfigError: if it cannot be pickled, or holds too much.
    """
    file = io.BytesIO()
    try:
        _Pickler(file).dump(function)
    except Exception as error:  # whatever the objects that it refers to raise
        accepted = f"it must be picklable, to be compiled in another process: {error}"
        raise ConfigError(refusal("function", name, accepted)) from error
    if file.tell() > _MOST_BYTES:
        accepted = (
            f"pickled it takes {format_bytes(file.tell())}: pass arrays as arguments, whose shapes "
            "alone are sent, instead of closing over them"
        )
        raise ConfigError(refusal("function", name, accepted))
    return base64.b64encode(file.getvalue()).decode()


def unpickled(text: str, path: Sequence[str]) -> Builder:
    """The function of `pickled`; modules that it refers to are imported from `path` as well."""
    sys.path.extend(folder for folder in path if folder not in sys.path)
    return cloudpickle.loads(base64.b64decode(text))


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, or of the class of another callable."""
    return getattr(function, "__name__", type(function).__name__)


def call_of(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    device_count: int,
    batch_argnums: int | Sequence[int] | None = None,
) -> Call:
    """`function` called with `arguments` on `device_count` devices.

    If an argument's arrays (or shapes) have a `NamedSharding` over a mesh of that many devices,
    which may be abstract, it is kept, and arrays without one are replicated. Otherwise the call is
    data parallel: arrays of `batch_argnums` are sharded along their first dimension.

    The arguments are those of `scalejax.xla.profile_call`.

    Raises:
        ConfigError: if shardings are of other meshes, or the samples do not divide.
    """
    import jax

    name = name_of(function)
    leaves = jax.tree.leaves(tuple(arguments))
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    named = [each for each in shardings if isinstance(each, jax.sharding.NamedSharding)]
    meshes = {tuple(each.mesh.shape.items()) for each in named if each.mesh.size > 1}
    if len(meshes) > 1:
        accepted = "all must be of one mesh"
        raise ConfigError(refusal("shardings", sorted(meshes), accepted))
    if meshes:
        (axes,) = meshes
        if batch_argnums is not None:
            accepted = "its arguments have shardings, which say what is divided; leave it out"
            raise ConfigError(refusal("batch_argnums", batch_argnums, accepted))
        if math.prod(size for _, size in axes) != device_count:
            accepted = f"its mesh must have devices={device_count} devices"
            raise ConfigError(refusal("shardings", dict(axes), accepted))
        specs = [
            each.spec
            if isinstance(each, jax.sharding.NamedSharding) and each.mesh.size > 1
            else None
            for each in shardings
        ]
        builder = _Builder(function, _shapes(tuple(arguments)), specs)
        return Call(builder=builder, mesh_axes=dict(axes), name=name, global_batch=None)
    return _data_parallel(function, tuple(arguments), device_count, batch_argnums, name)


def scaled(
    arguments: Sequence[Any], factor: Fraction, batch_argnums: int | Sequence[int] | None = None
) -> tuple[Any, ...]:
    """Shapes of a data-parallel function's arguments with `factor` times the samples.

    Raises:
        ConfigError: if that is not a whole number, or the arguments have shardings.
    """
    import jax

    given = tuple(arguments)
    leaves = jax.tree.leaves(given)
    if any(isinstance(getattr(e, "sharding", None), jax.sharding.NamedSharding) for e in leaves):
        accepted = "arguments with shardings of their own are not scaled"
        raise ConfigError(refusal("scaling", "weak", accepted))
    positions = _positions(given, batch_argnums)

    def larger(leaf: Any) -> Any:
        if not leaf.shape:
            return leaf
        rows = leaf.shape[0] * factor
        if rows.denominator != 1:
            accepted = (
                f"{leaf.shape[0]} samples on the fewest devices are not a whole number on all"
            )
            raise ConfigError(refusal("scaling", "weak", accepted))
        return leaf.update(shape=(int(rows), *leaf.shape[1:]))

    shapes = _shapes(given)
    return tuple(
        jax.tree.map(larger, each) if position in positions else each
        for position, each in enumerate(shapes)
    )


def _positions(
    arguments: tuple[Any, ...], batch_argnums: int | Sequence[int] | None
) -> tuple[int, ...]:
    """Positions of the arguments that hold samples, from 0."""
    given = len(arguments) - 1 if batch_argnums is None else batch_argnums
    given = given if isinstance(given, Sequence) else (given,)
    for position in given:
        if not -len(arguments) <= position < len(arguments):
            accepted = f"there are {len(arguments)} arguments, counted from 0"
            raise ConfigError(refusal("batch_argnums", position, accepted))
    return tuple(sorted({position % len(arguments) for position in given}))


def _data_parallel(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    device_count: int,
    batch_argnums: int | Sequence[int] | None,
    name: str,
) -> Call:
    import jax
    from jax.sharding import PartitionSpec

    if not arguments:
        accepted = "a function is compiled with its arguments, such as (params, opt_state, batch)"
        raise ConfigError(refusal("arguments", arguments, accepted))
    positions = _positions(arguments, batch_argnums)
    specs: list[Any] = []
    counts: set[int] = set()
    for index, argument in enumerate(arguments):
        is_batch = index in positions
        for leaf in jax.tree.leaves(argument):
            shape = getattr(leaf, "shape", ())
            if not (is_batch and shape):
                specs.append(None)
                continue
            require_multiple(f"arguments[{index}].shape[0]", shape[0], device_count, "devices")
            specs.append(PartitionSpec(DATA))
            counts.add(shape[0])
    if not counts:
        accepted = (
            f"none of its {len(arguments)} arguments holds arrays of samples; name those that do"
        )
        raise ConfigError(refusal("batch_argnums", positions, accepted))
    if len(counts) > 1:
        accepted = (
            f"its arrays have {', '.join(map(str, sorted(counts)))} rows, but there is one "
            "number of samples; pass other arrays as another argument, or give shardings"
        )
        raise ConfigError(refusal("batch_argnums", positions, accepted))
    return Call(
        builder=_Builder(function, _shapes(arguments), specs),
        mesh_axes={DATA: device_count},
        name=name,
        global_batch=counts.pop(),
        batch_names=tuple(_name_of_argument(function, arguments, each) for each in positions),
    )


def _name_of_argument(
    function: Callable[..., Any], arguments: tuple[Any, ...], position: int
) -> str:
    """Name of a positional argument, or its position if it has none."""
    try:
        signature = inspect.signature(function)
        signature.bind(*arguments)  # not of a function that it wraps, with other arguments
    except (TypeError, ValueError):
        return f"argument {position}"
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [each.name for each in signature.parameters.values() if each.kind in kinds]
    return repr(names[position]) if position < len(names) else f"argument {position}"


def _shapes(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """`arguments` with shapes in place of arrays, without shardings."""
    import jax
    import jax.numpy as jnp

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        try:
            dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)
            # A Python number takes the type of its other operand, and must when compiled too.
            is_weak = getattr(leaf, "weak_type", isinstance(leaf, int | float | complex))
            return jax.ShapeDtypeStruct(jnp.shape(leaf), dtype, weak_type=is_weak)
        except TypeError as error:
            accepted = "it must be an array, a number, or a jax.ShapeDtypeStruct; close over others"
            raise ConfigError(refusal("arguments", leaf, accepted)) from error

    return jax.tree.map(shape, arguments)


@dataclass(frozen=True, slots=True)
class _Builder:
    """A `Builder` of a function that knows no mesh."""

    function: Callable[..., Any]
    shapes: tuple[Any, ...]
    specs: list[Any]

    @property
    def __name__(self) -> str:
        return name_of(self.function)

    def __call__(self, mesh: Any) -> tuple[Any, tuple[Any, ...]]:
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        leaves, tree = jax.tree.flatten(self.shapes)
        placed = [
            jax.ShapeDtypeStruct(
                leaf.shape,
                leaf.dtype,
                weak_type=leaf.weak_type,
                sharding=NamedSharding(mesh, PartitionSpec() if spec is None else spec),
            )
            for leaf, spec in zip(leaves, self.specs, strict=True)
        ]
        is_jitted = hasattr(self.function, "lower")
        function = self.function if is_jitted else jax.jit(self.function)
        return function, jax.tree.unflatten(tree, placed)
