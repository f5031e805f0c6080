"""The `Step`: one update of one run as a value, which is both trained and compiled for costing.

Knows the network, the optimizer and how gradients are reduced over the mesh. Knows no data
source, no clock and no cluster: devices come in a mesh, real or only described.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from scalejax.config.checks import require_noise_scale_parts
from scalejax.config.data import DatasetFacts
from scalejax.config.gradient_sync import LocalSgdConfig
from scalejax.config.run import ResolvedRun, in_phase
from scalejax.models import BatchNormScope
from scalejax.models.pretrained import pretrained_weights
from scalejax.training.data_parallel import combined_gradients
from scalejax.training.gradient_sync.local_sgd import local_update
from scalejax.training.gradients import Batch, gradients, mean_loss
from scalejax.training.mesh import batch_sharding, replicated
from scalejax.training.noise_scale import NoiseAverages, estimates
from scalejax.training.optimizers.averaging import averaged
from scalejax.training.optimizers.fine_tuning import updated
from scalejax.training.optimizers.loss_scale import LossScaled
from scalejax.training.schedules import Schedule
from scalejax.training.setup import TrainSetup, feature_width, reads_features, train_setup
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
    shardings_of,
    state_shapes,
    whole_shapes,
)

# What a global batch of a run consists of: shapes, types and shardings.


def batch_shapes(run: ResolvedRun, mesh: Mesh) -> Batch:
    """Shapes of one global batch of `run`: uint8 images or float32 numbers and int32 classes, or
    int32 tokens; float32 weights of the rows, where not all of them count; float32 "mix" of pairs
    of rows, if they are mixed."""
    return batch_shapes_on(run, batch_sharding(mesh))


def batch_shapes_on(run: ResolvedRun, sharding: NamedSharding | None) -> Batch:
    """Likewise, on whatever `sharding` names; on nothing if it is None."""
    dataset = run.dataset
    parts: dict[str, tuple[tuple[int, ...], Any]]
    parts = {"inputs": (dataset.input_shape, input_dtype(dataset))}
    if reads_features(run.config):
        parts = {"inputs": ((feature_width(train_setup(run)),), jnp.float32)}
    for name in ("targets", "places") if dataset.is_masked else ("targets",):
        parts[name] = (dataset.target_shape, jnp.int32)
    if run.is_weighted:
        parts["weights"] = ((), jnp.float32)
    if run.is_mixed:
        parts["mix"] = ((), jnp.float32)
    return {
        name: jax.ShapeDtypeStruct((run.split.global_batch, *shape), dtype, sharding=sharding)
        for name, (shape, dtype) in parts.items()
    }


def input_dtype(dataset: DatasetFacts) -> Any:
    """Of the examples of a data set, before any network."""
    image_dtype = jnp.float32 if dataset.is_table else jnp.uint8
    return jnp.int32 if dataset.is_text else image_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One update of a run over a mesh."""

    function: Any
    """The jitted (state, batch) -> (state, metrics); the state is donated."""
    state: TrainState
    """Shapes, types and shardings of the state."""
    batch: Batch
    """Shapes, types and shardings of a global batch."""


def build_step(
    run: ResolvedRun, mesh: Mesh, *, phase: int = 0, schedule: Schedule | None = None
) -> Step:
    """The update of `run` over `mesh`: gradient of the mean loss of the global batch, applied;
    or what the run's exchange makes of the gradients of its devices.

    The loss is the mean over all samples of all devices that count, however they are split over
    devices and microbatches, so that splits change nothing but rounding (Goyal et al. 2017,
    remark 3).
    BatchNorm is the exception, by definition: its statistics are of one microbatch, over all
    devices or those of its group, and its running statistics move once per microbatch.

    Args:
        run: the run.
        mesh: its devices.
        phase: which of the batches of the run, if it grows.
        schedule: the learning rate by step; if None, that of the config.

    Raises:
        ConfigError: if the network cannot be built for the data set.
    """
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
    return Step(function=function, state=state, batch=batch)


def init_state(run: ResolvedRun, mesh: Mesh) -> TrainState:
    """The state before the first update, drawn from the run's seed, or read from the weights that
    the model begins with; the same on any mesh.

    Raises:
        ConfigError: if such weights are not there.
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
        kept = jax.jit(partial(initial_gradient_sync, setup), out_shardings=shardings.exchange)
        state = replace(state, exchange=kept(params))
    if isinstance(run.config.gradient_sync, LocalSgdConfig):
        spread = shardings_of(state_shapes(setup, mesh))
        own, lies = ((of.params, of.model_state, of.opt_state) for of in (state, spread))
        params, model_state, opt_state = jax.jit(partial(copies, setup), out_shardings=lies)(own)
        state = replace(state, params=params, model_state=model_state, opt_state=opt_state)
    if run.config.averaging is not None:  # of its own: the update may write over either
        copied = jax.jit(partial(jax.tree.map, jnp.copy), out_shardings=shardings.average)
        average = copied({"params": params, "model_state": model_state})
        state = replace(state, average=average)
    return state


def initial_weights(setup: TrainSetup, shapes: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
    """Parameters and statistics of these shapes: those that the model begins with, or drawn."""
    read = tuple(pretrained_weights(setup.run.config.model, tree) for tree in shapes)
    is_read = jax.tree.map(lambda leaf: leaf is not None, read, is_leaf=lambda leaf: leaf is None)

    def drawn() -> PyTree:  # only what is missing: to draw all takes seconds to compile
        weights = initial_network(setup)
        return jax.tree.map(lambda leaf, has: None if has else leaf, weights, is_read)

    shardings = jax.tree.map(lambda leaf, has: None if has else leaf.sharding, shapes, is_read)
    return updated(read, jax.jit(drawn, out_shardings=shardings)())


def forward(run: ResolvedRun) -> tuple[Callable[..., PyTree], tuple[PyTree, ...]]:
    """The loss of one global batch on one device, and the shapes to trace it with.

    For counting what the model itself needs: no mesh, no gradient, no recompute, and no call of
    a library that a trace does not see into.
    """
    setup = train_setup(run)
    return partial(mean_loss, setup, BatchNormScope()), _traced(setup)


def forward_and_backward(run: ResolvedRun) -> tuple[Callable[..., PyTree], tuple[PyTree, ...]]:
    """Likewise the loss and its gradient by the parameters that learn, with what the model
    recomputes: where few learn, the backward pass is less than twice the forward pass."""
    setup = train_setup(run)
    return partial(gradients, setup, BatchNormScope(), scale=None), _traced(setup)


def _traced(setup: TrainSetup) -> tuple[PyTree, ...]:
    """Shapes of parameters, statistics and a global batch."""
    state, batch = abstract_state(setup), batch_shapes_on(setup.run, sharding=None)
    return state.params, state.model_state, batch


def _evenly_weighted(batch: Batch) -> Batch:
    """`batch` with the weights of its rows, if it has any, made to be 1 in the mean of all devices.

    Here, and not where the losses are: parts of a batch cannot know how many rows count in others.
    If no row counts, no weight is above 0, and the gradient is 0.
    """
    if "weights" not in batch:
        return batch
    weights = batch["weights"]
    return {**batch, "weights": weights * (weights.size / jnp.maximum(weights.sum(), 1))}


def _update(
    setup: TrainSetup, mesh: Mesh, state: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, jax.Array]]:
    batch = _evenly_weighted(batch)
    gradient_sync = setup.run.config.gradient_sync
    if isinstance(gradient_sync, LocalSgdConfig):
        return local_update(setup, gradient_sync, mesh, state, batch)
    before = state.opt_state
    scale = before.scale if isinstance(before, LossScaled) else None
    params = gathered_params(setup, mesh, state.params)
    gradient, model_state, metrics, kept = combined_gradients(setup, mesh)(
        params, state.model_state, batch, scale, state.exchange
    )
    noise, metrics = _measured(setup, state, gradient, metrics, scale)
    learning = learning_params(setup, state.params)
    updates, opt_state = setup.optimizer.update(gradient, state.opt_state, learning)
    step = state.step + 1
    params = updated(state.params, optax.apply_updates(learning, updates))
    weights = {"params": params, "model_state": model_state}
    new_state = TrainState(
        step=step,
        params=params,
        model_state=model_state,
        opt_state=opt_state,
        average=averaged(setup.run, step, state.average, weights),
        noise=noise,
        exchange=kept,
    )
    learning_rate = jnp.asarray(setup.schedule(state.step), jnp.float32)
    metrics = {**metrics, "learning_rate": learning_rate}
    if isinstance(before, LossScaled):
        return _unless_skipped(state, new_state, metrics)
    return new_state, metrics


def _measured(
    setup: TrainSetup,
    state: TrainState,
    gradient: PyTree,
    metrics: dict[str, jax.Array],
    scale: jax.Array | None,
) -> tuple[NoiseAverages | None, dict[str, jax.Array]]:
    """What the run measures of its gradient: averages for the noise scale, and metrics."""
    run, wanted = setup.run, setup.run.config.train.noise_scale
    if not run.config.train.measures_gradient_norm:
        return None, metrics
    unscaled = 1.0 if scale is None else 1 / scale**2
    squared_norm = optax.tree.norm(gradient, squared=True) * unscaled
    metrics = {**metrics, "gradient_norm": jnp.sqrt(squared_norm)}
    if wanted is None:
        return None, metrics
    parts = _part_count(run, state.model_state)
    found = estimates(
        metrics.pop("small_squared_norm") * unscaled,
        squared_norm,
        small_batch=run.split.global_batch / parts,
        big_batch=run.split.global_batch,
    )
    noise = state.noise.updated(wanted.decay, *found)
    return noise, {**metrics, "noise_scale": noise.noise_scale}


def _part_count(run: ResolvedRun, model_state: PyTree) -> int:
    mode, has_batch_norm = run.config.layout.mode, bool(jax.tree.leaves(model_state))
    return require_noise_scale_parts(run.split, mode=mode, has_batch_norm=has_batch_norm)


def _unless_skipped(
    state: TrainState, new_state: TrainState, metrics: dict[str, jax.Array]
) -> tuple[TrainState, dict[str, jax.Array]]:
    """`new_state`, of which the optimizer has left parameters and moments as they were where a
    gradient overflowed, with the rest likewise; and the metrics of the loss as it is."""
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
