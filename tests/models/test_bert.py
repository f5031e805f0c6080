"""bert: its published sizes, segments, direction, and that only the masked places are read."""

import math
from functools import cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalejax.config.data import SEPARATOR_TOKEN, MaskedTokensConfig
from scalejax.config.model import BertConfig, Remat
from scalejax.data.datasets import open_source
from scalejax.data.facts import read_facts
from scalejax.models import BatchNormScope, build_network
from scalejax.models.bert import Bert
from scalejax.xla.model_flop import forward_flop

DATA = MaskedTokensConfig(tokens=16, masked=3, vocabulary=64)
EXAMPLES = open_source(DATA, "train", seed=0).take(np.arange(4))


def built(remat: Remat) -> Bert:
    """A small network."""
    config = BertConfig(name="bert_base", layers=2, hidden=32, heads=4, max_tokens=16, remat=remat)
    network = build_network(config, read_facts(DATA), bn=BatchNormScope(), rngs=nnx.Rngs(0))
    assert isinstance(network, Bert)
    return network


@cache
def build() -> Bert:
    """One that keeps all."""
    return nnx.jit(lambda: built("none"))()  # op by op it would take seconds


@jax.jit
def logits_of(network: Bert, inputs: jax.Array, places: jax.Array) -> jax.Array:
    """The forward pass."""
    return network(inputs, places=places, is_training=True)


@pytest.mark.parametrize(
    ("name", "count", "hidden", "layers"),
    [("bert_base", 109_514_298, 768, 12), ("bert_large", 335_174_458, 1024, 24)],
)
def test_bert_is_as_large_as_published(name, count, hidden, layers):
    """Parameters of `BertForMaskedLM` in Hugging Face's transformers, exactly; FLOP by hand.

    That is 110 M and 340 M in the paper, which counts the pooler too. Per token and block 12 h^2
    multiply-adds and 2 s h for attention; per masked place h^2 and h v.
    """
    dataset = read_facts(MaskedTokensConfig())
    graph, state = nnx.split(
        nnx.eval_shape(
            lambda: build_network(
                BertConfig(name=name), dataset, bn=BatchNormScope(), rngs=nnx.Rngs(0)
            )
        )
    )
    tokens, masked = (jax.ShapeDtypeStruct((1, size), jnp.int32) for size in (128, 20))

    flop = forward_flop(
        lambda s, x, places: cast(Any, nnx.merge(graph, s))(x, places=places, is_training=True),
        state,
        tokens,
        masked,
    )

    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state)) == count
    by_hand = layers * 128 * (12 * hidden**2 + 2 * 128 * hidden) + 20 * hidden * (hidden + 30_522)
    assert flop == 2 * by_hand


def test_every_token_is_seen_from_every_place():
    """Unlike in gpt: a change at the end is felt at the beginning."""
    inputs, places = EXAMPLES["inputs"], np.ones((4, 3), np.int32)
    changed = np.array(inputs)
    changed[:, 14] = (changed[:, 14] + 1) % 64

    a, b = (logits_of(build(), tokens, places) for tokens in (inputs, changed))

    assert (np.abs(a - b).max(axis=(1, 2)) > 1e-4).all()


def test_logits_are_of_the_places_asked_for():
    """In their order, and the same as when all places are asked for."""
    inputs, places = EXAMPLES["inputs"], EXAMPLES["places"]
    everywhere = np.broadcast_to(np.arange(16, dtype=np.int32), (4, 16))

    of_all = logits_of(build(), inputs, everywhere)
    found = logits_of(build(), inputs, places[:, ::-1])

    expected = np.take_along_axis(np.asarray(of_all), places[:, ::-1, None], axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_what_follows_a_separator_is_of_the_second_segment():
    """The separator itself is of the first, and so is all where there is none."""
    network = build()
    words = jnp.full((1, 6), 9).at[0, 2].set(SEPARATOR_TOKEN)
    table = jnp.zeros((64, 32))

    embedded = network._embedded(words, table) - network.places.embedding[None, :6]

    segment = jnp.repeat(network.segments.embedding[...], 3, axis=0)[None]
    np.testing.assert_allclose(embedded, segment, atol=1e-6)


def test_recompute_changes_no_gradient():
    """Of the scores of attention; two gradients compile, 5 s of processor time. What is computed
    again otherwise goes the way of a `gpt` and a `llama`, whose gradients are tested so."""
    params = nnx.state(build(), nnx.Param)

    def gradient(remat: Remat) -> nnx.State:
        structure = nnx.graphdef(nnx.eval_shape(lambda: built(remat)))

        def loss(params: nnx.State) -> jax.Array:
            network = cast(Any, nnx.merge(structure, params))
            inputs, places = EXAMPLES["inputs"], EXAMPLES["places"]
            return jnp.square(network(inputs, places=places, is_training=True)).mean()

        return jax.jit(jax.grad(loss))(params)

    # the same sums in another order of fusions
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-7),
        gradient("none"),
        gradient("selective"),
    )
