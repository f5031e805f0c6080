"""EfficientNet-Lite0: its published size, and depthwise convolutions that are convolutions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalejax.config.data import SyntheticImagesConfig
from scalejax.config.model import ImageNetworkConfig
from scalejax.data.facts import read_facts
from scalejax.models import BatchNormScope, build_network
from scalejax.models.efficientnet import Depthwise
from scalejax.xla.model_flop import forward_flop

LITE = ImageNetworkConfig(name="efficientnet_lite0")


def abstract_network():
    """The network for ImageNet, nothing computed."""
    return nnx.eval_shape(
        lambda: build_network(
            LITE, read_facts(SyntheticImagesConfig()), bn=BatchNormScope(), rngs=nnx.Rngs(0)
        )
    )


def test_it_has_as_many_parameters_as_published():
    """timm's `tf_efficientnet_lite0`: 4.65 M."""
    params = jax.tree.leaves(nnx.state(abstract_network(), nnx.Param))

    assert sum(math.prod(leaf.shape) for leaf in params) == 4_652_008


def test_products_are_those_of_the_published_table_and_depthwise_ones_few():
    """Multiply-adds of an image by hand; those that FLOP of the model leave out are 9 %."""
    graph, state = nnx.split(abstract_network())
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    found = forward_flop(lambda s, x: nnx.merge(graph, s)(x, is_training=False), state, image) // 2
    products, depthwise = 112**2 * 27 * 32 + 7**2 * 320 * 1280 + 1280 * 1000, 0
    for before, after, size, width_in, inner, width_out in (  # sides, sides, channels
        (112, 112, 3, 0, 32, 16),
        (112, 56, 3, 16, 96, 24),
        (56, 56, 3, 24, 144, 24),
        (56, 28, 5, 24, 144, 40),
        (28, 28, 5, 40, 240, 40),
        (28, 14, 3, 40, 240, 80),
        *[(14, 14, 3, 80, 480, 80)] * 2,
        (14, 14, 5, 80, 480, 112),
        *[(14, 14, 5, 112, 672, 112)] * 2,
        (14, 7, 5, 112, 672, 192),
        *[(7, 7, 5, 192, 1152, 192)] * 3,
        (7, 7, 3, 192, 1152, 320),
    ):
        products += before**2 * width_in * inner + after**2 * inner * width_out
        depthwise += after**2 * size**2 * inner

    assert found == products
    assert depthwise / (products + depthwise) == pytest.approx(0.09, abs=0.001)


@pytest.mark.slow_except("3-1-7", "3-2-8", "5-1-8", "5-2-7")
@pytest.mark.parametrize("side", [7, 8])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [3, 5])
def test_shifted_products_are_a_grouped_convolution(size, stride, side):
    """XLA's own, with TensorFlow's padding: values, and gradients of both operands."""
    layer = Depthwise(4, size=size, stride=stride, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    images = jax.random.normal(jax.random.key(1), (2, side, side + 1, 4))
    graph, params = nnx.split(layer)

    def ours(kernel, images):
        return nnx.merge(graph, nnx.State({"kernel": kernel}))(images)

    def theirs(kernel, images):
        return jax.lax.conv_general_dilated(
            images,
            kernel[:, :, None],
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=4,
        )

    kernel = nnx.to_pure_dict(params)["kernel"]
    out, back = jax.vjp(ours, kernel, images)
    expected, expected_back = jax.vjp(theirs, kernel, images)

    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    for found, wanted in zip(back(out), expected_back(out), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
