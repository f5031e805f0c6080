"""mlp, cnn and the ResNets: published sizes, and initialisation that does what it is for."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalejax.config.data import FashionMnistConfig, SyntheticImagesConfig
from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.model import (
    CnnConfig,
    ImageNetworkConfig,
    MlpConfig,
    ModelConfig,
    ResNetConfig,
)
from scalejax.data.facts import read_facts
from scalejax.models import BatchNormScope, Network, build_network
from scalejax.models.cnn import Cnn
from scalejax.models.resnet import Block, ResNet
from scalejax.xla.model_flop import forward_flop

FASHION = read_facts(FashionMnistConfig(edition="embedded"))
IMAGENET = read_facts(SyntheticImagesConfig())


@cache
def shapes_of(model: ModelConfig, dataset: DatasetFacts) -> Network:
    """A network that holds shapes in place of numbers; to trace a large one takes seconds."""
    return nnx.eval_shape(
        lambda: build_network(model, dataset, bn=BatchNormScope(), rngs=nnx.Rngs(0))
    )


def parameter_count(model: ModelConfig, dataset: DatasetFacts) -> int:
    """Numbers in all parameters; nothing is computed."""
    network = shapes_of(model, dataset)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(network, nnx.Param)))


@pytest.mark.slow_except("resnet18-11689512", "resnet50-25557032")
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
    ],
)
def test_resnets_have_as_many_parameters_as_published(name, count):
    """The `num_params` of torchvision's ImageNet weights, exactly."""
    assert parameter_count(ResNetConfig(name=name), IMAGENET) == count


@pytest.mark.slow_except("vgg16-224-138357544-15.47", "alexnet-227-61838248-0.839")
@pytest.mark.parametrize(
    ("name", "image_size", "count", "giga_multiply_adds"),
    [
        # `num_params` and GFLOPS of torchvision's weights
        ("vgg16", 224, 138_357_544, 15.47),
        # by hand from TensorFlow's benchmarks' alexnet_model.py: 3,207,104 in convolutions,
        # 37,752,832 + 16,781,312 + 4,097,000 in linear layers; nothing of it is published
        ("alexnet", 227, 61_838_248, 0.839),
        # torchvision's 27,161,264 less the auxiliary head's 3,326,696; its GFLOPS, without it
        ("inception_v3", 299, 23_834_568, 5.713),
        # the trainable ones of Keras' 22,910,480; 8.4 in timm's tables, which round it
        ("xception", 299, 22_855_952, 8.357),
    ],
)
def test_published_networks_are_as_large_as_published(name, image_size, count, giga_multiply_adds):
    """Parameters exactly; multiply-adds of one image, forward, to the digits published."""
    dataset = read_facts(SyntheticImagesConfig(image_size=image_size))
    model = ImageNetworkConfig(name=name)

    assert parameter_count(model, dataset) == count
    found = multiply_adds(model, image_size) / 1e9
    assert found == pytest.approx(giga_multiply_adds, abs=0.0006)


@pytest.mark.slow_except("vgg16", "alexnet")
@pytest.mark.parametrize("name", ["vgg16", "alexnet", "inception_v3", "xception"])
def test_the_smallest_image_is_the_smallest_that_leaves_something(name):
    """At `smallest_image` pixels there are logits, and one pixel less leaves nothing."""
    model = ImageNetworkConfig(name=name, width=1 / 32)
    side = model.smallest_image

    assert multiply_adds(model, side) > 0
    if name in ("vgg16", "alexnet") and jax.__version_info__ >= (0, 11):
        return  # layers of no inputs are built without complaint, and give their bias
    with pytest.raises((ZeroDivisionError, ValueError, TypeError)):
        multiply_adds(model, side - 1)


def multiply_adds(model: ModelConfig, image_size: int) -> int:
    """Of the matrix products and convolutions of one image's forward pass."""
    dataset = read_facts(SyntheticImagesConfig(image_size=image_size))
    graph, state = nnx.split(shapes_of(model, dataset))
    image = jax.ShapeDtypeStruct((1, image_size, image_size, 3), jnp.float32)
    return forward_flop(lambda s, x: nnx.merge(graph, s)(x, is_training=False), state, image) // 2


def test_mlp_and_cnn_have_as_many_parameters_as_by_hand():
    """Weights and biases; a convolution has no bias, its BatchNorm has two vectors."""
    mlp = 784 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10
    cnn = 9 * (1 * 4 + 4 * 8) + 2 * (4 + 8) + 8 * 10 + 10

    assert parameter_count(MlpConfig(hidden=(128, 128)), FASHION) == mlp
    assert parameter_count(CnnConfig(channels=(4, 8)), FASHION) == cnn


def block(width_in: int, width: int, *, is_bottleneck: bool, stride: int) -> Block:
    """A float32 block with seed 0."""
    return Block(
        width_in,
        width,
        is_bottleneck=is_bottleneck,
        stride=stride,
        dtype=jnp.dtype("float32"),
        bn=BatchNormScope(),
        rngs=nnx.Rngs(0),
    )


@pytest.mark.parametrize("is_bottleneck", [False, True])
def test_a_fresh_block_is_the_identity_after_relu(is_bottleneck):
    """The last BatchNorm scale of a block is zero, so that depth does no harm at first."""
    width = 2 if is_bottleneck else 8
    inputs = jax.random.normal(jax.random.key(1), (2, 6, 6, 8))

    out = nnx.jit(
        lambda: block(8, width, is_bottleneck=is_bottleneck, stride=1)(inputs, is_training=True)
    )()

    np.testing.assert_allclose(out, jax.nn.relu(inputs), atol=1e-6)


def test_the_stride_of_a_bottleneck_is_on_its_3x3_convolution():
    """That is ResNet v1.5; v1 has it on the 1x1 before."""

    def built_and_applied():
        built = block(8, 4, is_bottleneck=True, stride=2)
        return built, built(jnp.ones((1, 8, 8, 8)), is_training=False)

    built, out = nnx.eval_shape(built_and_applied)
    convolutions = [unit.convolution for unit in built.units]

    found = [(layer.kernel_size[0], layer.strides) for layer in convolutions]
    assert found == [(1, 1), (3, 2), (1, 1)]
    assert out.shape == (1, 4, 4, 16)


def test_resnet_downsamples_as_published():
    """224 -> 112 (stem) -> 56 (pool) -> 56, 28, 14, 7: 4.09 G multiply-adds for ResNet-50.

    torchvision publishes 4.09 GFLOPS (multiply-adds) for its resnet50 weights; counted here from
    the shapes of convolutions and linear layer in the traced program, which leaves out
    BatchNorm, ReLU and pooling (< 1 %).
    """
    graph, state = nnx.split(shapes_of(ResNetConfig(name="resnet50"), IMAGENET))
    jaxpr = jax.make_jaxpr(lambda s, x: nnx.merge(graph, s)(x, is_training=False))(
        state, jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    )

    multiply_adds = 2048 * 1000  # the linear layer
    for equation in jaxpr.eqns:
        if equation.primitive.name == "conv_general_dilated":
            places = equation.outvars[0].aval.size
            kernel = equation.invars[1].aval
            multiply_adds += places * kernel.size // kernel.shape[-1]
    assert multiply_adds / 1e9 == pytest.approx(4.09, abs=0.005)


def test_convolutions_start_with_he_variance_by_outgoing_connections():
    """Standard deviation sqrt(2 / (3 * 3 * 512)); the linear layer's is 0.01."""

    @nnx.jit
    def last_layers():
        network = build_network(
            ResNetConfig(name="resnet18"), IMAGENET, bn=BatchNormScope(), rngs=nnx.Rngs(0)
        )
        assert isinstance(network, ResNet)
        return network.blocks[-1].units[-1].convolution.kernel[...], network.head.kernel[...]

    kernel, head = last_layers()

    # 2.4 M and 0.5 M samples: standard error of a deviation is 1 / sqrt(2 n), about 0.1 %
    assert float(kernel.std()) == pytest.approx(math.sqrt(2 / (9 * 512)), rel=5e-3)
    assert float(head.std()) == pytest.approx(0.01, rel=5e-3)
    assert float(jnp.abs(kernel).max()) > 4 * float(kernel.std())  # normal, not truncated


def test_running_statistics_change_in_training_only():
    """Every BatchNorm of the network hears `is_training`."""

    @nnx.jit
    def means():
        network = build_network(
            CnnConfig(channels=(4, 8)), FASHION, bn=BatchNormScope(), rngs=nnx.Rngs(0)
        )
        assert isinstance(network, Cnn)
        images = jax.random.normal(jax.random.key(0), (8, 28, 28, 1))
        network(images, is_training=False)
        after_evaluation = [norm.mean[...] for norm in network.norms]
        network(images, is_training=True)
        return after_evaluation, [norm.mean[...] for norm in network.norms]

    after_evaluation, after_training = means()

    assert all(bool((mean == 0).all()) for mean in after_evaluation)
    assert all(bool((mean != 0).all()) for mean in after_training)
