"""The `Step`: one update of one run as a value, used both to train and to compile for costing.

Knows the network, the optimizer and how gradients are reduced over the mesh. Knows no data
source, no clock and no cluster: devices come as a mesh, real or only described.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import Mesh

from scalejax.config.checks import require_noise_scale_parts
from scalejax.config.dataset_facts import POSITIONS, SEGMENT_IDS, DatasetFacts
from scalejax.config.model import ImageNetworkConfig, ResNetConfig
from scalejax.config.optimizer import SophiaConfig
from scalejax.config.run import ResolvedRun, in_phase
from scalejax.core.errors import ConfigError
from scalejax.models import BatchNormScope, network_class
from scalejax.models.float8 import with_present_scales
from scalejax.models.moe import with_counted_loads
from scalejax.models.pretrained import pretrained_weights
from scalejax.training.data_parallel import combined_gradients, require_stages_in_shards
from scalejax.training.gradient_sync.local_sgd import local_update
from scalejax.training.gradients import (
    Batch,
    gradients,
    mean_loss,
    with_row_numbers,
    with_sampled_labels,
    with_target_weights,
)
from scalejax.training.mesh import batch_sharding, replicated
from scalejax.training.noise_scale import NoiseAverages, estimates
from scalejax.training.optimizers.averaging import averaged
from scalejax.training.optimizers.fine_tuning import updated
from scalejax.training.optimizers.loss_scale import LossScaled
from scalejax.training.optimizers.sophia import refreshed
from scalejax.training.optimizers.transformations import squared_layer_norms
from scalejax.training.schedules import Schedule
from scalejax.training.setup import (
    TrainSetup,
    feature_width,
    has_batch_norm,
    reads_features,
    train_setup,
)
from scalejax.training.start import started_weights
from scalejax.training.state import (
    PyTree,
    TrainState,
    abstract_state,
    copies,
    gathered_params,
    initial_gradient_sync,
    initial_network,
    initial_noise,
    learning_params,
    off_device,
    on_device,
    shardings_of,
    state_shapes,
    whole_shapes,
)

# Shapes, types and shardings of a global batch.


def batch_shapes(run: ResolvedRun, mesh: Mesh | None) -> Batch:
    """Shapes of one global batch of `run`, sharded over the batch axes of `mesh` if there is one.

    Inputs are uint8 images, float32 numbers or int32 tokens; targets are int32, as are
    "segment_ids" and "positions" of packed documents. Float32 "weights" of the rows are added if
    not all of them count, and float32 "mix" or "cut" if rows are mixed in pairs.
    """
    dataset = run.dataset
    sharding = None if mesh is None else batch_sharding(mesh)
    parts: dict[str, tuple[tuple[int, ...], Any]]
    parts = {"inputs": (dataset.input_shape, input_dtype(dataset))}
    if reads_features(run.config):
        parts = {"inputs": ((feature_width(train_setup(run)),), jnp.float32)}
    for name in ("targets", "places") if dataset.is_masked else ("targets",):
        parts[name] = (dataset.target_shape, jnp.int32)
    for name in (SEGMENT_IDS, POSITIONS) if dataset.is_packed else ():
        parts[name] = (dataset.input_shape, jnp.int32)
    if run.is_weighted:
        parts["weights"] = ((), jnp.float32)
    if run.is_mixed:
        parts |= {"cut": ((3,), jnp.float32)} if run.is_cut else {"mix": ((), jnp.float32)}
    return {
        name: jax.ShapeDtypeStruct((run.split.global_batch, *shape), dtype, sharding=sharding)
        for name, (shape, dtype) in parts.items()
    }


def input_dtype(dataset: DatasetFacts) -> Any:
    """Data type of the inputs of a data set, before any network."""
    image_dtype = jnp.float32 if dataset.is_table else jnp.uint8
    return jnp.int32 if dataset.is_text else image_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One update of a run over a mesh.

    Example:
        >>> from importlib.resources import files
        >>> from scalejax import build_mesh, build_step, load_config, resolve
        >>> path = files("scalejax") / "config/examples/fashion_small_batch.toml"
        >>> run = resolve(load_config(path), 1)
        >>> step = build_step(run, build_mesh(run.layout))
        >>> step.batch["inputs"].shape, step.batch["targets"].shape
        ((32, 28, 28, 1), (32,))
    """

    function: Any
    """The jitted (state, batch) -> (state, metrics); the state is donated."""
    state: TrainState
    """Shapes, types and shardings of the state."""
    batch: Batch
    """Shapes, types and shardings of a global batch."""
    run: ResolvedRun
    """The run whose update it is."""

    def lower(self) -> jax.stages.Lowered:
        """The step lowered, to be compiled for the devices of its mesh.

        Raises:
            ConfigError: if it has an array that XLA cannot index, which would end the process.
        """
        traced = self.function.trace(self.state, self.batch)
        largest = max(_arrays_of(traced.jaxpr.jaxpr), key=lambda each: each.size)
        if largest.size * largest.dtype.itemsize > _MOST_BYTES:
            raise ConfigError(
                f"the step of {self.run.config.model.name!r} is refused: it has an array "
                f"{largest.str_short()}, larger than XLA can index; take fewer samples for each "
                "device, or shorter ones."
            )
        return traced.lower()


_MOST_BYTES = 2**62
"""Largest array: XLA counts elements and bytes in 64 bits, with a sign."""


def _arrays_of(jaxpr: Jaxpr) -> Iterator[ShapedArray]:
    """Types of all arrays in a program and in the functions that it calls."""
    for variable in (*jaxpr.invars, *(v for equation in jaxpr.eqns for v in equation.outvars)):
        if isinstance(variable.aval, ShapedArray):
            yield variable.aval
    for equation in jaxpr.eqns:
        for called in jaxprs_in_params(equation.params):
            yield from _arrays_of(called)


def build_step(
    run: ResolvedRun, mesh: Mesh, *, phase: int = 0, schedule: Schedule | None = None
) -> Step:
    """The training step of `run` over `mesh`, jitted but not compiled.

    Example:
        >>> import jax
        >>> from importlib.resources import files
        >>> from scalejax import build_mesh, build_step, init_state, load_config, resolve
        >>> path = files("scalejax") / "config/examples/fashion_small_batch.toml"
        >>> run = resolve(load_config(path), 1)
        >>> mesh = build_mesh(run.layout)
        >>> step = build_step(run, mesh)
        >>> batch = jax.tree.map(lambda each: jax.numpy.zeros(each.shape, each.dtype), step.batch)
        >>> state, metrics = step.function(init_state(run, mesh), batch)
        >>> int(state.step), sorted(metrics)
        (1, ['accuracy', 'learning_rate', 'loss'])

    It applies the gradient of the mean loss of the global batch, or the gradient that the run's
    gradient synchronisation makes of the gradients of its devices.

    The loss is the mean over all samples that count on all devices, however they are split over
    devices and microbatches, so that splitting changes nothing but rounding (Goyal et al. 2017,
    remark 3). BatchNorm is the exception, by definition: its statistics are those of one
    microbatch, over all devices or those of a group, and its running statistics are updated once
    per microbatch.

    Args:
        run: the run.
        mesh: its devices.
        phase: index of the batch-size phase, if the batch grows.
        schedule: the learning rate by step; if None, that of the config.

    Raises:
        ConfigError: if the network cannot be built for the data set, or the installed compiler
            cannot compile the step.
    """
    require_stages_in_shards(run)
    setup = train_setup(run, mesh, schedule)
    if phase:  # with the optimizer and the schedule of the whole run
        setup = replace(setup, run=in_phase(setup.run, run.phases[phase]))
    state = state_shapes(setup, mesh)
    if run.config.train.noise_scale is not None:
        _part_count(setup.run, state.model_state)  # a user's own network may have BatchNorm too
    batch = batch_shapes(setup.run, mesh)
    state_shardings = shardings_of(state)
    function = jax.jit(
        partial(_update, setup, mesh),
        in_shardings=(state_shardings, shardings_of(batch)),
        out_shardings=(state_shardings, replicated(mesh)),
        donate_argnums=0,
    )
    return Step(function=function, state=state, batch=batch, run=setup.run)


def init_state(run: ResolvedRun, mesh: Mesh) -> TrainState:
    """The state before the first update: initialised from the run's seed, or loaded from the
    model's pretrained weights; the same on any mesh.

    Example:
        >>> import jax
        >>> from importlib.resources import files
        >>> from scalejax import build_mesh, init_state, load_config, resolve
        >>> path = files("scalejax") / "config/examples/fashion_small_batch.toml"
        >>> run = resolve(load_config(path), 1)
        >>> state = init_state(run, build_mesh(run.layout))
        >>> sum(each.size for each in jax.tree.leaves(state.params))
        118282

    Raises:
        ConfigError: if the pretrained weights are missing.
    """
    setup = train_setup(run, mesh)
    shapes = whole_shapes(setup, mesh)
    shardings = shardings_of(shapes)
    params, model_state = initial_weights(setup, (shapes.params, shapes.model_state))
    init = jax.jit(setup.optimizer.init, out_shardings=shardings.opt_state)
    opt_state = init(learning_params(setup, params))
    step = jax.device_put(jnp.zeros((), jnp.int32), shardings.step)
    noise = jax.device_put(initial_noise(setup), shardings.noise)
    state = TrainState(
        step=step, params=params, model_state=model_state, opt_state=opt_state, noise=noise
    )
    if run.config.gradient_sync is not None:
        init_sync = jax.jit(partial(initial_gradient_sync, setup), out_shardings=shardings.exchange)
        state = replace(state, exchange=init_sync(params))
    if run.config.local_sgd is not None:
        per_device = shardings_of(state_shapes(setup, mesh))
        one, out_shardings = (
            (tree.params, tree.model_state, tree.opt_state) for tree in (state, per_device)
        )
        replicate = jax.jit(partial(copies, setup), out_shardings=out_shardings)
        params, model_state, opt_state = replicate(one)
        state = replace(state, params=params, model_state=model_state, opt_state=opt_state)
    if run.config.averaging is not None:  # a copy: the update may write over either
        copied = jax.jit(partial(jax.tree.map, jnp.copy), out_shardings=shardings.average)
        average = copied({"params": params, "model_state": model_state})
        state = replace(state, average=average)
    return state


def initial_weights(setup: TrainSetup, shapes: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
    """Parameters and statistics of these shapes: those that the run starts from, or pretrained
    ones, where given; random elsewhere."""
    config = setup.run.config
    if config.start is None:
        loaded = tuple(pretrained_weights(config.model, tree) for tree in shapes)
    else:
        loaded = started_weights(config, shapes)
    is_loaded = jax.tree.map(
        lambda leaf: leaf is not None, loaded, is_leaf=lambda leaf: leaf is None
    )

    def initialised() -> PyTree:  # only what is missing: initialising all takes seconds to compile
        weights = initial_network(setup)
        return jax.tree.map(lambda leaf, has: None if has else leaf, weights, is_loaded)

    shardings = jax.tree.map(lambda leaf, has: None if has else leaf.sharding, shapes, is_loaded)
    return updated(loaded, jax.jit(initialised, out_shardings=shardings)())


def forward(run: ResolvedRun) -> tuple[Callable[..., PyTree], tuple[PyTree, ...]]:
    """The loss of one global batch on one device as a function, and the shapes to trace it with.

    For counting the FLOP of the model itself: no mesh, no gradient, no recompute, and no library
    call that is opaque to a trace.
    """
    setup = train_setup(run)
    return partial(mean_loss, setup, BatchNormScope()), _traced(setup)


def forward_and_backward(run: ResolvedRun) -> tuple[Callable[..., PyTree], tuple[PyTree, ...]]:
    """The loss and its gradient on one device as a function, and the shapes to trace it with.

    The gradient is with respect to the trainable parameters, recomputation included: if few are
    trainable, the backward pass is less than twice the forward pass.
    """
    setup = train_setup(run)
    return partial(gradients, setup, BatchNormScope(), scale=None), _traced(setup)


def _traced(setup: TrainSetup) -> tuple[PyTree, ...]:
    """Shapes of parameters, statistics and a global batch."""
    state, batch = abstract_state(setup), batch_shapes(setup.run, None)
    return state.params, state.model_state, batch


def _update(
    setup: TrainSetup, mesh: Mesh, state: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, jax.Array]]:
    batch = with_row_numbers(setup, with_target_weights(batch), state.step)
    if (local_sgd := setup.run.config.local_sgd) is not None:
        return local_update(setup, local_sgd, mesh, state, batch)
    before = state.opt_state
    scale = before.scale if isinstance(before, LossScaled) else None
    params = gathered_params(setup, mesh, state.params)
    gradient, model_state, metrics, sync_state = combined_gradients(setup, mesh)(
        params, state.model_state, batch, scale, state.exchange
    )
    model_state, of_loads = with_counted_loads(setup.run.config.model, model_state)
    noise, metrics = _gradient_metrics(setup, state, gradient, metrics, scale)
    learning = learning_params(setup, _apart_from_backward(setup, state.params))
    opt_state = on_device(setup, state.opt_state, gradient)
    opt_state = _with_curvature(setup, mesh, state, params, batch, opt_state)
    updates, opt_state = setup.optimizer.update(gradient, opt_state, learning)
    opt_state = off_device(setup, opt_state)
    step = state.step + 1
    params = updated(state.params, optax.apply_updates(learning, updates))
    weights = {"params": params, "model_state": model_state}
    average = averaged(setup.run, step, state.average, weights)
    if average is not None:
        scaled = with_present_scales(average["model_state"], model_state)
        average = {**average, "model_state": scaled}
    new_state = TrainState(
        step=step,
        params=params,
        model_state=model_state,
        opt_state=opt_state,
        average=average,
        noise=noise,
        exchange=sync_state,
    )
    learning_rate = jnp.asarray(setup.schedule(state.step), jnp.float32)
    metrics = {**metrics, **of_loads, "learning_rate": learning_rate}
    if isinstance(before, LossScaled):
        return _select_unless_skipped(state, new_state, metrics)
    return new_state, metrics


def _with_curvature(
    setup: TrainSetup,
    mesh: Mesh,
    state: TrainState,
    params: PyTree,
    batch: Batch,
    opt_state: PyTree,
) -> PyTree:
    """`opt_state`, with its curvature estimated again if the optimizer keeps one and it is due in
    this update; by the function that computes the gradient, however that is split."""
    config = setup.run.config.optimizer
    if not isinstance(config, SophiaConfig):
        return opt_state

    def of_sampled_labels() -> tuple[PyTree, Any]:
        sampled, labels = with_sampled_labels(setup, batch, state.step)
        gradient, *_ = combined_gradients(setup, mesh)(
            params, state.model_state, sampled, None, state.exchange
        )
        return gradient, labels

    return refreshed(config, opt_state, state.step, of_sampled_labels)


def _apart_from_backward(setup: TrainSetup, params: PyTree) -> PyTree:
    """`params` for the optimizer, behind a barrier: XLA does not fuse it with the backward pass.

    Otherwise XLA fuses the update of a 1 x 1 convolution's float32 weights with their cast to 16
    bits for the gradient of the layer below, as both read the same weights: the backward pass then
    waits for that gradient's all-reduce, and XLA cannot combine it with others. ResNet-50 in
    bfloat16 had 34 all-reduces, 30 of them small and waited for; with the barrier it has three of
    up to 30 MiB.
    """
    model = setup.run.config.model
    is_cast = model.compute_dtype != "float32" and setup.run.layout.device_count > 1
    if not (is_cast and isinstance(model, ResNetConfig | ImageNetworkConfig)):
        return params
    return jax.lax.optimization_barrier(params)


def _gradient_metrics(
    setup: TrainSetup,
    state: TrainState,
    gradient: PyTree,
    metrics: dict[str, Any],
    scale: jax.Array | None,
) -> tuple[NoiseAverages | None, dict[str, Any]]:
    """Moving averages for the gradient noise scale; and `metrics` with the gradient norm, the norms
    of layers and the noise scale added, each if the run measures it."""
    run, wanted = setup.run, setup.run.config.train.noise_scale
    unscaled = 1.0 if scale is None else 1 / scale**2
    if run.config.train.layer_gradient_norms:
        squares = squared_layer_norms(gradient, network_class(run.config.model).stacked)
        norms = {name: jnp.sqrt(square * unscaled) for name, square in squares.items()}
        metrics = {**metrics, "layer_gradient_norms": norms}
    if not run.config.measures_gradient_norm:
        return None, metrics
    squared_norm = optax.tree.norm(gradient, squared=True) * unscaled
    metrics = {**metrics, "gradient_norm": jnp.sqrt(squared_norm)}
    if wanted is None:
        return None, metrics
    parts = _part_count(run, state.model_state)
    variance, true_squared_norm = estimates(
        metrics.pop("small_squared_norm") * unscaled,
        squared_norm,
        small_batch=run.split.global_batch / parts,
        big_batch=run.split.global_batch,
    )
    noise = state.noise.updated(wanted.decay, variance, true_squared_norm)
    return noise, {**metrics, "noise_scale": noise.noise_scale}


def _part_count(run: ResolvedRun, model_state: PyTree) -> int:
    mode, keeps = run.config.layout.mode, has_batch_norm(run.config.model, model_state)
    return require_noise_scale_parts(run.split, mode=mode, has_batch_norm=keeps)


def _select_unless_skipped(
    state: TrainState, new_state: TrainState, metrics: dict[str, jax.Array]
) -> tuple[TrainState, dict[str, jax.Array]]:
    """`new_state`, or `state` with only the loss scale updated if the gradient overflowed; and the
    metrics with the unscaled loss.

    Parameters and optimizer state were already left unchanged by the optimizer; this restores the
    step count, running statistics, average and noise averages.
    """
    before, after = state.opt_state, new_state.opt_state
    is_skipped = after.skipped_updates > before.skipped_updates
    step, model_state, average, noise = jax.tree.map(
        partial(jnp.where, is_skipped),
        (state.step, state.model_state, state.average, state.noise),
        (new_state.step, new_state.model_state, new_state.average, new_state.noise),
    )
    scaling = {"loss_scale": before.scale, "skipped_updates": after.skipped_updates}
    kept = {"step": step, "model_state": model_state, "average": average, "noise": noise}
    new_state = replace(new_state, **kept)
    return new_state, {**metrics, "loss": metrics["loss"] / before.scale, **scaling}
