"""Attention of tokens over a context axis, by blocks and over heads, against whole samples."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalejax.config.dataset_facts import POSITIONS, SEGMENT_IDS
from scalejax.config.parallelism import ContextStrategy, Layout
from scalejax.models.attention import causal_attention
from scalejax.models.attention_blocks import block_gradients, block_result
from scalejax.models.packing import documents_of, packed
from scalejax.models.sharding import ShardingConstraints, in_token_order, sharding_context
from scalejax.training.mesh import build_mesh


def heads(index: int, tokens: int, count: int, size: int = 6) -> jax.Array:
    """Random heads of two samples."""
    return jax.random.normal(jax.random.key(index), (2, tokens, count, size))


def test_this_jax_lowers_fused_blocks_for_gpus():
    """Their kernels are private, and take other arguments in other versions."""
    heads = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    log_sums = jax.ShapeDtypeStruct((2, 4, 128), jnp.float32)
    gradients = jax.jit(partial(block_gradients, "fused", is_causal=True))
    traced = gradients.trace(heads, heads, heads, heads, log_sums, heads)

    assert "__cudnn$fmhaSoftmaxBackward" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("pairs", [6, 2])
def test_blocks_of_odd_sizes_add_up_to_the_whole(pairs):
    """Queries 5 to 9 of 10 over keys 0 to 4 and 5 to 9, in JAX's own attention and gradients."""
    q, weights = heads(0, 5, 6), heads(1, 5, 6)
    k, v = heads(2, 10, pairs), heads(3, 10, pairs)
    is_seen = jnp.arange(5)[:, None] + 5 >= jnp.arange(10)[None, :]
    blocks = ((k[:, :5], v[:, :5], False), (k[:, 5:], v[:, 5:], True))

    def reference(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, mask=is_seen)

    expected, pull = jax.vjp(reference, q, k, v)
    before, own = (block_result("unfused", q, k, v, is_causal=own) for k, v, own in blocks)
    whole = own.merged(before)
    of_blocks = [
        block_gradients("unfused", q, k, v, *whole, weights, is_causal=own) for k, v, own in blocks
    ]
    found = (
        whole.values,
        sum(each[0] for each in of_blocks),
        jnp.concatenate([each[1] for each in of_blocks], axis=1),
        jnp.concatenate([each[2] for each in of_blocks], axis=1),
    )

    # float32 and another order of sums of 10 keys, 5 queries or 6 elements
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        found,
        (expected, *pull(weights)),
    )


@pytest.mark.parametrize(
    ("strategy", "context", "pairs", "length"),
    [
        ("ring", 2, 6, None),
        ("ring", 3, 2, 7),
        ("all_gather", 3, 2, None),
        ("all_gather", 2, 2, 4),
        ("all_to_all", 3, 1, None),
        ("all_to_all", 3, 1, 7),
    ],
)
def test_every_strategy_is_attention_over_whole_samples(
    strategy: ContextStrategy, context: int, pairs: int, length: int | None
):
    """Values and gradients; an even number of tokens of each shard, heads of keys for some of the
    queries, and for all-to-alls fewer than devices. Documents of a length, with others of 3 tokens
    between them, lie within chunks and across."""
    tokens = 2 * 5 * context
    arrays = (heads(0, tokens, 6), heads(1, tokens, pairs), heads(2, tokens, pairs))
    weights = heads(3, tokens, 6)
    mesh = build_mesh(Layout(context=context))
    constraints = ShardingConstraints(context_strategy=strategy, is_zigzag=strategy != "all_to_all")
    batch = {}
    if length is not None:
        ids = np.repeat(np.arange(2 * tokens), [length, 3] * tokens)
        ids = np.stack([ids[:tokens], ids[2 : tokens + 2]])
        batch = {SEGMENT_IDS: jnp.asarray(ids), POSITIONS: jnp.zeros_like(ids)}

    def loss(q, k, v, order=lambda array: array):
        with packed(documents_of(batch)):
            return (order(weights) * causal_attention(q, k, v, "unfused")).sum()

    def over_context(*arrays):
        with sharding_context(mesh.abstract_mesh, constraints):
            return loss(*map(in_token_order, arrays), order=in_token_order)

    @jax.jit
    def both(*arrays):
        return [
            jax.value_and_grad(each, argnums=(0, 1, 2))(*arrays)
            for each in (over_context, partial(loss))
        ]

    placed = jax.device_put(arrays, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    found, expected = both(*placed)
    # float32 and another order of sums
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected
    )


def test_the_order_of_tokens_gives_every_shard_a_first_and_a_last_chunk():
    """Of 12 tokens in 6 chunks on 3 devices, the first device has 0, 1 and 10, 11."""
    mesh = build_mesh(Layout(context=3))
    with sharding_context(mesh.abstract_mesh, ShardingConstraints(is_zigzag=True)):
        order = in_token_order(jnp.arange(12), axis=0)

    assert order.tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
