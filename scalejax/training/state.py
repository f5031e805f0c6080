"""The training state: its parts, their shapes, and their shardings over a mesh.

Knows how parameters and optimizer state are sharded; nothing of losses and gradients.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey

from scalejax.config.model import activation_type
from scalejax.config.optimizer import AdamWConfig
from scalejax.config.parallelism import CONTEXT, DATA, EXPERT
from scalejax.config.run import ResolvedRun, RunConfig
from scalejax.core.errors import ConfigError, refusal
from scalejax.models import BatchNormScope, is_cast, network_class, param_specs, parameter_path
from scalejax.models.sharding import also_over, split_axes
from scalejax.training.gradient_sync import GradientSync, build_gradient_sync
from scalejax.training.gradient_sync.device_rows import PyTree
from scalejax.training.gradient_sync.diloco import initial_outer
from scalejax.training.mesh import replicated
from scalejax.training.noise_scale import NoiseAverages
from scalejax.training.optimizers.fine_tuning import (
    require_known_parts,
    trainable,
    updated,
    with_base_type,
)
from scalejax.training.setup import TrainSetup, network_of, train_setup


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Everything that an update changes."""

    step: PyTree
    """Updates made so far, int32."""
    params: PyTree
    """Parameters by path: float32, unless `fine_tuning.base_dtype` (of frozen ones) or
    `optimizer.main_params_dtype` says otherwise. With local SGD, this field and the next two hold
    one copy for each device along the data axis, [devices, ...]."""
    model_state: PyTree
    """Running statistics of BatchNorm, float32, by path."""
    opt_state: PyTree
    """State of the optimizer, for the trainable parameters."""
    average: PyTree = None
    """Weight average (EMA or SWA) {"params", "model_state"}; None if none is kept."""
    noise: PyTree = None
    """The `NoiseAverages` of the gradients, float32; None if they are not measured."""
    exchange: PyTree = None
    """State of gradient synchronisation, such as error feedback, for each device along the data
    axis, [devices, ...]; with local SGD the outer parameters and the outer optimizer's state,
    replicated; None if there is none. Named as in the checkpoints of 0.1."""


def initial_network(setup: TrainSetup) -> tuple[PyTree, PyTree]:
    """Parameters and running statistics before the first update."""
    network = network_of(setup, BatchNormScope())
    try:
        _, params, statistics = nnx.split(network, nnx.Param, nnx.BatchStat)
    except ValueError as error:
        accepted = "a network may hold nnx.Param and nnx.BatchStat only (no dropout, no counters)"
        raise ConfigError(refusal("model.name", setup.run.config.model.name, accepted)) from error
    config = setup.run.config
    params = with_base_type(config.fine_tuning, config.model, nnx.to_pure_dict(params))
    params = _in_main_type(config, params)
    return params, nnx.to_pure_dict(statistics)


def _in_main_type(config: RunConfig, params: PyTree) -> PyTree:
    """`params` with matrices and embeddings, which are used in the compute type alone, in the type
    in which the optimizer keeps them."""
    optimizer = config.optimizer
    if not isinstance(optimizer, AdamWConfig) or optimizer.main_params_dtype == "float32":
        return params
    dtype = optimizer.main_params_dtype
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            leaf.astype(dtype) if is_cast(config.model, parameter_path(path)) else leaf
        ),
        params,
    )


def state_bytes(run: ResolvedRun, mesh: Mesh) -> int:
    """Bytes of the state of `run`, each parameter and moment counted once however it is sharded; if
    every device has its own copy (local SGD), all copies."""
    leaves = jax.tree.leaves(state_shapes(train_setup(run, mesh), mesh))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def stage_parameters(run: ResolvedRun, mesh: Mesh) -> tuple[int, int]:
    """Number of parameters that a device uses of the layers of its pipeline stage; and the bytes of
    these and of their moments in its state, or 0 if a ZeRO stage shards them over data."""
    setup = train_setup(run, mesh)
    state, layout = abstract_state(setup), run.config.layout
    blocks = {"blocks": state.params["blocks"]}
    used = jax.tree.leaves(_used_shardings(setup, mesh, blocks))
    leaves, _ = jax.tree_util.tree_flatten_with_path(blocks)
    elements = {
        parameter_path(path): math.prod(sharding.shard_shape(leaf.shape))
        for (path, leaf), sharding in zip(leaves, used, strict=True)
    }
    own = sum(elements.values())
    if layout.zero_stage:
        return own, 0
    moments = None if layout.optimizer_memory_host_offload else state.opt_state
    held, _ = jax.tree_util.tree_flatten_with_path((blocks, moments))
    names = (
        parameter_path(tuple(each for each in path if isinstance(each, DictKey)))
        for path, _ in held
    )
    sizes = (leaf.dtype.itemsize for _, leaf in held)
    return own, sum(elements.get(name, 0) * size for name, size in zip(names, sizes, strict=True))


def abstract_state(setup: TrainSetup) -> TrainState:
    """Shapes and types of the state; nothing is computed.

    Raises:
        ConfigError: if the network cannot be built, or lacks a part named for fine-tuning.
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
    """Number of trainable parameters of `run`, and of all parameters of its network.

    Raises:
        ConfigError: as `abstract_state`.
    """
    setup = train_setup(run)
    params = abstract_state(setup).params
    learning, whole = (
        sum(leaf.size for leaf in jax.tree.leaves(tree))
        for tree in (learning_params(setup, params), params)
    )
    return learning, whole


def learning_params(setup: TrainSetup, params: PyTree) -> PyTree:
    """`params`, or a tree of the same structure, with None in place of frozen parameters."""
    return trainable(setup.run.config.fine_tuning, params)


def initial_noise(setup: TrainSetup) -> NoiseAverages | None:
    """The averages of the noise scale before the first update, if the run measures it."""
    if setup.run.config.train.noise_scale is None:
        return None
    return NoiseAverages(*(jnp.zeros((), jnp.float32) for _ in NoiseAverages._fields))


def gradient_sync_of(setup: TrainSetup) -> GradientSync:
    """The gradient synchronisation of the run."""
    run = setup.run
    return build_gradient_sync(
        run.config.gradient_sync,
        stacked=network_class(run.config.model).stacked,
    )


def initial_gradient_sync(setup: TrainSetup, params: PyTree) -> PyTree:
    """State of gradient synchronisation before the first update."""
    learning = learning_params(setup, params)
    if (local_sgd := setup.run.config.local_sgd) is not None:
        return initial_outer(local_sgd, learning)
    return copies(setup, gradient_sync_of(setup).init(learning))


def copies(setup: TrainSetup, tree: PyTree) -> PyTree:
    """One copy of `tree` for each device along the data axis, [devices, ...]."""
    devices = setup.run.layout.data
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[None], (devices, *leaf.shape)), tree)


def local_slice(parts: PyTree) -> PyTree:
    """One device's slice of a tree of [devices, ...], inside `shard_map`."""
    return jax.tree.map(lambda leaf: leaf[0], parts)


def as_local_slice(own: PyTree) -> PyTree:
    """`own` with a leading axis of size 1, as this device's slice of [devices, ...]."""
    return jax.tree.map(lambda leaf: leaf[None], own)


def _kept_average(setup: TrainSetup, params: PyTree, model_state: PyTree) -> PyTree:
    """The tree of a weight average of these, if the run keeps one."""
    if setup.run.config.averaging is None:
        return None
    return {"params": params, "model_state": model_state}


def state_shapes(setup: TrainSetup, mesh: Mesh) -> TrainState:
    """Shapes of the state with their shardings: those of `whole_shapes`, or with local SGD one
    copy of parameters and optimizer state for each device along the data axis."""
    shapes = whole_shapes(setup, mesh)
    if setup.run.config.local_sgd is None:
        return shapes
    parts = NamedSharding(mesh, PartitionSpec(DATA))
    own = (shapes.params, shapes.model_state, shapes.opt_state)
    params, model_state, opt_state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=parts),
        jax.eval_shape(partial(copies, setup), own),
    )
    return replace(shapes, params=params, model_state=model_state, opt_state=opt_state)


def whole_shapes(setup: TrainSetup, mesh: Mesh) -> TrainState:
    """Shapes and shardings of a state with one copy of each parameter; optimizer state is sharded
    as its parameters are.

    With a ZeRO stage they are sharded over the data axis as well, as in Megatron-LM's distributed
    optimizer; the network reads gathered parameters (`gathered_params`). Frozen parameters have no
    optimizer state and stay whole. Offloaded optimizer state is in host memory (`on_device`).
    """
    shapes = abstract_state(setup)
    whole = replicated(mesh)
    params = _used_shardings(setup, mesh, shapes.params)
    if setup.run.config.layout.zero_stage:
        learning = (learning_params(setup, tree) for tree in (shapes.params, params))
        params = updated(params, jax.tree.map(_over_data, *learning))
    model_state = jax.tree.map(lambda _: whole, shapes.model_state)
    is_local = setup.run.config.local_sgd is not None
    is_offloaded = setup.run.config.layout.optimizer_memory_host_offload
    kept = whole if is_local else NamedSharding(mesh, PartitionSpec(DATA))

    def placed(
        leaf: jax.ShapeDtypeStruct, of_parameter: jax.ShapeDtypeStruct, like: NamedSharding
    ) -> NamedSharding:
        sharding = _like_parameter(leaf.shape, of_parameter.shape, like)
        return sharding.with_memory_kind("pinned_host") if is_offloaded else sharding

    shardings = TrainState(
        step=whole,
        params=params,
        model_state=model_state,
        opt_state=_of_parameters(
            setup,
            placed,
            shapes.opt_state,
            learning_params(setup, shapes.params),
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


def on_device(setup: TrainSetup, opt_state: PyTree, gradient: PyTree) -> PyTree:
    """`opt_state`, copied from host memory if the run offloads it: for each parameter only once its
    gradient is there, or the compiler would copy all of it when the step begins.

    Only state as large as the parameters is offloaded. A CPU has one memory: the copies are within
    it, and the arithmetic is the same.
    """
    if not setup.run.config.layout.optimizer_memory_host_offload:
        return opt_state

    def brought(leaf: jax.Array, of_parameter: jax.Array) -> jax.Array:
        leaf, _ = lax.optimization_barrier((leaf, of_parameter))
        return jax.device_put(leaf, jax.memory.Space.Device)

    return _of_parameters(setup, brought, opt_state, gradient)


def off_device(setup: TrainSetup, opt_state: PyTree) -> PyTree:
    """`opt_state`, copied to host memory if the run offloads it."""
    if not setup.run.config.layout.optimizer_memory_host_offload:
        return opt_state
    return _of_parameters(
        setup, lambda leaf: jax.device_put(leaf, jax.memory.Space.Host), opt_state
    )


def _of_parameters(
    setup: TrainSetup, function: Callable[..., Any], opt_state: PyTree, *trees: PyTree, **how: Any
) -> PyTree:
    """Applies `function` to each array of the optimizer's state that belongs to a parameter, and to
    what `trees` have for it; a parameter that a part of the optimizer does not have is left out."""

    def of_leaf(leaf: Any, *rest: Any) -> Any:
        return leaf if isinstance(leaf, optax.MaskedNode) else function(leaf, *rest)

    return optax.tree.map_params(
        setup.optimizer,
        of_leaf,
        opt_state,
        *trees,
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
        **how,
    )


def _like_parameter(
    shape: tuple[int, ...], of_parameter: tuple[int, ...], like: NamedSharding
) -> NamedSharding:
    """The sharding of an array of the optimizer's state, from that of its parameter: the same if
    the shapes are equal; else the first dimensions, as far as they are the parameter's, are sharded
    as those, and the last ones over the other axes where these divide them."""
    if shape == of_parameter:
        return like
    same = 0
    while same < min(len(shape), len(of_parameter)) and shape[same] == of_parameter[same]:
        same += 1
    same = min(same, max(len(shape) - 2, 0))
    split = split_axes(like.spec, len(of_parameter))
    spec = PartitionSpec(*like.spec[:same], *[None] * (len(shape) - len(like.spec[:same])))
    for axis in (axis for axes in split[same:] for axis in axes):
        own = split_axes(spec, len(shape))
        order = sorted(range(same, len(shape)), key=lambda index: (len(own[index]) > 0, index))
        spec = also_over(axis, spec, shape, like.mesh.shape, order)
    return NamedSharding(like.mesh, spec)


def _used_shardings(setup: TrainSetup, mesh: Mesh, params: PyTree) -> PyTree:
    """Shardings of parameters while the network reads them: replicated over the data axis."""
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
    """The parameters that the network reads, all-gathered if the state shards them over data.

    Parameters that the network uses in the compute type are gathered in it: half the bytes of
    float32, and the only full copy that a device holds.
    """
    model = setup.run.config.model
    if not setup.run.config.layout.zero_stage:
        return params
    used = _used_shardings(setup, mesh, params)

    def gathered(path: tuple[Any, ...], leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
        if is_cast(model, parameter_path(path)):
            # Constrained to be sharded after the cast, or the compiler would gather before it.
            parts = _over_data(leaf, sharding)
            leaf = lax.with_sharding_constraint(leaf.astype(activation_type(model)), parts)
        return lax.with_sharding_constraint(leaf, sharding)

    learning = (learning_params(setup, tree) for tree in (params, used))
    return updated(params, jax.tree_util.tree_map_with_path(gathered, *learning))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPart:
    """Shard of a parameter's gradient that each device along the data axis needs.

    A dimension that other axes shard as well is reshaped to (their shards, shards of the data
    axis, rest), so that a device's gradient shard lies within its shard of the parameter.
    """

    spec: PartitionSpec
    """Sharding over the data axis of the gradient that `mean` returns; empty if replicated."""
    shape: tuple[int, ...] = ()
    """Shape of the gradient with that dimension split."""
    kept: PartitionSpec | None = None
    """Sharding of that shape over the other axes."""
    dimension: int | None = None
    """Dimension that is reduce-scattered; None if the gradient is all-reduced."""

    def mean(self, gradient: jax.Array) -> jax.Array:
        """This device's shard of the mean of `gradient` over the data axis."""
        dimension = self.dimension
        if dimension is None:
            return lax.pmean(gradient, DATA)

        def scattered(apart: jax.Array) -> jax.Array:
            part = lax.psum_scatter(apart, DATA, scatter_dimension=dimension, tiled=True)
            return part / lax.axis_size(DATA)

        # In a `shard_map` over the other axes: left to itself, the compiler would gather over them.
        others = set(jax.sharding.get_abstract_mesh().axis_names) - {DATA}
        return jax.shard_map(
            scattered,
            in_specs=self.kept,
            out_specs=self.kept,
            axis_names=others,
            check_vma=False,
        )(gradient.reshape(self.shape))


def data_parts(setup: TrainSetup, mesh: Mesh) -> PyTree:
    """A `DataPart` for each trainable parameter: replicated, or sharded over data with ZeRO."""
    params = abstract_state(setup).params

    def part(leaf: jax.ShapeDtypeStruct, used: NamedSharding) -> DataPart:
        spec = _over_data(leaf, used).spec
        for index, entry in enumerate(spec):
            axes = entry if isinstance(entry, tuple) else (entry,)
            if setup.run.config.layout.zero_stage and DATA in axes:
                others = math.prod(mesh.shape[axis] for axis in axes[: axes.index(DATA)])
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
    """`sharding` with one dimension of `leaf` sharded over the data axis as well, and over expert
    and context if they shard none (expert shards the parameters of experts only); unchanged if no
    dimension is divisible.

    Takes the largest unsharded dimension, or else the largest: most device counts divide it,
    unlike the number of layers.
    """
    mesh, spec = sharding.mesh, sharding.spec
    split = split_axes(spec, leaf.ndim)
    if any(DATA in axes for axes in split):
        return sharding
    order = sorted(range(leaf.ndim), key=lambda index: (len(split[index]) > 0, -leaf.shape[index]))
    spec = also_over(DATA, spec, leaf.shape, mesh.shape, order)
    for axis in (EXPERT, CONTEXT):
        if mesh.shape[axis] > 1 and not any(axis in axes for axes in split):
            spec = also_over(axis, spec, leaf.shape, mesh.shape, order)
    return NamedSharding(mesh, spec)


def shardings_of(shapes: PyTree) -> PyTree:
    """The sharding of each leaf of a tree of shapes."""
    return jax.tree.map(lambda leaf: leaf.sharding, shapes)
