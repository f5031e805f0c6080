"""Which attention a run takes, by device, type and size of a head."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from scalejax.config.model import AttentionKind, ComputeType, GptConfig, LlamaConfig, MlpConfig
from scalejax.config.run import RunConfig, resolve, with_fields
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import JsonValue, build
from scalejax.models.attention import causal_attention, with_resolved_attention
from scalejax.training import setup
from scalejax.training.mesh import build_mesh

H100 = SimpleNamespace(platform="gpu", compute_capability="9.0")
A100 = SimpleNamespace(platform="gpu", compute_capability="8.0")
V100 = SimpleNamespace(platform="gpu", compute_capability="7.0")
MI300X = SimpleNamespace(platform="gpu", compute_capability="gfx942")


def gpt(
    attention: AttentionKind = "auto", hidden: int = 512, dtype: ComputeType = "bfloat16"
) -> GptConfig:
    """Four heads."""
    return GptConfig(hidden=hidden, heads=4, attention=attention, compute_dtype=dtype)


def test_auto_is_fused_where_cudnn_has_it():
    """From compute capability 8.0 on, in 16 bits."""
    assert with_resolved_attention(gpt(), H100) == gpt("fused")
    assert with_resolved_attention(gpt(), A100) == gpt("fused")
    assert with_resolved_attention(gpt(dtype="float16"), A100) == gpt("fused", dtype="float16")
    assert with_resolved_attention(gpt(), V100) == gpt("unfused")
    assert with_resolved_attention(gpt(), MI300X) == gpt("unfused")
    assert with_resolved_attention(gpt(dtype="float32"), H100) == gpt("unfused", dtype="float32")


def test_auto_is_unfused_on_a_cpu_and_without_a_device():
    """What trains here, and what counts FLOP, stays in JAX's own operations."""
    assert with_resolved_attention(gpt(), jax.devices("cpu")[0]) == gpt("unfused")
    assert with_resolved_attention(gpt(), None) == gpt("unfused")
    assert with_resolved_attention(gpt("fused"), None) == gpt("unfused")


def test_wide_heads_are_fused_on_newer_chips_only():
    """At most 128 wide on Ampere and 256 from Hopper on, a multiple of 8 on both."""
    assert with_resolved_attention(gpt(hidden=4 * 192), H100) == gpt("fused", hidden=4 * 192)
    assert with_resolved_attention(gpt(hidden=4 * 192), A100) == gpt("unfused", hidden=4 * 192)
    assert with_resolved_attention(gpt(hidden=4 * 100), H100) == gpt("unfused", hidden=4 * 100)


def test_llama_takes_what_gpt_takes():
    """By the size of a head, and whatever its heads of keys."""
    small = LlamaConfig(hidden=512, heads=4, kv_heads=2, compute_dtype="bfloat16")

    assert with_resolved_attention(small, H100) == replace(small, attention="fused")
    assert with_resolved_attention(small, V100) == replace(small, attention="unfused")
    assert with_resolved_attention(small, None) == replace(small, attention="unfused")
    with pytest.raises(ConfigError, match="multiple of 8 and at most 128, not 192"):
        with_resolved_attention(replace(small, hidden=768, attention="fused"), A100)


def test_unfused_stays_unfused():
    """Asked for by name, on any device; and other networks have no attention."""
    assert with_resolved_attention(gpt("unfused"), H100) == gpt("unfused")
    assert with_resolved_attention(MlpConfig(), H100) == MlpConfig()


@pytest.mark.parametrize("pairs", [6, 2, 1])
def test_unfused_attention_is_jax_s_own(pairs):
    """Values and gradients, in float32, against `jax.nn.dot_product_attention`; several heads of
    queries may read one of keys."""
    q, k, v = (
        jax.random.normal(jax.random.key(index), (2, 12, heads, 8))
        for index, heads in enumerate((6, pairs, pairs))
    )
    weights = jax.random.normal(jax.random.key(3), q.shape)

    def ours(q, k, v):
        return (weights * causal_attention(q, k, v, "unfused")).sum()

    def reference(q, k, v):
        return (weights * jax.nn.dot_product_attention(q, k, v, is_causal=True)).sum()

    @jax.jit
    def both(q, k, v):
        return [jax.value_and_grad(each, argnums=(0, 1, 2))(q, k, v) for each in (ours, reference)]

    found, expected = both(q, k, v)
    # float32 and another order of sums
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected
    )


def test_fused_by_name_is_refused_where_there_is_none():
    """With what is missing."""
    with pytest.raises(ConfigError, match=r"model.attention='fused'.*capability 8.0 or later"):
        with_resolved_attention(gpt("fused"), jax.devices("cpu")[0])
    with pytest.raises(ConfigError, match=r"model\.compute_dtype=.bfloat16"):
        with_resolved_attention(gpt("fused", dtype="float32"), H100)
    with pytest.raises(ConfigError, match="multiple of 8 and at most 128, not 192"):
        with_resolved_attention(gpt("fused", hidden=4 * 192), A100)


def test_fused_by_name_over_context_is_refused_without_the_kernels_of_this_jax(monkeypatch):
    """They are private; "auto" goes without."""
    tables: dict[str, JsonValue] = {
        "model": {"name": "gpt", "layers": 1, "hidden": 32, "heads": 2},
        "data": {"name": "synthetic_tokens", "tokens": 8, "vocabulary": 8},
        "batch": {"global_batch": 2},
        "optimizer": {"name": "sgd"},
        "schedule": {"base_learning_rate": 0.1},
        "layout": {"data": 1, "context": 2},
    }
    run = resolve(build(RunConfig, tables))
    fused = resolve(with_fields(run.config, {"model.attention": "fused"}))
    monkeypatch.setattr(setup, "has_fused_blocks", lambda: False)

    model = setup.train_setup(run, build_mesh(run.layout)).run.config.model
    assert isinstance(model, GptConfig)
    assert model.attention == "unfused"
    with pytest.raises(ConfigError, match=r"attention='fused' .* this JAX has no fused kernel"):
        setup.train_setup(fused, build_mesh(run.layout))
