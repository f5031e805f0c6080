"""What decoders of today have that Llama's does not: against a plain reference, and costed."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalejax.config.data import SyntheticTokensConfig
from scalejax.config.model import BlockConfig, LlamaConfig, MlaConfig, MtpConfig
from scalejax.core.errors import ConfigError
from scalejax.data.facts import read_facts
from scalejax.models import BatchNormScope, build_network
from scalejax.models.attention import causal_attention
from scalejax.models.llama import Llama
from scalejax.xla.model_flop import forward_flop

TOKENS, VOCABULARY, HIDDEN, HEADS, FFN = 12, 64, 32, 4, 48
DATASET = read_facts(SyntheticTokensConfig(tokens=TOKENS, vocabulary=VOCABULARY))
INPUTS = jax.random.randint(jax.random.key(7), (2, TOKENS), 0, VOCABULARY)
PLAIN = LlamaConfig(
    layers=3, hidden=HIDDEN, heads=HEADS, kv_heads=2, ffn_hidden=FFN, rope_theta=100.0
)
GEMMA = dataclasses.replace(
    PLAIN,
    tied_embeddings=True,
    scaled_embeddings=True,
    block=BlockConfig(
        head_size=12,
        qk_norm="head",
        sliding_window=4,
        global_every=2,
        local_rope_theta=10.0,
        activation="gelu",
        post_norms=True,
    ),
)
GPT_OSS = dataclasses.replace(
    PLAIN,
    block=BlockConfig(qkv_bias=True, sliding_window=5, global_every=2, attention_sinks=True),
)
NEMOTRON = dataclasses.replace(
    PLAIN,
    block=BlockConfig(
        qk_norm="all_heads", rope_fraction=0.5, activation="squared_relu", is_gated=False,
        norm="layer",
    ),
)  # fmt: skip
MLA = MlaConfig(
    q_lora_rank=24, kv_lora_rank=16, nope_head_size=8, rope_head_size=4, value_head_size=6
)
DEEPSEEK = dataclasses.replace(PLAIN, mla=MLA)
DEEPSEEK_LITE = dataclasses.replace(PLAIN, mla=dataclasses.replace(MLA, q_lora_rank=None))
DECODERS = {
    "gemma": GEMMA,
    "gpt-oss": GPT_OSS,
    "nemotron": NEMOTRON,
    "deepseek": DEEPSEEK,
    "deepseek-lite": DEEPSEEK_LITE,
}


def built(config: LlamaConfig) -> Llama:
    """A small network."""
    network = build_network(config, DATASET, bn=BatchNormScope(), rngs=nnx.Rngs(0))
    assert isinstance(network, Llama)
    return network


def normed(x: np.ndarray, norm: dict, kind: str = "rms") -> np.ndarray:
    """RMSNorm or LayerNorm."""
    if kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    scaled = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * norm["scale"]
    return scaled + norm.get("bias", 0)


def turned(head_SK: np.ndarray, theta: float) -> np.ndarray:
    """Every number of a head and its partner in the other half as one complex number, turned."""
    half = head_SK.shape[1] // 2
    numbers = head_SK[:, :half] + 1j * head_SK[:, half:]
    angles = np.arange(len(head_SK))[:, None] * theta ** (-np.arange(half) / half)
    numbers = numbers * np.exp(1j * angles)
    return np.concatenate([numbers.real, numbers.imag], axis=1)


def attended(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None, sink: float | None
) -> np.ndarray:
    """One head of one example, token by token."""
    rows = []
    for place in range(len(q)):
        first = 0 if window is None else max(0, place - window + 1)
        powers = np.exp(k[first : place + 1] @ q[place] / math.sqrt(q.shape[1]))
        total = powers.sum() + (0 if sink is None else math.exp(sink))
        rows.append(powers @ v[first : place + 1] / total)
    return np.stack(rows)


def heads_of(config: LlamaConfig, layer: dict, x: np.ndarray, theta: float) -> list[tuple]:
    """(queries, keys, values) of each head of one example."""
    found = []
    if (mla := config.mla) is not None:
        latent = x @ layer["kv_down"]["kernel"]
        shared = turned(latent[:, mla.kv_lora_rank :], theta)
        latent = normed(latent[:, : mla.kv_lora_rank], layer["kv_norm"])
        wide, of_queries = x, layer.get("q")
        if of_queries is None:
            wide, of_queries = normed(x @ layer["q_down"]["kernel"], layer["q_norm"]), layer["q_up"]
        for head in range(HEADS):
            q = wide @ of_queries["kernel"][:, head]
            kv = latent @ layer["kv_up"]["kernel"][:, head]
            split = mla.nope_head_size
            q = np.concatenate([q[:, :split], turned(q[:, split:], theta)], axis=1)
            found.append((q, np.concatenate([kv[:, :split], shared], axis=1), kv[:, split:]))
        return found
    kernel = layer["qkv"]["kernel"]
    bias = layer["qkv"].get("bias", np.zeros(kernel.shape[1:]))
    every = np.einsum("sd,dgnk->gnsk", x, kernel) + bias[:, :, None]
    q = every[:, :-2].reshape(HEADS, len(x), -1)
    k = every[:, -2]
    for name, heads in (("q_norm", q), ("k_norm", k)):
        if config.block.qk_norm == "head":
            heads[:] = normed(heads, layer[name])
        elif config.block.qk_norm == "all_heads":
            flat = normed(heads.transpose(1, 0, 2).reshape(len(x), -1), layer[name])
            heads[:] = flat.reshape(len(x), len(heads), -1).transpose(1, 0, 2)
    rotated = round(config.head_size * config.block.rope_fraction)

    def placed(head: np.ndarray) -> np.ndarray:
        return np.concatenate([turned(head[:, :rotated], theta), head[:, rotated:]], axis=1)

    return [(placed(q[i]), placed(k[i // 2]), every[i // 2, -1]) for i in range(HEADS)]


def gelu(x: np.ndarray) -> np.ndarray:
    """Its tanh form."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": gelu,
    "squared_relu": lambda x: np.maximum(x, 0) ** 2,
}


def residual_after(config: LlamaConfig, blocks: dict, x: np.ndarray) -> np.ndarray:
    """The residual stream of one example after stacked blocks, token by token."""
    options = config.block
    for index in range(len(blocks["attention_norm"]["scale"])):
        block = jax.tree.map(lambda leaf, i=index: leaf[i], blocks)
        every = options.global_every
        is_local = options.sliding_window is not None and (every is None or (index + 1) % every)
        window = options.sliding_window if is_local else None
        theta = (options.local_rope_theta or config.rope_theta) if is_local else config.rope_theta
        layer = block["attention"]
        normal = normed(x, block["attention_norm"], options.norm)
        sinks = layer.get("sinks", [None] * HEADS)
        mixed = [
            attended(q, k, v, window, sinks[head])
            for head, (q, k, v) in enumerate(heads_of(config, layer, normal, theta))
        ]
        added = np.concatenate(mixed, axis=1) @ layer["projection"]["kernel"]
        if options.post_norms:
            added = normed(added, block["attention_post_norm"])
        x = x + added
        normal = normed(x, block["feed_forward_norm"], options.norm)
        forward, activated = block["feed_forward"], ACTIVATIONS[options.activation]
        if options.is_gated:
            gate, up = np.einsum("sd,dnf->nsf", normal, forward["gated"]["kernel"])
            inner = activated(gate) * up
        else:
            inner = activated(normal @ forward["up"]["kernel"])
        added = inner @ forward["down"]["kernel"]
        if options.post_norms:
            added = normed(added, block["feed_forward_post_norm"])
        x = x + added
    return x


def reference(config: LlamaConfig, params: dict, tokens_S: np.ndarray) -> np.ndarray:
    """The logits of one example, layer by layer and token by token, in NumPy."""
    options = config.block
    x = params["tokens"]["embedding"][tokens_S]
    if config.scaled_embeddings:
        x = x * math.sqrt(HIDDEN)
    x = residual_after(config, params["blocks"], x)
    output = params["tokens" if config.tied_embeddings else "output"]["embedding"]
    return normed(x, params["norm"], options.norm) @ output.T


@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_those_of_a_plain_reference(name):
    """Three layers, local and global, with scales, biases and sinks that are no defaults."""
    config = DECODERS[name]
    structure, state = nnx.split(nnx.jit(lambda: built(config))(), nnx.Param)
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [
        leaf * 4 + 0.1 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    state = jax.tree.unflatten(tree, leaves)
    params = jax.tree.map(np.asarray, nnx.to_pure_dict(state))

    found = jax.jit(lambda s, x: nnx.merge(structure, s)(x, is_training=True))(state, INPUTS)

    expected = np.stack([reference(config, params, np.asarray(row)) for row in INPUTS])
    # float32 beside float64 in parts, over logits of the order of ten
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())


def test_the_token_after_the_next_is_predicted_from_both():
    """DeepSeek-V3's equations 21 to 23, with the blocks of the reference; 2 s to compile."""
    config = dataclasses.replace(PLAIN, layers=1, mtp=MtpConfig())
    structure, state = nnx.split(nnx.jit(lambda: built(config))(), nnx.Param)
    state = jax.tree.map(lambda leaf: leaf * 4, state)
    params = jax.tree.map(np.asarray, nnx.to_pure_dict(state))
    inputs, targets = INPUTS[:, :-1], INPUTS[:, 1:]

    def both(state: nnx.State) -> tuple[jax.Array, jax.Array]:
        network = nnx.merge(structure, state)
        assert isinstance(network, Llama)
        return network.logits_of_two(inputs, targets)

    first, second = jax.jit(both)(state)

    for row in range(len(INPUTS)):
        expected = reference(config, params, np.asarray(inputs[row]))
        np.testing.assert_allclose(first[row], expected, rtol=2e-3, atol=2e-2)
        embedding = params["tokens"]["embedding"]
        x = embedding[np.asarray(inputs[row])]
        x = residual_after(config, params["blocks"], x)
        joined = [
            normed(part, norm)
            for part, norm in zip(
                (x, embedding[np.asarray(targets[row])]), params["mtp_norms"].values(), strict=True
            )
        ]
        x = np.concatenate(joined, axis=1) @ params["mtp_join"]["kernel"]
        x = residual_after(config, params["mtp_blocks"], x)
        expected = normed(x, params["mtp_norm"]) @ params["output"]["embedding"].T
        np.testing.assert_allclose(second[row], expected, rtol=2e-3, atol=2e-2)


def test_parts_of_a_sequence_are_the_masked_whole():
    """Windows that divide the tokens, with sinks, and gradients of all; 2 s to compile."""
    shapes = [(2, 12, 4, 6), (2, 12, 2, 6), (2, 12, 2, 5)]
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False))
    sinks = jax.random.normal(keys[3], (4,))

    def total(window: int, *arrays: jax.Array) -> jax.Array:
        q, k, v, sinks = arrays
        mixed = causal_attention(q, k, v, "unfused", window=window, sinks_H=sinks)
        return (mixed * jnp.cos(jnp.arange(mixed.size).reshape(mixed.shape))).sum()

    def padded(array: jax.Array) -> jax.Array:  # 13 tokens: no window divides them
        return jnp.pad(array, ((0, 0), (0, 1), (0, 0), (0, 0)))

    def whole(window: int, *arrays: jax.Array) -> jax.Array:
        q, k, v = map(padded, arrays[:3])
        mixed = causal_attention(q, k, v, "unfused", window=window, sinks_H=arrays[3])[:, :12]
        return (mixed * jnp.cos(jnp.arange(mixed.size).reshape(mixed.shape))).sum()

    differentiated = [
        jax.jit(jax.value_and_grad(lambda *arrays, f=f: f(4, *arrays), argnums=(0, 1, 2, 3)))
        for f in (total, whole)
    ]
    in_parts, masked = (each(q, k, v, sinks) for each in differentiated)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), in_parts, masked
    )


def test_model_flop_count_windows_and_latents():
    """A window of keys for each token of a local layer; latents down, and up to all heads."""

    def counted(config: LlamaConfig) -> int:
        structure, params = nnx.split(nnx.eval_shape(lambda: built(config)), nnx.Param)
        forward = lambda p, x: nnx.merge(structure, p)(x, is_training=True)  # noqa: E731  counted
        return forward_flop(forward, params, INPUTS)

    head, window = 12, 4  # of GEMMA, whose third layer begins a period
    scores = 2 * HEADS * head * (2 * window + TOKENS)
    products = 3 * (2 * HEADS + 2 * 2) * head * HIDDEN + 3 * 3 * HIDDEN * FFN
    of_gemma = scores + products + HIDDEN * VOCABULARY
    assert counted(GEMMA) == 2 * INPUTS.size * of_gemma
    queries = HIDDEN * 24 + 24 * HEADS * 12
    keys = HIDDEN * (16 + 4) + 16 * HEADS * (8 + 6)
    attention = queries + keys + TOKENS * HEADS * (12 + 6) + HEADS * 6 * HIDDEN
    of_deepseek = 3 * (attention + 3 * HIDDEN * FFN) + HIDDEN * VOCABULARY
    assert counted(DEEPSEEK) == 2 * INPUTS.size * of_deepseek


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: BlockConfig(head_size=7), r"head_size=7 .*nearest: 6 or 8"),
        (lambda: BlockConfig(global_every=2), r"global_every=2 .*sliding_window is missing"),
        (lambda: BlockConfig(rope_fraction=0.0), r"rope_fraction=0\.0 .*above 0"),
        (lambda: LlamaConfig(block=BlockConfig(rope_fraction=0.3)), r"rope_fraction=0\.3"),
        (lambda: LlamaConfig(mla=MLA, block=BlockConfig(qkv_bias=True)), r"qkv_bias=True"),
        (lambda: dataclasses.replace(MLA, kv_lora_rank=0), r"model\.mla\.kv_lora_rank=0"),
    ],
)
def test_blocks_that_cannot_be_are_refused(build, sentence):
    """Field, value and what is accepted."""
    with pytest.raises(ConfigError, match=sentence):
        build()


def test_what_fused_attention_lacks_is_said():
    """Sinks; and heads of values of another size before Hopper."""
    fused = dataclasses.replace(PLAIN, compute_dtype="bfloat16")

    assert fused.lacks_for_fused_attention((8, 0)) is None
    for config, capability, lack in (
        (GPT_OSS, (9, 0), "sinks"),
        (
            dataclasses.replace(DEEPSEEK, mla=dataclasses.replace(MLA, rope_head_size=8)),
            (8, 0),
            "9",
        ),
    ):
        config = dataclasses.replace(config, compute_dtype="bfloat16")
        assert lack in str(config.lacks_for_fused_attention(capability))
