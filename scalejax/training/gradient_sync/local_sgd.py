"""Local SGD: each device updates its own parameters, and all average them every few steps.

One program does both, with the average behind a condition. For costing, `condition_shares` gives
how often each condition holds on average over a run, by named scope.

A device without a row that counts in a step makes no update in it: its parameters, statistics and
optimizer state stay as they are, and the learning rate advances as for the others. An average
weights all devices alike, as its definition says, however many rows they had. Before local SGD
begins, all apply the mean gradient over all rows that count.

With `reduction = "adasum"` devices continue from Adasum of the sums of their updates since the last
average, which with an average in every step is Horovod's DistributedOptimizer(op=Adasum). A device
that made no update adds nothing to it.

Source: Stich 2018, arXiv 1805.09767; Lin et al. 2018, arXiv 1808.07217; Douillard et al. 2023,
arXiv 2311.08105.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from scalejax.config.checks import require_local_batch_norm
from scalejax.config.gradient_sync import AVERAGE, SYNCHRONOUS, LocalSgdConfig
from scalejax.config.parallelism import DATA
from scalejax.models import BatchNormScope, network_class
from scalejax.training.gradient_sync import adasum
from scalejax.training.gradient_sync.device_rows import device_rows
from scalejax.training.gradient_sync.diloco import outer_step
from scalejax.training.gradients import Batch, gradients
from scalejax.training.optimizers.fine_tuning import updated
from scalejax.training.setup import TrainSetup
from scalejax.training.state import PyTree, TrainState, as_local_slice, learning_params, local_slice


def local_update(
    setup: TrainSetup, config: LocalSgdConfig, mesh: Mesh, state: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state after each device's update on its own samples, and the mean metrics.

    Loss and accuracy are averaged over all samples in every step: a few bytes.

    Raises:
        ConfigError: if the network has BatchNorm over all devices.
    """
    copies = (state.params, state.model_state, state.opt_state)
    whole, split = PartitionSpec(), PartitionSpec(DATA)
    on_device = jax.shard_map(
        partial(_on_device, setup, config),
        mesh=mesh,
        in_specs=(split, whole, whole, split),
        out_specs=(split, whole, whole),
        check_vma=False,  # JAX cannot infer that an average behind a condition is replicated
    )
    (params, model_state, opt_state), outer, metrics = on_device(
        copies, state.exchange, state.step, batch
    )
    new_state = TrainState(
        step=state.step + 1,
        params=params,
        model_state=model_state,
        opt_state=opt_state,
        exchange=outer,
    )
    learning_rate = jnp.asarray(setup.schedule(state.step), jnp.float32)
    return new_state, {**metrics, "learning_rate": learning_rate}


def _on_device(
    setup: TrainSetup,
    config: LocalSgdConfig,
    copies: tuple[PyTree, PyTree, PyTree],
    outer: PyTree,
    step: jax.Array,
    batch: Batch,
) -> tuple[tuple[PyTree, PyTree, PyTree], PyTree, dict[str, jax.Array]]:
    """The update of one device, on its slice of [devices, ...]."""
    run, begin = setup.run, round(config.begin_epoch * setup.run.steps_per_epoch)
    params, model_state, opt_state = local_slice(copies)
    if jax.tree.leaves(model_state):  # only known here for a user's own network
        require_local_batch_norm(run.config.layout)
    bn = BatchNormScope(groups=max(1, run.bn_groups // run.layout.data))
    rows, before = device_rows(batch), (learning_params(setup, params), model_state, opt_state)
    gradient, model_state, metrics = gradients(setup, bn, params, model_state, batch, None)
    if begin:
        with jax.named_scope(SYNCHRONOUS):
            gradient = lax.cond(
                step < begin, lambda own: _mean(rows.weighted(own)), lambda own: own, gradient
            )
    if run.config.measures_gradient_norm:
        metrics["gradient_norm"] = optax.tree.norm(gradient, squared=True)
    learning, *_ = before
    updates, opt_state = setup.optimizer.update(gradient, opt_state, learning)
    after = (optax.apply_updates(learning, updates), model_state, opt_state)
    if rows.own is not None:
        after = _unless_idle((rows.own == 0) & (step >= begin), before, after)
    learning, model_state, opt_state = after
    if begin and outer is not None:  # while synchronous, the outer parameters follow all devices
        last = jax.tree.map(partial(jnp.where, step < begin), learning, outer["params"])
        outer = {**outer, "params": last}

    def averaged(learning: PyTree, model_state: PyTree, outer: PyTree) -> tuple[Any, Any, Any]:
        if config.reduction == "mean":
            learning = _mean(learning)
        else:
            moved = jax.tree.map(jnp.subtract, learning, outer["params"])
            combined = adasum.combined(moved, network_class(run.config.model).stacked)
            learning = jax.tree.map(jnp.add, outer["params"], combined)
        learning, outer = outer_step(config, learning, outer)
        return learning, _mean(model_state), outer

    made = step + 1 - begin
    is_due = (made > 0) & (made % config.every_steps == 0)
    with jax.named_scope(AVERAGE):
        learning, model_state, outer = lax.cond(
            is_due, averaged, lambda *own: own, learning, model_state, outer
        )
    metrics = _mean(rows.weighted(metrics))
    if "gradient_norm" in metrics:
        metrics["gradient_norm"] = jnp.sqrt(metrics["gradient_norm"])
    return as_local_slice((updated(params, learning), model_state, opt_state)), outer, metrics


def _unless_idle(is_idle: jax.Array, before: PyTree, after: PyTree) -> PyTree:
    """`after`, or `before` if the device is idle, except for the counts that set learning rates."""

    def chosen(old: Any, new: Any) -> Any:
        is_rate = isinstance(old, optax.ScaleByScheduleState)
        return new if is_rate else jnp.where(is_idle, old, new)

    return jax.tree.map(
        chosen, before, after, is_leaf=lambda node: isinstance(node, optax.ScaleByScheduleState)
    )


def _mean(tree: PyTree) -> PyTree:
    return lax.pmean(tree, DATA)
