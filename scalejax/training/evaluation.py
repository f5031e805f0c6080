"""The evaluation program of a run: sums of loss and accuracy over a batch of examples.

Also the program that computes features of a frozen backbone, for its last layer to learn from.
Knows the network, and which of its weights are evaluated; no data source and no clock.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from scalejax.config.data import MixtureConfig
from scalejax.config.run import ResolvedRun
from scalejax.models import BatchNormScope
from scalejax.models.normalization import MOMENTUM, moving_norms, weigh_rows
from scalejax.training.checkpoint import load_weights
from scalejax.training.data_parallel import with_constraints
from scalejax.training.gradients import (
    Batch,
    is_paired,
    normalised,
    sample_metrics,
    split_microbatches,
    with_target_weights,
)
from scalejax.training.mesh import batch_sharding, build_mesh, replicated
from scalejax.training.optimizers import evaluated_params
from scalejax.training.optimizers.fine_tuning import updated
from scalejax.training.record import RunFolder
from scalejax.training.setup import (
    TrainSetup,
    network_of,
    network_with,
    train_setup,
    with_features,
)
from scalejax.training.state import (
    PyTree,
    TrainState,
    gathered_params,
    learning_params,
    shardings_of,
    whole_shapes,
)
from scalejax.training.step import batch_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The evaluation of one batch over a mesh."""

    weights_shapes: tuple[PyTree, PyTree]
    """Shapes, types and shardings of the (params, model_state) that are evaluated."""
    weights: Any
    """Function from a state to the (params, model_state) that are evaluated: the weight average,
    if the run keeps one."""
    function: Any
    """The jitted (params, model_state, batch) -> sums over the samples whose mask is 1 (for packed
    documents, over their targets that have a loss), in total or per device that divides the batch,
    as `train.metric_average` says; the lowest and highest logit of each class among them; and for a
    mixture, sums over the samples of each source."""
    batch: Batch
    """Shapes, types and shardings of a global batch."""
    statistics: Any = None
    """The jitted (params, model_state, training batch) -> BatchNorm statistics of that batch, whose
    mean over an epoch is evaluated; those of a frozen BatchNorm are from `model_state`. None if all
    are frozen, or if the evaluated weights are no average of distant ones
    (`RunConfig.averages_samples`)."""


def build_evaluation(run: ResolvedRun, mesh: Mesh) -> Evaluation:
    """The evaluation of `run` over `mesh`, with the running statistics of BatchNorm."""
    setup = train_setup(run, mesh)
    state = whole_shapes(setup, mesh)
    training_only = ("weights", "mix", "cut")
    shapes = batch_shapes(run, mesh)
    batch = {name: shape for name, shape in shapes.items() if name not in training_only}
    mask = jax.ShapeDtypeStruct(
        (run.split.global_batch,), jnp.float32, sharding=batch_sharding(mesh)
    )
    batch = {**batch, "mask": mask}
    if isinstance(run.config.data, MixtureConfig):
        batch["source"] = jax.ShapeDtypeStruct(mask.shape, jnp.int32, sharding=mask.sharding)
    function = jax.jit(
        partial(with_constraints, setup, mesh, partial(_evaluate, setup, mesh)),
        in_shardings=shardings_of((state.params, state.model_state, batch)),
        out_shardings=replicated(mesh),
    )
    weights = _evaluated_weights(setup, shardings_of((state.params, state.model_state)))
    statistics = None
    if run.config.averages_samples and moving_norms(
        nnx.eval_shape(lambda: network_of(setup, BatchNormScope()))
    ):
        statistics = jax.jit(
            partial(with_constraints, setup, mesh, partial(_batch_statistics, setup, mesh)),
            in_shardings=shardings_of((state.params, state.model_state, shapes)),
            out_shardings=shardings_of(state.model_state),
        )
    return Evaluation(
        weights_shapes=(state.params, state.model_state),
        weights=weights,
        function=function,
        batch=batch,
        statistics=statistics,
    )


def _batch_statistics(
    setup: TrainSetup, mesh: Mesh, params: PyTree, model_state: PyTree, batch: Batch
) -> PyTree:
    """Means and variances of one training batch with these parameters: of each of its microbatches,
    as in training, averaged over the groups of rows in which any counts. Those of a frozen
    BatchNorm, which normalises by them, are those of `model_state`."""
    params, run = gathered_params(setup, mesh, params), setup.run
    scope = BatchNormScope(groups=run.bn_groups)

    def network_and_parts() -> tuple[nnx.Module, list[nnx.BatchStat]]:
        network = network_with(setup, scope, params, model_state)
        return network, [part for norm in moving_norms(network) for part in (norm.mean, norm.var)]

    def of_microbatch(rows: Batch) -> tuple[list[jax.Array], jax.Array]:
        """Statistics times the share of groups that count, and this share."""
        (network, moving), counted = network_and_parts(), jnp.ones(())
        for part in moving:
            part.set_value(jnp.zeros_like(part[...]))
        if "weights" in rows:
            weigh_rows(network, rows["weights"])
            counted = (rows["weights"].reshape(run.bn_groups, -1) > 0).any(axis=1).mean()
        sample_metrics(setup, network, rows, is_training=True)
        return [part[...] / (1 - MOMENTUM) for part in moving], counted

    split = partial(split_microbatches, run.split.microbatches, 2 if is_paired(batch) else 1)
    values, counted = jax.lax.map(of_microbatch, jax.tree.map(split, batch))
    network, moving = network_and_parts()
    for part, of_microbatches in zip(moving, values, strict=True):
        part.set_value(of_microbatches.sum(axis=0) / counted.sum())
    return nnx.to_pure_dict(nnx.state(network, nnx.BatchStat))


def trained_weights(run: ResolvedRun, path: Path) -> dict[str, PyTree]:
    """The `params` and `model_state` that `run` ended with in the folder `path`.

    Raises:
        CheckpointMismatch: if there are none, they are damaged, of another network, or cannot be
            read.
    """
    mesh = build_mesh(run.layout)
    state = whole_shapes(train_setup(run, mesh), mesh)
    like = {"params": state.params, "model_state": state.model_state}
    return load_weights(RunFolder(path=path).weights, like)


def build_features(setup: TrainSetup) -> Any:
    """The jitted (params, model_state, inputs) -> float32 [examples, width]: the features that the
    last layer of a frozen network reads, with the running statistics of BatchNorm."""

    def features(params: PyTree, model_state: PyTree, inputs: jax.Array) -> jax.Array:
        network = with_features(network_with(setup, BatchNormScope(), params, model_state))
        values = network.features(normalised(inputs, setup.run.dataset), is_training=False)
        return values.astype(jnp.float32)

    return jax.jit(features)


def _evaluated_weights(
    setup: TrainSetup, shardings: tuple[PyTree, PyTree]
) -> Callable[[TrainState], tuple[PyTree, PyTree]]:
    """Function from a state to the parameters and statistics to evaluate, with `shardings`."""
    averaging, optimizer = setup.run.config.averaging, setup.run.config.optimizer
    if setup.run.config.local_sgd is not None:
        mean = jax.jit(
            partial(jax.tree.map, lambda copies: copies.mean(axis=0)), out_shardings=shardings
        )
        return lambda state: mean((state.params, state.model_state))
    if averaging is not None and averaging.replaces_weights:
        return lambda state: (state.average["params"], state.average["model_state"])
    if optimizer.averages_iterates:

        def averaged(opt_state: PyTree, params: PyTree) -> PyTree:
            learned = evaluated_params(optimizer, opt_state, learning_params(setup, params))
            return updated(params, learned)

        jitted = jax.jit(averaged, out_shardings=shardings[0])
        return lambda state: (jitted(state.opt_state, state.params), state.model_state)
    return lambda state: (state.params, state.model_state)


def _evaluate(
    setup: TrainSetup, mesh: Mesh, params: PyTree, model_state: PyTree, batch: Batch
) -> dict[str, jax.Array]:
    params = gathered_params(setup, mesh, params)
    network = network_with(setup, BatchNormScope(), params, model_state)
    source = batch.get("source")
    batch = {name: rows for name, rows in batch.items() if name != "source"}
    losses, hits, logits = sample_metrics(setup, network, batch, is_training=False)
    mask = with_target_weights({**batch, "weights": batch["mask"]})["weights"]
    is_sample = mask.reshape(-1, *[1] * (logits.ndim - 1)) > 0
    samples = tuple(range(logits.ndim - 1))
    run = setup.run
    is_over_all = run.config.train.metric_average == "examples"

    def summed(values: jax.Array) -> jax.Array:
        """Sum over all rows, or over those of each device, which are contiguous."""
        return values.sum() if is_over_all else values.reshape(run.layout.batch_shards, -1).sum(1)

    # `where`, not a product: the loss of a padding row may be anything, even NaN.
    masked_losses, by_source = jnp.where(mask > 0, losses * mask, 0), {}
    if source is not None:
        assert isinstance(run.config.data, MixtureConfig)  # noqa: S101  checked by `build_evaluation`
        is_of = jax.nn.one_hot(source, len(run.config.data.sources), dtype=bool)
        by_source = {
            name: jnp.where(is_of, values.reshape(len(source), -1).sum(1, keepdims=True), 0).sum(0)
            for name, values in (("source_losses", masked_losses), ("source_counts", mask))
        }
    return {
        **by_source,
        "lowest_logits": jnp.min(logits, axis=samples, where=is_sample, initial=jnp.inf),
        "highest_logits": jnp.max(logits, axis=samples, where=is_sample, initial=-jnp.inf),
        "loss_sum": summed(masked_losses),
        "correct_sum": summed(jnp.where(mask > 0, hits * mask, 0)),
        "count": summed(mask),
        "examples": batch["mask"].sum(),
    }
