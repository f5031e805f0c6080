"""BatchNorm: by hand, against Flax, and the same numbers however the batch is spread."""

from functools import partial
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from scalejax.core.errors import ConfigError
from scalejax.models import BatchNorm, BatchNormScope

CHANNELS = 3
RNG = np.random.default_rng(0)
IMAGES = jnp.asarray(RNG.normal(1.5, 2.0, (16, 4, 4, CHANNELS)), jnp.float32)


def batch_norm(**scope: Any) -> BatchNorm:
    """A float32 BatchNorm of three channels."""
    return BatchNorm(
        CHANNELS,
        scope=BatchNormScope(**scope),
        dtype=jnp.dtype("float32"),
        rngs=nnx.Rngs(0),
    )


def test_two_samples_become_minus_one_and_one():
    """By hand: of 1 and 3 the mean is 2, the deviation 1; the average keeps nine tenths."""
    norm = BatchNorm(1, scope=BatchNormScope(), dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))

    out = norm(jnp.array([[1.0], [3.0]]), is_training=True)

    np.testing.assert_allclose(out, [[-1.0], [1.0]], atol=1e-5)  # epsilon is 1e-5 of variance 1
    np.testing.assert_allclose(norm.mean[...], [0.1 * 2.0], rtol=1e-6)
    np.testing.assert_allclose(norm.var[...], [0.9 * 1.0 + 0.1 * 1.0], rtol=1e-6)


def test_running_statistics_can_take_groups_in_turn():
    """Hoffer et al. 2017, algorithm 1: as if each of the groups were a batch of its own."""
    at_once, one_by_one = batch_norm(groups=4, is_in_turn=True), batch_norm()

    found = at_once(IMAGES, is_training=True)
    expected = [one_by_one(IMAGES[at : at + 4], is_training=True) for at in range(0, 16, 4)]

    np.testing.assert_allclose(found, jnp.concatenate(expected), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(at_once.mean[...], one_by_one.mean[...], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(at_once.var[...], one_by_one.var[...], rtol=1e-5)


@pytest.mark.parametrize("is_in_turn", [False, True])
def test_rows_of_weight_0_are_in_no_statistics(is_in_turn):
    """The rows that count alone, group by group; a group without any moves nothing."""
    weighted = batch_norm(groups=4, is_in_turn=is_in_turn)
    weighted.row_weights = jnp.array([1.6] * 6 + [0] * 2 + [0] * 4 + [1.6] * 4)

    found = weighted(IMAGES, is_training=True)

    mean, var = np.zeros(CHANNELS), np.ones(CHANNELS)
    for start, stop in ((0, 4), (4, 6), (12, 16)):
        rows = np.asarray(IMAGES[start:stop], np.float64)
        of_group = rows.mean((0, 1, 2)), rows.var((0, 1, 2))
        expected = (rows - of_group[0]) / np.sqrt(of_group[1] + 1e-5)
        np.testing.assert_allclose(found[start:stop], expected, rtol=1e-4, atol=1e-4)
        kept = 0.9 if is_in_turn else 1
        mean, var = (kept * old + 0.1 * new for old, new in zip((mean, var), of_group, strict=True))
    if not is_in_turn:  # the mean over the groups, of which one stays at the start
        mean, var = mean / 4, 1 + (var - 1 - 0.3) / 4
    np.testing.assert_allclose(weighted.mean[...], mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(weighted.var[...], var, rtol=1e-4)


def test_evaluation_uses_running_statistics_and_leaves_them():
    """What one sample gets in evaluation does not depend on its neighbours."""
    norm = batch_norm()
    norm(IMAGES, is_training=True)
    mean, var = norm.mean[...], norm.var[...]

    out = norm(IMAGES[:1], is_training=False)

    expected = (np.asarray(IMAGES[:1]) - np.asarray(mean)) / np.sqrt(np.asarray(var) + 1e-5)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(norm.mean[...], mean)
    np.testing.assert_array_equal(norm.var[...], var)


def test_one_group_equals_batch_norm_of_flax():
    """The same function as `flax.linen.BatchNorm` with momentum 0.9."""
    norm = batch_norm()
    reference = flax.linen.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-5)
    variables = reference.init(jax.random.key(0), IMAGES)

    with jax.numpy_rank_promotion("allow"):
        expected, updated = jax.jit(partial(reference.apply, mutable="batch_stats"))(
            variables, IMAGES
        )

    np.testing.assert_allclose(norm(IMAGES, is_training=True), expected, rtol=1e-5, atol=1e-5)
    statistics = updated["batch_stats"]  # type: ignore[index]  a dict of collections
    np.testing.assert_allclose(norm.mean[...], statistics["mean"], rtol=1e-5)
    np.testing.assert_allclose(norm.var[...], statistics["var"], rtol=1e-5)


def test_groups_are_neighbouring_rows_normalised_apart():
    """A batch in 4 groups is 4 batches, and the running statistics average theirs."""
    grouped = batch_norm(groups=4)
    alone = [batch_norm() for _ in range(4)]

    out = grouped(IMAGES, is_training=True)
    parts = [
        norm(rows, is_training=True) for norm, rows in zip(alone, jnp.split(IMAGES, 4), strict=True)
    ]

    np.testing.assert_allclose(out, jnp.concatenate(parts), rtol=1e-5, atol=1e-5)
    for name in ("mean", "var"):
        average = np.mean([getattr(norm, name)[...] for norm in alone], axis=0)
        np.testing.assert_allclose(getattr(grouped, name)[...], average, rtol=1e-5)
    assert not np.allclose(out, batch_norm()(IMAGES, is_training=True), atol=1e-2)


@pytest.mark.parametrize(
    ("in_shard_map", "under_jit"),
    [
        ({"axis_name": "data"}, {}),
        ({}, {"groups": 8}),
        ({"groups": 2}, {"groups": 16}),
    ],
    ids=["global", "per device", "smaller than a device"],
)
def test_shard_map_equals_groups_under_jit(in_shard_map, under_jit):
    """Both modes of a step give one value, gradient and average, with replication checked."""
    graphs = [nnx.split(batch_norm(**scope), ...)[0] for scope in (in_shard_map, under_jit)]
    _, *states = nnx.split(batch_norm(), nnx.Param, nnx.BatchStat)
    params, statistics = map(nnx.to_pure_dict, states)

    def objective(params, statistics, rows, graph):
        norm = nnx.merge(graph, nnx.State(params), nnx.State(statistics))
        out = jnp.sin(norm(rows, is_training=True)).mean()
        return out, nnx.to_pure_dict(nnx.state(norm, nnx.BatchStat))

    def per_device(params, statistics, rows):
        params = jax.lax.pcast(params, "data", to="varying")
        gradient = jax.value_and_grad(partial(objective, graph=graphs[0]), has_aux=True)
        return jax.lax.pmean(gradient(params, statistics, rows), "data")

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (P(), P(), P("data"))
    mapped = jax.shard_map(per_device, mesh=mesh, in_specs=specs, out_specs=P())
    found = jax.jit(mapped)(params, statistics, IMAGES)

    gradient = jax.value_and_grad(partial(objective, graph=graphs[1]), has_aux=True)
    expected = jax.jit(gradient)(params, statistics, IMAGES)
    jax.tree.map(
        # float32 sums over 256 places in another order
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        found,
        expected,
    )


def test_statistics_of_bfloat16_inputs_are_float32():
    """The mean of 4096 ones is one; summed in bfloat16 it would stop at 256."""
    norm = BatchNorm(1, scope=BatchNormScope(), dtype=jnp.dtype("bfloat16"), rngs=nnx.Rngs(0))

    out = norm(jnp.ones((4096, 1), jnp.bfloat16), is_training=True)

    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(norm.mean[...], [0.1], rtol=1e-5)


def test_impossible_scopes_are_refused():
    """Groups below one, groups that share an axis, and a batch that groups do not divide."""
    with pytest.raises(ConfigError, match=r"bn\.groups=0 is refused"):
        BatchNormScope(groups=0)
    with pytest.raises(ConfigError, match="shared over 'data' are of one group"):
        BatchNormScope(groups=2, axis_name="data")
    with pytest.raises(ConfigError, match=r"batch=16 is refused.*nearest: 15 or 18"):
        batch_norm(groups=3)(IMAGES, is_training=True)
