"""The state that an update changes: its parts, their shapes, and how they are spread over a mesh.

Knows where parameters and optimizer state lie; nothing of losses and gradients.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalejax.config.gradient_sync import LocalSgdConfig
from scalejax.config.parallelism import DATA
from scalejax.config.run import ResolvedRun
from scalejax.core.errors import ConfigError, refusal
from scalejax.models import BatchNormScope, is_cast, network_class, param_specs, parameter_path
from scalejax.models.sharding import also_over, split_axes
from scalejax.training.gradient_sync import GradientSync, gradient_exchange
from scalejax.training.gradient_sync.diloco import initial_outer
from scalejax.training.mesh import replicated
from scalejax.training.noise_scale import NoiseAverages
from scalejax.training.optimizers.fine_tuning import require_known_parts, trainable
from scalejax.training.setup import TrainSetup, network_of, train_setup

PyTree = Any
"""Nested dicts and dataclasses of arrays, as JAX means it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Everything that an update changes."""

    step: PyTree
    """Updates made so far, int32."""
    params: PyTree
    """Parameters, float32, by path; with local SGD, here and in the next two, those of each device
    along data, [devices, ...]."""
    model_state: PyTree
    """Running statistics of BatchNorm, float32, by path."""
    opt_state: PyTree
    """State of the optimizer, of the parameters that learn."""
    average: PyTree = None
    """The average of params and model_state, by these names; None if none is kept."""
    noise: PyTree = None
    """The `NoiseAverages` of the gradients, float32; None if they are not measured."""
    exchange: PyTree = None
    """What each device along data keeps between exchanges, [devices, ...]; with local SGD, the
    last average and what steps from it, whole; None if nothing."""


def initial_network(setup: TrainSetup) -> tuple[PyTree, PyTree]:
    """Parameters and running statistics before the first update."""
    network = network_of(setup, BatchNormScope())
    try:
        _, params, statistics = nnx.split(network, nnx.Param, nnx.BatchStat)
    except ValueError as error:
        accepted = "a network may hold nnx.Param and nnx.BatchStat only (no dropout, no counters)"
        raise ConfigError(refusal("model.name", setup.run.config.model.name, accepted)) from error
    return nnx.to_pure_dict(params), nnx.to_pure_dict(statistics)


def state_bytes(run: ResolvedRun, mesh: Mesh) -> int:
    """Bytes of the state of `run`, each parameter and moment once, however they are spread; those
    of each device where each has its own."""
    leaves = jax.tree.leaves(state_shapes(train_setup(run, mesh), mesh))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def abstract_state(setup: TrainSetup) -> TrainState:
    """Shapes and types of the state, nothing computed.

    Raises:
        ConfigError: if the network cannot be built, or is to be fine-tuned in parts it has not.
    """
    params, model_state = jax.eval_shape(partial(initial_network, setup))
    require_known_parts(setup.run.config.fine_tuning, params)
    return TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32),
        params=params,
        model_state=model_state,
        opt_state=jax.eval_shape(setup.optimizer.init, learning_params(setup, params)),
        average=_kept_average(setup, params, model_state),
        noise=jax.eval_shape(partial(initial_noise, setup)),
        exchange=jax.eval_shape(partial(initial_gradient_sync, setup), params),
    )


def learning_count(run: ResolvedRun) -> tuple[int, int]:
    """Parameters of `run` that learn, and all that its network has, counted in numbers.

    Raises:
        ConfigError: as of `abstract_state`.
    """
    setup = train_setup(run)
    params = abstract_state(setup).params
    learning, whole = (
        sum(leaf.size for leaf in jax.tree.leaves(tree))
        for tree in (learning_params(setup, params), params)
    )
    return learning, whole


def learning_params(setup: TrainSetup, params: PyTree) -> PyTree:
    """`params`, or a tree alike, with None in place of what does not learn."""
    return trainable(setup.run.config.fine_tuning, params)


def initial_noise(setup: TrainSetup) -> NoiseAverages | None:
    """The averages of the noise scale before the first update, if the run measures it."""
    if setup.run.config.train.noise_scale is None:
        return None
    return NoiseAverages(*(jnp.zeros((), jnp.float32) for _ in NoiseAverages._fields))


def gradient_sync_of(setup: TrainSetup) -> GradientSync:
    """How the devices of the run bring their gradients together."""
    run = setup.run
    return gradient_exchange(
        run.config.gradient_sync,
        stacked=network_class(run.config.model).stacked,
        per_device_batch=run.split.per_device_batch,
    )


def initial_gradient_sync(setup: TrainSetup, params: PyTree) -> PyTree:
    """What the devices keep for their exchange before the first update."""
    config, learning = setup.run.config.gradient_sync, learning_params(setup, params)
    if isinstance(config, LocalSgdConfig):
        return initial_outer(config, learning)
    return copies(setup, gradient_sync_of(setup).init(learning))


def copies(setup: TrainSetup, tree: PyTree) -> PyTree:
    """`tree` once for each device along data, [devices, ...]."""
    devices = setup.run.layout.data
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[None], (devices, *leaf.shape)), tree)


def own_part(parts: PyTree) -> PyTree:
    """What one device holds of a tree of [devices, ...], inside `shard_map`."""
    return jax.tree.map(lambda leaf: leaf[0], parts)


def as_part(own: PyTree) -> PyTree:
    """The same as the device's part of [devices, ...]."""
    return jax.tree.map(lambda leaf: leaf[None], own)


def _kept_average(setup: TrainSetup, params: PyTree, model_state: PyTree) -> PyTree:
    """The tree of an average of these, if the run keeps one."""
    if setup.run.config.averaging is None:
        return None
    return {"params": params, "model_state": model_state}


def state_shapes(setup: TrainSetup, mesh: Mesh) -> TrainState:
    """Shapes of the state with their shardings: those of `whole_shapes`, or, with local SGD, of
    each device along data its own."""
    shapes = whole_shapes(setup, mesh)
    if not isinstance(setup.run.config.gradient_sync, LocalSgdConfig):
        return shapes
    parts = NamedSharding(mesh, PartitionSpec(DATA))
    own = (shapes.params, shapes.model_state, shapes.opt_state)
    params, model_state, opt_state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=parts),
        jax.eval_shape(partial(copies, setup), own),
    )
    return replace(shapes, params=params, model_state=model_state, opt_state=opt_state)


def whole_shapes(setup: TrainSetup, mesh: Mesh) -> TrainState:
    """Shapes of a state that all devices share: optimizer state lies where its parameters do.

    With a ZeRO stage that is in parts over data, as Megatron-LM's distributed optimizer has it:
    what the network reads is gathered from them (`gathered_params`).
    """
    shapes = abstract_state(setup)
    whole = replicated(mesh)
    params = _used_shardings(setup, mesh, shapes.params)
    if setup.run.config.layout.zero_stage:
        params = jax.tree.map(_over_data, shapes.params, params)
    model_state = jax.tree.map(lambda _: whole, shapes.model_state)
    is_local = isinstance(setup.run.config.gradient_sync, LocalSgdConfig)
    kept = whole if is_local else NamedSharding(mesh, PartitionSpec(DATA))
    shardings = TrainState(
        step=whole,
        params=params,
        model_state=model_state,
        opt_state=optax.tree.map_params(
            setup.optimizer,
            lambda _, like: like,
            shapes.opt_state,
            learning_params(setup, params),
            transform_non_params=lambda _: whole,
        ),
        average=_kept_average(setup, params, model_state),
        noise=jax.tree.map(lambda _: whole, shapes.noise),
        exchange=jax.tree.map(lambda _: kept, shapes.exchange),
    )
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def _used_shardings(setup: TrainSetup, mesh: Mesh, params: PyTree) -> PyTree:
    """How parameters of these shapes lie while the network reads them: whole over data."""
    specs = param_specs(
        params,
        network_class(setup.run.config.model).partition_rules(),
        setup.run.layout.axis_sizes,
    )
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )


def gathered_params(setup: TrainSetup, mesh: Mesh, params: PyTree) -> PyTree:
    """The parameters that the network reads, gathered if the state keeps them in parts over data.

    Those that the network uses in the compute type travel in it: half the bytes of float32, and
    the only whole copy that a device holds.
    """
    model = setup.run.config.model
    if not setup.run.config.layout.zero_stage:
        return params
    used = _used_shardings(setup, mesh, params)

    def gathered(path: tuple[Any, ...], leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
        if is_cast(model, parameter_path(path)):
            # Held in its parts as what it is cast to, or the compiler would gather it before.
            parts = _over_data(leaf, sharding)
            leaf = lax.with_sharding_constraint(leaf.astype(model.compute_dtype), parts)
        return lax.with_sharding_constraint(leaf, sharding)

    return jax.tree_util.tree_map_with_path(gathered, params, used)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPart:
    """Which part of a parameter's gradient each device along the data axis needs.

    A dimension that other axes divide as well is taken as (their parts, parts of the data axis,
    rest), so that a device's own part lies within the part of the parameter that it holds.
    """

    spec: PartitionSpec
    """How `mean` leaves the gradient over the data axis; of no dimension if it stays whole."""
    shape: tuple[int, ...] = ()
    """Of the gradient with that dimension taken apart."""
    kept: PartitionSpec | None = None
    """How the other axes divide it then."""
    dimension: int | None = None
    """The one over which it is scattered; None if it stays whole."""

    def mean(self, gradient: jax.Array) -> jax.Array:
        """The device's part of the mean of `gradient` over the data axis."""
        dimension = self.dimension
        if dimension is None:
            return lax.pmean(gradient, DATA)

        def scattered(apart: jax.Array) -> jax.Array:
            part = lax.psum_scatter(apart, DATA, scatter_dimension=dimension, tiled=True)
            return part / lax.axis_size(DATA)

        # Each device for what it holds of it: left to the compiler, the other axes are gathered.
        others = set(jax.sharding.get_abstract_mesh().axis_names) - {DATA}
        return jax.shard_map(
            scattered,
            in_specs=self.kept,
            out_specs=self.kept,
            axis_names=others,
            check_vma=False,
        )(gradient.reshape(self.shape))


def data_parts(setup: TrainSetup, mesh: Mesh) -> PyTree:
    """A `DataPart` for each parameter that learns: whole, but for what the layout's ZeRO stage
    keeps apart."""
    params = abstract_state(setup).params

    def part(leaf: jax.ShapeDtypeStruct, used: NamedSharding) -> DataPart:
        spec = _over_data(leaf, used).spec
        for index, entry in enumerate(spec):
            axes = entry if isinstance(entry, tuple) else (entry,)
            if setup.run.config.layout.zero_stage and DATA in axes:
                others = math.prod(mesh.shape[axis] for axis in axes if axis != DATA)
                split = (others, mesh.shape[DATA], -1)
                kept = (*used.spec, *[None] * leaf.ndim)[: leaf.ndim]
                return DataPart(
                    kept=PartitionSpec(*kept[: index + 1], None, None, *kept[index + 1 :]),
                    spec=PartitionSpec(*[None] * (index + 1), DATA),
                    shape=(*leaf.shape[:index], *split, *leaf.shape[index + 1 :]),
                    dimension=index + 1,
                )
        return DataPart(spec=PartitionSpec())

    parts = jax.tree.map(part, params, _used_shardings(setup, mesh, params))
    return learning_params(setup, parts)


def _over_data(leaf: jax.Array | jax.ShapeDtypeStruct, sharding: NamedSharding) -> NamedSharding:
    """`sharding` with one dimension of `leaf` split over the data axis as well; the same where no
    dimension is divisible.

    The largest that nothing splits yet, or else the largest: one that most numbers of devices
    divide, which the number of layers is not.
    """
    mesh, spec = sharding.mesh, sharding.spec
    split = split_axes(spec, leaf.ndim)
    if any(DATA in axes for axes in split):
        return sharding
    order = sorted(range(leaf.ndim), key=lambda index: (len(split[index]) > 0, -leaf.shape[index]))
    return NamedSharding(mesh, also_over(DATA, spec, leaf.shape, mesh.shape, order))


def shardings_of(shapes: PyTree) -> PyTree:
    """Where each leaf of a tree of shapes lies."""
    return jax.tree.map(lambda leaf: leaf.sharding, shapes)
