"""llama: against a plain reference, its split, recompute, FLOP, and what it refuses."""

import dataclasses
import math
from functools import cache, partial

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from program_cases import kept_jobs

from scalejax.config.data import SyntheticTokensConfig
from scalejax.config.model import GptConfig, LlamaConfig, Remat
from scalejax.config.run import RunConfig, resolve
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build as build_config
from scalejax.data.facts import read_facts
from scalejax.hardware import load_cluster
from scalejax.models import BatchNormScope, build_network
from scalejax.models.gpt import Gpt
from scalejax.models.llama import Llama
from scalejax.xla import profile
from scalejax.xla.model_flop import forward_flop

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, TOKENS, VOCABULARY, BATCH = 2, 32, 4, 2, 48, 12, 64, 4
DATASET = read_facts(SyntheticTokensConfig(tokens=TOKENS, vocabulary=VOCABULARY))
INPUTS = jax.random.randint(jax.random.key(7), (BATCH, TOKENS), 0, VOCABULARY)
SMALL = LlamaConfig(
    layers=LAYERS, hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS, ffn_hidden=FFN, rope_theta=100.0
)
RUN = {
    "model": {"name": "llama", "layers": 4, "hidden": 64, "heads": 8, "kv_heads": 2},
    "data": {"name": "synthetic_tokens", "tokens": 8, "vocabulary": 32},
    "batch": {"global_batch": 8, "microbatches": 2},
    "optimizer": {"name": "adamw"},
    "schedule": {"base_learning_rate": 0.1},
}


def built(config: LlamaConfig | GptConfig) -> Llama | Gpt:
    """A small network."""
    network = build_network(config, DATASET, bn=BatchNormScope(), rngs=nnx.Rngs(0))
    assert isinstance(network, Llama | Gpt)
    return network


@cache
def build(config: LlamaConfig | GptConfig) -> Llama | Gpt:
    """The same one every time, for it holds nothing that changes."""
    return nnx.jit(lambda: built(config))()  # op by op it would take seconds


def shapes(config: LlamaConfig | GptConfig) -> Llama | Gpt:
    """A network that holds shapes in place of numbers."""
    return nnx.eval_shape(lambda: built(config))


def loss(params: nnx.State, structure: nnx.GraphDef, inputs: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next token."""
    logits = nnx.merge(structure, params)(inputs, is_training=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], inputs[:, 1:]).mean()


def rms_norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Divided by the root of the mean square, and scaled."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale


def turned(head_SK: np.ndarray, theta: float) -> np.ndarray:
    """Every number of a head and its partner in the other half as one complex number, turned."""
    half = head_SK.shape[1] // 2
    numbers = head_SK[:, :half] + 1j * head_SK[:, half:]
    angles = np.arange(len(head_SK))[:, None] * theta ** (-np.arange(half) / half)
    numbers = numbers * np.exp(1j * angles)
    return np.concatenate([numbers.real, numbers.imag], axis=1)


def attended(layer: dict, x_SD: np.ndarray) -> np.ndarray:
    """Attention of one example, head by head; two heads of queries read one of keys."""
    mixed = []
    for head in range(HEADS):
        pair, index = divmod(head, HEADS // KV_HEADS)
        weights = layer["qkv"]["kernel"][:, pair]
        q = turned(x_SD @ weights[:, index], 100.0)
        k = turned(x_SD @ weights[:, -2], 100.0)
        v = x_SD @ weights[:, -1]
        scores = q @ k.T / math.sqrt(HIDDEN // HEADS)
        scores = np.where(np.tril(np.ones_like(scores)), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed.append(shares / shares.sum(-1, keepdims=True) @ v)
    return np.concatenate(mixed, axis=1) @ layer["projection"]["kernel"]


def reference(params: dict, tokens_S: np.ndarray) -> np.ndarray:
    """The logits of one example, layer by layer, in NumPy."""
    x = params["tokens"]["embedding"][tokens_S]
    for index in range(LAYERS):
        block = jax.tree.map(lambda leaf, i=index: leaf[i], params["blocks"])
        x = x + attended(block["attention"], rms_norm(x, block["attention_norm"]["scale"]))
        normal = rms_norm(x, block["feed_forward_norm"]["scale"])
        gate, up = np.moveaxis(
            np.tensordot(normal, block["feed_forward"]["gated"]["kernel"], 1), 1, 0
        )
        x = x + gate / (1 + np.exp(-gate)) * up @ block["feed_forward"]["down"]["kernel"]
    return rms_norm(x, params["norm"]["scale"]) @ params["output"]["embedding"].T


def test_logits_are_those_of_a_plain_reference():
    """RoPE, RMSNorm, SwiGLU and grouped queries, written out; scales that are not one."""
    structure, state = nnx.split(build(SMALL), nnx.Param)
    key = jax.random.key(1)
    state = jax.tree.map(  # larger weights, so that attention is not flat
        lambda leaf: leaf * 5 + 0.1 * jax.random.normal(key, leaf.shape), state
    )
    params = jax.tree.map(np.asarray, nnx.to_pure_dict(state))

    found = jax.jit(lambda s, x: nnx.merge(structure, s)(x, is_training=True))(state, INPUTS)

    expected = np.stack([reference(params, np.asarray(row)) for row in INPUTS])
    # float32 beside float64 in parts; logits are of the order of ten
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_a_token_changes_no_logit_before_it():
    """Attention is causal: what comes later cannot be seen."""
    network = build(SMALL)
    changed = INPUTS.at[:, 9].set((INPUTS[:, 9] + 1) % VOCABULARY)

    a, b = (
        nnx.jit(lambda n, x: n(x, is_training=True))(network, tokens)
        for tokens in (INPUTS, changed)
    )

    np.testing.assert_array_equal(a[:, :9], b[:, :9])
    assert not np.allclose(a[:, 9:], b[:, 9:], atol=1e-4)


@pytest.mark.slow_except("llama")
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_recompute_changes_no_gradient(name):
    """`selective` makes scores once more, `selective_op` besides them the projection and what is
    gated, `full` every product of a block but the last. Gradients compile, 2 s of processor time
    each: a `bert` has those of `selective`."""
    small = SMALL if name == "llama" else GptConfig(layers=LAYERS, hidden=HIDDEN, heads=HEADS)
    gradients, flop = {}, {}
    params = nnx.state(build(small), nnx.Param)
    remats: tuple[Remat, ...] = ("none", "selective", "selective_op", "full")
    for remat in remats:
        structure = nnx.graphdef(shapes(dataclasses.replace(small, remat=remat)))
        gradient_of = partial(jax.grad(loss), structure=structure, inputs=INPUTS)
        if remat in ("none", {"gpt": "full", "llama": "selective_op"}[name]):
            gradients[remat] = jax.jit(gradient_of)(params)
        flop[remat] = forward_flop(gradient_of, params)

    scores = 2 * BATCH * TOKENS * LAYERS * TOKENS * HIDDEN
    # The mixture is not made again: it is kept, as what the projection reads.
    assert flop["selective"] - flop["none"] == scores
    again = HIDDEN + (FFN if name == "llama" else 0)
    products = 2 * BATCH * TOKENS * LAYERS * HIDDEN * again
    assert flop["selective_op"] - flop["none"] == scores + products
    assert flop["full"] > flop["selective_op"]
    jax.tree.map(
        # the same sums in another order of fusions
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7),
        *gradients.values(),
    )


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_selective_recompute_keeps_no_scores(name):
    """Nothing of [B, H, S, S] leaves the forward scan."""
    small = SMALL if name == "llama" else GptConfig(layers=LAYERS, hidden=HIDDEN, heads=HEADS)
    kept = {}
    remats: tuple[Remat, ...] = ("none", "selective")
    for remat in remats:
        structure, params = nnx.split(shapes(dataclasses.replace(small, remat=remat)), nnx.Param)
        gradient_of = partial(jax.grad(loss), structure=structure, inputs=INPUTS)
        equations = jax.make_jaxpr(gradient_of)(params).jaxpr.eqns
        forward = next(each for each in equations if each.primitive.name == "scan")
        kept[remat] = [each.aval.shape for each in forward.outvars]

    def scores(found: list[tuple[int, ...]]) -> int:
        return sum(shape[-2:] == (TOKENS, TOKENS) for shape in found)

    assert scores(kept["none"]) >= 1
    assert scores(kept["selective"]) == 0


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_every_second_product_is_kept(name):
    """Of a block its input, queries to values, what attention gives, and gate or inside."""
    small = SMALL if name == "llama" else GptConfig(layers=LAYERS, hidden=HIDDEN, heads=HEADS)
    structure, params = nnx.split(
        shapes(dataclasses.replace(small, remat="selective_op")), nnx.Param
    )
    gradient_of = partial(jax.grad(loss), structure=structure, inputs=INPUTS)
    equations = jax.make_jaxpr(gradient_of)(params).jaxpr.eqns
    forward = next(each for each in equations if each.primitive.name == "scan")

    kept = [each.aval.size for each in forward.outvars if each.aval.shape[0] == LAYERS]
    queries = HIDDEN + 2 * (KV_HEADS if name == "llama" else HEADS) * HIDDEN // HEADS
    inside = FFN if name == "llama" else 4 * HIDDEN

    widths = sorted(size // (LAYERS * BATCH * TOKENS) for size in kept)
    assert widths == sorted([HIDDEN, queries, HIDDEN, inside])


def test_model_flop_are_those_counted_by_hand():
    """Per token and block: queries and projection h^2 each, keys and values h kv each, three
    matrices h f, and scores and their mixture s h each, whatever the heads of keys; the output
    h v."""
    structure, params = nnx.split(shapes(SMALL), nnx.Param)
    flop = forward_flop(lambda p, x: nnx.merge(structure, p)(x, is_training=True), params, INPUTS)

    of_keys = HIDDEN // HEADS * KV_HEADS
    block = 2 * HIDDEN**2 + 2 * HIDDEN * of_keys + 3 * HIDDEN * FFN + 2 * TOKENS * HIDDEN
    assert flop == 2 * BATCH * TOKENS * (LAYERS * block + HIDDEN * VOCABULARY)


def test_a_profile_has_the_exchanges_of_gpt_and_the_model_flop_of_llama(monkeypatch):
    """Megatron: of a block's activations two sums forward and two backward over tensor; no more
    for the keys, though their heads are others."""
    tables = {**RUN, "batch": {"global_batch": 8}, "layout": {"tensor": 2}}
    run = resolve(build_config(RunConfig, tables), 4)
    monkeypatch.setattr("scalejax.xla.batch.run_jobs", kept_jobs)

    program = profile(run, load_cluster("dgx-h100"), cache=None, backend="cpu")

    keys = 64 // 8 * 2
    block = 2 * 64**2 + 2 * 64 * keys + 3 * 64 * 352 + 2 * 8 * 64
    assert program.model_flop == 3 * 2 * 8 * 8 * (4 * block + 64 * 32)
    activations = 4 * 8 * 64 * 4  # samples of a device, tokens, width, bytes
    of_blocks = [
        gradient_sync.payload_bytes
        for operation, times in program.walk()
        if (gradient_sync := operation.collective) is not None
        and gradient_sync.group.axes == ("tensor",)
        and times == 4  # in the loops over the layers
    ]
    assert of_blocks == [activations] * 4


@pytest.mark.parametrize("config", [SMALL, GptConfig(layers=2, hidden=32, heads=4)])
def test_an_output_layer_of_its_own_is_as_large_as_the_embedding(config):
    """Tied, there is one table, and gradients of both ends meet in it."""
    counts = {}
    for is_tied in (True, False):
        network = shapes(dataclasses.replace(config, tied_embeddings=is_tied))
        params = nnx.state(network, nnx.Param)
        counts[is_tied] = sum(leaf.size for leaf in jax.tree.leaves(params))

    assert counts[False] - counts[True] == VOCABULARY * HIDDEN


def test_a_gpt_s_inner_width_can_be_chosen():
    """Two matrices and one bias of a block depend on it."""
    wide, usual = (
        sum(leaf.size for leaf in jax.tree.leaves(nnx.state(shapes(config), nnx.Param)))
        for config in (
            GptConfig(layers=2, hidden=32, heads=4, ffn_hidden=160),
            GptConfig(layers=2, hidden=32, heads=4),
        )
    )

    assert wide - usual == 2 * (160 - 128) * (2 * 32 + 1)


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"model": {"heads": 8, "kv_heads": 3}}, r"model\.heads=8 .*kv_heads=3 \(nearest: 6 or 9"),
        ({"model": {"hidden": 72}}, r"model\.hidden=72 .*2\*heads=16 \(nearest: 64 or 80"),
        ({"model": {"ffn_hidden": 0}}, r"model\.ffn_hidden=0 .*at least 1"),
        (
            {"layout": {"tensor": 4}},
            r"model\.kv_heads=2 .*layout\.tensor=4 \(nearest: 4\)",
        ),
        ({"layout": {"pipeline": 5}}, r"model\.layers=4 .*pipeline=5 stages needs a layer"),
        ({"layout": {"context": 3}}, r"data\.tokens=8 .*3 \(nearest: 6 or 9"),
        ({"data": {"name": "synthetic_images"}}, r"model\.name='llama' .*reads text"),
    ],
)
def test_what_cannot_be_split_is_refused(tables, sentence):
    """Field, value and the nearest that can."""
    merged = {**RUN, **tables, "model": {**RUN["model"], **tables.get("model", {})}}

    with pytest.raises(ConfigError, match=sentence):
        build_config(RunConfig, merged)
