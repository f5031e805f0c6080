"""What a model needs, counted in its trace."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from scalejax.config.run import RunConfig, resolve
from scalejax.core.serialization import JsonValue, build
from scalejax.xla.compiled import _model_flop
from scalejax.xla.model_flop import forward_flop

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
W = jax.ShapeDtypeStruct((8, 8), jnp.float32)
PRODUCT = 2 * 4 * 8 * 8
"""FLOP of x @ w."""


@jax.custom_vjp
def with_own_gradient(x, w):
    """A product whose gradient is the user's own."""
    return x @ w


with_own_gradient.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda kept, g: (g @ kept[1].T, kept[0].T @ g),
)


@pytest.mark.parametrize(
    ("function", "products"),
    [
        pytest.param(lambda x, w: jnp.tanh(x @ w) @ w, 2, id="plain"),
        pytest.param(jax.jit(lambda x, w: x @ w), 1, id="jit"),
        pytest.param(jax.checkpoint(lambda x, w: x @ w), 1, id="remat"),
        pytest.param(lambda x, w: jax.nn.relu(x @ w), 1, id="custom_jvp"),
        pytest.param(with_own_gradient, 1, id="custom_vjp"),
        pytest.param(
            lambda x, w: jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=5)[0],
            5,
            id="scan",
        ),
        pytest.param(
            lambda x, w: jax.lax.cond(x.sum() > 0, lambda: x @ w @ w, lambda: x @ w),
            2,
            id="costlier branch",
        ),
        pytest.param(lambda x, w: jax.vmap(lambda row: row @ w)(x), 1, id="vmap"),
        pytest.param(lambda x, w: x[:, :1] + w[:4, :1], 0, id="no product"),
    ],
)
def test_products_are_counted_wherever_they_stand(function, products):
    """In nested calls, loops, rematerialised and custom-gradient functions."""
    assert forward_flop(function, X, W) == products * PRODUCT


def test_a_per_device_function_counts_for_all_its_devices():
    """The trace under `shard_map` is that of one device of 8."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rows = jax.ShapeDtypeStruct((32, 8), jnp.float32)
    mapped = jax.shard_map(
        lambda x, w: x @ w,
        mesh=mesh,
        in_specs=(PartitionSpec(("data", "tensor")), PartitionSpec()),
        out_specs=PartitionSpec(("data", "tensor")),
    )

    assert forward_flop(mapped, rows, W) == 2 * 32 * 8 * 8


def test_a_convolution_counts_its_groups_and_strides():
    """4 groups of 32 / 4 input channels, 14 x 14 outputs, 3 x 3 window."""

    def convolve(images, kernel):
        return jax.lax.conv_general_dilated(
            images,
            kernel,
            (2, 2),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=4,
        )

    images = jax.ShapeDtypeStruct((16, 28, 28, 32), jnp.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, 8, 64), jnp.float32)

    assert forward_flop(convolve, images, kernel) == 2 * 16 * 14 * 14 * 64 * 9 * 8


def test_adapters_need_as_much_in_a_pipeline_as_on_one_device():
    """Counted without stages, which have no mesh there."""
    tables = {
        "model": {"name": "llama", "layers": 4, "hidden": 16, "heads": 2, "remat": "full"},
        "data": {"name": "synthetic_tokens", "tokens": 8, "vocabulary": 16},
        "batch": {"global_batch": 8, "microbatches": 4},
        "optimizer": {"name": "adamw"},
        "schedule": {"base_learning_rate": 0.1},
        "fine_tuning": {"lora": {"rank": 2}},
    }
    stages = {"pipeline": 2, "pipeline_schedule": "1f1b"}

    alone, *in_stages = (
        _model_flop(resolve(build(RunConfig, {**tables, "layout": layout}), devices))
        for layout, devices in (({}, 1), (stages, 2), ({**stages, "pipeline_chunks": 2}, 2))
    )

    assert in_stages == [alone, alone]


def test_slots_of_experts_that_stay_empty_do_not_count():
    """Nor where some parameters are frozen, and the backward pass is counted too."""
    tables = {
        "model": {"name": "llama", "layers": 1, "hidden": 16, "heads": 2},
        "data": {"name": "synthetic_tokens", "tokens": 32, "vocabulary": 16},
        "batch": {"global_batch": 8},
        "optimizer": {"name": "adamw"},
        "schedule": {"base_learning_rate": 0.1},
        "fine_tuning": {"trainable": ["blocks"]},
    }
    experts = {"experts": 4, "experts_per_token": 2, "expert_hidden": 8}

    def counted(**room):
        tables["model"]["moe"] = {**experts, **room}
        return _model_flop(resolve(build(RunConfig, tables), 1))

    assert counted(capacity_factor=4.0) == counted()


def test_a_window_that_does_not_divide_the_tokens_needs_no_more():
    """Each token attends to 8: computed in parts of 16 for 16 tokens, over all 17 for 17. So do
    both gradients, and what is computed again does not count."""

    def counted(tokens, window=8, remat="none", **words: JsonValue):
        tables = {
            "model": {
                "name": "llama", "layers": 1, "hidden": 16, "heads": 2, "kv_heads": 2,
                "ffn_hidden": 16, "remat": remat, "block": {"sliding_window": window},
            },
            "data": {"name": "synthetic_tokens", "tokens": tokens, "vocabulary": 16},
            "batch": {"global_batch": 1},
            "optimizer": {"name": "adamw"},
            "schedule": {"base_learning_rate": 0.1},
            **words,
        }  # fmt: skip
        return _model_flop(resolve(build(RunConfig, tables), 1))

    a_token = 3 * 2 * (4 * 16 * 16 + 3 * 16 * 16 + 16 * 16)  # layers, and the output layer
    scores = 3 * 2 * 2 * 16  # with one token, and what it mixes

    assert counted(16) == 16 * (a_token + 8 * scores)
    assert counted(17) == counted(17, remat="selective") == 17 * (a_token + 8 * scores)
    assert counted(17, window=17) == 17 * (a_token + 17 * scores)
    local, whole = (
        counted(17, window=window, fine_tuning={"trainable": ["blocks"]}) for window in (8, 17)
    )
    assert local - whole == 17 * (8 - 17) * scores
