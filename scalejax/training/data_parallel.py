"""The gradient of a global batch, computed data-parallel over a mesh and synchronised.

Knows how devices share the work of one gradient; nothing of how it is applied.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from scalejax.config.model import DecoderConfig
from scalejax.config.parallelism import DATA
from scalejax.config.run import ResolvedRun
from scalejax.core.environment import has_required_flags, required_flags
from scalejax.core.errors import ConfigError, refusal
from scalejax.models import BatchNormScope, attention
from scalejax.models.sharding import ShardingConstraints, sharding_context
from scalejax.training.gradient_sync.device_rows import device_rows
from scalejax.training.gradients import Batch, gradients
from scalejax.training.setup import TrainSetup, has_batch_norm
from scalejax.training.state import (
    PyTree,
    as_local_slice,
    data_parts,
    gradient_sync_of,
    learning_params,
    local_slice,
)


def combined_gradients(setup: TrainSetup, mesh: Mesh) -> Callable[..., Any]:
    """The function that computes the synchronised gradient of a global batch.

    It maps (params, model_state, batch, scale, synchronisation state [devices, ...]) to (gradient,
    model_state, metrics, new synchronisation state), by the run's gradient synchronisation and the
    layout's mode ("jit", "shard_map" or "pmap").
    """
    run = setup.run
    mode, is_local = run.config.layout.mode, run.config.layout.bn_scope == "local"
    if mode == "jit":
        is_in_turn = run.config.layout.bn_running == "in_turn"
        bn = BatchNormScope(groups=run.bn_groups, is_in_turn=is_in_turn)
        reduced = partial(_reduced_once_per_step, setup, mesh, bn)
        return partial(with_constraints, setup, mesh, reduced)
    if is_local:
        bn = BatchNormScope(groups=run.bn_groups // run.layout.data)
    else:
        bn = BatchNormScope(axis_name=DATA)
    gradient_sync, wanted = gradient_sync_of(setup), run.config.gradient_sync
    counts_alike = wanted is not None and wanted.name == "adasum"  # devices, whatever their rows

    def per_device(
        params: PyTree,
        model_state: PyTree,
        batch: Batch,
        scale: jax.Array | None,
        sync_state: PyTree,
    ) -> PyTree:
        # Without the cast, the gradient of a replicated parameter is already summed over the
        # axis, and the mean that follows would leave it too large by the number of devices.
        params, model_state = lax.pcast((params, model_state), DATA, to="varying")
        rows, of_all = device_rows(batch), None
        if not is_local and not counts_alike:
            # Weighted in the loss: if devices share statistics, a gradient crosses from one to
            # another, and has to carry the weight of the device that its loss is from.
            of_all, rows = rows, replace(rows, own=None)
        gradient, model_state, metrics = gradients(
            setup, bn, params, model_state, batch, scale, rows=of_all
        )
        gradient, sync_state = gradient_sync.combine(gradient, rows, local_slice(sync_state))
        others = lax.pmean((model_state, rows.weighted(metrics)), DATA)
        return gradient, *others, as_local_slice(sync_state)

    whole, split = PartitionSpec(), PartitionSpec(DATA)
    # With several processes `pmap` would take the rows of its own process only; as it is
    # `jit(shard_map)` underneath, `shard_map` then computes the same over all processes.
    if mode == "shard_map" or jax.process_count() > 1:
        return jax.shard_map(
            per_device,
            mesh=mesh,
            in_specs=(whole, whole, split, whole, split),
            out_specs=(whole, whole, whole, split),
            # JAX cannot infer that the result of a gather is replicated.
            check_vma=run.config.gradient_sync is None,
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

    def over_devices(
        params: PyTree, model_state: PyTree, batch: Batch, scale: Any, sync_state: PyTree
    ) -> PyTree:
        batch = jax.tree.map(lambda rows: rows.reshape(run.layout.data, -1, *rows.shape[1:]), batch)
        return *mapped(params, model_state, batch, scale), sync_state

    return over_devices


def require_stages_in_shards(run: ResolvedRun) -> None:
    """Refuse pipeline stages, each in a `shard_map`, within shards of the batch if the compiler
    would abort this process on them.

    Raises:
        ConfigError: if it would.
    """
    layout = run.config.layout
    is_by_stage = layout.pipeline_schedule != "gpipe" or layout.pipeline_chunks > 1
    is_by_stage = is_by_stage or run.config.model.expert_count > 0
    if run.layout.pipeline == 1 or not is_by_stage or not _is_per_shard(run):
        return
    if not has_required_flags():
        flags = " ".join(required_flags())
        accepted = (
            "with 1F1B, ZB-H1, chunks or experts it must be 1 with this version of JAX, whose "
            f'compiler aborts otherwise, unless XLA_FLAGS="{flags}" is in the environment when '
            "JAX starts (the command scalejax sets it)"
        )
        raise ConfigError(refusal("layout.data", run.layout.data, accepted))


def _is_per_shard(run: ResolvedRun) -> bool:
    """Whether each shard of the batch computes its gradient before the reduction, BatchNorm
    aside."""
    is_single = run.split.microbatches == 1 and run.config.train.noise_scale is None
    return run.layout.data > 1 and not (is_single and run.config.layout.zero_stage < 2)


def _reduced_once_per_step(
    setup: TrainSetup,
    mesh: Mesh,
    bn: BatchNormScope,
    params: PyTree,
    model_state: PyTree,
    batch: Batch,
    scale: jax.Array | None,
    sync_state: PyTree,
) -> tuple[PyTree, PyTree, dict[str, jax.Array], PyTree]:
    """`gradients`, reduced over the data axis explicitly, once per step; and `sync_state` as it is.

    The compiler would reduce once per microbatch. Under ZeRO the reduction is a reduce-scatter.
    ZeRO 2 never holds full gradients, and so must reduce those of every microbatch. Two cases are
    left to the compiler: a single microbatch, whose all-reduce it overlaps with the backward pass,
    and BatchNorm, whose statistics are over all devices. The noise scale is never left to it, as
    it compares the gradients of the devices before the reduction.
    """
    run = setup.run
    zero_stage = run.config.layout.zero_stage
    if has_batch_norm(run.config.model, model_state) or not _is_per_shard(run):
        return *gradients(setup, bn, params, model_state, batch, scale), sync_state
    parts = data_parts(setup, mesh)

    def scattered(gradient: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf, part: part.mean(leaf), gradient, parts)

    def per_shard(
        params: PyTree, model_state: PyTree, batch: Batch, scale: jax.Array | None
    ) -> PyTree:
        # Weighted in the loss: losses of routers are over all tokens, whatever rows count.
        rows = device_rows(batch)
        reduce = scattered if zero_stage == 2 else None
        gradient, model_state, metrics = gradients(
            setup, bn, params, model_state, batch, scale, reduce, rows
        )
        gradient = gradient if zero_stage == 2 else scattered(gradient)
        return gradient, model_state, lax.pmean(metrics, DATA)

    gradient, model_state, metrics = jax.shard_map(
        per_shard,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec(DATA), PartitionSpec()),
        out_specs=(jax.tree.map(lambda part: part.spec, parts), PartitionSpec(), PartitionSpec()),
        axis_names={DATA},
        check_vma=False,  # jax 0.12 refuses erf, which BERT's GELU is made of, when it checks
    )(params, model_state, batch, scale)
    learning = learning_params(setup, params)
    whole = jax.tree.map(lambda leaf, like: leaf.reshape(like.shape), gradient, learning)
    return whole, model_state, metrics, sync_state


def with_constraints(
    setup: TrainSetup, mesh: Mesh, function: Callable[..., Any], *arguments: PyTree
) -> Any:
    """`function` traced with `mesh` and the run's sharding constraints in the context."""
    layout, model = setup.run.config.layout, setup.run.config.model
    strategy = layout.context_strategy
    is_by_blocks = isinstance(model, DecoderConfig) and attention.goes_by_blocks(
        strategy, model.attention
    )
    constraints = ShardingConstraints(
        is_sequence_parallel=layout.sequence_parallel,
        microbatches=setup.run.split.microbatches,
        chunks=layout.pipeline_chunks,
        context_strategy=strategy,
        is_zigzag=is_by_blocks and layout.context > 1,
    )
    with sharding_context(mesh.abstract_mesh, constraints):
        return function(*arguments)
