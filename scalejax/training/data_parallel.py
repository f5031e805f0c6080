"""The gradient of a global batch over a mesh, brought together as the run says.

Knows how devices share the work of one gradient; nothing of what is made of it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from scalejax.config.parallelism import DATA
from scalejax.models import BatchNormScope
from scalejax.models.sharding import ShardingConstraints, arranged
from scalejax.training.gradients import Batch, gradients
from scalejax.training.setup import TrainSetup
from scalejax.training.state import (
    PyTree,
    as_part,
    data_parts,
    gradient_sync_of,
    learning_params,
    own_part,
)


def combined_gradients(setup: TrainSetup, mesh: Mesh) -> Callable[..., Any]:
    """`gradients` of the global batch, brought together as the run's exchange and the layout's mode
    say: from (params, model_state, batch, scale, what each device has kept for it [devices, ...])
    to (gradient, model_state, metrics, what each device keeps)."""
    run = setup.run
    mode, is_local = run.config.layout.mode, run.config.layout.bn_scope == "local"
    if mode == "jit":
        is_in_turn = run.config.layout.bn_running == "in_turn"
        bn = BatchNormScope(groups=run.bn_groups, is_in_turn=is_in_turn)
        reduced = partial(with_constraints, setup, mesh, partial(_reduced_once, setup, mesh, bn))
        return partial(_keeping, reduced)
    if is_local:
        bn = BatchNormScope(groups=run.bn_groups // run.layout.data)
    else:
        bn = BatchNormScope(axis_name=DATA)
    gradient_sync = gradient_sync_of(setup)

    def per_device(
        params: PyTree, model_state: PyTree, batch: Batch, scale: jax.Array | None, kept: PyTree
    ) -> PyTree:
        # Without the cast, the gradient of a replicated parameter is already summed over the
        # axis, and the mean that follows would leave it too large by the number of devices.
        params, model_state = lax.pcast((params, model_state), DATA, to="varying")
        gradient, *others = gradients(setup, bn, params, model_state, batch, scale)
        gradient, kept = gradient_sync.combine(gradient, own_part(kept))
        return gradient, *lax.pmean(others, DATA), as_part(kept)

    whole, split = PartitionSpec(), PartitionSpec(DATA)
    # With several processes `pmap` would take the rows of its own process alone; it is
    # `jit(shard_map)` underneath, so there its newer spelling does the same for all.
    if mode == "shard_map" or jax.process_count() > 1:
        return jax.shard_map(
            per_device,
            mesh=mesh,
            in_specs=(whole, whole, split, whole, split),
            out_specs=(whole, whole, whole, split),
            check_vma=run.config.gradient_sync
            is None,  # of a gather, JAX does not see that it is whole
        )
    mapped = jax.pmap(
        lambda params, model_state, batch, scale: per_device(
            params, model_state, batch, scale, None
        )[:3],
        axis_name=DATA,
        in_axes=(None, None, 0, None),
        out_axes=None,  # type: ignore[arg-type]  None is accepted: the results are equal
        devices=list(mesh.devices.flat),
    )
    return partial(
        _keeping,
        lambda params, model_state, batch, scale: mapped(
            params,
            model_state,
            jax.tree.map(lambda rows: rows.reshape(run.layout.data, -1, *rows.shape[1:]), batch),
            scale,
        ),
    )


def _keeping(reduced: Callable[..., Any], *arguments: PyTree) -> PyTree:
    """What `reduced` makes of all arguments but the last, which is what devices keep, and that."""
    *others, kept = arguments
    return *reduced(*others), kept


def _reduced_once(
    setup: TrainSetup,
    mesh: Mesh,
    bn: BatchNormScope,
    params: PyTree,
    model_state: PyTree,
    batch: Batch,
    scale: jax.Array | None,
) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
    """`gradients`, summed over the data axis by the step itself.

    Once, and not once for each microbatch as the compiler would; and to where each device needs
    them (a reduce-scatter) if the axis keeps state in parts. ZeRO 2 never holds them whole, and
    so must sum those of every microbatch. Left to the compiler are a single microbatch, whose
    sums it runs beside the backward pass, and BatchNorm, whose statistics are over all devices.
    For the noise scale it must not be: the gradients of the devices are compared before.
    """
    run = setup.run
    zero_stage = run.config.layout.zero_stage
    is_compilers = run.layout.data == 1 or jax.tree.leaves(model_state)
    is_whole = run.split.microbatches == 1 and run.config.train.noise_scale is None
    if is_compilers or (is_whole and zero_stage < 2):
        return gradients(setup, bn, params, model_state, batch, scale)
    parts = data_parts(setup, mesh)

    def scattered(gradient: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf, part: part.mean(leaf), gradient, parts)

    def of_part(params: PyTree, batch: Batch, scale: jax.Array | None) -> PyTree:
        reduce = scattered if zero_stage == 2 else None
        gradient, _, metrics = gradients(setup, bn, params, model_state, batch, scale, reduce)
        gradient = gradient if zero_stage == 2 else scattered(gradient)
        return gradient, lax.pmean(metrics, DATA)

    gradient, metrics = jax.shard_map(
        of_part,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(DATA), PartitionSpec()),
        out_specs=(jax.tree.map(lambda part: part.spec, parts), PartitionSpec()),
        axis_names={DATA},
        check_vma=False,  # jax 0.12 refuses erf, which BERT's GELU is made of, when it checks
    )(params, batch, scale)
    learning = learning_params(setup, params)
    whole = jax.tree.map(lambda leaf, like: leaf.reshape(like.shape), gradient, learning)
    return whole, model_state, metrics


def with_constraints(
    setup: TrainSetup, mesh: Mesh, function: Callable[..., Any], *arguments: PyTree
) -> Any:
    """`function` traced with `mesh` in the context, and what networks must know of the run."""
    layout = setup.run.config.layout
    constraints = ShardingConstraints(
        is_sequence_parallel=layout.sequence_parallel,
        microbatches=setup.run.split.microbatches,
        chunks=layout.pipeline_chunks,
    )
    with arranged(mesh.abstract_mesh, constraints):
        return function(*arguments)
