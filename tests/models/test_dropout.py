"""Promises of dropout and stochastic depth, of masks alone."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.model import GptConfig, LlamaConfig, MtpConfig, VitConfig
from scalejax.config.moe import MoeConfig
from scalejax.config.run import RunConfig
from scalejax.config.training import DropoutConfig
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.models import blocks as blocks_module
from scalejax.models import gpt, llama, vit
from scalejax.models.blocks import stacked_blocks, through_blocks
from scalejax.models.dropout import dropped, dropping, in_layer, numbered

NUMBERS = jnp.arange(64, dtype=jnp.uint32)
ONES = jnp.ones((64, 16, 32))
LAYERS = 4


IMAGES = {
    "model": {"name": "mlp"},
    "data": {"name": "synthetic_images", "image_size": 8, "channels": 1, "classes": 8},
}


def after_each_layer(config: DropoutConfig, numbers: jax.Array = NUMBERS) -> np.ndarray:
    """What two places of each layer leave of ones, [layers, places, B, S, D]."""

    def block(carry: None, layer: jax.Array) -> tuple[None, jax.Array]:
        with in_layer(layer):
            ones = jnp.ones((len(numbers), *ONES.shape[1:]))
            return carry, jnp.stack([dropped(ones), dropped(ones)])

    with dropping(config, numbers):
        _, left = jax.lax.scan(block, None, numbered(jnp.zeros(LAYERS)))
    return np.asarray(left)


def test_a_share_is_left_out_and_the_rest_is_larger():
    """Of 262,144 entries a quarter, to five standard deviations; others are 4 / 3."""
    left = after_each_layer(DropoutConfig(rate=0.25))

    assert set(np.unique(left)) == {0.0, np.float32(1 / 0.75)}
    assert (left == 0).mean() == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / left.size) ** 0.5)


def test_every_sample_layer_and_place_has_a_mask_of_its_own():
    """And the same again for the same number, wherever it is in a batch."""
    left = after_each_layer(DropoutConfig(rate=0.25))
    masks = {mask.tobytes() for mask in left.reshape(-1, 16 * 32)}
    other = after_each_layer(DropoutConfig(rate=0.25), NUMBERS[32:])

    assert len(masks) == left.size // (16 * 32)
    np.testing.assert_array_equal(other, left[:, :, 32:])


def test_deeper_layers_are_left_out_more_often():
    """Huang et al. 2016, equation 4: of layer l of 4, l / 4 of the rate, whole samples; what stays
    is larger by as much, so that the mean is 1."""
    left = after_each_layer(DropoutConfig(depth_rate=0.8), jnp.arange(2000, dtype=jnp.uint32))
    samples = left.reshape(LAYERS, -1, 16 * 32)

    assert (samples == samples[:, :, :1]).all()
    shares = (samples[:, :, 0] == 0).mean(axis=1)
    np.testing.assert_allclose(shares, [0.2, 0.4, 0.6, 0.8], atol=0.05)
    np.testing.assert_allclose(samples.mean(axis=(1, 2)), 1, atol=0.2)


WIDTHS: dict[str, Any] = {"hidden": 16, "heads": 2, "compute_dtype": "float32"}
NEARLY_ALL = 1 - 1e-7


@pytest.mark.parametrize(
    ("network", "config"),
    [(gpt, GptConfig(**WIDTHS)), (llama, LlamaConfig(**WIDTHS)), (vit, VitConfig(**WIDTHS))],
    ids=["gpt", "llama", "vit"],
)
@pytest.mark.parametrize("rate", ["rate", "depth_rate"])
def test_a_block_of_which_all_is_left_out_is_the_identity(network, config, rate):
    """The residual stream itself is never left out; without dropout the block adds to it."""
    blocks = stacked_blocks(lambda rngs: network.Block(config, rngs=rngs), 1, nnx.Rngs(0))
    x_BSD = jax.random.normal(jax.random.key(1), (8, 4, 16))
    passed = partial(through_blocks, blocks, x_BSD, dtype=jnp.dtype("float32"), remat="none")

    with dropping(DropoutConfig(**{rate: NEARLY_ALL}), jnp.arange(8, dtype=jnp.uint32)):
        np.testing.assert_array_equal(passed(), x_BSD)
    assert (passed() != x_BSD).mean() > 0.9


def test_vit_leaves_out_of_the_embedding():
    """With all left out nothing of an image is in the logits, whose layer begins at zeros."""
    images = DatasetFacts(
        train_examples=8, test_examples=8, input_shape=(8, 8, 1), target_shape=(), classes=8
    )
    network = vit.Vit(VitConfig(**WIDTHS, layers=1, patch=4), images, rngs=nnx.Rngs(0))
    network.head.kernel.set_value(jnp.ones_like(network.head.kernel[...]).at[0].set(2))
    inputs = jax.random.normal(jax.random.key(1), (8, 8, 8, 1))

    assert (network(inputs, is_training=True) != 0).all()
    with dropping(DropoutConfig(rate=NEARLY_ALL), jnp.arange(8, dtype=jnp.uint32)):
        np.testing.assert_array_equal(network(inputs, is_training=True), 0)


def test_layers_of_several_stacks_are_numbered_through(monkeypatch):
    """Dense blocks, those with experts, and that of multi-token prediction: no mask is repeated,
    and rates grow from the first to the last."""
    seen, real = [], blocks_module.numbered

    def spy(stacked: Any, *which: int) -> Any:
        with jax.ensure_compile_time_eval(), dropping(DropoutConfig(rate=0.5), NUMBERS):
            numbers, totals, _ = real(stacked, *which)
        seen.append((numbers.tolist(), set(totals.tolist())))
        return real(stacked, *which)

    monkeypatch.setattr(blocks_module, "numbered", spy)
    experts = MoeConfig(experts=4, experts_per_token=2, dense_layers=1, expert_hidden=16)
    config = LlamaConfig(**WIDTHS, layers=3, moe=experts, mtp=MtpConfig())
    tokens = DatasetFacts(
        train_examples=8, test_examples=8, input_shape=(8,), target_shape=(8,), classes=32
    )

    def traced(inputs: jax.Array) -> Any:
        return llama.Llama(config, tokens, rngs=nnx.Rngs(0)).logits_of_two(inputs, inputs)

    jax.eval_shape(traced, jax.ShapeDtypeStruct((4, 8), jnp.int32))

    assert seen == [([0], {4}), ([1, 2], {4}), ([3], {4})]


def test_nothing_is_left_out_without_numbers():
    """As in evaluation."""
    with dropping(DropoutConfig(rate=0.5), None):
        np.testing.assert_array_equal(dropped(ONES), ONES)
    np.testing.assert_array_equal(dropped(ONES), ONES)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"dropout": {"rate": 1.0}}, r"dropout\.rate=1\.0 is refused"),
        (IMAGES, r"model\.name='mlp' is refused: \[dropout\] is for"),
        ({"layout": {"pipeline": 2}}, r"layout\.pipeline=2 is refused: with \[dropout\]"),
    ],
)
def test_impossible_dropout_is_refused(tables, said):
    """One sentence, which names the field."""
    run = {
        "model": {"name": "gpt", "layers": 2, "hidden": 32, "heads": 4},
        "data": {"name": "synthetic_tokens", "tokens": 8, "vocabulary": 32},
        "batch": {"global_batch": 8, "microbatches": 2},
        "optimizer": {"name": "sgd"},
        "schedule": {"base_learning_rate": 0.1},
        "dropout": {"rate": 0.1},
    }
    with pytest.raises(ConfigError, match=said):
        build(RunConfig, run | tables)
