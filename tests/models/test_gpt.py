"""gpt: its published size, causality, recompute, and the collectives of its compiled step."""

import math
import re
from collections import Counter
from functools import cache, partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.config.data import SyntheticTokensConfig
from scalejax.config.model import GptConfig
from scalejax.config.parallelism import BATCH_AXES, Layout
from scalejax.data.facts import read_facts
from scalejax.models import BatchNormScope, build_network, param_specs
from scalejax.models.gpt import Gpt
from scalejax.training.mesh import build_mesh
from scalejax.xla.model_flop import forward_flop

LAYERS, HIDDEN, TOKENS, VOCABULARY, BATCH = 3, 64, 16, 512, 16
DATASET = read_facts(SyntheticTokensConfig(tokens=TOKENS, vocabulary=VOCABULARY))
INPUTS = jax.random.randint(jax.random.key(7), (BATCH, TOKENS), 0, VOCABULARY)


@cache
def build(remat: Literal["none", "full"] = "none") -> Gpt:
    """A small network; the same one every time, for it holds nothing that changes."""
    config = GptConfig(layers=LAYERS, hidden=HIDDEN, heads=4, remat=remat)

    @nnx.jit  # op by op it would take seconds
    def built():
        return build_network(config, DATASET, bn=BatchNormScope(), rngs=nnx.Rngs(0))

    network = built()
    assert isinstance(network, Gpt)
    return network


@jax.jit
def logits_of(network: Gpt, inputs: jax.Array) -> jax.Array:
    """The forward pass."""
    return network(inputs, is_training=True)


def loss(params: nnx.State, structure: nnx.GraphDef, inputs: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next token."""
    logits = nnx.merge(structure, params)(inputs, is_training=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], inputs[:, 1:]).mean()


def test_gpt2_small_has_as_many_parameters_as_published():
    """124,439,808: 12 layers, 768 wide, 1024 places, 50257 tokens, tied output."""
    dataset = read_facts(SyntheticTokensConfig(tokens=1024, vocabulary=50_257))
    config = GptConfig(layers=12, hidden=768, heads=12)
    network = nnx.eval_shape(
        lambda: build_network(config, dataset, bn=BatchNormScope(), rngs=nnx.Rngs(0))
    )

    leaves = jax.tree.leaves(nnx.state(network, nnx.Param))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == 124_439_808


def test_a_token_changes_no_logit_before_it():
    """Attention is causal: what comes later cannot be seen."""
    network = build()
    changed = INPUTS.at[:, 9].set((INPUTS[:, 9] + 1) % VOCABULARY)

    a, b = (logits_of(network, tokens) for tokens in (INPUTS, changed))

    np.testing.assert_array_equal(a[:, :9], b[:, :9])
    assert not np.allclose(a[:, 9:], b[:, 9:], atol=1e-3)


def test_every_layer_differs_and_starts_as_gpt2_does():
    """Layers are drawn apart; weights have deviation 0.02, residual ones 0.02 / sqrt(2 layers)."""
    params = nnx.to_pure_dict(nnx.state(build(), nnx.Param))
    up, down = (params["blocks"]["feed_forward"][name]["kernel"] for name in ("up", "down"))

    assert not np.allclose(up[0], up[1], atol=1e-3)
    # 49,152 samples: standard error 0.3 %
    assert float(up.std()) == pytest.approx(0.02, rel=0.015)
    assert float(down.std()) == pytest.approx(0.02 / math.sqrt(2 * LAYERS), rel=0.015)


def test_a_fresh_network_is_as_good_as_guessing():
    """Loss log(vocabulary), by hand 6.238, plus half the logits' variance, 64 x 0.02^2 / 2."""
    structure, params = nnx.split(build(), nnx.Param)

    found = jax.jit(loss, static_argnums=1)(params, structure, INPUTS)
    assert float(found) == pytest.approx(6.238 + 0.013, abs=0.02)


def test_recompute_changes_no_gradient():
    """`remat = "full"` multiplies once more for every block, and changes nothing else."""
    gradients, flop = [], []
    for remat in ("none", "full"):
        structure, params = nnx.split(build(remat), nnx.Param)
        gradient_of = partial(jax.grad(loss), structure=structure, inputs=INPUTS)
        gradients.append(jax.jit(gradient_of)(params))
        flop.append(forward_flop(gradient_of, params))

    per_token = 12 * HIDDEN**2 + 2 * TOKENS * HIDDEN  # multiply-adds of a block
    # Not again: the last product of a block, whose result is nobody's operand.
    again = 2 * BATCH * TOKENS * LAYERS * (per_token - 4 * HIDDEN**2)
    assert flop[1] - flop[0] == again
    jax.tree.map(
        # the same sums in another order of fusions
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7),
        *gradients,
    )


def test_a_block_keeps_few_results_for_its_backward_pass():
    """Without recompute: at most 21 times the residual stream, scores of attention included.

    Heads x tokens are as many as the width here. By hand, in widths: what the two norms read and
    give (4), queries, keys, values and their mixture (4), scores and softmax (3), GELU's argument
    and result (8), and two copies. With what norms and GELU make in between, it was 38.
    """
    structure, params = nnx.split(build(), nnx.Param)
    gradient_of = partial(jax.grad(loss), structure=structure, inputs=INPUTS)
    equations = jax.make_jaxpr(gradient_of)(params).jaxpr.eqns

    forward = next(each for each in equations if each.primitive.name == "scan")
    # Stacked over the layers; what is carried from one to the next is not.
    kept = [each for each in forward.outvars if each.aval.shape[:1] == (LAYERS,)]
    widths = sum(each.aval.size for each in kept) / (LAYERS * BATCH * TOKENS * HIDDEN)
    assert 10 < widths < 21


def test_scanned_blocks_equal_blocks_in_a_loop():
    """The scan is a way to write the loop, no other network."""
    network = build()
    structure, stacked = nnx.split(network.blocks)
    x = network.tokens(INPUTS) + network.places(jnp.arange(TOKENS))[None]
    for layer in range(LAYERS):
        x = nnx.merge(structure, jax.tree.map(lambda leaf, i=layer: leaf[i], stacked))(x)
    expected = network.tokens.attend(network.norm(x))

    np.testing.assert_allclose(network(INPUTS, is_training=True), expected, rtol=1e-4, atol=1e-5)


def collectives(data: int, fsdp: int, tensor: int) -> Counter[tuple[str, str]]:
    """Collectives of the compiled gradient, by (kind, shape of the first result)."""
    mesh = build_mesh(Layout(data=data, fsdp=fsdp, tensor=tensor))
    structure, state = nnx.split(build(), nnx.Param)
    shapes = nnx.to_pure_dict(jax.eval_shape(lambda: state))
    specs = param_specs(shapes, Gpt.partition_rules(), mesh.shape)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, P)
    )

    def gradient(params, inputs):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.grad(lambda p: loss(nnx.State(p), structure, inputs))(params)

    rows = NamedSharding(mesh, P(BATCH_AXES))
    lowered = jax.jit(gradient, in_shardings=(shardings, rows), out_shardings=shardings).lower(
        shapes, jax.ShapeDtypeStruct((BATCH, TOKENS), jnp.int32)
    )
    pattern = r"= \(?(\w+\[[\d,]*\]).* (all-reduce|all-gather|all-to-all|collective-permute)\("
    found = re.findall(pattern, lowered.compile().as_text() or "")
    return Counter((kind, shape) for shape, kind in found)


def test_tensor_parallel_blocks_need_four_sums_of_activations():
    """Megatron: one all-reduce after attention and one after the feed-forward layer, forward and
    backward; besides, one each for the embedding and the gradient of the output layer."""
    found = collectives(data=2, fsdp=1, tensor=4)

    activations = f"f32[{BATCH // 2},{TOKENS},{HIDDEN}]"
    assert found["all-reduce", activations] == 4 + 2
    assert {kind for kind, _ in found} == {"all-reduce"}  # heads and vocabulary are never moved
    logits = BATCH // 2 * TOKENS * VOCABULARY // 4
    assert all(
        math.prod(map(int, shape[4:-1].split(","))) < logits for _, shape in found if "," in shape
    )


def test_fsdp_gathers_only_what_tensor_leaves():
    """Of a matrix that both axes divide, a device gathers its own part of the heads and the inner
    width; twice, for nothing is kept whole until the backward pass."""
    found = collectives(data=2, fsdp=2, tensor=2)

    heads, inner = 4 // 2, 4 * HIDDEN // 2
    gathered = {shape: count for (kind, shape), count in found.items() if kind == "all-gather"}
    assert gathered == {
        f"f32[{HIDDEN},3,{heads},16]": 2,
        f"f32[{heads * 16},{HIDDEN}]": 2,
        f"f32[{HIDDEN},{inner}]": 2,
        f"f32[{inner},{HIDDEN}]": 2,
        f"f32[{VOCABULARY // 2},{HIDDEN}]": 1,
        f"f32[{TOKENS},{HIDDEN}]": 1,
    }
    assert found["all-reduce", f"f32[{BATCH // 4},{TOKENS},{HIDDEN}]"] == 4 + 2


def test_fsdp_gathers_parameters_and_never_activations():
    """Every all-gather has the shape of a parameter; rows stay on their device."""
    found = collectives(data=1, fsdp=8, tensor=1)

    kinds = {kind for kind, _ in found}
    assert kinds == {"all-gather", "all-reduce"}
    gathered = {shape for kind, shape in found if kind == "all-gather"}
    assert gathered == {
        f"f32[{HIDDEN},3,4,16]",  # qkv
        f"f32[{HIDDEN},{HIDDEN}]",  # projection
        f"f32[{HIDDEN},{4 * HIDDEN}]",  # up
        f"f32[{4 * HIDDEN},{HIDDEN}]",  # down
        f"f32[{VOCABULARY},{HIDDEN}]",  # tokens
        f"f32[{TOKENS},{HIDDEN}]",  # places
    }
